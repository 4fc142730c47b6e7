"""The package's shape: who imports whom, what is exported, what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import proxykv_hf

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "proxykv_hf"

#: A file imports only from levels below its own.
LEVELS = {
    0: ["errors", "files", "_compat"],
    1: [
        "geometry",
        "retention",
        "storage",
        "prompt",
        "chat",
        "report",
        "lane",
        "logits",
        "moments",
        "evaluation.sole",
        "evaluation.task",
    ],
    2: ["attention", "inputs", "ragged", "scorers.base"],
    3: ["layers", "reconstruction", "rotary", "scorers.observing"],
    4: ["features", "prefill", "pruning", "snapshot"],
    5: ["cache", "dynamic", "mapper"],
    6: [
        "scorers.expected_attention",
        "scorers.fixed",
        "scorers.h2o",
        "scorers.head_prior",
        "scorers.hidden_state",
        "scorers.kvzip",
        "scorers.on_lane",
        "scorers.random",
        "scorers.snapkv",
        "scorers.streaming_llm",
    ],
    7: ["scorers.proxy", "scorers.static_alignment"],
    8: ["pretrained", "evaluation.rows"],
    9: [
        "generation",
        "model_card",
        "training.generated",
        "training.losses",
        "training.metrics",
        "training.shards",
        "evaluation.longbench",
        "evaluation.metrics",
        "evaluation.tasks.fitting",
        "evaluation.tasks.words",
        "benchmark.meter",
        "benchmark.prompt",
        "benchmark.report",
        "evaluation.outcomes",
        "evaluation.statistics",
        "evaluation.drawing",
        "evaluation.kept",
        "evaluation.answers",
        "evaluation.methods",
    ],
    10: [
        "evaluation.kept_plot",
        "evaluation.summary",
        "training.checkpoints",
        "training.config",
        "training.corpus",
        "training.feature_cache",
        "evaluation.readers",
        "evaluation.tasks.counting",
        "evaluation.tasks.facts",
        "evaluation.tasks.few_shot",
        "evaluation.tasks.function",
        "evaluation.tasks.key_value",
        "evaluation.tasks.prose",
        "benchmark.measure",
        "commands.models",
        "evaluation.prompts",
    ],
    11: [
        "commands.sources",
        "evaluation.plots",
        "evaluation.runner",
        "evaluation.table",
        "training.curves",
        "training.dataset",
        "training.teacher",
        "evaluation.tasks.dialogue",
        "evaluation.tasks.documents",
        "evaluation.tasks.many_questions",
        "evaluation.tasks.niah",
        "evaluation.tasks.passages",
    ],
    12: [
        "training.hidden_state",
        "training.loop",
        "training.ridge",
        "evaluation.tasks.tracking",
        "commands.bench",
        "commands.generate",
        "commands.kept",
        "commands.push",
        "commands.report",
        "commands.teacher",
    ],
    13: ["training.prepare", "training.results", "evaluation.tasks.__init__"],
    14: ["commands.evaluate", "commands.train"],
    15: [
        "__init__",
        "benchmark.__init__",
        "cli",
        "commands.__init__",
        "evaluation.__init__",
        "scorers.__init__",
        "training.__init__",
    ],
}
LEVEL = {name: level for level, names in LEVELS.items() for name in names}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def imports_of(path: Path, name: str) -> list[str]:
    found = []
    package = name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            if node.module:
                found.append(".".join([*base, node.module]))
            else:
                found += [".".join([*base, alias.name]) for alias in node.names if alias.name != "__version__"]
    return found


def test_every_module_has_a_level():
    assert sorted(LEVEL) == sorted(name for name, _ in modules())


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_go_down(name, path):
    for imported in imports_of(path, name):
        # The first is for type checkers only, the second happens when it is called.
        if (name, imported) in [("snapshot", "cache"), ("cache", "pretrained")]:
            continue
        # What is imported from a package's own ``__init__`` lies there.
        level = LEVEL[imported] if imported in LEVEL else LEVEL[f"{imported}.__init__"]
        assert level < LEVEL[name], f"{name} imports {imported}"


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
