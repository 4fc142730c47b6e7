"""`ProxyPrunedCache`: a transformers cache that scores a prompt's KV pairs and keeps the best of them.

Paper terms (arXiv 2605.16360): M_l is ``target``, rho is ``policy.retention_ratio``, Y is what a
scorer returns, M is the kept mask.

A cache is empty, then in its prefill (one forward, or several for a chunked prefill), then ready: the
prompt is scored and pruned, and later forwards append. When the prefill is over is known to
`ProxyPrunedCache.prefill`; in a stock ``generate`` it shows by what comes next, see
`ProxyPrunedCache.before_forward`.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import Cache, DynamicSlidingWindowLayer, bind_forward, call_forward
from ..attention import functions as attention
from ..attention.lease import Lease
from ..errors import (
    CacheStateError,
    GeometryError,
    InvalidInputError,
    InvalidPolicyError,
    UnsupportedModelError,
)
from ..geometry import ModelGeometry, check_loaded, device_of
from ..scorers.base import Scorer, ScorerRun
from .inputs import check_input, mask_as_held, without_seen
from .layers import PrunedLayer
from .prefill import SCHEDULES, Prefill, Schedule, Taps, checked_scores, plain_timeout
from .prompt import Context, Prompt, left_pad, plain_context, read_prompt
from .pruning import Pruner, is_ragged, keep_masks, warn_over_budget
from .report import CacheReport
from .retention import RetentionPolicy, check_policy, pack_mask, policy_or_ratio, unpack_mask
from .snapshot import load_cache, save_cache
from .storage import RaggedStorage, own, storage_bytes


class _Phase(enum.Enum):
    EMPTY = "empty"
    PREFILL = "in its prefill"
    READY = "ready"
    SPOILED = "spoiled"
    CLOSED = "closed"


class ProxyPrunedCache(DynamicCache):
    """A cache for ``model.generate(..., past_key_values=cache)`` that keeps a share of the prompt.

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

    layers: list[Any]  # `PrunedLayer`s, and transformers' own sliding-window layers

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
        check_loaded(target)
        check_policy(policy)
        if scorer is not None and (isinstance(scorer, type) or not isinstance(scorer, Scorer)):
            raise TypeError(f"expected a scorer such as KVzipScorer(tokenizer), got {scorer!r}")
        if schedule is not None and schedule not in SCHEDULES:
            raise InvalidInputError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.geometry = ModelGeometry.from_config(target.config)
        self.target = target
        self.scorer = scorer
        self.policy = policy
        self.tokenizer = tokenizer
        self.strict = strict
        self.timeout = plain_timeout(timeout)
        self.schedule = schedule
        self.context = plain_context(context)
        self._phase = _Phase.CLOSED
        self._open()

    def _open(self) -> None:
        """Take the model's attention and start empty."""
        # `DynamicCache.__init__` is passed over: it would make layers of its own kinds.
        Cache.__init__(self, layers=self._new_layers())
        self._taps: Taps = []
        self._runs: dict[str, ScorerRun] = {}
        self._lease = Lease(self.target)
        self._finalizer = weakref.finalize(self, _let_go, self._lease, self._taps, self._runs)
        self._start_empty()

    def _new_layers(self) -> list[Any]:
        return [
            PrunedLayer(index) if window is None else DynamicSlidingWindowLayer(sliding_window=window)
            for index, window in enumerate(self.geometry.sliding_windows)
        ]

    def _start_empty(self) -> None:
        attention.forget()
        self.layers = self._new_layers()
        self._phase = _Phase.EMPTY
        self._in_forward = False
        self._forward_thread = threading.current_thread()  # of the latest forward
        self._forward_started = 0.0
        self._recording = False
        self._expected: int | None = None
        self._prefill = self._new_prefill(self.context)
        self._prompt: Prompt | None = None
        self._rows = torch.empty(0, dtype=torch.long)
        self._may_prune_ahead = False
        self._scores: dict[str, Tensor] | None = None  # of a prefill that has been scored
        self._pruner: Pruner | None = None  # from then until all layers are pruned
        self._over_budget = 0
        self._kept: Tensor | None = None  # [R, L_full, H, ceil(P / 8)], packed bits
        self._seconds: dict[str, float] = {}
        self._devices = {"target": str(device_of(self.target))}
        self._bytes_peak = self._bytes_peak_proxy = 0
        self._fallback: str | None = None

    def _new_prefill(
        self, context: Context | None, scorers: Mapping[str, Scorer] | None = None, strict: bool = False
    ) -> Prefill:
        if scorers is None:
            scorers = {} if self.scorer is None else {self.scorer.name: self.scorer}
        return Prefill(
            self.target,
            self.geometry,
            scorers,
            tokenizer=self.tokenizer,
            context=context,
            strict=strict or self.strict,
            timeout=self.timeout,
            schedule=self.schedule,
            taps=self._taps,
            runs=self._runs,
        )

    # ---------------------------------------------------------------- what a user calls

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
        if self._phase is not _Phase.EMPTY:
            raise CacheStateError(f"expected an empty cache, got one that is {self._phase.value}: call reset() first")
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
        self._expected = input_ids.shape[1] if prune else None
        try:
            call_forward(self.target, cache=self, use_cache=True, logits_to_keep=1, **inputs)
            return self._settle(prune)
        except BaseException:
            if not self._is_settled():
                self._spoil()
            raise

    def expect(self, tokens: int) -> None:
        """Say how many tokens (columns) the prompt of a stock ``generate`` has: then its end needs no guess."""
        self._check_usable()
        if self._phase is not _Phase.EMPTY or tokens < 1:
            raise CacheStateError(f"expected an empty cache and at least one token, got {self._phase.value}, {tokens}")
        self._expected = tokens

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
        if self._prompt is None or self._kept is not None or self._is_ragged():
            raise CacheStateError(
                "expected a whole cache, whose rows are not shared: make one with prefill(..., prune=False), and "
                "fork(n) what compress() returns"
            )
        for one in policy if isinstance(policy, Sequence) else [policy]:
            check_policy(one)
        started = time.perf_counter()
        if isinstance(policy, RetentionPolicy):
            twin = self._twin(policy)
            twin._decide(checked_scores(scores, self.geometry, self._prompt), policy)
        else:
            twin = self._twin(self.policy)
            twin._decide_each_way(scores, policy)
        twin._prune_layers()
        twin._seconds["prune"] = time.perf_counter() - started
        warn_over_budget(twin._over_budget)
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
        """Have layers whose rows' copies cost nothing."""
        if self._prompt is None or self._is_ragged():
            return
        if self._prompt.padded:  # whole, and without its padding it is ragged
            self._pruner = Pruner(self._kept_mask(), self._rows, ragged=True)
            self._prune_layers()
        else:
            for layer in self._full_layers():
                layer.share_rows()

    def kept_indices(self, layer: int, row: int = 0) -> list[Tensor]:
        """M: per head of a full-attention layer the prompt positions kept, ascending, in the row's own positions."""
        self._settle()
        if self._prompt is None or layer not in self.geometry.full_layers:
            raise InvalidInputError(
                f"expected a full-attention layer of a prefilled cache, got layer {layer}; full attention: "
                f"{list(self.geometry.full_layers)}"
            )
        distinct = int(self._rows[row])
        kept = self._kept_mask()[distinct, self.geometry.full_layers.index(layer)]
        return [head.nonzero()[:, 0] - self._prompt.pads[distinct] for head in kept]

    def report(self) -> CacheReport:
        """Tokens, bytes and seconds so far; settles a prefill that is waiting to be pruned."""
        self._settle()
        self._note_peak()
        rows, after = self._rows.tolist(), 0
        seen: list[int] = []
        kept: list[list[list[int]]] = []
        if self._prompt is not None:
            after = self.get_seq_length() - self._prompt.columns
            counts = (self._kept_mask().sum(-1) + after).tolist()
            seen = [self._prompt.lengths[row] + after for row in rows]
            kept = [counts[row] for row in rows]
        return CacheReport(
            seen_tokens=seen,
            kept_tokens=kept,
            bytes_full=self._bytes_full(),
            bytes_kept=storage_bytes(list(self.tensors())),
            bytes_peak=self._bytes_peak,
            bytes_peak_proxy=self._bytes_peak_proxy,
            seconds=dict(self._seconds),
            devices=dict(self._devices),
            fallback=self._fallback,
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

    def save(self, folder: str | Path) -> None:
        """Write the cache to ``folder``, from where `load` reads it."""
        self._settle()
        save_cache(self, Path(folder))

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
            folder: Where it lies.
            target: The model that made it.
            scorer: Only needed to ``reset()`` it and prefill anew.
            tokenizer: The same.

        Raises:
            FileNotFoundError: No cache in ``folder``.
            GeometryError: Made by a model of another geometry. Other weights are a warning.
        """
        return load_cache(cls, Path(folder), target, scorer, tokenizer)

    def close(self) -> None:
        """Free the memory and let go of the target; the cache is of no use any more."""
        self._let_go(_Phase.CLOSED)

    def __enter__(self) -> ProxyPrunedCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that hold this cache's memory."""
        for layer in self.layers:
            if isinstance(layer, PrunedLayer):
                yield from layer.tensors()
            elif layer.is_initialized:
                yield from (layer.keys, layer.values)
        if self._kept is not None:
            yield self._kept

    # ---------------------------------------------------------------- transformers' contract

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K `[B, H, q, D]` and V `[B, H, q, Dv]`, detached; return what attention is to use."""
        if not self._in_forward:
            self._check_usable()
            raise CacheStateError(
                f"expected to be used in a forward of the cache's own target ({type(self.target).__name__}): "
                "call that model itself, not a part of it nor another model (of a PEFT model the target is "
                "get_base_model())"
            )
        if self.geometry.sliding_windows[layer_idx] is None:
            heads = key_states.shape[1]
            if heads != self.geometry.num_key_value_heads:
                raise UnsupportedModelError(
                    f"expected {self.geometry.num_key_value_heads} KV heads as the config says, got {heads} in "
                    f"layer {layer_idx}"
                )
        key_states, value_states = key_states.detach(), value_states.detach()
        if self._may_prune_ahead:
            if self._scores is None and self._prefill.ready():
                self._score_ahead()
            if self._pruner is not None:
                return self._update_pruned(key_states, value_states, layer_idx, *args, **kwargs)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def _update_pruned(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `update`, of a prompt whose scores are known: only what is kept is stored, attention gets all."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, PrunedLayer):
            whole = layer.update(key_states, value_states, *args, **kwargs)
            layer.keys, layer.values = own(layer.keys), own(layer.values)  # a view would hold the whole prompt
            return whole
        assert self._pruner is not None
        with self._pruning():
            place = self.geometry.full_layers.index(layer_idx)
            self._pruner.reserve(key_states, value_states, place, self._devices_of_layers)
            self._prune_layer(layer, key_states, value_states, key_states.nbytes + value_states.nbytes)
        attention.hand_over(key_states, value_states, layer)  # which holds nothing, and lets the back end attend
        return key_states, value_states

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Called as a forward with this cache begins.

        The first forward is prefill. After it, several tokens at once are its next chunk; one token,
        or any forward after a ``crop`` (assisted decoding), is a continuation, and so the prompt is
        scored and pruned before it. Of a forward that brings what was seen once more, as assisted
        decoding's first does over a filled cache, only the rest is run.

        Returns: other keyword arguments for the forward, or None.
        """
        if model is not self.target:
            raise GeometryError(
                f"expected the cache's own target, a {type(self.target).__name__}, got another "
                f"{type(model).__name__}: a cache belongs to the model it was made with"
            )
        self._check_usable()
        seen = self.get_seq_length()
        unseen = without_seen(kwargs, seen) if self._recording and seen else {}
        call = bind_forward(model, args, kwargs | unseen)
        ragged = self.policy.allocation == "global" if self._prompt is None else self._is_ragged()
        batch, tokens = check_input(call, len(self._rows), seen, ragged)
        if self._phase is _Phase.PREFILL and self._is_prefill_over(tokens):
            self._settle()
        if self._phase is _Phase.PREFILL:
            self._prefill.extend(call, (batch, tokens))
        elif self._phase is _Phase.EMPTY:
            if not self._prefill.scorers:
                raise CacheStateError(
                    "this cache was given no scorer and cannot prefill: ProxyPrunedCache(target, scorer, policy), "
                    "load(..., scorer=...) or prefill(..., prune=False, scorers={name: scorer})"
                )
            self._rows = torch.arange(batch)
            try:
                drafts = self._drafts(call, tokens)
                self._prefill.begin(call, (batch, tokens), drafts, self._full_layers(), self._expected)
                self._may_prune_ahead = tokens == self._expected and self._prefill.scores_ahead
                if self._may_prune_ahead and self._prefill.ready():
                    self._score_ahead()
            except BaseException:
                self._prefill.cancel()
                self._start_empty()
                raise
            self._phase = _Phase.PREFILL
        mask = None if self._prompt is None else mask_as_held(call.get("attention_mask"), self._prompt, self._rows)
        self._in_forward, self._forward_thread = True, threading.current_thread()
        self._forward_started = time.perf_counter()
        changed = unseen if mask is None else unseen | {"attention_mask": mask}
        return kwargs | changed if changed else None

    def _is_prefill_over(self, tokens: int) -> bool:
        """Whether a forward of ``tokens`` more belongs to the answer."""
        if self._expected is not None:
            return self.get_seq_length() >= self._expected
        return tokens == 1 or self._prefill.cropped

    def _drafts(self, call: dict[str, Any], tokens: int) -> int:
        """Tokens at the end of a first forward that are not the prompt's, in assisted decoding."""
        if self._expected is not None:
            return max(0, tokens - self._expected)
        # Drafts are sent along with the prompt, and logits are wanted from the last prompt token on.
        logits = call.get("logits_to_keep")
        return max(0, logits - 1) if self._recording and isinstance(logits, int) else 0

    def after_forward(self, model: nn.Module, succeeded: bool) -> None:
        """Called as a forward with this cache ends; not for a KeyboardInterrupt in its midst."""
        if not self._in_forward or self._used_elsewhere():  # refused before it began
            return
        if not succeeded:
            self._spoil()
            return
        self._in_forward = False
        try:
            attention.check_consumed()
            if not self.get_seq_length():
                raise UnsupportedModelError(
                    f"{type(model).__name__} stored nothing in its cache: it has no KV to prune"
                )
        except UnsupportedModelError:
            self._spoil()
            raise
        phase = "prefill" if self._phase is _Phase.PREFILL else "decode"
        if phase == "prefill":
            self._wait_for_devices()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - self._forward_started

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; 0 or a negative number, as transformers has it.

        Raises:
            CacheStateError: They reach into what was pruned, or past what a sliding window still holds.
        """
        self._check_usable()
        if tokens_to_remove > 0:
            raise InvalidInputError(
                f"expected 0 or a negative number, how many tokens to remove, got {tokens_to_remove}"
            )
        count, seen = -tokens_to_remove, self.get_seq_length()
        if self._phase is _Phase.PREFILL and count >= seen:
            raise CacheStateError(f"cannot crop {count} of {seen} tokens: nothing of the prompt would be left; reset()")
        for index, layer in enumerate(self.layers):  # all are checked before one is changed
            if isinstance(layer, PrunedLayer):
                layer.check_crop(count)
            elif count and layer.is_initialized and not _can_crop(layer, count):
                raise CacheStateError(
                    f"cannot crop: layer {index} holds a sliding window of {layer.sliding_window} tokens only; call "
                    "activate_past_recording() before the forward that is to be taken back"
                )
        for layer in self.layers:
            # A sliding layer that does not record has nothing to let go, and would raise.
            if layer.is_initialized and (isinstance(layer, PrunedLayer) or count or layer.record_past):
                layer.crop(tokens_to_remove)
        if self._phase is _Phase.PREFILL:
            self._prefill.crop(count, seen)
        elif self._prompt is not None and seen - count < self._prompt.columns:
            self._prompt = self._prompt.cropped(self._prompt.columns - (seen - count))

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> None:
        """Have sliding-window layers keep what a ``crop`` may want back; assisted decoding calls it first."""
        self._recording = True
        super().activate_past_recording(*args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the batch rows ``beam_idx``, for beam search."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        self._settle()
        self._select_rows(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows ``indices`` (numbers, or a mask)."""
        self._settle()
        self._select_rows(torch.arange(len(self._rows))[indices.cpu()])

    def _select_rows(self, rows: Tensor) -> None:
        self._settle()
        if self._prompt is not None:
            self._note_peak()
            rows = rows.cpu()  # layers may be on several devices, and all take indices from there
            for layer in self.layers:
                layer.batch_select_indices(rows)
            self._rows = self._rows[rows]

    def reset(self) -> None:
        """Back to empty; also a way on after an exception has spoiled the cache."""
        if self._phase is _Phase.CLOSED:
            self._check_usable()
        self._prefill.cancel()
        if self._phase is _Phase.SPOILED:
            self._open()
        else:
            self._start_empty()

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        self._settle()
        return super().__iter__()

    def __reduce__(self) -> Any:
        raise TypeError("a ProxyPrunedCache belongs to a model and cannot be pickled: save(folder) and load() do it")

    def __deepcopy__(self, memo: dict[int, Any]) -> ProxyPrunedCache:
        memo[id(self)] = twin = self.fork()
        return twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.target).__name__}, {self.policy}, {self._phase.value})"

    @property
    def is_compileable(self) -> bool:
        """False: what is stored changes its shape."""
        return False

    # ---------------------------------------------------------------- scoring and pruning

    @torch.no_grad()
    def _settle(self, prune: bool = True) -> dict[str, Tensor]:
        """End a prefill: score, and prune. Does nothing at any other time.

        Returns: scores by name.
        """
        self._check_usable()
        if self._phase is not _Phase.PREFILL:
            return {}
        try:
            return self._finish_prefill(prune)
        except BaseException as error:
            if self._prompt is not None and isinstance(error, Exception):
                self._end_prefill()  # whole, and right
            else:
                self._spoil()
            raise

    def _finish_prefill(self, prune: bool) -> dict[str, Tensor]:
        if self._scores is None:
            self._score(self.get_seq_length())
        scores = self._scores or {}
        with self._pruning():
            if prune and scores:
                try:
                    if self._kept is None:
                        self._decide(next(iter(scores.values())), self.policy)
                    self._prune_layers()
                except BaseException:  # out of memory, say: some layers are pruned and some are not
                    self._spoil()
                    raise
            self._end_prefill()
        warn_over_budget(self._over_budget)
        return scores

    def _end_prefill(self) -> None:
        """From now on forwards append; nothing of the prefill is left that they could meet."""
        self._prefill.cancel()
        self._prefill = self._new_prefill(self.context)  # lets go of the prompt
        self._expected, self._scores, self._may_prune_ahead = None, None, False
        self._phase = _Phase.READY
        for layer in self.layers:
            if not isinstance(layer, PrunedLayer) and layer.is_initialized:  # a view would hold the whole prompt
                layer.keys, layer.values = own(layer.keys), own(layer.values)

    def _score_ahead(self) -> None:
        """Score while the target prefills; layers that are filled already are pruned at once."""
        assert self._expected is not None
        with self._pruning():
            self._score(self._expected)
            if self._scores:
                self._decide(next(iter(self._scores.values())), self.policy)
                self._prune_layers()

    def _score(self, seen: int) -> None:
        """Have the prompt of ``seen`` tokens scored, after which ``_scores`` is a dict, empty if that failed."""
        prefill = self._prefill
        prompt, self._rows = prefill.read(seen)
        self._prompt = prompt.without_ids()
        self._scores = prefill.finish(prompt, self._rows, self.layers)
        self._fallback = prefill.fallback
        self._seconds |= prefill.seconds
        self._devices |= prefill.devices
        self._bytes_peak_proxy = prefill.bytes_peak_proxy

    def _decide(self, scores: Tensor, policy: RetentionPolicy) -> None:
        """From scores `[R, L, H, P]` to what is kept."""
        assert self._prompt is not None
        policies = [policy] * len(self._prompt.lengths)
        keep, self._over_budget = keep_masks(scores[:, list(self.geometry.full_layers)], self._prompt, policies)
        self._kept = pack_mask(keep).cpu()
        if not keep.all():
            self._pruner = Pruner(keep, self._rows, is_ragged(keep, self._prompt))

    def _decide_each_way(self, scores: Tensor, policies: Sequence[RetentionPolicy]) -> None:
        """Become n rows of the one that is held; full-attention layers follow when they are pruned.

        Args:
            scores: `[n, L, H, P]`.
            policies: n of them.
        """
        assert self._prompt is not None
        if len(self._rows) != 1:
            raise CacheStateError(f"expected one row, to be kept in several ways, got a cache of {len(self._rows)}")
        if not policies:
            raise InvalidPolicyError("expected a policy, or a list of at least one, got an empty list")
        self._prompt = self._prompt.repeated(int(self._rows[0]), len(policies))
        self._rows = torch.arange(len(policies))
        scores = checked_scores(scores, self.geometry, self._prompt)[:, list(self.geometry.full_layers)]
        keep, self._over_budget = keep_masks(scores, self._prompt, policies)
        self._kept = pack_mask(keep).cpu()
        self._pruner = Pruner(keep, self._rows, ragged=True)
        for layer in self.layers:
            if not isinstance(layer, PrunedLayer):
                layer.batch_repeat_interleave(len(policies))

    def _prune_layers(self) -> None:
        """Shrink the layers that are whole, one after another."""
        if self._pruner is None:
            return
        for layer in list(self._full_layers()):
            if layer.storage is not None and not layer.offset:
                keys, values = layer.storage.keys, layer.storage.values
                rows = (len(self._rows), -1, -1, -1)  # one row may be pruned in several ways
                self._prune_layer(layer, keys.expand(rows), values.expand(rows))
        if all(layer.is_initialized for layer in self.layers):
            self._pruner = None

    def _devices_of_layers(self) -> list[torch.device | None]:
        """Where each full-attention layer computes, as far as its attention can be found."""
        modules: dict[Any, nn.Module] = {
            module.layer_idx: module for module in attention.attention_modules(self.target.get_decoder())
        }
        return [device_of(modules[layer]) if layer in modules else None for layer in self.geometry.full_layers]

    def _prune_layer(self, layer: PrunedLayer, keys: Tensor, values: Tensor, fresh: int = 0) -> None:
        """Put what is kept of `[B, H, N, D]` and `[B, H, N, Dv]`, ``fresh`` bytes beside the cache, in its place."""
        assert self._pruner is not None
        place = self.geometry.full_layers.index(layer.index)
        pruned = self._pruner.prune(place, layer.index, keys, values)
        self._note_peak(fresh + storage_bytes(pruned.tensors()))
        self.layers[layer.index] = pruned

    @contextlib.contextmanager
    def _pruning(self) -> Iterator[None]:
        """Time spent inside is the prune's, and not the forward's around it."""
        self._wait_for_devices()
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self._seconds["prune"] = self._seconds.get("prune", 0.0) + elapsed
        self._forward_started += elapsed

    def _wait_for_devices(self) -> None:
        """Until what was launched on CUDA is computed, so that its time is the phase's that launched it."""
        for device in {tensor.device for tensor in self.tensors()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _kept_mask(self) -> Tensor:
        """`[R, L_full, H, P]`, bool."""
        assert self._prompt is not None
        if self._kept is not None:
            return unpack_mask(self._kept, self._prompt.columns)
        columns = torch.arange(self._prompt.columns)
        real = columns >= torch.tensor(self._prompt.pads)[:, None]
        layers, heads = len(self.geometry.full_layers), self.geometry.num_key_value_heads
        return real[:, None, None].expand(-1, layers, heads, -1)

    # ---------------------------------------------------------------- state

    def _is_ragged(self) -> bool:
        return any(isinstance(layer.storage, RaggedStorage) for layer in self._full_layers())

    def _is_settled(self) -> bool:
        return self._phase is not _Phase.PREFILL

    def _full_layers(self) -> Iterator[PrunedLayer]:
        return (layer for layer in self.layers if isinstance(layer, PrunedLayer))

    def _used_elsewhere(self) -> bool:
        """Whether another thread, which still runs, is in a forward."""
        thread = self._forward_thread
        return self._in_forward and thread is not threading.current_thread() and thread.is_alive()

    def _check_usable(self) -> None:
        if self._used_elsewhere():
            raise CacheStateError(
                "the cache is in use by another thread, in a forward: call when that is through, or fork() before; "
                "reset() if it never ends"
            )
        if self._in_forward:  # the forward before this call never ended: a KeyboardInterrupt, say
            self._spoil()
        if self._phase is _Phase.CLOSED:
            raise CacheStateError("the cache is closed: make a new one")
        if self._phase is _Phase.SPOILED:
            raise CacheStateError(
                "an exception in its midst left the cache half written: call reset() or make a new one"
            )

    def _twin(self, policy: RetentionPolicy) -> ProxyPrunedCache:
        """A ready or empty cache with this one's content, memory shared until written."""
        twin = type(self)(
            self.target,
            self.scorer,
            policy,
            tokenizer=self.tokenizer,
            context=self.context,
            strict=self.strict,
            timeout=self.timeout,
            schedule=self.schedule,
        )
        twin._bytes_peak_proxy = self._bytes_peak_proxy
        twin._restore(
            layers=[layer.fork() if isinstance(layer, PrunedLayer) else copy.copy(layer) for layer in self.layers],
            prompt=self._prompt,
            rows=self._rows,
            kept=self._kept,
            seconds=self._seconds,
            devices=self._devices,
            fallback=self._fallback,
        )
        return twin

    def _restore(
        self,
        *,
        layers: list[Any],
        prompt: Prompt | None,
        rows: Tensor,
        kept: Tensor | None,
        seconds: dict[str, float],
        devices: dict[str, str],
        fallback: str | None,
    ) -> None:
        """Take over the content of another cache, an empty or a ready one."""
        self.layers = layers
        self._prompt, self._rows, self._kept = prompt, rows, kept
        self._seconds, self._devices, self._fallback = dict(seconds), dict(devices), fallback
        self._phase = _Phase.EMPTY if prompt is None else _Phase.READY
        self._note_peak()

    def _spoil(self) -> None:
        self._let_go(_Phase.SPOILED)

    def _let_go(self, phase: _Phase) -> None:
        if self._phase is not _Phase.CLOSED:
            self._prefill.cancel()
            self._start_empty()
            self._phase = phase
            self._finalizer()

    def _note_peak(self, besides: int = 0) -> None:
        """Called before memory shrinks, and for a report; between, it only grows. ``besides`` is held beside it."""
        self._bytes_peak = max(self._bytes_peak, storage_bytes(list(self.tensors())) + besides)

    def _bytes_full(self) -> int:
        total = 0
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            if isinstance(layer, PrunedLayer):
                assert layer.storage is not None
                keys, values = layer.storage.keys, layer.storage.values
                per_token = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
                total += keys.shape[0] * layer.get_seq_length() * per_token
            else:
                total += layer.keys.nbytes + layer.values.nbytes
        return total


def _let_go(lease: Lease, taps: Taps, runs: dict[str, ScorerRun]) -> None:
    while taps:
        taps.pop().remove()
    while runs:
        runs.popitem()[1].cancel()
    lease.release()


def _can_crop(layer: DynamicSlidingWindowLayer, count: int) -> bool:
    """Whether a sliding-window layer still holds what its window needs once ``count`` tokens are gone."""
    assert layer.keys is not None
    seen, stored = layer.get_seq_length(), layer.keys.shape[2]
    full = seen < layer.sliding_window or layer.record_past
    return full and stored - count >= min(seen - count, layer.sliding_window - 1)
