"""The pairs of models that mappers are shipped for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models import load, resolve
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proxykv_hf import ProxyScorer

MAPPERS = Path(__file__).resolve().parents[1] / "mappers"


@dataclass(frozen=True)
class Pair:
    """A target and who scores for it.

    Args:
        target: A name of `models.MODELS`.
        proxy: Another, or None for the target's own first layers.
    """

    target: str
    proxy: str | None


PAIRS = {
    "smollm2": Pair("smollm2-135m", None),
    "qwen2.5-coder": Pair("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
}


def load_pair(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ProxyScorer]:
    """The target, its tokenizer and the scorer of its mapper."""
    pair = PAIRS[name]
    target, tokenizer = load(pair.target)
    proxy = None if pair.proxy is None else resolve(pair.proxy)
    return target, tokenizer, ProxyScorer.from_pretrained(MAPPERS / name, target=target, proxy=proxy)
