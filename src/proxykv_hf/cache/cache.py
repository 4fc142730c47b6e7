"""`ProxyPrunedCache`: a transformers cache that scores the KV pairs of a prompt and keeps the best of them.

This file holds the methods that a user calls. `prunable` holds those that transformers calls.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._compat import call_forward
from ..errors import CacheStateError, InvalidInputError
from ..geometry import device_of
from ..scorers.base import Scorer
from .kept import Kept
from .layers import PrunedLayer
from .phase import Phase
from .prefill import Schedule
from .prompt import Context, checked_ids, read_prompt
from .prunable import PrunableCache
from .pruning import warn_over_budget
from .report import CacheReport, Usage, bytes_if_whole
from .retention import RetentionPolicy, check_policy, policy_or_ratio
from .scores import checked_scores
from .snapshot import Snapshot, read_snapshot, write_snapshot
from .storage import storage_bytes


class ProxyPrunedCache(PrunableCache):
    """A KV cache for ``model.generate(..., cache=cache)`` that keeps only the best KV pairs of the prompt.

    The scorer rates the KV pairs of the prompt. The cache keeps the best ones, as many as the policy allows, and frees
    the memory of the others. The KV pairs of all later tokens are kept.

    Args:
        target: M_l, the model that generates. Its attention implementation is replaced until the last cache on this
            model is closed or garbage-collected.
        scorer: Rates the KV pairs of the prompt. It may be None if the cache never prefills, or if `prefill` is given
            its scorers.
        policy: How much of the prompt is kept.
        tokenizer: The target's tokenizer, for scorers that need one.
        context: The part of the prompt that may be evicted: one span ``(start, stop)`` for all rows or one per row, in
            the row's own positions (padding is not counted). By default the whole prompt. Tokens outside the context
            are always kept and do not count towards the budget.
        strict: If true, an error is raised when scoring fails, or if the target has sliding-window layers only. If
            false, the cache then stays uncompressed, and a `ProxyKVWarning` tells why.
        timeout: Seconds to wait for scores, before and after the target's prefill together; None waits as long as it
            takes. When the time is over, scoring has failed. The proxy still finishes the layer or the mapper call that
            it is in.
        schedule: When the scorer's proxy runs. ``"overlap"``: at the same time as the target's prefill.
            ``"proxy_first"``: before it, for the lowest peak memory. ``"sequential"``: after it, for measurements. By
            default ``"proxy_first"`` if both models would compute on the same CPU cores, else ``"overlap"``.

    Raises:
        UnsupportedModelError: The target has no KV cache that can be pruned.
        InvalidPolicyError: ``policy`` is not a `RetentionPolicy`.
        InvalidInputError: ``schedule``, ``timeout`` or ``context`` is not valid.
        TypeError: ``target`` is not a loaded model, or ``scorer`` is not a scorer.

    Stock ``generate`` does not tell the cache where the prefill ends, so the cache has to guess. A forward of one token
    ends the prefill, even if it is the last chunk of a chunked prefill. A forward of several tokens continues it, even
    if it is a follow-up turn after ``max_new_tokens=1``. Call `expect` before ``generate``, or `report` before the
    follow-up turn, to end the prefill at the right place.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        scorer: Scorer | None,
        policy: RetentionPolicy,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        context: Context | None = None,
        strict: bool = False,
        timeout: float | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__(
            target,
            scorer,
            policy,
            tokenizer=tokenizer,
            context=context,
            strict=strict,
            timeout=timeout,
            schedule=schedule,
        )

    @classmethod
    def from_pretrained(
        cls,
        mapper: str | Path,
        *,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        policy: RetentionPolicy | None = None,
        retention_ratio: float | None = None,
        context: Context | None = None,
        strict: bool = False,
        timeout: float | None = None,
        schedule: Schedule | None = None,
        proxy: str | Path | PreTrainedModel | None = None,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> ProxyPrunedCache:
        """Make a cache whose scorer is a `ProxyScorer`: a small model and a trained mapper.

        Args:
            mapper: A Hub id, or a folder. The mapper's config names the proxy.
            target: The model that generates.
            tokenizer: The target's tokenizer. It is compared with the proxy's.
            policy: How much of the prompt is kept. Give ``policy`` or ``retention_ratio``, not both.
            retention_ratio: The share of the context's KV pairs that is kept, in (0, 1]. By default 0.3.
            context: The part of the prompt that may be evicted, see `ProxyPrunedCache`. By default the whole prompt.
            strict: Raise an error if scoring fails, instead of leaving the cache uncompressed with a warning.
            timeout: Seconds to wait for scores; None waits as long as it takes.
            schedule: When the proxy runs, see `ProxyPrunedCache`.
            proxy: A folder, a Hub id or a loaded model, in place of the proxy that the mapper's config names.
            revision: The mapper's revision on the Hub.
            device: The device of a proxy that is loaded here. By default the target's device.
            dtype: The dtype of a proxy that is loaded here. By default the target's dtype.
            threads: CPU threads that the proxy uses; None for as many as torch uses elsewhere.

        Raises:
            InvalidInputError: ``mapper`` holds no mapper, or torch cannot compute on ``device``.
            InvalidPolicyError: Both ``policy`` and ``retention_ratio`` are given, or the ratio is not valid.
            GeometryError: The mapper was trained for another target or proxy.
            UnsupportedModelError: The target's KV cache cannot be pruned, or its first layers cannot be the proxy.
            TypeError: ``target`` is not a loaded model.
        """
        from ..scorers.proxy import ProxyScorer

        policy = policy_or_ratio(policy, retention_ratio)
        scorer = ProxyScorer.from_pretrained(
            mapper, target=target, proxy=proxy, revision=revision, device=device, dtype=dtype, threads=threads
        )
        return cls(
            target,
            scorer,
            policy,
            tokenizer=tokenizer,
            context=context,
            strict=strict,
            timeout=timeout,
            schedule=schedule,
        )

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        context: Context | None = None,
        prune: bool = True,
        scorers: Mapping[str, Scorer] | None = None,
    ) -> dict[str, Tensor]:
        """Run the target over a prompt, score the prompt's KV pairs, and prune the cache.

        Args:
            input_ids: `[B, N]`, the prompt.
            attention_mask: `[B, N]`, zero wherever a row has no token, on either side or in between, or None. Padding
                is moved to the left if the target has sliding windows.
            context: The part of this prompt that may be evicted. By default the cache's ``context``.
            prune: If false, the cache stays whole, and `compress` makes pruned copies of it.
            scorers: Scorers by name, which all score this one prefill. By default the cache's own scorer. Only allowed
                with ``prune=False``.

        Returns: the scores `[R, L, H, N]` by the scorer's name, for R distinct rows in order of first appearance and N
            left-padded columns. Empty if scoring failed and the cache is uncompressed.

        Raises:
            CacheStateError: The cache is not empty, is closed, or has no scorer.
            InvalidInputError: The prompt is empty, the mask has another shape, the context lies outside the prompt, or
                ``scorers`` is given with ``prune=True``.
            ScoringError: Scoring failed, and the cache is strict or ``prune`` is false.
        """
        self._check_usable()
        self._life.check_empty()
        if scorers is not None and prune:
            raise InvalidInputError("expected prune=False with scorers, got prune=True: pass prune=False")
        has_windows = any(self.geometry.sliding_windows)  # a window counts columns, padding between tokens too
        input_ids, attention_mask = checked_ids(input_ids, attention_mask, move_padding=has_windows)
        context = self.context if context is None else context
        batch, columns = input_ids.shape
        read_prompt(input_ids, attention_mask, None, context, (batch, columns))  # refuses a wrong context at once
        device = device_of(self.target.get_input_embeddings())
        inputs: dict[str, Any] = {"input_ids": input_ids.to(device)}
        if attention_mask is not None:
            mask = attention_mask.to(device)
            inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        self._prefill = self._new_prefill(context, scorers, strict=not prune)
        self._prefill.expected = columns if prune else None
        try:
            call_forward(self.target, cache=self, use_cache=True, logits_to_keep=1, **inputs)
            return self._settle(prune)
        except BaseException:
            if self._life.phase is Phase.PREFILL:
                self._spoil()
            raise

    def expect(self, tokens: int) -> None:
        """Tell the cache where the prefill of a stock ``generate`` ends, so that it does not have to guess.

        Args:
            tokens: The length of the prompt in tokens (columns), at least 1.

        Raises:
            CacheStateError: The cache is not empty, or is closed.
            InvalidInputError: ``tokens`` is less than 1.
        """
        self._check_usable()
        self._life.check_empty()
        if tokens < 1:
            raise InvalidInputError(f"expected a prompt of at least one token, got {tokens}")
        self._prefill.expected = tokens

    def compress(self, scores: Tensor, policy: RetentionPolicy | Sequence[RetentionPolicy]) -> ProxyPrunedCache:
        """Make a pruned copy of this cache, which itself stays whole. Each of the two has to be closed.

        Args:
            scores: `[R, L, H, N]`, as ``prefill(..., prune=False)`` returns them.
            policy: How much the copy keeps. For a cache of one row, it may be a list of n policies. The copy then has n
                rows: the same prompt, pruned in n ways. Row i follows ``policy[i]`` and row i of ``scores``
                `[n, L, H, N]`.

        Raises:
            CacheStateError: The cache is empty, pruned already, or has no full-attention layer. Or a list is given for
                a cache of several rows.
            InvalidPolicyError: ``policy`` is neither a `RetentionPolicy` nor a list of at least one.
            ScoringError: The scores have a wrong shape, or hold NaN.
        """
        self._settle()
        kept = self._kept
        if kept is None or kept.packed is not None or self._is_ragged():
            raise CacheStateError(
                "expected a whole cache, whose rows are not shared, got one that is empty, pruned, or forked with "
                "n > 1: make one with prefill(..., prune=False), and call fork(n) on what compress() returns"
            )
        if not self.geometry.full_layers:
            raise CacheStateError(
                "expected a target with full-attention layers, got one with sliding windows only: its cache is bounded "
                "already and there is nothing to prune"
            )
        for one in policy if isinstance(policy, Sequence) else [policy]:
            check_policy(one)
        started = time.perf_counter()
        if isinstance(policy, RetentionPolicy):
            twin = self._twin(policy)
            twin._kept, twin._pruner = kept.decide(checked_scores(scores, self.geometry, kept.prompt), policy)
        else:
            twin = self._twin(self.policy)
            twin._kept, twin._pruner = kept.decide_each_way(scores, policy)
            for layer in twin.layers:
                if not isinstance(layer, PrunedLayer):
                    layer.batch_repeat_interleave(len(policy))
        twin._prune_layers()
        twin._usage.seconds["prune"] = time.perf_counter() - started
        warn_over_budget(twin._kept.over_budget)
        return twin

    def fork(self, n: int = 1) -> ProxyPrunedCache:
        """Make an independent copy, which shares memory until one of the two is written. Each has to be closed.

        Args:
            n: How many times the copy holds each row, at least 1. With n > 1, the copies of a row share their
                full-attention layers for good. One pass over these layers serves all copies of a row. What the copies
                share cannot be cropped or compressed.

        Raises:
            InvalidInputError: ``n`` is less than 1.
        """
        if n < 1:
            raise InvalidInputError(f"expected n of at least 1, the copies of each row, got fork({n})")
        self._settle()
        twin = self._twin(self.policy)
        if n > 1:
            twin._share_rows()
            twin.batch_repeat_interleave(n)
        return twin

    def _share_rows(self) -> None:
        """Change the full-attention layers so that copies of a row take no memory."""
        if self._kept is None or self._is_ragged():
            return
        if self._kept.prompt.padded:  # the padding is left out, so the layers become ragged
            self._pruner = self._kept.pruner(self._kept.mask(), ragged=True)
            self._prune_layers()
        else:
            for layer in self._full_layers():
                layer.share_rows()

    def _twin(self, policy: RetentionPolicy) -> ProxyPrunedCache:
        """A cache with the content of this one, ready or empty. Both share memory until one of them is written."""
        twin = type(self)(self.target, self.scorer, policy, tokenizer=self.tokenizer, **self._options())
        layers = [layer.fork() if isinstance(layer, PrunedLayer) else copy.copy(layer) for layer in self.layers]
        twin._take_over(layers, self._kept, self._usage.fork())
        return twin

    def _options(self) -> dict[str, Any]:
        """The constructor's arguments that a saved cache holds too."""
        return {"context": self.context, "strict": self.strict, "timeout": self.timeout, "schedule": self.schedule}

    def _take_over(self, layers: list[Any], kept: Kept | None, usage: Usage) -> None:
        """Take the content of another cache; then this cache is ready, or empty if the other one is."""
        self.layers, self._kept, self._usage = layers, kept, usage
        if kept is not None:
            self._life.phase = Phase.READY
        self._note_peak()

    def kept_indices(self, layer: int, row: int = 0) -> list[Tensor]:
        """The prompt positions that one full-attention layer keeps for a row (M in the paper).

        Args:
            layer: The layer's index in the model.
            row: The batch row.

        Returns: H tensors `[K]`, one for each KV head: the positions it keeps, ascending, in the row's own positions
            (padding is not counted).

        Raises:
            CacheStateError: The cache is empty.
            InvalidInputError: There is no such layer, or it has a sliding window.
        """
        self._settle()
        if self._kept is None:
            raise CacheStateError("expected a prefilled cache, got an empty one: prefill it first")
        return self._kept.indices(layer, row)

    def kept_pairs(self, layer: int, row: int = 0) -> list[tuple[Tensor, Tensor]]:
        """The K and V that one full-attention layer holds for a row, head by head, for every allocation.

        Args:
            layer: The layer's index in the model.
            row: The batch row.

        Returns: for each KV head, K `[K, D]` and V `[K, Dv]` of the prompt's kept tokens and of all later tokens, in
            order and without padding. They may be views of the cache's memory, so do not write to them.

        Raises:
            CacheStateError: The cache is empty.
            InvalidInputError: There is no such layer, or it has a sliding window.
        """
        self.kept_indices(layer, row)
        assert self._kept is not None
        held: PrunedLayer = self.layers[layer]
        pairs, prompt = held.pairs(row), self._kept.prompt
        if held.offset or not prompt.padded:
            return pairs
        own = prompt.own_columns(int(self._kept.rows[row]))
        columns = torch.cat([own, torch.arange(prompt.columns, len(pairs[0][0]))]).to(pairs[0][0].device)
        return [(keys[columns], values[columns]) for keys, values in pairs]

    def report(self) -> CacheReport:
        """Report tokens, bytes and seconds so far. If a prefill still waits to be scored and pruned, this ends it."""
        self._settle()
        self._note_peak()
        seen: list[int] = []
        kept: list[list[list[int]]] = []
        if self._kept is not None:
            prompt = self._kept.prompt
            after = self.get_seq_length() - prompt.columns
            seen = [prompt.lengths[row] + after for row in self._kept.rows.tolist()]
            kept = self._kept.counts(after)
        return CacheReport(
            seen_tokens=seen,
            kept_tokens=kept,
            bytes_full=sum(map(bytes_if_whole, self.layers)),
            bytes_kept=storage_bytes(list(self.tensors())),
            bytes_peak=self._usage.bytes_peak,
            bytes_peak_proxy=self._usage.bytes_peak_proxy,
            seconds=dict(self._usage.seconds),
            devices=dict(self._usage.devices),
            fallback=self._usage.fallback,
        )

    def save(self, folder: str | Path) -> None:
        """Write the cache to a file, which `load` reads.

        Args:
            folder: The folder for the file. It is made if it is missing.

        Raises:
            CacheStateError: The cache is empty.
        """
        self._settle()
        if self._kept is None:
            raise CacheStateError("expected a prefilled cache, got an empty one: there is nothing to save")
        snapshot = Snapshot(self.layers, self._kept, self.policy, self._options(), self._usage)
        write_snapshot(snapshot, Path(folder), self.target)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        target: PreTrainedModel,
        *,
        scorer: Scorer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> ProxyPrunedCache:
        """Load a cache that `save` wrote, onto the devices of the target's layers and in the target's dtype.

        Args:
            folder: The folder that was given to `save`.
            target: The model that made the cache.
            scorer: The scorer for a new prefill after ``reset()``. The loaded content does not need one.
            tokenizer: The target's tokenizer, if the scorer needs one.

        Raises:
            FileNotFoundError: ``folder`` holds no cache.
            CacheStateError: The file is damaged, or has another format.
            GeometryError: The cache was made by a model of another geometry.

        If the cache was made by other weights of the same geometry, a `ProxyKVWarning` says so.
        """
        saved = read_snapshot(Path(folder), target)
        cache = cls(target, scorer, saved.policy, tokenizer=tokenizer, **saved.options)
        cache._take_over(saved.layers, saved.kept, saved.usage)
        return cache

    def close(self) -> None:
        """Free the cache's memory and give the target its own attention back. A closed cache cannot be used again."""
        self._let_go(Phase.CLOSED)

    def __enter__(self) -> ProxyPrunedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ProxyPrunedCache belongs to a model and cannot be pickled: use save(folder) and load()")

    def __deepcopy__(self, memo: dict[int, Any]) -> ProxyPrunedCache:
        memo[id(self)] = twin = self.fork()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.target).__name__}, {self.policy}, {self._life.phase.value})"
