"""The pairs of target and proxy that this repository has mappers for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models import load, resolve
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from proxykv_hf import ProxyScorer

MAPPERS = Path(__file__).resolve().parents[1] / "mappers"


@dataclass(frozen=True)
class Pair:
    """A target and its proxy.

    Args:
        target: A key of `models.MODELS`.
        proxy: A key of `models.MODELS`, or None for the target's own first layers.
    """

    target: str
    proxy: str | None


PAIRS = {
    "smollm2": Pair("smollm2-135m", None),
    "qwen2.5-coder": Pair("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
}


def load_pair(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ProxyScorer]:
    """Load the target, its tokenizer, and the scorer with the pair's mapper."""
    pair = PAIRS[name]
    target, tokenizer = load(pair.target)
    proxy = None if pair.proxy is None else resolve(pair.proxy)
    return target, tokenizer, ProxyScorer.from_pretrained(MAPPERS / name, target=target, proxy=proxy)
