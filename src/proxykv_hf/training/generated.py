"""Generated retrieval documents: texts in which single tokens matter and must be kept.

They are needles inserted into text, records, tables, lists, words, chains of assignments and dialogues, with random
names and values. Each text may be cut at any length, since every beginning of it is a document of the same kind.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Callable

#: One in this many file names and made-up words is held out.
HELD_OUT_SHARE = 10

SYLLABLES = """
ba co du fe gi ha jo ku la me ni po qua ri so tu va wo xe yi zu bro cle dri flo gra sta tre plo ner min
dal ver son tal ick ous mar len ton ash orn eld
""".split()

FACTS = (
    "Remember that the {key} of {owner} was set to {value}.",
    "Note for later: {owner}'s {key} is {value}.",
    "The {key} kept by {owner} reads {value}.",
    "{owner} told us that {value} opens the {key}.",
    "In case anyone asks, the {key} for {owner} came to {value}.",
    "According to {owner}, the {key} should be {value}.",
    "Do not forget: {key} {value} belongs to {owner}.",
    "At the office of {owner} they use {value} as {key}.",
    "{owner} changed the {key} to {value} on Tuesday.",
    "It was agreed with {owner} to write {value} next to {key}.",
    "We found {value} under {key} in the papers of {owner}.",
    "The label on the {key} from {owner} says {value}.",
    "{owner} ({key}): {value}",
    "# {key} of {owner} -> {value}",
    "{owner}.{key} = {value}",
    "[{owner}] {key}: {value}",
    "Only {owner} knows that {key} means {value}.",
    "{key} / {owner} / {value}",
    "Please send {value} when {owner} wants the {key}.",
    "Under {key}, the register of {owner} has {value}.",
)
RECORDS = (
    "{key}: {value}",
    "{key} = {value}",
    "{key}\t{value}",
    '{{"id": "{key}", "{field}": "{value}"}}',
    '<{field} id="{key}">{value}</{field}>',
    "- {key}\n    {field}: {value}",
    "[{key}]\n{field} = {value}",
    "set {key} {value}",
    '"{key}" => "{value}",',
    "{field}/{key}?{value}",
)
LINKS = (
    "{new} = {old}",
    "let {new} be {old}",
    "{new} := {old}",
    "{new} is a copy of {old}.",
    "Whatever {old} holds, {new} holds too.",
    "{new} refers to {old}",
    "{new} <- {old}",
)
SMALL_TALK = (
    "Did you sleep well?",
    "I was late again this morning.",
    "Fine, go on.",
    "Wait, let me write that down.",
    "That is what I thought.",
    "The weather has been strange all week.",
    "Are you sure about it?",
    "Good, then we are nearly done.",
    "Somebody has to tell the others.",
    "I will look it up when I am back.",
)
QUESTIONS = ("Say, what was the {key} again?", "And {owner}'s {key}?", "Which {key} did {owner} mention?")
REPLIES = ("It was {value}.", "{value}, as I said.", "I have {value} here.")
HEADINGS = ("What {owner} needs", "{owner}: {key}", "For the {key}", "List of {owner}", "{key} ({owner})")
BULLETS = ("- ", "* ", "+ ", "{number}. ", "{number}) ", "[ ] ")


def is_held_out(name: str) -> bool:
    """Whether a file name or a word is used only for held-out documents; its SHA-256 decides."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


class Names:
    """Random names and values, for training documents or for held-out documents.

    Args:
        rng: The random generator.
        held_out: Whether they are for held-out documents. The two sides share no word.
        text: A text whose words are used in names too.
    """

    def __init__(self, rng: random.Random, held_out: bool, text: str) -> None:
        self.rng, self.held_out = rng, held_out
        known = dict.fromkeys(re.findall(r"\b[a-z]{4,10}\b", text))
        self.known = [word for word in known if is_held_out(word) == held_out]

    def word(self) -> str:
        """A word of the text, or a made-up one."""
        if self.known and self.rng.random() < 0.5:
            return self.rng.choice(self.known)
        while True:
            word = "".join(self.rng.choices(SYLLABLES, k=self.rng.randint(2, 3)))
            if is_held_out(word) == self.held_out:
                return word

    def key(self) -> str:
        """One or two words, sometimes with a number, joined by spaces, underscores or hyphens."""
        parts = [self.word() for _ in range(self.rng.randint(1, 2))]
        if self.rng.random() < 0.3:
            parts.append(str(self.rng.randrange(1000)))
        return self.rng.choice((" ", "_", "-")).join(parts)

    def owner(self) -> str:
        """A name that looks like that of a person or a place."""
        return " ".join(self.word().title() for _ in range(self.rng.randint(1, 2)))

    def value(self) -> str:
        """A number, a code, a date, or words."""
        kind = self.rng.randrange(7)
        if kind < 2:
            return str(self.rng.randrange(10 ** self.rng.randint(2, 8)))
        if kind == 2:
            return f"{self.rng.randrange(10**4)}.{self.rng.randrange(100):02d}"
        if kind == 3:
            return f"{self.rng.getrandbits(32):08x}"
        if kind == 4:
            groups = (f"{self.rng.getrandbits(4 * n):0{n}x}" for n in (8, 4, 4, 4, 12))
            return "-".join(groups)
        if kind == 5:
            return f"{self.rng.randint(1, 28)}.{self.rng.randint(1, 12)}.{self.rng.randint(1900, 2030)}"
        return " ".join(self.word() for _ in range(self.rng.randint(1, 3)))


def strewn(rng: random.Random, text: str, lines: list[str]) -> str:
    """``text`` with ``lines`` inserted at random places, in order: at its start, or after a line or a sentence."""
    breaks = [match.end() for match in re.finditer(r"\n+|(?<=[.!?]) ", text)]
    places = sorted(rng.choices([0, *breaks], k=len(lines)))
    parts, before = [], 0
    for place, line in zip(places, lines, strict=True):
        parts += [text[before:place], line, "\n" if place == 0 or text[place - 1] == "\n" else " "]
        before = place
    return "".join([*parts, text[before:]])


def needles(rng: random.Random, names: Names, text: str) -> str:
    """``text`` with facts inserted, many or few.

    In a third of the documents all facts have the same wording, and in a third the same owner. In a tenth of the
    documents the text is one passage that is repeated.
    """
    if rng.random() < 0.1:
        passage = text[: rng.randint(100, 400)].strip() + "\n"
        text = passage * (len(text) // len(passage) + 1)
    gap = round(2 ** rng.uniform(7.5, 10))  # characters of text per fact
    count = max(1, len(text) // gap)
    wordings = rng.choices(FACTS, k=1 if rng.random() < 0.33 else count)
    owners = [names.owner() for _ in range(1 if rng.random() < 0.33 else count)]
    return strewn(
        rng,
        text,
        [
            rng.choice(wordings).format(key=names.key(), owner=rng.choice(owners), value=names.value())
            for _ in range(count)
        ],
    )


def chains(rng: random.Random, names: Names, text: str) -> str:
    """Several chains ``x = value, y = x, z = y``: their links, mixed, inserted into ``text`` or without the text."""
    alone = rng.random() < 0.3
    link = rng.choice(LINKS)
    count = max(1, len(text) // (40 if alone else round(2 ** rng.uniform(7, 9))))
    ends = [names.value() for _ in range(max(1, count // rng.randint(2, 6)))]
    upper = rng.random() < 0.5
    lines = []
    for _ in range(count):
        place, new = rng.randrange(len(ends)), re.sub(r"[ -]", "_", names.key())
        new = new.upper() if upper else new
        lines.append(link.format(new=new, old=ends[place]))
        ends[place] = new
    return "\n".join(lines) if alone else strewn(rng, text, lines)


def until(characters: int, line: Callable[[], str], separator: str = "\n") -> str:
    """Make lines until they have at least this many characters, and join them."""
    lines: list[str] = []
    written = 0
    while written < characters:
        lines.append(line())
        written += len(lines[-1]) + len(separator)
    return separator.join(lines)


def records(rng: random.Random, names: Names, text: str) -> str:
    """Keys and values, all in one format, or facts, all in one wording."""
    form = rng.choice(RECORDS if rng.random() < 0.6 else FACTS)
    field, same = names.word(), rng.random() < 0.5

    def record() -> str:
        about = field if same else names.word()
        return form.format(key=names.key(), field=about, owner=names.owner(), value=names.value())

    return until(len(text), record)


def table(rng: random.Random, names: Names, text: str) -> str:
    """A table of three to six columns; the first column holds keys."""
    columns = [names.word() for _ in range(rng.randint(3, 6))]
    bar = rng.choice((" | ", ",", "\t", "  "))
    kinds = [rng.choice((names.value, names.word, lambda: str(rng.randrange(1000)))) for _ in columns[1:]]
    head = [bar.join(columns)] + ([bar.join("---" for _ in columns)] if bar == " | " else [])
    return "\n".join(head) + "\n" + until(len(text), lambda: bar.join([names.key(), *(kind() for kind in kinds)]))


def lists(rng: random.Random, names: Names, text: str) -> str:
    """Lists of a few items, each under a heading."""

    def section() -> str:
        bullet, noted = rng.choice(BULLETS), rng.random() < 0.5
        items = [
            bullet.format(number=number + 1) + names.key() + (f" ({names.value()})" if noted else "")
            for number in range(rng.randint(3, 12))
        ]
        return "\n".join([rng.choice(HEADINGS).format(owner=names.owner(), key=names.key()), *items])

    return until(len(text), section, "\n\n")


def words(rng: random.Random, names: Names, text: str) -> str:
    """Words in random order, some much more frequent than others, plain or numbered."""
    pool = [names.word() for _ in range(rng.randint(10, 120))]
    steepness = rng.uniform(0.0, 2.0)
    weights = [(rank + 1) ** -steepness for rank in range(len(pool))]
    form, separator = rng.choice((("{word}", " "), ("{word}", "\n"), ("{word}", ", "), ("{number}. {word}", " ")))
    numbers = itertools.count(1)
    return until(
        len(text),
        lambda: form.format(word=rng.choices(pool, weights)[0], number=next(numbers)),
        separator,
    )


def dialogue(rng: random.Random, names: Names, text: str) -> str:
    """A dialogue of two to four speakers, who state facts, chat, and ask for facts that were stated before."""
    speakers = [names.owner() for _ in range(rng.randint(2, 4))]
    told: list[dict[str, str]] = []

    def turn() -> str:
        speaker, other = rng.sample(speakers, 2)
        kind = rng.random()
        if kind < 0.4:
            return f"{speaker}: {rng.choice(SMALL_TALK)}"
        if kind < 0.8 or not told:
            told.append({"key": names.key(), "owner": names.owner(), "value": names.value()})
            return f"{speaker}: {rng.choice(FACTS).format(**told[-1])}"
        fact = rng.choice(told)
        return f"{speaker}: {rng.choice(QUESTIONS).format(**fact)}\n{other}: {rng.choice(REPLIES).format(**fact)}"

    return until(len(text), turn)
