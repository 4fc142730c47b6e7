"""Many questions over one context of varied facts in prose, after SCBench's multi-request mode (arXiv 2412.10319)."""

from __future__ import annotations

from collections.abc import Callable

from ..task import Example, Question, Task
from .facts import Fact
from .fitting import Pieces, fit, seeded, strewn
from .prose import sentences
from .words import Words

QUESTIONS = 12
#: Tokens of text per entry of the chronicle.
TOKENS_PER_ENTRY = 64
LEAST_ENTRIES = 5
HEAD = "What follows is a chronicle, with the thoughts of its writer. Questions about it come afterwards.\n\n"
#: The kinds of entries; each entry tells two facts, one after the other.
ENTRIES = (
    (
        Fact("person", "The inn called the {name} was opened by {value} in a year of floods.",
             "Who opened the inn called the {name}?", "The inn called the {name} was opened by"),
        Fact("number", "Its cellar holds {value} bottles.",
             "How many bottles does the cellar of the inn called the {name} hold?", "The cellar of the {name} holds"),
    ),
    (
        Fact("number", "The ship {name} carried {value} sacks of rye on her maiden voyage.",
             "How many sacks of rye did the ship {name} carry?", "The ship {name} carried"),
        Fact("person", "Her last captain was {value}.",
             "Who was the last captain of the ship {name}?", "The last captain of the ship {name} was"),
    ),
    (
        Fact("number", "A bell known as the {name} weighs {value} pounds.",
             "How many pounds does the bell known as the {name} weigh?", "The bell known as the {name} weighs"),
        Fact("town", "It was cast for the parish of {value}, where it still rings at dusk.",
             "For which parish was the bell known as the {name} cast?",
             "The bell known as the {name} was cast for the parish of"),
    ),
    (
        Fact("person", "Among singers the {name} Choir is well thought of, and {value} conducts it.",
             "Who conducts the {name} Choir?", "The {name} Choir is conducted by"),
        Fact("number", "So far it has given {value} concerts.",
             "How many concerts has the {name} Choir given?",
             "The number of concerts that the {name} Choir has given is"),
    ),
    (
        Fact("number", "{value} trees stand in the {name} Orchard.",
             "How many trees stand in the {name} Orchard?", "The number of trees in the {name} Orchard is"),
        Fact("person", "The oldest of them was planted by {value}.",
             "Who planted the oldest tree of the {name} Orchard?",
             "The oldest tree of the {name} Orchard was planted by"),
    ),
    (
        Fact("person", "This time the {name} Prize went to {value}, to everybody's surprise.",
             "To whom did the {name} Prize go?", "The {name} Prize went to"),
        Fact("number", "The winner takes home {value} crowns.",
             "How many crowns does the winner of the {name} Prize take home?",
             "The number of crowns that the winner of the {name} Prize takes home is"),
    ),
    (
        Fact("town", "Over the {name} Bridge runs the road to {value}.",
             "To which place does the road over the {name} Bridge run?", "The road over the {name} Bridge runs to"),
        Fact("number", "{value} carts cross it every season.",
             "How many carts cross the {name} Bridge every season?",
             "The number of carts that cross the {name} Bridge every season is"),
    ),
    (
        Fact("number", "The painting “{name}” was sold for {value} florins.",
             "For how many florins was the painting “{name}” sold?",
             "The number of florins for which the painting “{name}” was sold is"),
        Fact("person", "It had been painted by {value} in a single night.",
             "Who painted the painting “{name}”?", "The painting “{name}” was painted by"),
    ),
    (
        Fact("town", "The {name} Circus spends its winters in {value}.",
             "Where does the {name} Circus spend its winters?", "The {name} Circus spends its winters in"),
        Fact("person", "Its tightrope walker performs under the name of {value}.",
             "Under which name does the tightrope walker of the {name} Circus perform?",
             "The tightrope walker of the {name} Circus performs under the name of"),
    ),
)  # fmt: skip


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: entries strewn into essays; at most ``QUESTIONS`` questions ask for one fact each."""
    rng = seeded("many_questions", seed, index, "facts")
    words = Words(rng)
    entries: list[str] = []
    asked: list[Question] = []
    for _ in range(max(LEAST_ENTRIES, tokens // TOKENS_PER_ENTRY)):
        name, facts = words.thing().title(), rng.choice(ENTRIES)
        values = [fact.value(words) for fact in facts]
        entries.append(" ".join(fact.told(name, value) for fact, value in zip(facts, values, strict=True)))
        asked += [fact.asked(name, value) for fact, value in zip(facts, values, strict=True)]

    def alone(count: int) -> str:
        return HEAD + " ".join(entries[:count])

    count = fit("many_questions", tokens, length, alone, least=1, most=len(entries))
    essays = Pieces(sentences(seeded("many_questions", seed, index, "essays")))
    mix = strewn(rng, entries[:count])

    def build(sentences: int) -> str:
        return HEAD + " ".join(mix(essays.first(sentences)))

    context = build(fit("many_questions", tokens, length, build))
    chosen = rng.sample(asked[: 2 * count], min(QUESTIONS, 2 * count))
    return Example("many_questions", f"{index:05d}", context, tuple(chosen))


TASK = Task("many_questions", "string_match_all", make, "after SCBench's multi-request mode, arXiv 2412.10319")
