"""Question answering over documents, RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3), with made-up documents.

RULER hides the paragraph that answers a question of SQuAD (qa_1), or the two that answer a question of HotpotQA (qa_2),
among other paragraphs of the same data set. Here all documents are entries of an encyclopaedia about places that do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..task import Example, Question, Task
from .facts import Fact
from .fitting import Pieces, fit, seeded, shares
from .words import Words

ASK = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
HEAD = f"{ASK}\n\nThe following are given documents.\n\n"
QUESTION = f"\n\n{ASK}\n\nQuestion: {{question}}"
ANSWER = "Answer:"
#: Tokens of text per document.
TOKENS_PER_DOCUMENT = 90
LEAST_DOCUMENTS = 3

#: The titles of entries, and the facts in each entry.
SUBJECTS = {
    "{name} Canal": (
        Fact("person", "The {name} Canal was dug under the direction of {value}.",
             "Under whose direction was the {name} Canal dug?"),
        Fact("number", "From lock to lock it measures {value} fathoms.",
             "How many fathoms does the {name} Canal measure?"),
    ),
    "{name} Observatory": (
        Fact("number", "The {name} Observatory stands at a height of {value} feet.",
             "At how many feet does the {name} Observatory stand?"),
        Fact("person", "Its great refractor was donated by {value}.",
             "Who donated the great refractor of the {name} Observatory?"),
    ),
    "{name} Cheese": (
        Fact("person", "{name} Cheese is traced back to {value}, a dairymaid.",
             "To whom is {name} Cheese traced back?"),
        Fact("number", "Today {value} wheels of it leave the dairies in a month.",
             "How many wheels of {name} Cheese leave the dairies in a month?"),
    ),
    "{name} Lighthouse": (
        Fact("number", "The lantern room of {name} Lighthouse is reached by {value} steps.",
             "By how many steps is the lantern room of {name} Lighthouse reached?"),
        Fact("person", "The first keeper of the light was {value}.",
             "Who was the first keeper of {name} Lighthouse?"),
    ),
    "{name} Regatta": (
        Fact("person", "The {name} Regatta was won by {value} more often than by anybody else.",
             "Who won the {name} Regatta more often than anybody else?"),
        Fact("number", "The course has a length of {value} yards.",
             "Of how many yards is the course of the {name} Regatta?"),
    ),
}  # fmt: skip
WHO_SAYS = (
    "Travel guides", "Local historians", "Most almanacs", "Older encyclopaedias", "A museum leaflet of some length",
    "Several travellers", "Unsigned pamphlets", "Two parish chronicles", "Letters from that century", "Schoolbooks",
)  # fmt: skip
SAID = (
    "praise it, though without giving reasons", "pass over the early years in silence",
    "call the surrounding country bleak but memorable", "dwell on a fire that may never have happened",
    "contradict each other about its later fortunes", "mention a quarrel over grazing rights nearby",
    "describe the approach on foot as the finest one", "repeat an anecdote about a runaway goat",
    "complain of the draughts and the price of lodging", "attribute its good repair to a bequest",
    "disagree on how its name ought to be pronounced", "include an engraving that flatters it",
    "recommend a visit in early autumn", "warn against the ferry in high winds",
)  # fmt: skip


def padding(task: str, seed: int, index: int, place: int) -> Iterator[str]:
    """Sentences that fit into any entry."""
    rng = seeded(task, seed, index, f"padding {place}")
    while True:
        yield f"{rng.choice(WHO_SAYS)} {rng.choice(SAID)}."


def laid_out(
    task: str, tokens: int, length: Callable[[str], int], seed: int, index: int, entries: list[tuple[str, str]]
) -> str:
    """The context: entries, each a title and a text, as numbered documents, padded to the wanted length.

    It has as many entries as fit, and always the first two, which hold the answer.
    """
    paddings = [Pieces(padding(task, seed, index, place)) for place in range(len(entries))]

    def build(count: int, sentences: int) -> str:
        order = seeded(task, seed, index, "order").sample(range(count), count)
        texts = [
            f"Document {number}:\n{entries[place][0]}\n{' '.join([entries[place][1], *paddings[place].first(share)])}"
            for number, (place, share) in enumerate(zip(order, shares(sentences, count), strict=True), 1)
        ]
        return HEAD + "\n\n".join(texts)

    count = fit(task, tokens, length, lambda count: build(count, 0), least=2, most=len(entries))
    return build(count, fit(task, tokens, length, lambda sentences: build(count, sentences)))


def single(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make` of qa_1: one document holds the answer."""
    rng = seeded("qa_1", seed, index, "facts")
    words = Words(rng)
    entries, asked = [], []
    for _ in range(max(LEAST_DOCUMENTS, tokens // TOKENS_PER_DOCUMENT)):
        name, title = words.town(), rng.choice(list(SUBJECTS))
        values = [fact.value(words) for fact in SUBJECTS[title]]
        told = [fact.told(name, value) for fact, value in zip(SUBJECTS[title], values, strict=True)]
        entries.append((title.format(name=name), " ".join(told)))
        fact, value = rng.choice(list(zip(SUBJECTS[title], values, strict=True)))
        asked.append(Question(QUESTION.format(question=fact.question.format(name=name)), (value,), ANSWER, 16))
    return Example("qa_1", f"{index:05d}", laid_out("qa_1", tokens, length, seed, index, entries), (asked[0],))


def hop(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make` of qa_2: one document leads to another, which holds the answer."""
    rng = seeded("qa_2", seed, index, "facts")
    words = Words(rng)
    entries, asked = [], []
    for _ in range(max(LEAST_DOCUMENTS, tokens // TOKENS_PER_DOCUMENT) // 2 + 1):
        sculptor, town, architect = words.person(), words.town(), words.person()
        entries += [
            (sculptor, f"{sculptor} was a sculptor who was born in {town} and worked in sandstone."),
            (town, f"{town} is a market town. The town hall of {town} was designed by {architect}."),
        ]
        question = f"Who designed the town hall of the town in which the sculptor {sculptor} was born?"
        asked.append(Question(QUESTION.format(question=question), (architect,), ANSWER, 16))
    return Example("qa_2", f"{index:05d}", laid_out("qa_2", tokens, length, seed, index, entries), (asked[0],))


TASKS = (
    Task("qa_1", "string_match_part", single, "after RULER qa_1, arXiv 2404.06654"),
    Task("qa_2", "string_match_part", hop, "after RULER qa_2, arXiv 2404.06654"),
)
