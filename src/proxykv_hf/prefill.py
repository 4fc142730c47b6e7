"""A prompt on its way through the target, and the scorers that rate it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import attention
from .errors import InvalidInputError, ProxyKVError, ProxyKVWarning, ScoringError
from .geometry import ModelGeometry
from .layers import PrunedLayer
from .prompt import Context, Prompt, read_prompt
from .scorers.base import Observation, Scorer, ScorerRun, ScoringRequest

Taps = list[torch.utils.hooks.RemovableHandle]


class Prefill:
    """Collects the chunks of a prompt, and runs its scorers beside them.

    Args:
        target: The model.
        geometry: Its geometry.
        scorers: By name.
        tokenizer: For scorers that need one.
        context: What may be evicted.
        strict: Raise if scoring fails, instead of warning and going on without scores.
        taps: Hooks on the model while it is observed; the caller owns the list and removes what is
            left in it should this object be dropped.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        geometry: ModelGeometry,
        scorers: Mapping[str, Scorer],
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        context: Context | None,
        strict: bool,
        taps: Taps,
    ) -> None:
        self.target, self.geometry, self.scorers = target, geometry, scorers
        self.tokenizer, self.context, self.strict = tokenizer, context, strict
        self.taps = taps
        self.batch = 0
        self.cropped = False
        """Whether tokens were taken back: then the next forward is no chunk of the prompt."""
        self.seconds: dict[str, float] = {}
        self.devices: dict[str, str] = {}
        self.fallback: str | None = None
        """Why there are no scores, or None."""
        self._runs: dict[str, ScorerRun] = {}
        self._chunks: list[Tensor | None] = []
        self._mask: Tensor | None = None
        self._next_positions: Tensor | None = None
        self._drafts = 0

    def begin(
        self, call: Mapping[str, Any], shape: tuple[int, int], drafts: int, layers: Iterable[PrunedLayer]
    ) -> None:
        """The first chunk is about to go through the target.

        Args:
            call: The forward's arguments.
            shape: ``(B, q)``.
            drafts: Tokens at the end that are not the prompt's, in assisted decoding.
            layers: The cache's, to be watched.

        Raises:
            ValueError: What a scorer refuses, before any work.
        """
        self._drafts = drafts
        self._note(call, shape)
        request = self._first_request((shape[0], shape[1] - drafts))
        for name, scorer in self.scorers.items():
            try:
                self._runs[name] = scorer.begin(request)
            except ValueError:
                self.cancel()
                raise
            except Exception as error:
                self._fail(name, error)
                break
        observers = [run for name, run in self._runs.items() if self.scorers[name].observes]

        def watch(observation: Observation) -> None:
            for run in observers:
                run.observe(observation)

        for layer in layers:
            layer.watch = watch
        if observers:
            self.taps.extend(attention.tap_hidden(self.target))

    def extend(self, call: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """The next chunk follows: who does not observe begins again when the prompt is whole."""
        self._note(call, shape)
        for name in [name for name in self._runs if not self.scorers[name].observes]:
            self._runs.pop(name).cancel()

    def _note(self, call: Mapping[str, Any], shape: tuple[int, int]) -> None:
        self.batch = shape[0]
        self._chunks.append(call.get("input_ids"))
        self._mask = call.get("attention_mask")
        positions = call.get("position_ids")
        self._next_positions = None
        if positions is not None and positions.ndim == 2:
            self._next_positions = positions[:, -1].expand(shape[0]).cpu() + 1

    def crop(self, count: int, seen: int) -> None:
        """The last ``count`` of ``seen`` tokens were taken back."""
        self.cropped = True
        ids = self._ids()
        self._chunks = [None if ids is None else ids[:, : seen - count]]
        self._mask = None if self._mask is None else self._mask[:, : seen - count]
        self._next_positions = None if self._next_positions is None else self._next_positions - count
        self._drafts = max(0, self._drafts - count)

    def read(self, seen: int) -> tuple[Prompt, Tensor]:
        """The whole prompt after ``seen`` tokens, and each batch row's distinct row `[B]`.

        Raises:
            InvalidInputError: Padding that is not on the left, a context outside the prompt.
        """
        positions = None if self._next_positions is None else self._next_positions - self._drafts
        return read_prompt(self._ids(), self._mask, positions, self.context, (self.batch, seen - self._drafts))

    def finish(self, prompt: Prompt, rows: Tensor, layers: Sequence[Any]) -> dict[str, Tensor]:
        """Scores by name, `[R, L, H, P]`; none if scoring failed, see ``fallback``.

        Args:
            prompt: From `read`.
            rows: From `read`.
            layers: The cache's, whole.
        """
        self._remove_taps()
        for layer in layers:
            if isinstance(layer, PrunedLayer):
                layer.watch = None
        request = ScoringRequest(prompt, self.geometry, self.tokenizer)
        view = WholeLayers(self.target, request, rows, layers)
        scores: dict[str, Tensor] = {}
        for name, scorer in self.scorers.items():
            if self.fallback is not None:
                return {}
            started = time.perf_counter()
            try:
                run = self._runs.get(name) or scorer.begin(request)
                self._runs[name] = run
                scores[name] = checked_scores(run.finish(view), self.geometry, prompt)
                del self._runs[name]
                self.seconds |= run.seconds
                self.devices |= run.devices
            except Exception as error:
                self._fail(name, error)
            self.seconds["wait"] = self.seconds.get("wait", 0.0) + time.perf_counter() - started
        return {} if self.fallback is not None else scores

    def cancel(self) -> None:
        """Drop the runs and the hooks."""
        self._remove_taps()
        while self._runs:
            self._runs.popitem()[1].cancel()

    def _remove_taps(self) -> None:
        while self.taps:
            self.taps.pop().remove()

    def _ids(self) -> Tensor | None:
        known = [chunk for chunk in self._chunks if chunk is not None]
        return torch.cat(known, dim=1) if len(known) == len(self._chunks) else None

    def _first_request(self, shape: tuple[int, int]) -> ScoringRequest:
        """The request as far as it is known: more chunks may follow, and the span may lie in them."""
        positions = None if self._next_positions is None else self._next_positions - self._drafts
        try:
            prompt, _ = read_prompt(self._ids(), self._mask, positions, self.context, shape)
        except InvalidInputError:
            prompt, _ = read_prompt(self._ids(), None, positions, None, shape)
        return ScoringRequest(prompt, self.geometry, self.tokenizer)

    def _fail(self, name: str, error: Exception) -> None:
        """Raise if strict, else remember and warn."""
        self.cancel()
        if self.strict:
            if isinstance(error, ProxyKVError):
                raise error
            raise ScoringError(f"scorer {name!r} failed: {type(error).__name__}: {error}") from error
        self.fallback = f"{name}: {type(error).__name__}: {error}"
        warnings.warn(
            f"the cache stays uncompressed, since its scorer failed ({self.fallback}); strict=True raises instead",
            ProxyKVWarning,
            stacklevel=2,
        )


class WholeLayers:
    """A prefilled cache's layers as scorers read them (`scorers.base.WholeCache`)."""

    def __init__(self, target: PreTrainedModel, request: ScoringRequest, rows: Tensor, layers: Sequence[Any]) -> None:
        self.target, self.request = target, request
        self._rows, self._layers = rows, layers

    def batch_row(self, row: int) -> int:
        """See `scorers.base.WholeCache`."""
        return int((self._rows == row).nonzero()[0])

    def states(self, row: int) -> Sequence[tuple[Tensor, Tensor]]:
        """See `scorers.base.WholeCache`."""
        prompt, batch_row = self.request.prompt, self.batch_row(row)
        states = []
        for layer in self._layers:
            first = layer.get_seq_length() - layer.keys.shape[2]  # the column of what is stored first
            columns = slice(max(0, prompt.pads[row] - first), prompt.columns - first)
            states.append((layer.keys[batch_row, None, :, columns], layer.values[batch_row, None, :, columns]))
        return states


def checked_scores(scores: Any, geometry: ModelGeometry, prompt: Prompt) -> Tensor:
    """``scores``, if they are `[R, L, H, P]` and no number where one is needed is NaN.

    Raises:
        ScoringError: They are not.
    """
    expected = [len(prompt.lengths), geometry.num_layers, geometry.num_key_value_heads, prompt.columns]
    if not isinstance(scores, Tensor) or [*scores.shape] != expected:
        got = [*scores.shape] if isinstance(scores, Tensor) else type(scores).__name__
        raise ScoringError(f"expected scores [R, L, H, N] = {expected}, got {got}")
    full = list(geometry.full_layers)
    for row, pad in enumerate(prompt.pads):
        if scores[row, full, :, pad:].isnan().any():
            raise ScoringError(f"the scores of row {row} hold NaN")
    return scores.detach()
