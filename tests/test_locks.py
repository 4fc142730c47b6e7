"""The locks hold what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [
    requirement
    for text in [
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    ]
    if (requirement := Requirement(text)).name != PROJECT["name"]
]


def releases(lock):
    """``{name: (version, number of hashes)}``; a package may be there twice, for different Pythons."""
    found = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "requirements" / lock).read_text()):
        if match := re.match(r"([\w.-]+)==([^ ;]+)", entry):
            found[match[1].lower().replace("_", "-")] = (Version(match[2]), entry.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("lock", ["locked.txt", "oldest.txt"])
def test_a_lock_holds_a_suitable_release_of_every_dependency_and_its_hashes(lock):
    found = releases(lock)
    assert all(hashes for _, hashes in found.values())
    for requirement in ASKED:
        name = requirement.name.lower().replace("_", "-")
        if name != "torch":  # see the Makefile
            version, _ = found[name]
            assert requirement.specifier.contains(version), f"{requirement} in pyproject.toml: run `make lock`"


@pytest.mark.parametrize("lock", ["locked.txt", "oldest.txt"])
def test_a_lock_holds_no_torch_and_nothing_of_cuda(lock):
    assert not [name for name in releases(lock) if re.match("torch|nvidia|cuda|triton", name)]


def test_the_oldest_lock_holds_the_lower_bounds():
    """Of what the library itself imports; a bound that nothing can be installed with would be a wrong promise."""
    found = releases("oldest.txt")
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        bound = next(each.version for each in requirement.specifier if each.operator == ">=")
        if requirement.name == "torch":
            assert f"OLDEST_TORCH := torch=={bound}" in (ROOT / "Makefile").read_text()
        elif requirement.name != "packaging":  # others among the dependencies want a newer one
            assert found[requirement.name.lower().replace("_", "-")][0].release[:2] == Version(bound).release[:2], text
