"""Classes learned from examples, after LongBench's trec (arXiv 2308.14508, section 3).

As in TREC, the name of a class tells what the class means. But a class has several possible names, and only the
examples show which one is used, so that the answer needs the examples. As in LongBench, the question is one more
example without its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from ..task import Example, Question, Task
from .fitting import Pieces, fit, seeded, shuffled_forever

QUESTIONS = 8
CLASSES = 4
HEAD = "Every message to a shop goes to one of its desks. Here are some messages and their desks.\n\n"
ARTICLES = (
    """
toaster, raincoat, bicycle bell, garden hose, desk fan, wool sweater, coffee grinder, picture frame, rice cooker,
camping tent, hair dryer, chess board, bread knife, bath towel, travel bag, mountain bike, sewing machine, reading lamp,
winter jacket, water bottle, tennis racket, wall clock, soup bowl, leather belt, flower vase, yoga mat, sleeping bag
""".replace("\n", " ")
    .strip()
    .split(", ")
)
#: Possible names of the desk of each class.
NAMES = {
    "instructions": ("Handbook", "Guidance", "Tutoring", "Coaching"),
    "opening hours": ("Timetable", "Schedule", "Hours", "Openings"),
    "where is my order": ("Logistics", "Shipping", "Dispatch", "Freight"),
    "praise": ("Applause", "Gratitude", "Accolades", "Kudos"),
    "job application": ("Recruitment", "Staffing", "Careers", "Personnel"),
    "price": ("Pricing", "Tariffs", "Costing", "Billing"),
}
#: Messages of each class; ``{article}`` is an article of the shop.
MESSAGES = {
    "instructions": (
        "How do I clean my {article}?",
        "What does the manual say about storing a {article}?",
        "The instructions for my {article} make no sense to me.",
        "Is there a video that shows how to assemble the {article}?",
        "I cannot work out how to use the {article}, can you explain?",
        "Which settings does the manual recommend for the {article}?",
    ),
    "opening hours": (
        "Is the shop open on Sundays? I want to look at a {article}.",
        "Until what hour can I come by for a {article} tonight?",
        "Do you close over lunch? I would drop in to try a {article}.",
        "At what time do your doors open on Saturday? I am after a {article}.",
        "Are you open on public holidays, in case I need a {article}?",
        "How late is the {article} department open on Fridays?",
    ),
    "where is my order": (
        "I ordered a {article} three weeks ago and nothing has come.",
        "Has my {article} been shipped yet?",
        "The tracking page for my {article} has not moved in days.",
        "When will the {article} that I ordered be delivered?",
        "My {article} should have been here on Monday. Where is it?",
        "Still no sign of my {article}. Is it lost in the post?",
    ),
    "praise": (
        "I adore the {article}. Thank you so much!",
        "Your assistant helped me choose a {article} and was wonderful.",
        "Just to say that the {article} is the best I have ever had.",
        "What a splendid {article}, my compliments to everyone.",
        "Five stars for the {article} and for the kind staff.",
        "The {article} has made my whole family happy, well done.",
    ),
    "job application": (
        "Are you hiring? I have sold every kind of {article}.",
        "I would love to work in the {article} department.",
        "Enclosed is my CV; I have ten years of {article} experience.",
        "Is there an apprenticeship for people who can fix a {article}?",
        "I am a student looking for a weekend job, perhaps selling a {article} or two.",
        "May I apply for the vacancy at the {article} counter?",
    ),
    "price": (
        "How much does the {article} cost?",
        "Is there a discount if I buy more than one {article}?",
        "What would you charge for a {article}?",
        "The {article} is cheaper elsewhere. Will you match that?",
        "Does the price of the {article} include tax?",
        "When is the {article} going to be on sale?",
    ),
}


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: solved messages of ``CLASSES`` classes; the ``QUESTIONS`` messages to solve are not among them."""
    rng = seeded("few_shot", seed, index, "classes")
    desk_of = {name: rng.choice(NAMES[name]) for name in rng.sample(list(MESSAGES), CLASSES)}
    every = {
        name: [form.format(article=article) for form, article in itertools.product(MESSAGES[name], ARTICLES)]
        for name in desk_of
    }
    classes = list(itertools.islice(shuffled_forever(rng, list(desk_of)), QUESTIONS))
    asked: dict[str, str] = {}
    for name in classes:
        asked[rng.choice([message for message in every[name] if message not in asked])] = name

    def solved() -> Iterator[str]:
        others = {name: [message for message in messages if message not in asked] for name, messages in every.items()}
        for name in shuffled_forever(rng, list(desk_of)):
            yield f"Message: {rng.choice(others[name])}\nDesk: {desk_of[name]}"

    pieces = Pieces(solved())

    def build(count: int) -> str:
        return HEAD + "\n\n".join(pieces.first(count))

    count = fit("few_shot", tokens, length, build, least=CLASSES)
    questions = tuple(
        Question(f"\n\nMessage: {message}", (desk_of[name],), "Desk:", 8, tuple(desk_of.values()))
        for message, name in asked.items()
    )
    return Example("few_shot", f"{index:05d}", build(count), questions)


TASK = Task("few_shot", "classification", make, "after LongBench trec, arXiv 2308.14508")
