"""The pairs of models that mappers are shipped for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models import load, resolve
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from proxykv_hf import (
    HeadPriorScorer,
    KVzipScorer,
    ProxyScorer,
    RandomScorer,
    Scorer,
    SnapKVScorer,
    StaticAlignmentScorer,
)
from proxykv_hf.pretrained import load_proxy_scorer

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


def load_pair(
    name: str, mapper: Path | None = None, threads: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ProxyScorer]:
    """The target, its tokenizer and the scorer of its mapper."""
    pair = PAIRS[name]
    target, tokenizer = load(pair.target)
    proxy = None if pair.proxy is None else resolve(pair.proxy)
    return target, tokenizer, load_proxy_scorer(mapper or MAPPERS / name, target=target, proxy=proxy, threads=threads)


def all_scorers(name: str, tokenizer: PreTrainedTokenizerBase, proxykv: ProxyScorer) -> dict[str, Scorer]:
    """ProxyKV, the oracle and everything it is compared with, by name."""
    scorers: dict[str, Scorer] = {
        "proxykv": proxykv,
        "kvzip": KVzipScorer(tokenizer),
        "head_prior": HeadPriorScorer(proxykv.mapper.head_prior()),
        "snapkv": SnapKVScorer(),
        "random": RandomScorer(),
    }
    proxy = PAIRS[name].proxy
    if proxy is not None:
        folder = resolve(proxy)
        small = AutoModel.from_pretrained(folder, dtype=proxykv.proxy.dtype).eval()
        scorers["static_alignment"] = StaticAlignmentScorer(small, AutoTokenizer.from_pretrained(folder))
    return scorers
