"""The documents that mappers are trained on: real text and generated retrieval documents, from a seed.

Document k depends only on the seed, on k and on the text files, so processes can share the work, and a run can
continue where another one stopped. Held-out documents use files and made-up words that no training document uses: the
hash of the file's name, or of the word, decides.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import random
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidInputError, ProxyKVWarning
from .generated import Names, chains, dialogue, is_held_out, lists, needles, records, table, words

#: Increases whenever a change of the code changes the documents of a seed.
VERSION = 1
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
SUFFIXES = (".py", ".rst", ".txt", ".md")
#: The kinds of documents, and the weight with which each is drawn.
KINDS = {
    "text": 5,
    "joined": 2,
    "needles": 4,
    "records": 2,
    "table": 1,
    "lists": 1,
    "words": 1,
    "chains": 2,
    "dialogue": 1,
}
GENERATORS: dict[str, Callable[[random.Random, Names, str], str]] = {
    "needles": needles,
    "records": records,
    "table": table,
    "lists": lists,
    "words": words,
    "chains": chains,
    "dialogue": dialogue,
}
#: Characters generated per wanted token: more than texts have per token, so that there are always enough tokens.
CHARACTERS_PER_TOKEN = 6
#: Files are drawn in proportion to their characters, but at most this many, so that long files do not dominate.
LONGEST_SHARE = 64_000
#: Files with fewer characters are left out.
LEAST_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """A text to be scored.

    Args:
        text: The text. It has more than ``tokens`` tokens and is cut later.
        tokens: N, the number of tokens wanted.
        kind: A key of ``KINDS``.
        sources: The files that the text was taken from, as ``folder/path``.
        split: ``"train"`` or ``"held_out"``.
    """

    text: str
    tokens: int
    kind: str
    sources: tuple[str, ...]
    split: Split


@dataclass(frozen=True)
class TextFile:
    """A file of a text source.

    Args:
        name: ``folder/path``.
        path: Where it is.
        characters: Its length in characters.
        sha256: The SHA-256 of its text, unpacked.
    """

    name: str
    path: Path
    characters: int
    sha256: str


class Corpus:
    """All documents of a seed.

    Files that are not UTF-8 text are left out, with one `ProxyKVWarning`.

    Args:
        folders: Folders of text. Each is a source, named by the last part of its path, and is read with its subfolders:
            all files that end in one of ``SUFFIXES``, or in one of these and ``.gz``. A text that is there twice counts
            once.
        split: Whether to make training or held-out documents. A file belongs to one of the two by its own name, without
            folders and ``.gz``.
        seed: Every seed gives other documents.
        tokens: Least and greatest length of a document. Lengths are log-uniform, so short documents are more frequent.

    Raises:
        InvalidInputError: There is no folder, two folders have the same name, there is no text for this split, or the
            range of lengths is invalid.
    """

    def __init__(
        self,
        folders: Sequence[str | Path],
        *,
        split: Split = "train",
        seed: int = 0,
        tokens: tuple[int, int] = (256, 2048),
    ) -> None:
        if split not in SPLITS:
            raise InvalidInputError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        if not 1 <= tokens[0] <= tokens[1]:
            raise InvalidInputError(f"tokens: expected 1 <= least <= greatest, got {tokens[0]} and {tokens[1]}")
        self.split, self.seed, self.tokens = split, seed, (tokens[0], tokens[1])
        files = [file for file in read_folders(folders) if is_held_out(own_name(file.path)) == (split == "held_out")]
        if not files:
            raise InvalidInputError(
                f"expected text files ({', '.join(SUFFIXES)}, or these with .gz) of {LEAST_CHARACTERS} characters and "
                f"more for the {split} documents, found none in {', '.join(map(str, folders)) or 'no folder'}"
            )
        self.sources: dict[str, list[TextFile]] = {}
        for file in files:
            self.sources.setdefault(file.name.split("/")[0], []).append(file)

    def recipe(self) -> dict[str, Any]:
        """Everything that determines the documents, as values for JSON."""
        files = [file for files in self.sources.values() for file in files]
        digest = hashlib.sha256("".join(f"{file.name} {file.sha256}\n" for file in files).encode())
        return {
            "version": VERSION,
            "seed": self.seed,
            "split": self.split,
            "kinds": dict(KINDS),
            "tokens": list(self.tokens),
            "sources": {name: len(files) for name, files in self.sources.items()},
            "files_sha256": digest.hexdigest(),
        }

    def document(self, number: int) -> Document:
        """The document of a number, from 0. Every number has a document."""
        rng = random.Random(f"{self.seed} {number}")
        kind = rng.choices(list(KINDS), weights=list(KINDS.values()))[0]
        low, high = map(math.log, self.tokens)
        tokens = round(math.exp(rng.uniform(low, high)))
        characters = CHARACTERS_PER_TOKEN * tokens
        if kind == "joined":
            first, second = rng.sample(list(self.sources), 2) if len(self.sources) > 1 else 2 * list(self.sources)
            begin, begun = self._piece(rng, first, round(characters * rng.uniform(0.1, 0.4)))
            end, ended = self._piece(rng, second, characters)
            return Document(f"{begin}\n\n{end}", tokens, kind, begun + ended, self.split)
        text, files = self._piece(rng, rng.choice(list(self.sources)), characters)
        if kind != "text":
            text = GENERATORS[kind](rng, Names(rng, self.split == "held_out", text), text)
        return Document(text, tokens, kind, files, self.split)

    def _piece(self, rng: random.Random, source: str, characters: int) -> tuple[str, tuple[str, ...]]:
        """About ``characters`` of text from random lines of a source's files on, and the names of these files."""
        files = self.sources[source]
        bounds = list(itertools.accumulate(min(file.characters, LONGEST_SHARE) for file in files))
        pieces: list[str] = []
        names: dict[str, None] = {}
        missing = characters
        while missing > 0:
            file = rng.choices(files, cum_weights=bounds)[0]
            text = read_text(file.path)
            start = text.find("\n", rng.randrange(max(1, len(text) - missing // 2))) + 1
            piece = text[start : start + missing].strip("\n")
            if piece:
                pieces.append(piece)
                names[file.name] = None
            missing -= len(piece) + 2
        return "\n\n".join(pieces), tuple(names)


def own_name(path: Path) -> str:
    """A file's name without folders and ``.gz``. It does not depend on which of its parent folders was given."""
    return path.name.removesuffix(".gz")


def read_text(path: Path) -> str:
    """Read the text of a file, unpacked if it is a ``.gz``, with line feeds as the only line ends."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def read_folders(folders: Sequence[str | Path]) -> list[TextFile]:
    """Find all text files in the folders, in the order of their names; see `Corpus`."""
    roots = sorted((Path(folder).resolve() for folder in folders), key=lambda root: root.name)
    for root, other in itertools.pairwise(roots):
        if root.name == other.name:
            raise InvalidInputError(f"expected folders of different names, got {root} and {other}: rename one")
    found: dict[str, TextFile] = {}
    unreadable: list[str] = []
    for root in roots:
        if not root.is_dir():
            raise InvalidInputError(f"expected a folder of text files, but {root} is not a folder")
        paths = (path for path in root.rglob("*") if own_name(path).endswith(SUFFIXES) and path.is_file())
        for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
            name = f"{root.name}/{path.relative_to(root).as_posix()}"
            try:
                text = read_text(path)
            except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error):
                unreadable.append(name)
                continue
            digest = hashlib.sha256(text.encode()).hexdigest()
            if len(text) >= LEAST_CHARACTERS:
                found.setdefault(digest, TextFile(name, path, len(text), digest))
    if unreadable:
        warnings.warn(
            f"left out {len(unreadable)} files that are not UTF-8 text: {', '.join(unreadable[:3])}"
            + (", …" if len(unreadable) > 3 else ""),
            ProxyKVWarning,
            stacklevel=3,
        )
    return sorted(found.values(), key=lambda file: file.name)
