"""`PrunableCache`: the methods of the cache that transformers and the forward hooks call.

In the paper's terms (arXiv 2605.16360), M_l is ``target``, rho is ``policy.retention_ratio``, Y is what a scorer
returns, and M is the kept mask. `phase` shows the phases of a cache.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from .._compat import Cache, bind_forward
from ..attention.functions import attention_modules, check_consumed, forget, hand_over
from ..attention.lease import Lease
from ..errors import CacheStateError, GeometryError, InvalidInputError, UnsupportedModelError
from ..geometry import ModelGeometry, check_loaded, device_of
from ..scorers.base import Scorer, ScorerRun
from .inputs import check_input, mask_as_held, returns_attentions, without_seen
from .kept import Kept
from .layers import PrunedLayer, can_crop_window, new_layers
from .phase import Lifecycle, Phase
from .prefill import SCHEDULES, Prefill, Schedule, Taps, plain_timeout
from .prompt import Context, plain_context
from .pruning import Pruner, warn_over_budget
from .report import Usage
from .retention import RetentionPolicy, check_policy
from .storage import RaggedStorage, own, storage_bytes


class PrunableCache(DynamicCache):
    """A cache that lets a scorer rate its prompt, and prunes it. See `ProxyPrunedCache` for the arguments."""

    layers: list[Any]  # `PrunedLayer`s, and transformers' own sliding-window layers

    def __init__(
        self,
        target: PreTrainedModel,
        scorer: Scorer | None,
        policy: RetentionPolicy,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        context: Context | None,
        strict: bool,
        timeout: float | None,
        schedule: Schedule | None,
    ) -> None:
        check_loaded(target)
        check_policy(policy)
        if scorer is not None and (isinstance(scorer, type) or not isinstance(scorer, Scorer)):
            raise TypeError(f"expected a scorer such as KVzipScorer(tokenizer), got {scorer!r}")
        if schedule is not None and schedule not in SCHEDULES:
            raise InvalidInputError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.geometry = ModelGeometry.from_config(target.config, may_be_bounded=not strict)
        self.target = target
        self.scorer = scorer
        self.policy = policy
        self.tokenizer = tokenizer
        self.strict = strict
        self.timeout = plain_timeout(timeout)
        self.schedule = schedule
        self.context = plain_context(context)
        self._life = Lifecycle()
        self._open()

    def _open(self) -> None:
        """Replace the model's attention, and start empty."""
        Cache.__init__(self, layers=new_layers(self.geometry))  # `DynamicCache` would make layers of other types
        self._taps: Taps = []
        self._runs: dict[str, ScorerRun] = {}
        self._lease = Lease(self.target)
        self._finalizer = weakref.finalize(self, _let_go, self._lease, self._taps, self._runs)
        self._start_empty()

    def _start_empty(self) -> None:
        forget()
        self.layers = new_layers(self.geometry)
        self._life.end_forward()
        self._life.phase = Phase.EMPTY
        self._forward_started = 0.0
        self._recording = False
        self._prefill = self._new_prefill(self.context)
        self._scores: dict[str, Tensor] | None = None  # set once the prompt is scored, until the prefill ends
        self._kept: Kept | None = None  # set once the prompt is scored
        self._pruner: Pruner | None = None  # set from then until all layers are pruned
        self._usage = Usage({"target": str(device_of(self.target))})

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

    # ---------------------------------------------------------------- a forward

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Called when a forward with this cache begins. Returns other keyword arguments for it, or None.

        The first forward is the prefill. After it, several tokens at once are the next chunk of the prompt. One token,
        or any forward after a ``crop`` (assisted decoding), ends the prefill: the prompt is scored and pruned first. If
        a forward brings the seen tokens again (assisted decoding over a filled cache), only the new ones run.
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
        batch, tokens = check_input(call, self._batch, seen)
        if self._life.phase is Phase.PREFILL and self._prefill.is_over(seen, tokens):
            self._settle()
        if self._life.phase is Phase.PREFILL:
            self._prefill.extend(call, (batch, tokens))
        elif self._life.phase is Phase.EMPTY:
            self._begin_prefill(call, batch, tokens)
        mask = None
        if self._kept is not None:
            mask = mask_as_held(call.get("attention_mask"), self._kept.prompt, self._kept.rows)
        self._show_places(returns_attentions(call, model))
        self._life.begin_forward()
        self._forward_started = time.perf_counter()
        changed = unseen if mask is None else unseen | {"attention_mask": mask}
        return kwargs | changed if changed else None

    def _show_places(self, wanted: bool) -> None:
        """If ``wanted``, make the layers spread their attention matrices over everything that was seen."""
        places = self._kept.places() if wanted and self._kept is not None else {}
        for layer in self._full_layers():
            layer.places = places.get(layer.index)

    def _begin_prefill(self, call: dict[str, Any], batch: int, tokens: int) -> None:
        """Start the scorers before the first forward. After an error the cache is empty again."""
        if not self._prefill.scorers and self.geometry.full_layers:
            raise CacheStateError(
                "this cache was given no scorer and cannot prefill: pass one to ProxyPrunedCache(target, scorer, "
                "policy), to load(..., scorer=...) or to prefill(..., prune=False, scorers={name: scorer})"
            )
        try:
            full_layers = [self.layers[index] for index in self.geometry.full_layers]
            self._prefill.begin(call, (batch, tokens), full_layers, assisted=self._recording)
            if self._prefill.prunes_ahead and self._prefill.ready():
                self._score_ahead()
        except BaseException:
            self._prefill.cancel()
            self._start_empty()
            raise
        self._life.phase = Phase.PREFILL

    def after_forward(self, model: nn.Module, succeeded: bool) -> None:
        """Called when a forward with this cache ends, but not if a KeyboardInterrupt ended it."""
        if not self._life.in_forward or self._life.used_elsewhere():  # it was refused before it began
            return
        if not succeeded:
            self._spoil()
            return
        self._life.end_forward()
        try:
            check_consumed()
            if not self.get_seq_length():
                raise UnsupportedModelError(f"{type(model).__name__} stored nothing in its cache: nothing to prune")
        except UnsupportedModelError:
            self._spoil()
            raise
        prefill = self._life.phase is Phase.PREFILL
        if prefill:
            self._wait_for_devices()
        self._usage.add("prefill" if prefill else "decode", time.perf_counter() - self._forward_started)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K `[B, H, q, D]` and V `[B, H, q, Dv]`; return the K and V that attention uses."""
        if not self._life.in_forward:
            self._check_usable()
            raise CacheStateError(
                f"expected a forward of the cache's own target ({type(self.target).__name__}), got a use outside of "
                "one: call that model itself, not a part of it or another model (for PEFT: get_base_model())"
            )
        heads, expected = key_states.shape[1], self.geometry.num_key_value_heads
        if self.geometry.sliding_windows[layer_idx] is None and heads != expected:
            raise UnsupportedModelError(
                f"layer {layer_idx}: expected {expected} KV heads as the config says, got {heads}"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        layer = self.layers[layer_idx]
        if self._prefill.prunes_ahead:
            if self._scores is None and self._prefill.ready():
                self._score_ahead()
            if self._pruner is not None and isinstance(layer, PrunedLayer):
                return self._update_pruned(self._pruner, layer, key_states, value_states)
            if self._pruner is not None:
                whole = layer.update(key_states, value_states, *args, **kwargs)
                layer.keys, layer.values = own(layer.keys), own(layer.values)  # a view would keep the whole prompt
                return whole
        return layer.update(key_states, value_states, *args, **kwargs)

    def _update_pruned(self, pruner: Pruner, layer: PrunedLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `update` once the scores are known: store only what is kept, and return all K and V."""
        with self._pruning():
            pruner.prune_fresh(self.layers, layer.index, keys, values, self._devices_of_layers, self._note_peak)
        hand_over(keys, values, layer)  # the replaced ``layer`` is empty, so the back end attends
        return keys, values

    # ---------------------------------------------------------------- transformers' other methods

    def crop(self, tokens_to_remove: int, *args: Any, **kwargs: Any) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. The argument is 0 or negative, as in transformers.

        Raises:
            CacheStateError: These tokens reach into the pruned part, or past what a sliding window still holds.
        """
        self._check_usable()
        if tokens_to_remove > 0:
            raise InvalidInputError(f"expected 0 or less, got {tokens_to_remove}: crop(-n) removes n tokens")
        count, seen = -tokens_to_remove, self.get_seq_length()
        if self._life.phase is Phase.PREFILL and count >= seen:
            raise CacheStateError(f"cannot crop {count} of {seen} tokens: nothing of the prompt would be left; reset()")
        for index, layer in enumerate(self.layers):  # check all layers before one is changed
            if isinstance(layer, PrunedLayer):
                layer.check_crop(count)
            elif count and layer.is_initialized and not can_crop_window(layer, count):
                raise CacheStateError(
                    f"cannot crop: layer {index} holds a sliding window of {layer.sliding_window} tokens only; call "
                    "activate_past_recording() before the forward whose tokens are to be removed"
                )
        for layer in self.layers:
            # A sliding layer that does not record holds nothing to remove, and would raise.
            if layer.is_initialized and (isinstance(layer, PrunedLayer) or count or layer.record_past):
                layer.crop(tokens_to_remove, *args, **kwargs)
        if self._life.phase is Phase.PREFILL:
            self._prefill.crop(count, seen)
        elif self._kept is not None and seen - count < self._kept.prompt.columns:
            self._kept = self._kept.crop(self._kept.prompt.columns - (seen - count))

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> None:
        """Make sliding-window layers keep what a ``crop`` needs. Assisted decoding calls this first."""
        self._recording = True
        super().activate_past_recording(*args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor, *args: Any, **kwargs: Any) -> None:
        """Reorder the batch rows by ``beam_idx``, for beam search."""
        self._select_rows(beam_idx, *args, **kwargs)

    def batch_repeat_interleave(self, repeats: int, *args: Any, **kwargs: Any) -> None:
        """Repeat each batch row."""
        self._settle()
        self._select_rows(torch.arange(self._batch).repeat_interleave(repeats), *args, **kwargs)

    def batch_select_indices(self, indices: Tensor, *args: Any, **kwargs: Any) -> None:
        """Keep the batch rows ``indices`` (row numbers, or a bool mask)."""
        self._settle()
        self._select_rows(torch.arange(self._batch)[indices.cpu()], *args, **kwargs)

    def _select_rows(self, rows: Tensor, *args: Any, **kwargs: Any) -> None:
        self._settle()
        if self._kept is not None:
            self._note_peak()
            rows = rows.cpu()  # layers may be on several devices, and all take indices on the CPU
            for layer in self.layers:
                layer.batch_select_indices(rows, *args, **kwargs)
            self._kept = self._kept.select(rows)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Empty the cache, with new layers. This also makes a cache usable again that an exception has spoiled."""
        if self._life.phase is Phase.CLOSED:
            self._check_usable()
        self._prefill.cancel()
        if self._life.phase is Phase.SPOILED:
            self._open()
        else:
            self._start_empty()

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        self._settle()
        return super().__iter__()

    @property
    def is_compileable(self) -> bool:
        """False, because the stored tensors change their shape."""
        return False

    # ---------------------------------------------------------------- scoring and pruning

    @torch.no_grad()
    def _settle(self, prune: bool = True) -> dict[str, Tensor]:
        """End a prefill: score, and prune. Do nothing in any other phase. Returns the scores by name."""
        self._check_usable()
        if self._life.phase is not Phase.PREFILL:
            return {}
        try:
            return self._finish_prefill(prune)
        except BaseException as error:
            if self._kept is not None and isinstance(error, Exception):
                self._end_prefill()  # the cache is whole, and usable
            else:
                self._spoil()
            raise

    def _finish_prefill(self, prune: bool) -> dict[str, Tensor]:
        if self._scores is None:
            self._score(self.get_seq_length())
        assert self._kept is not None
        scores = self._scores or {}
        with self._pruning():
            if prune and scores:
                try:
                    if self._kept.packed is None:
                        self._kept, self._pruner = self._kept.decide(next(iter(scores.values())), self.policy)
                    self._prune_layers()
                except BaseException:  # out of memory, for example: only some layers are pruned
                    self._spoil()
                    raise
            self._end_prefill()
        warn_over_budget(self._kept.over_budget)
        return scores

    def _end_prefill(self) -> None:
        """Make the cache ready: later forwards only append, and nothing of the prefill is left."""
        self._prefill.cancel()
        self._prefill = self._new_prefill(self.context)  # drops the prompt
        self._scores = None
        self._life.phase = Phase.READY
        for layer in self.layers:
            if not isinstance(layer, PrunedLayer) and layer.is_initialized:  # a view would keep the whole prompt
                layer.keys, layer.values = own(layer.keys), own(layer.values)

    def _score_ahead(self) -> None:
        """Score while the target prefills, and prune the layers that are filled already."""
        assert self._prefill.expected is not None
        with self._pruning():
            self._score(self._prefill.expected)
            if self._scores and self._kept is not None:
                self._kept, self._pruner = self._kept.decide(next(iter(self._scores.values())), self.policy)
                self._prune_layers()

    def _score(self, seen: int) -> None:
        """Score the prompt of ``seen`` tokens. Afterwards ``_scores`` is a dict, which is empty if scoring failed."""
        prefill, usage = self._prefill, self._usage
        prompt, rows = prefill.read(seen)
        self._kept = Kept(prompt.without_ids(), rows, self.geometry)
        self._scores = prefill.finish(prompt, rows, self.layers)
        usage.fallback = prefill.fallback
        usage.seconds |= prefill.seconds
        usage.devices |= prefill.devices
        usage.bytes_peak_proxy = prefill.bytes_peak_proxy

    def _prune_layers(self) -> None:
        """Prune the layers that are whole, one after another."""
        if self._pruner is not None:
            self._pruner.prune_filled(self.layers, self._note_peak)
            if all(layer.is_initialized for layer in self.layers):
                self._pruner = None

    def _devices_of_layers(self) -> list[torch.device | None]:
        """The device of each full-attention layer; None if its attention module is not found."""
        modules: dict[Any, torch.device] = {
            module.layer_idx: device_of(module) for module in attention_modules(self.target.get_decoder())
        }
        return [modules.get(layer) for layer in self.geometry.full_layers]

    @contextlib.contextmanager
    def _pruning(self) -> Iterator[None]:
        """Count the time spent inside as pruning, and not as part of the forward around it."""
        self._wait_for_devices()
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        self._usage.add("prune", elapsed)
        self._forward_started += elapsed

    def _wait_for_devices(self) -> None:
        """Wait for the work launched on CUDA, so that its time counts for the phase that launched it."""
        for device in {tensor.device for tensor in self.tensors()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    # ---------------------------------------------------------------- state

    @property
    def _batch(self) -> int:
        """B; 0 while the cache is empty."""
        return self._prefill.batch if self._kept is None else len(self._kept.rows)

    def _is_ragged(self) -> bool:
        return any(isinstance(layer.storage, RaggedStorage) for layer in self._full_layers())

    def _full_layers(self) -> Iterator[PrunedLayer]:
        return (layer for layer in self.layers if isinstance(layer, PrunedLayer))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that hold this cache's memory."""
        for layer in self.layers:
            if isinstance(layer, PrunedLayer):
                yield from layer.tensors()
            elif layer.is_initialized:
                yield from (layer.keys, layer.values)
        if self._kept is not None:
            yield from self._kept.tensors()

    def _note_peak(self, besides: int = 0) -> None:
        """Note the peak memory, with ``besides`` more bytes. Called before memory shrinks, and for a report."""
        self._usage.note_peak(storage_bytes(list(self.tensors())) + besides)

    def _check_usable(self) -> None:
        """Refuse a call from another thread during a forward, and any call on a closed or spoiled cache."""
        self._life.check_thread()
        if self._life.in_forward:  # the forward before this call never ended, for example by a KeyboardInterrupt
            self._spoil()
        self._life.check_phase()

    def _spoil(self) -> None:
        self._let_go(Phase.SPOILED)

    def _let_go(self, phase: Phase) -> None:
        """Free the memory, and give the target its own attention back."""
        if self._life.phase is not Phase.CLOSED:
            self._prefill.cancel()
            self._start_empty()
            self._life.phase = phase
            self._finalizer()


def _let_go(lease: Lease, taps: Taps, runs: dict[str, ScorerRun]) -> None:
    while taps:
        taps.pop().remove()
    while runs:
        runs.popitem()[1].cancel()
    lease.release()
