"""A tiny target, a tiny proxy and a teacher's shards on disk, and a config to train on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from texts import write_texts
from tiny import tiny_model, tiny_tokenizer

from proxykv_hf.training.corpus import Corpus
from proxykv_hf.training.teacher import score_corpus

DOCUMENTS = 11
SIZES = {"bottleneck": 8, "head_tokens": 2, "width": 8, "encoder_heads": 2, "window": 32, "overlap": 8}


def make_home(root: Path) -> Path:
    """Write the folders ``target``, ``proxy`` and ``teacher``. The teacher has two shards."""
    tokenizer = tiny_tokenizer()
    target = tiny_model("llama", 2)
    for name, model in (("target", target), ("proxy", tiny_model("qwen2", 1))):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    corpus = Corpus(write_texts(root / "texts"), tokens=(16, 40))
    with torch.no_grad():
        score_corpus(target, tokenizer, corpus, DOCUMENTS, root / "teacher", target_id="org/tiny", progress=False)
    return root


def settings(home: Path, teacher: Path, out: Path, /, **changes: Any) -> dict[str, Any]:
    """The content of the TOML file for a short training run; ``changes`` replace entries."""
    features = {"sources": ["attention", "hidden"], "proxy_layers": 2, "hidden_layers": [1, 2]}
    common = {"title": "Tiny", "target": str(home / "target"), "teacher": [str(teacher)], "out": str(out)}
    return common | {"features": features, "mapper": SIZES, "epochs": 3, "batch": 2} | changes
