"""What somebody said in a long conversation, after LongMemEval's single-session questions (arXiv 2410.10813)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..task import Example, Task
from .facts import Fact
from .fitting import Pieces, fit, seeded, shuffled_forever, strewn
from .prose import TOPICS
from .words import FIRST_NAMES, Words

QUESTIONS = 8
SPEAKERS = 4
#: Tokens of talk per fact.
TOKENS_PER_FACT = 60
HEAD = "The following is a conversation between {names} and {last}.\n\n"
#: Facts that speakers tell about themselves.
TOLD = (
    Fact("town", "My sister has moved to {value}, of all places.",
         "To which town has {name}'s sister moved?", "{name}'s sister has moved to"),
    Fact("number", "That new stove cost me {value} crowns, would you believe it.",
         "How many crowns did {name}'s new stove cost?", "The number of crowns that {name}'s stove cost is"),
    Fact("person", "I am taking riding lessons from {value} now.",
         "Who gives riding lessons to {name}?", "{name} takes riding lessons from"),
    Fact("thing", 'Our boat is called "{value}" now, since the children insisted.',
         "What is {name}'s boat called?", "{name}'s boat is called \""),
    Fact("number", "I have {value} stamps in my album by now.",
         "How many stamps does {name} have?", "The number of stamps that {name} has is"),
    Fact("person", "My grandfather went to sea with {value}, long ago.",
         "With whom did {name}'s grandfather go to sea?", "{name}'s grandfather went to sea with"),
    Fact("town", "We spent our honeymoon in {value} and it rained.",
         "Where did {name} spend the honeymoon?", "{name} spent the honeymoon in"),
    Fact("number", "My locker at the pool is number {value} this season.",
         "Which number does {name}'s locker at the pool have?", "The number of {name}'s locker at the pool is"),
    Fact("person", "The dentist who treats me is called {value}.",
         "What is {name}'s dentist called?", "{name}'s dentist is called"),
    Fact("town", "I grew up in {value}, right behind the brewery.",
         "Where did {name} grow up?", "{name} grew up in"),
    Fact("number", "Yesterday my step counter stopped at {value}, not a step more.",
         "At which number did {name}'s step counter stop?", "{name}'s step counter stopped at"),
    Fact("person", "We rent our flat from {value}, who never answers letters.",
         "From whom does {name} rent the flat?", "{name} rents the flat from"),
)  # fmt: skip
#: Small talk; ``{things}`` are the things of any topic in `prose`.
TALK = (
    "Has anyone thought about {things} lately?",
    "I could listen to stories about {things} for hours.",
    "Honestly, {things} bore me.",
    "You always come back to {things}, don't you?",
    "Yes, quite.",
    "Who would have guessed.",
    "Let us not argue about {things} again.",
    "I never said that I dislike {things}.",
    "There was a programme about {things} on the radio.",
    "More tea, anybody?",
    "Speaking of which, {things} are back in fashion.",
    "My aunt swears by {things}, but she swears by a lot.",
    "Is it me, or is it getting chilly in here?",
    "If you ask me, {things} are overrated.",
    "That reminds me of a film with far too many {things} in it.",
    "Hold on, the kettle is boiling.",
    "Oh, I disagree, {things} are wonderful.",
    "We could all go and look at {things} one day.",
    "Sorry, I was miles away. Go on about {things}.",
    "I read somewhere that {things} are good for the nerves.",
    "Do you hear that noise? It must be the neighbours.",
    "Well, {things} and I have never been friends.",
    "Nobody at work wants to hear about {things} any more.",
    "Fair enough.",
    "Next year I will learn everything about {things}.",
    "Pass me the biscuits, would you?",
    "A cousin of mine makes a living with {things}.",
    "What would we do without {things}?",
)


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """`Task.make`: facts strewn into small talk; several speakers tell the same kind of fact about themselves."""
    rng = seeded("dialogue", seed, index, "facts")
    words = Words(rng)
    speakers = rng.sample(FIRST_NAMES, SPEAKERS)
    head = HEAD.format(names=", ".join(speakers[:-1]), last=speakers[-1])
    told = rng.sample([(speaker, fact) for speaker in speakers for fact in TOLD], SPEAKERS * len(TOLD))
    told = told[: max(QUESTIONS, tokens // TOKENS_PER_FACT)]
    facts = [(speaker, fact, fact.value(words)) for speaker, fact in told]
    lines = [f"{speaker}: {fact.told(speaker, value)}" for speaker, fact, value in facts]

    def talk() -> Iterator[str]:
        chat = seeded("dialogue", seed, index, "talk")
        for form in shuffled_forever(chat, TALK):
            things = chat.choice(chat.choice(TOPICS).things.split(", "))
            yield f"{chat.choice(speakers)}: {form.format(things=things)}"

    count = fit("dialogue", tokens, length, lambda count: head + "\n".join(lines[:count]), least=1, most=len(lines))
    between, mix = Pieces(talk()), strewn(rng, lines[:count])

    def build(turns: int) -> str:
        return head + "\n".join(mix(between.first(turns)))

    context = build(fit("dialogue", tokens, length, build))
    chosen = rng.sample(facts[:count], min(QUESTIONS, count))
    asked = tuple(fact.asked(speaker, value) for speaker, fact, value in chosen)
    return Example("dialogue", f"{index:05d}", context, asked)


TASK = Task("dialogue", "string_match_all", make, "after LongMemEval, arXiv 2410.10813, section 3")
