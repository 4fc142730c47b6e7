"""`ProxyPrunedCache`: a transformers cache that scores a prompt's KV pairs and keeps the best of them.

What a user calls is here. `prunable` holds what transformers calls.
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
from .prompt import Context, left_pad, read_prompt
from .prunable import PrunableCache
from .pruning import warn_over_budget
from .report import CacheReport, Usage
from .retention import RetentionPolicy, check_policy, policy_or_ratio
from .scores import checked_scores
from .snapshot import Snapshot, read_snapshot, write_snapshot
from .storage import storage_bytes


class ProxyPrunedCache(PrunableCache):
    """A cache for ``model.generate(..., cache=cache)`` that keeps a share of the prompt.

    Args:
        target: M_l, the model that generates; its attention implementation is ours until the last
            cache on it is closed or collected.
        scorer: Rates the prompt's KV pairs; None only for a cache that will never prefill.
        policy: How much is kept.
        tokenizer: The target's, for scorers that need one.
        context: What may be evicted, in each row's own positions (without padding); all by default.
            Tokens outside are kept and do not count in the budget's total.
        strict: Raise if scoring fails, instead of going on uncompressed with a `ProxyKVWarning`.
        timeout: Seconds to wait for scores, before the target's prefill and once it is over; after them scoring
            has failed, as soon as the layer in hand, or the mapper, is through.
        schedule: When a scorer's proxy runs: ``"overlap"``, beside the target's prefill; ``"proxy_first"``,
            before it, for the lowest peak memory; ``"sequential"``, after it, for measuring. By default
            ``"proxy_first"`` if both would compute on the same CPU cores, else ``"overlap"``.

    Raises:
        UnsupportedModelError: The target has no KV cache that can be pruned.
        InvalidPolicyError: ``policy`` is not a `RetentionPolicy`.
        InvalidInputError: A schedule, timeout or context that is none.

    Stock ``generate`` does not say where a prefill ends. A last chunk of one token counts as its
    continuation, and so does a follow-up after ``max_new_tokens=1``: call ``report()`` in between.
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
        """A cache whose scorer is a small model, through a trained mapper.

        Args:
            mapper: A Hub id, or a folder. Its config names the proxy.
            target: The model that generates.
            tokenizer: The target's, to be compared with the proxy's.
            policy: How much is kept; or ``retention_ratio`` for a default policy of that ratio.
            retention_ratio: See ``policy``; 0.3 if neither is given.
            context: As in the constructor.
            strict: The same.
            timeout: The same.
            schedule: The same.
            proxy: In place of the proxy that the mapper's config names, see `ProxyScorer.from_pretrained`.
            revision: Of the mapper, likewise.
            device: Of the proxy, likewise.
            dtype: The same.
            threads: CPU threads of the proxy's lane.

        Raises:
            InvalidInputError: No mapper there.
            InvalidPolicyError: Both ratio and policy, or a wrong ratio.
            GeometryError: The mapper was trained for another target or proxy.
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
        """Run the target over a prompt, score it, and prune.

        Args:
            input_ids: `[B, N]`.
            attention_mask: `[B, N]`, padding on either side, or None.
            context: As in the constructor, for this prompt.
            prune: False leaves the cache whole, for `compress`.
            scorers: With ``prune=False``: scorers by name, all run over this one prefill; by default
                the cache's own.

        Returns: scores by scorer's name, `[R, L, H, N]`, R distinct rows in order of appearance,
            columns left-padded; empty if scoring failed and the cache is uncompressed.

        Raises:
            InvalidInputError: An empty prompt, a mask of another shape, a context outside the prompt.
            ScoringError: Scoring failed and the cache is strict, or ``prune`` is false.
        """
        self._check_usable()
        self._life.check_empty()
        if scorers is not None and prune:
            raise InvalidInputError("scorers are compared over a whole cache: pass prune=False with them")
        input_ids, attention_mask = left_pad(input_ids, attention_mask)
        context = self.context if context is None else context
        shape = (input_ids.shape[0], input_ids.shape[1])
        read_prompt(input_ids, attention_mask, None, context, shape)  # refuses a wrong context before any work
        device = device_of(self.target.get_input_embeddings())
        inputs: dict[str, Any] = {"input_ids": input_ids.to(device)}
        if attention_mask is not None:
            mask = attention_mask.to(device)
            inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        self._prefill = self._new_prefill(context, scorers, strict=not prune)
        self._prefill.expected = input_ids.shape[1] if prune else None
        try:
            call_forward(self.target, cache=self, use_cache=True, logits_to_keep=1, **inputs)
            return self._settle(prune)
        except BaseException:
            if self._life.phase is Phase.PREFILL:
                self._spoil()
            raise

    def expect(self, tokens: int) -> None:
        """Say how many tokens (columns) the prompt of a stock ``generate`` has: then its end needs no guess."""
        self._check_usable()
        self._life.check_empty()
        if tokens < 1:
            raise InvalidInputError(f"expected a prompt of at least one token, got {tokens}")
        self._prefill.expected = tokens

    def compress(self, scores: Tensor, policy: RetentionPolicy | Sequence[RetentionPolicy]) -> ProxyPrunedCache:
        """A pruned copy of this whole cache, which stays whole.

        Args:
            scores: `[R, L, H, N]` as ``prefill(..., prune=False)`` returns them.
            policy: How much the copy keeps. A list of n policies, for a cache of one row, makes a copy of n rows:
                the same prompt kept in n ways, each by its own row of ``scores`` `[n, L, H, N]` and its own policy.

        Raises:
            CacheStateError: The cache is empty or pruned already, or has several rows where a list is given.
            InvalidPolicyError: What is no policy, or an empty list.
            ScoringError: Scores of a wrong shape, or with NaN.
        """
        self._settle()
        kept = self._kept
        if kept is None or kept.packed is not None or self._is_ragged():
            raise CacheStateError(
                "expected a whole cache, whose rows are not shared: make one with prefill(..., prune=False), and "
                "fork(n) what compress() returns"
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
        """An independent copy that shares what it holds until it is written.

        With ``n``, each row n times over: the copies share full-attention layers for good, one pass over them
        serves all copies, and what they share cannot be cropped or compressed.
        """
        if n < 1:
            raise InvalidInputError(f"expected at least one row a row, got fork({n})")
        self._settle()
        twin = self._twin(self.policy)
        if n > 1:
            twin._share_rows()
            twin.batch_repeat_interleave(n)
        return twin

    def _share_rows(self) -> None:
        """Make the full-attention layers such that copies of a row cost nothing."""
        if self._kept is None or self._is_ragged():
            return
        if self._kept.prompt.padded:  # whole, and without its padding it is ragged
            self._pruner = self._kept.pruner(self._kept.mask(), ragged=True)
            self._prune_layers()
        else:
            for layer in self._full_layers():
                layer.share_rows()

    def _twin(self, policy: RetentionPolicy) -> ProxyPrunedCache:
        """A ready or empty cache with this one's content, memory shared until written."""
        twin = type(self)(self.target, self.scorer, policy, tokenizer=self.tokenizer, **self._options())
        layers = [layer.fork() if isinstance(layer, PrunedLayer) else copy.copy(layer) for layer in self.layers]
        twin._take_over(layers, self._kept, self._usage.fork())
        return twin

    def _options(self) -> dict[str, Any]:
        """The constructor's arguments that a file holds too."""
        return {
            "context": self.context,
            "strict": self.strict,
            "timeout": self.timeout,
            "schedule": self.schedule,
        }

    def _take_over(self, layers: list[Any], kept: Kept | None, usage: Usage) -> None:
        """Become ready with the content of another cache, or stay empty if that is empty."""
        self.layers, self._kept, self._usage = layers, kept, usage
        if kept is not None:
            self._life.phase = Phase.READY
        self._note_peak()

    def kept_indices(self, layer: int, row: int = 0) -> list[Tensor]:
        """M: per head of a full-attention layer the prompt positions kept, ascending, in the row's own positions.

        Raises:
            CacheStateError: The cache is empty.
            InvalidInputError: No such layer, or one with a sliding window.
        """
        self._settle()
        if self._kept is None:
            raise CacheStateError("expected a prefilled cache, got an empty one: prefill it first")
        return self._kept.indices(layer, row)

    def report(self) -> CacheReport:
        """Tokens, bytes and seconds so far; settles a prefill that is waiting to be pruned."""
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
            bytes_full=sum(map(_bytes_full, self.layers)),
            bytes_kept=storage_bytes(list(self.tensors())),
            bytes_peak=self._usage.bytes_peak,
            bytes_peak_proxy=self._usage.bytes_peak_proxy,
            seconds=dict(self._usage.seconds),
            devices=dict(self._usage.devices),
            fallback=self._usage.fallback,
        )

    def save(self, folder: str | Path) -> None:
        """Write the cache to ``folder``, from where `load` reads it.

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
        """A cache that `save` wrote, put where the target's layers are, in the target's dtype.

        Args:
            folder: The folder that was given to `save`.
            target: The model that made it.
            scorer: Only needed to ``reset()`` the cache and to prefill anew.
            tokenizer: Likewise.

        Raises:
            FileNotFoundError: No cache in ``folder``.
            CacheStateError: The file is damaged, or of another format.
            GeometryError: A model of another geometry made it. Other weights are a `ProxyKVWarning`.
        """
        saved = read_snapshot(Path(folder), target)
        cache = cls(target, scorer, saved.policy, tokenizer=tokenizer, **saved.options)
        cache._take_over(saved.layers, saved.kept, saved.usage)
        return cache

    def close(self) -> None:
        """Free the memory and let go of the target; the cache cannot be used any more."""
        self._let_go(Phase.CLOSED)

    def __enter__(self) -> ProxyPrunedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ProxyPrunedCache belongs to a model and cannot be pickled: save(folder) and load() do it")

    def __deepcopy__(self, memo: dict[int, Any]) -> ProxyPrunedCache:
        memo[id(self)] = twin = self.fork()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.target).__name__}, {self.policy}, {self._life.phase.value})"


def _bytes_full(layer: Any) -> int:
    """Bytes that the layer would hold had it kept all that it has seen."""
    if not layer.is_initialized:
        return 0
    if not isinstance(layer, PrunedLayer):
        return int(layer.keys.nbytes + layer.values.nbytes)
    assert layer.storage is not None
    keys, values = layer.storage.keys, layer.storage.values
    per_token = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
    return int(keys.shape[0] * layer.get_seq_length() * per_token)
