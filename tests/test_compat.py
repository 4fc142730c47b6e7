"""A release of transformers that does not suit is refused in plain words, before any forward."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny_model
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from proxykv_hf import ProxyPrunedCache, RandomScorer, RetentionPolicy, UnsupportedModelError, _compat

ROOT = Path(__file__).resolve().parents[1]
PRIVATE = re.compile(r"_global_mapping|_local_mapping|(?<!set)_attn_implementation|_hf_hook|ALL_\w+_FUNCTIONS")
INTERNAL = re.compile(r"from transformers\.(cache_utils|masking_utils|modeling_utils|generation\.\w+) import")


def imported(code: str) -> str:
    """What importing the library says after ``code`` has changed transformers."""
    command = [sys.executable, "-c", f"import transformers; {code}; import proxykv_hf"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip().splitlines()[-1]


def test_an_older_release_is_refused_at_import():
    assert imported("transformers.__version__ = '5.16.1'") == (
        f"ImportError: expected transformers {_compat.OLDEST} to {_compat.NEWEST}, on which proxykv-hf is tested, got "
        "5.16.1: it is too old; pip install 'transformers>=5.17,<6'"
    )


def test_a_release_that_lost_a_class_is_refused_at_import():
    told = imported("import transformers.cache_utils as c; del c.DynamicSlidingWindowLayer")
    assert told.startswith(f"ImportError: expected transformers {_compat.OLDEST} to {_compat.NEWEST}")
    assert "cannot import name 'DynamicSlidingWindowLayer'" in told


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (AttentionInterface, "register"),
        (AttentionMaskInterface, "register"),
        (PreTrainedConfig, "_attn_implementation"),
    ],
)
def test_a_release_that_lost_a_name_is_refused_when_a_cache_is_made(owner, name, monkeypatch):
    model = tiny_model()
    home = next(base for base in owner.__mro__ if name in vars(base))
    monkeypatch.delattr(home, name)
    with pytest.raises(UnsupportedModelError) as caught:
        ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.3))
    monkeypatch.undo()
    assert f"has no {name}; pip install 'transformers>=" in str(caught.value)
    assert f"expected transformers {_compat.OLDEST} to {_compat.NEWEST}" in str(caught.value)
    assert not model._forward_hooks
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.3)):
        pass


def test_only_compat_touches_what_transformers_keeps_to_itself():
    """Outside of it there are two mentions: a model's own config is shown its own name, see `_Renamed`."""
    found = [
        (path.name, match.group())
        for path in sorted((ROOT / "src").rglob("*.py"))
        if path.name != "_compat.py"
        for pattern in (PRIVATE, INTERNAL)
        for match in pattern.finditer(path.read_text())
    ]
    assert found == [("functions.py", "_attn_implementation")] * 2


def test_the_bounds_are_those_of_the_package_and_of_the_documentation():
    assert f'"transformers>={_compat.OLDEST},<6"' in (ROOT / "pyproject.toml").read_text()
    table = (ROOT / "docs" / "versions.md").read_text()
    releases = re.findall(r"^\| (5\.\d+)\.\d+ ", table, re.MULTILINE)
    assert (releases[0], releases[-1]) == (_compat.OLDEST, _compat.NEWEST)
