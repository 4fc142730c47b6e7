"""The package's shape: who imports whom, what is exported, what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import proxykv_hf

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "proxykv_hf"

#: The package's parts, in order: a file imports from its own part and from parts before it, never from a later one.
#: ``scorers.base``, what a scorer is, and the cache that is scored make up one part.
PARTS = [
    ["errors", "files", "_compat", "geometry", "chat"],
    ["attention"],
    ["scorers.base", "cache"],
    ["proxy"],
    ["scorers"],
    ["generation"],
    ["training", "evaluation", "bench"],
    ["commands"],
    ["cli", "__init__"],
]


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def part_of(name: str) -> int:
    """The number of a module's part."""
    at = {prefix: number for number, part in enumerate(PARTS) for prefix in part}
    path = name.split(".")
    return next(at[prefix] for end in range(len(path), 0, -1) if (prefix := ".".join(path[:end])) in at)


def imports_of(path: Path, name: str) -> set[str]:
    """The package's modules that a file imports, anywhere in it."""
    known = {module for module, _ in modules()}
    package = name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - (node.level - 1)], *(node.module or "").split(".")]
            base = [part for part in base if part]
            for alias in node.names:
                names = (".".join([*base, alias.name]), ".".join(base), ".".join([*base, "__init__"]))
                found.add(next(each for each in names if each in known))
    return found


IMPORTS = {name: imports_of(path, name) for name, path in modules()}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_file_imports_from_its_own_part_and_earlier_ones(name):
    later = {other for other in IMPORTS[name] if part_of(other) > part_of(name)} - {"__init__"}
    assert (name, later) in EXCEPTIONS or not later


#: `ProxyPrunedCache.from_pretrained` makes a scorer, and imports it when it is called.
EXCEPTIONS = [("cache.cache", {"scorers.proxy"})]


def test_no_imports_go_round():
    TopologicalSorter({name: others - {"__init__"} for name, others in IMPORTS.items()}).prepare()


def test_no_test_module_imports_another_test_module():
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[-1].startswith("test_")], path


def test_exports_are_sorted_and_there():
    assert proxykv_hf.__all__ == sorted(proxykv_hf.__all__)
    for name in proxykv_hf.__all__:
        assert getattr(proxykv_hf, name).__doc__


def test_importing_drags_in_nothing_optional_and_does_no_work():
    optional = ["tqdm.auto", "gguf", "matplotlib", "accelerate", "datasets", "sklearn", "pytest", "proxykv_hf.training"]
    code = (
        "import sys, transformers, transformers.modeling_utils; before = set(sys.modules);"
        "from transformers import AttentionInterface as A; names = set(A._global_mapping);"
        "import proxykv_hf; new = set(sys.modules) - before;"
        f"print([m for m in {optional} if m in new], sorted(set(A._global_mapping) - names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_the_changelog_knows_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(proxykv_hf.__version__)}\b", changelog, re.MULTILINE)
