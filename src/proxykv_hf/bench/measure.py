"""Measure the seconds and bytes that methods take to prefill, prune and decode, side by side in one process.

All methods read the same tokens (batch 1). Each repeat runs every method at every length, in another order than the
last repeat, so that a machine that becomes slower during the benchmark affects all methods alike.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from .._compat import call_forward
from ..attention.reconstruction import repeat_length
from ..cache.cache import ProxyPrunedCache
from ..cache.prefill import SCHEDULES
from ..cache.retention import RetentionPolicy
from ..cache.storage import storage_bytes
from ..errors import InvalidInputError
from ..evaluation.methods import FULL
from ..evaluation.methods import METHODS as SCORED
from ..geometry import device_of, max_positions
from ..scorers.base import Scorer
from ..scorers.random import RandomScorer
from .meter import PeakMemory

UNCOMPRESSED = "uncompressed"
#: ``full`` is transformers' own `DynamicCache`; ``uncompressed`` is `ProxyPrunedCache` with everything kept.
METHODS = (FULL, UNCOMPRESSED, *SCORED, *(f"proxykv:{schedule}" for schedule in SCHEDULES))
#: Prompt length of the warm-up runs, in tokens. A first run has costs that later runs do not have.
WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        methods: Some of ``METHODS``.
        lengths: Prompt lengths in tokens.
        policy: The retention policy of all methods that prune.
        repeats: Runs of each method at each length.
        new_tokens: Tokens decoded after each prompt.

    Raises:
        InvalidInputError: On construction; the message names the argument.
    """

    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    policy: RetentionPolicy
    repeats: int = 3
    new_tokens: int = 32

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods or len(set(self.methods)) < len(self.methods):
            raise InvalidInputError(
                f"methods: expected some of {', '.join(METHODS)}, each once, got {', '.join(self.methods) or 'none'}"
            )
        if not self.lengths or min(self.lengths) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise InvalidInputError(f"lengths: expected numbers of at least 1, each once, got {[*self.lengths]}")
        for name in ("repeats", "new_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def scored(self) -> list[str]:
        """The scorers that the methods need, by their names in `evaluation.methods.METHODS`."""
        names = dict.fromkeys(name.partition(":")[0] for name in self.methods)
        return [name for name in names if name in SCORED]

    @property
    def runs_per_repeat(self) -> int:
        return len(self.methods) * len(self.lengths)

    def check_positions(
        self,
        ids: Tensor,
        tokenizer: PreTrainedTokenizerBase,
        target: PreTrainedConfig,
        proxy: PreTrainedConfig | None = None,
    ) -> None:
        """Refuse lengths for which a model has too few positions.

        Args:
            ids: `[1, n]`, from `prompt.prompt_ids`.
            tokenizer: The target's tokenizer.
            target: The target's config.
            proxy: The proxy's config, or None if there is no proxy, or if it is the target's own first layers.

        Raises:
            InvalidInputError: A length is too long; the message names it.
        """
        for length in self.lengths:
            after, advice = self.new_tokens, "give shorter lengths"
            if "kvzip" in self.methods:
                after = max(after, repeat_length(tokenizer, ids[0, :length]))
                advice += ", or leave out kvzip, which repeats the prompt at the positions after it"
            for model, config, needed in (("target", target, length + after), ("proxy", proxy, length)):
                limit = None if config is None else max_positions(config)
                if limit is not None and needed > limit:
                    raise InvalidInputError(
                        f"lengths: a prompt of {length} tokens and what follows it need {needed} positions, but the "
                        f"{model} has {limit}: {advice}"
                    )


@dataclass(frozen=True)
class Method:
    """How a prompt is prefilled and its cache pruned.

    Args:
        scorer: What scores the KV pairs; None for transformers' own `DynamicCache`.
        policy: How many KV pairs are kept.
        schedule: When the proxy runs; None for the default of `ProxyPrunedCache`.
    """

    scorer: Scorer | None
    policy: RetentionPolicy
    schedule: str | None = None

    def prefill(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, ids: Tensor) -> DynamicCache:
        """Prefill ``ids`` `[1, N]` and return the cache, pruned if the method prunes."""
        if self.scorer is None:
            whole = DynamicCache(config=target.config)
            call_forward(target, input_ids=ids, cache=whole, use_cache=True, logits_to_keep=1)
            return whole
        options: dict[str, Any] = {} if self.schedule is None else {"schedule": self.schedule}
        cache = ProxyPrunedCache(target, self.scorer, self.policy, tokenizer=tokenizer, strict=True, **options)
        try:
            cache.prefill(ids)
        except BaseException:
            cache.close()
            raise
        return cache


def make_methods(plan: Plan, scorers: Mapping[str, Scorer]) -> dict[str, Method]:
    """The plan's methods by name.

    Args:
        plan: What is measured.
        scorers: The scorers of ``plan.scored``, by name; the schedules of ``proxykv`` share its scorer.

    Raises:
        InvalidInputError: A scorer is missing.
    """
    whole = RetentionPolicy(1.0, sink_tokens=0, recent_tokens=0)
    methods = {FULL: Method(None, whole), UNCOMPRESSED: Method(RandomScorer(), whole)}
    for name in plan.methods:
        kind, _, schedule = name.partition(":")
        if kind in SCORED:
            if kind not in scorers:
                raise InvalidInputError(f"{name}: expected a scorer {kind}, got {', '.join(scorers) or 'none'}")
            methods[name] = Method(scorers[kind], plan.policy, schedule or None)
    return {name: methods[name] for name in plan.methods}


def runs(
    plan: Plan,
    methods: Mapping[str, Method],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Tensor,
) -> Iterator[dict[str, Any]]:
    """Run the plan and yield one row for each run, ``plan.runs_per_repeat`` rows for each repeat.

    Args:
        plan: What is measured.
        methods: From `make_methods`.
        target: The target, in eval mode.
        tokenizer: The target's tokenizer, which is compared with the proxy's.
        ids: `[1, n]`, from `prompt.prompt_ids`, longer than the longest prompt.
    """
    ids, names = ids.to(device_of(target)), list(methods)
    for name in names:
        measure(target, tokenizer, methods[name], ids[:, : min(WARM_UP_TOKENS, *plan.lengths) + 1], 2)
    for repeat in range(plan.repeats):
        for length in plan.lengths:
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                row = measure(target, tokenizer, methods[name], ids[:, : length + 1], plan.new_tokens)
                yield {"repeat": repeat, "length": length, "method": name} | row


@torch.no_grad()
def measure(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, method: Method, ids: Tensor, new_tokens: int
) -> dict[str, Any]:
    """Measure one run.

    Args:
        target: The target, in eval mode.
        tokenizer: The target's tokenizer.
        method: How the prompt is prefilled and its cache pruned.
        ids: `[1, N + 1]`: a prompt, and the token that decoding starts with, which is the same for all methods.
        new_tokens: Tokens decoded.

    Returns: the seconds until the cache is pruned, in all and by phase; the bytes of the KV pairs after the prefill;
        the seconds of decoding, and its tokens per second; the peak memory beyond what was in use before
        (`PeakMemory`), until the cache is pruned and until the end; and the decoded tokens.
    """
    device = device_of(target)
    peak = PeakMemory(device)
    started = time.perf_counter()
    cache = method.prefill(target, tokenizer, ids[:, :-1])
    synchronize(device)
    prefilled = time.perf_counter()
    peak_prefill = peak.bytes()
    if isinstance(cache, ProxyPrunedCache):
        report = cache.report().to_dict()
        sizes = {name: size for name, size in report.items() if name.startswith("bytes_")}
        phases = report["seconds"]
    else:
        layers: list[Any] = cache.layers
        whole = storage_bytes([tensor for layer in layers for tensor in (layer.keys, layer.values)])
        sizes = {"bytes_full": whole, "bytes_kept": whole, "bytes_peak": whole}
        phases = {"prefill": prefilled - started}
    try:
        decoding = time.perf_counter()
        answer = decode(target, cache, ids[:, -1:], new_tokens)
        decoded = time.perf_counter()
    finally:
        if isinstance(cache, ProxyPrunedCache):
            cache.close()
    return {
        "seconds": prefilled - started,
        "phases": phases,
        "decode_seconds": decoded - decoding,
        "tokens_per_second": new_tokens / (decoded - decoding),
        **sizes,
        "memory_peak_prefill": peak_prefill,
        "memory_peak": peak.bytes(),
        "answer": answer,
    }


@torch.no_grad()
def decode(target: PreTrainedModel, cache: DynamicCache, token: Tensor, new_tokens: int) -> list[int]:
    """Decode greedily, with one forward per token: the same code for any cache, without the overhead of ``generate``.

    Args:
        target: The model.
        cache: The cache, filled with the prompt; decoding appends to it.
        token: `[1, 1]`, the first input token.
        new_tokens: Tokens decoded.
    """
    answer = []
    for _ in range(new_tokens):
        logits = call_forward(target, input_ids=token, cache=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        answer.append(token)
    return torch.cat(answer, dim=1)[0].tolist()


def synchronize(device: torch.device) -> None:
    """Wait for all work that is queued on a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def target_threads(threads: int | None) -> Iterator[None]:
    """Set the CPU threads of torch's work inside this context; None leaves them as they are."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


def environment(device: torch.device) -> dict[str, Any]:
    """The date, versions and hardware of a measurement."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "proxykv-hf": __version__,
    }
    names = {"cuda": lambda: torch.cuda.get_device_name(device), "cpu": _cpu_name}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "device": names.get(device.type, lambda: str(device))(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
