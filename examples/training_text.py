"""Free texts to train mappers on, without the Hub: from Debian packages and this machine's Python.

    python examples/training_text.py              # prints one folder per line, for `proxykv teacher --text`

`apt-get download` fetches the packages, and `dpkg -x` unpacks them into the cache folder. Nothing is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from models import cache_folder


@dataclass(frozen=True)
class TextSource:
    """The text in one Debian package.

    Args:
        package: The name of the package.
        folder: The folder of the text inside the package.
        suffix: The ending of the names of the text files.
        licence: The licence of the text.
    """

    package: str
    folder: str
    suffix: str
    licence: str


SOURCES = {
    "python-docs": TextSource("python3.11-doc", "usr/share/doc/python3.11/html/_sources", ".rst.txt", "PSF-2.0"),
    "essays": TextSource("anarchism", "usr/share/doc/anarchism/markdown", ".md.gz", "GPL-2.0"),
    "git-docs": TextSource("git-doc", "usr/share/doc/git-doc", ".txt", "GPL-2.0"),
    "postgresql-docs": TextSource("postgresql-doc-15", "usr/share/doc/postgresql-doc-15/html", ".html", "PostgreSQL"),
}
STDLIB = "python-stdlib"


def fetch(name: str) -> Path:
    """The folder of a text. The first call fetches the text; later calls return at once.

    Args:
        name: A key of ``SOURCES``, or ``STDLIB``.

    Raises:
        RuntimeError: This machine has no apt, apt cannot get the package, or the package holds no text.
    """
    destination = cache_folder() / "text" / name
    if destination.is_dir():
        return destination
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{name}-") as scratch:
        if name == STDLIB:
            root, files = _stdlib()
        else:
            source = SOURCES[name]
            root = _unpacked(source.package, Path(scratch)) / source.folder
            files = sorted(root.rglob(f"*{source.suffix}"))
        if not files:
            raise RuntimeError(f"expected text in {root}, found none: another version of the package?")
        ready = Path(scratch) / "ready"
        for path in files:
            copy = ready / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".html":
                copy.with_suffix(".txt").write_text(plain_text(path.read_text(encoding="utf-8")), encoding="utf-8")
            else:
                shutil.copyfile(path, copy)
        ready.rename(destination)  # the folder gets its name only when it is complete
    return destination


def _stdlib() -> tuple[Path, list[Path]]:
    """The files of the Python standard library, without its tests, its bundled documentation and its encodings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    return root, [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]


def _unpacked(package: str, scratch: Path) -> Path:
    """Download a package into ``scratch`` and unpack it there."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise RuntimeError(
            f"apt-get and dpkg fetch the package {package}, and this machine lacks them: take folders of your own "
            "text instead, of .txt, .md, .rst or .py files"
        )
    _run(["apt-get", "download", package], scratch, f"{package} (does `apt-get update` help?)")
    folder = scratch / "unpacked"
    _run(["dpkg", "-x", str(next(scratch.glob("*.deb"))), str(folder)], scratch, package)
    return folder


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:2])} failed for {what}:\n{done.stderr.strip()}")


class _Reader(HTMLParser):
    """Collects the visible text of a page. Every block element ends a line."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0  # how many invisible elements are open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in ("head", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("head", "script", "style")
        if tag in ("p", "div", "li", "tr", "dt", "dd", "h1", "h2", "h3", "h4", "pre"):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def plain_text(html: str) -> str:
    """The text of a page, without runs of blank lines."""
    reader = _Reader()
    reader.feed(html)
    lines = [line.rstrip() for line in "".join(reader.parts).split("\n")]
    return "\n".join(line for line, after in zip(lines, [*lines[1:], ""], strict=True) if line or after)


def fetch_all(names: Iterable[str], fetch_one: Callable[[str], Path] = fetch) -> list[Path]:
    """The folders of all texts that can be fetched. Each of the others is reported on stderr.

    Raises:
        RuntimeError: No text can be fetched.
    """
    folders = []
    for name in names:
        try:
            folders.append(fetch_one(name))
        except (RuntimeError, OSError) as error:
            print(f"Left out {name}: {error}", file=sys.stderr)
    if not folders:
        raise RuntimeError("expected at least one text that can be fetched")
    return folders


def main() -> None:
    names = [*SOURCES, STDLIB]
    parser = argparse.ArgumentParser(description="Fetch free texts and print their folders.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; all by default")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"unknown text {', '.join(sorted(unknown))}: expected some of {', '.join(names)}")
    try:
        folders = fetch_all(arguments.names or names)
    except RuntimeError as error:
        sys.exit(str(error))
    print(*folders, sep="\n")


if __name__ == "__main__":
    main()
