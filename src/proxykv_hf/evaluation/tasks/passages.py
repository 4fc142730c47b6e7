"""Find the paragraph of an abstract, after LongBench's passage_retrieval_en (arXiv 2308.14508, section 3)."""

from __future__ import annotations

from collections.abc import Callable

from ..task import Example, Question, Task
from .fitting import Pieces, fit, seeded, shares
from .prose import sentences
from .words import Words, a

QUESTIONS = 8
#: Tokens of text per paragraph.
TOKENS_PER_PARAGRAPH = 110
HEAD = "Here are some numbered paragraphs, each of which tells of one event among general remarks.\n\n"
#: Pairs: the sentence about an event, and the abstract of the paragraph that holds the sentence.
EVENTS = (
    ("At the autumn fair in {town} somebody paid far too much for {a_thing}.", "An overpriced {thing} changes hands."),
    ("The council of {town} voted to put {a_thing} on its coat of arms.", "{A_thing} becomes a heraldic figure."),
    ("It was in {town} that I saw {a_thing} fall out of a balloon.", "{A_thing} drops from the sky."),
    ("A thief in {town} left everything behind but {a_thing}.", "The only object stolen is {a_thing}."),
    ("The mayor of {town} was given {a_thing} for his jubilee.", "A dignitary is presented with {a_thing}."),
    ("For a wager the miller of {town} put {a_thing} on his head.", "Someone balances {a_thing} on a bet."),
    ("Divers near {town} brought {a_thing} up from a wreck.", "{A_thing} is salvaged from the sea."),
    ("The schoolchildren of {town} buried {a_thing} in a time capsule.", "Pupils hide {a_thing} for the future."),
    ("A lawsuit over {a_thing} kept the judges of {town} busy for years.", "The ownership of {a_thing} goes to court."),
    ("In {town} there is a monument that shows {a_thing}.", "{A_thing} is commemorated in stone."),
)  # fmt: skip


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: the abstract tells the event of a paragraph in other words than the paragraph."""
    rng = seeded("passage_retrieval", seed, index, "facts")
    words = Words(rng)
    events: list[str] = []
    abstracts: list[str] = []
    for _ in range(max(QUESTIONS, tokens // TOKENS_PER_PARAGRAPH)):
        (event, abstract), thing = rng.choice(EVENTS), words.thing()
        events.append(event.format(town=words.town(), a_thing=a(thing)))
        abstracts.append(abstract.format(thing=thing, a_thing=a(thing), A_thing=a(thing).capitalize()))
    essays = Pieces(sentences(seeded("passage_retrieval", seed, index, "essays")))

    def build(count: int, remarks: int) -> str:
        paragraphs, rest = [], iter(essays.first(remarks))
        places = seeded("passage_retrieval", seed, index, "places")
        for number, (event, share) in enumerate(zip(events, shares(remarks, count), strict=False), 1):
            texts = [next(rest) for _ in range(share)]
            texts.insert(places.randrange(share + 1), event)
            paragraphs.append(f"Paragraph {number}: {' '.join(texts)}")
        return HEAD + "\n\n".join(paragraphs)

    count = fit("passage_retrieval", tokens, length, lambda count: build(count, 0), least=1, most=len(events))
    context = build(count, fit("passage_retrieval", tokens, length, lambda remarks: build(count, remarks)))
    asked = tuple(
        Question(
            f"\n\nThe following is an abstract of one paragraph.\n\n{abstracts[place]}\n\n"
            "Which paragraph is the abstract of?",
            (str(place + 1),),  # the prefix ends with "Paragraph"
            "The abstract is of Paragraph",
            6,
        )
        for place in rng.sample(range(count), min(QUESTIONS, count))
    )
    return Example("passage_retrieval", f"{index:05d}", context, asked)


TASK = Task("passage_retrieval", "retrieval", make, "after LongBench passage_retrieval_en, arXiv 2308.14508")
