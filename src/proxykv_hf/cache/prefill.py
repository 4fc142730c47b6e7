"""The prefill of a prompt: its chunks on their way through the target, and the scorers that rate them."""

from __future__ import annotations

import numbers
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.functions import tap_hidden
from ..errors import InvalidInputError, ProxyKVError, ProxyKVWarning, ScoringError, UnsupportedModelError
from ..geometry import ModelGeometry, device_of
from ..scorers.base import Observation, OnLane, Scorer, ScorerRun, ScoringRequest
from .layers import PrunedLayer
from .prompt import Context, Prompt, left_padding_order, read_prompt
from .scores import checked_scores

Taps = list[torch.utils.hooks.RemovableHandle]

#: When a scorer on a lane runs: at the same time as the target's prefill; before it, for the lowest peak memory, since
#: each layer is then pruned as it is filled; or after it, for measurements.
Schedule = Literal["overlap", "proxy_first", "sequential"]
SCHEDULES = get_args(Schedule)

#: Forward arguments that tell rows apart, and the types of arguments that hold for all rows. Any other argument may
#: make rows of the same tokens differ.
ROW_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "cache")
SCALARS = (bool, int, float, str, type(None))


def plain_timeout(timeout: float | None) -> float | None:
    """Check a timeout in seconds, and turn it into a float; None stands for no limit.

    Raises:
        InvalidInputError: ``timeout`` is not a number of at least 0, or too large to wait for.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise InvalidInputError(f"timeout: expected seconds, a number of at least 0, or None, got {timeout!r}")
    return float(timeout)


class Prefill:
    """Collects the chunks of a prompt, and runs the scorers.

    Args:
        target: The model that prefills.
        geometry: The target's geometry.
        scorers: The scorers by name.
        tokenizer: The target's tokenizer, for scorers that need one.
        context: The part of the prompt that may be evicted.
        strict: Raise if scoring fails, instead of warning and going on without scores.
        timeout: Seconds to wait for scores.
        schedule: When the scorers run, see `Schedule`; None for the one that suits them.
        taps: The hooks on the model while it is observed. The caller owns the list, and removes the hooks that are left
            in it if this object is dropped.
        runs: The scorers' runs by name. The caller owns the dict, and cancels the runs that are left in it if this
            object is dropped.
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
        timeout: float | None,
        schedule: Schedule | None,
        taps: Taps,
        runs: dict[str, ScorerRun],
    ) -> None:
        self.target, self.geometry = target, geometry
        self.scorers = scorers if geometry.full_layers else {}
        self.tokenizer, self.context, self.strict = tokenizer, context, strict
        self.timeout, self.taps = timeout, taps
        self.schedule = schedule or self._suitable_schedule()
        self.batch = 0
        self.expected: int | None = None
        """Number of tokens (columns) of the whole prompt; None if it is not known."""
        self.prunes_ahead = False
        """Whether layers may be pruned as they are filled, because the prompt is known to come in one forward."""
        self.seconds: dict[str, float] = {}
        self.devices: dict[str, str] = {}
        self.bytes_peak_proxy = 0
        self.fallback: str | None = None
        """Why the cache stays uncompressed, or None."""
        self._runs = runs
        self._chunks: list[Tensor | None] = []
        self._mask: Tensor | None = None
        self._order: Tensor | None = None  # see `left_padding_order`, of the mask so far
        self._pads: tuple[int, ...] = ()  # padding columns of each batch row so far
        self._firsts: tuple[int, ...] = ()  # see `Observation`
        self._positions: list[Tensor] = []
        self._ids_tell_rows = True
        self._drafts = 0
        self._cropped = False

    def begin(
        self, call: Mapping[str, Any], shape: tuple[int, int], layers: Iterable[PrunedLayer], assisted: bool
    ) -> None:
        """Start the scorers, before the first chunk goes through the target.

        Args:
            call: The forward's arguments by name.
            shape: ``(B, q)``, the shape of the chunk.
            layers: The cache's full-attention layers, which are then observed.
            assisted: Whether assisted decoding has begun, which sends drafts along with the prompt.

        Raises:
            ValueError, UnsupportedModelError: A scorer refuses the prompt or the target.
        """
        self._drafts = self._count_drafts(call, shape[1], assisted)
        self._note(call, shape)
        # A chunk that is known to be only a part of the prompt is not worth a run: the run would have to be repeated.
        at_once = self.schedule != "sequential" and (self.expected is None or self.expected <= shape[1])
        is_whole = self.expected == shape[1]
        request = self._first_request((shape[0], shape[1] - self._drafts), is_whole, at_once)
        for name, scorer in self.scorers.items():
            try:
                self._runs[name] = scorer.begin(request)
            except (ValueError, UnsupportedModelError):
                self.cancel()
                raise
            except Exception as error:
                self._fail(name, error)
                break
            if self.schedule == "proxy_first":  # wait before the next scorer is launched
                started = time.perf_counter()
                self._runs[name].wait()
                self._note_wait(time.perf_counter() - started)
        for layer in layers:
            layer.watch = self._watch
        if any(self.scorers[name].observes for name in self._runs):
            self.taps.extend(tap_hidden(self.target))
        self.prunes_ahead = is_whole and self._scores_ahead()

    def is_over(self, seen: int, tokens: int) -> bool:
        """Whether the prefill is over, so that a forward of ``tokens`` tokens after ``seen`` belongs to the answer."""
        if self.expected is not None:
            return seen >= self.expected
        return tokens == 1 or self._cropped

    def _count_drafts(self, call: Mapping[str, Any], tokens: int, assisted: bool) -> int:
        """Number of draft tokens at the end of the first forward, which do not belong to the prompt."""
        if self.expected is not None:
            return max(0, tokens - self.expected)
        logits = call.get("logits_to_keep")  # the logits wanted begin at the last prompt token
        return max(0, logits - 1) if assisted and isinstance(logits, int) else 0

    def _watch(self, observation: Observation) -> None:
        """Show a layer's attention to the scorers that observe."""
        observers = {name: run for name, run in self._runs.items() if self.scorers[name].observes}
        if not observers:
            return
        seen = replace(observation, pads=self._pads, firsts=self._firsts)
        if self._order is not None and len(self._chunks) > 1:
            reason = (
                "expected left padding for a scorer that observes a chunked prompt, got an attention_mask with padding "
                "on the right or holes: pad on the left, or prefill in one forward"
            )
            self._fail(next(iter(observers)), InvalidInputError(reason))
            return
        if self._order is not None:
            seen = seen.in_order(self._order)
        for name, run in observers.items():
            try:
                run.observe(seen)
            except (ValueError, UnsupportedModelError):
                raise
            except Exception as error:  # `_fail` cancels all runs
                self._fail(name, error)
                return

    def _scores_ahead(self) -> bool:
        """Whether scores may be ready before the prefill is over: only with one scorer, which needs no cache."""
        return len(self.scorers) == 1 and len(self._runs) == 1 and not next(iter(self._runs.values())).needs_cache

    def ready(self) -> bool:
        """Whether `finish` would return without waiting. Never blocks."""
        return all(run.ready() for run in self._runs.values())

    def _suitable_schedule(self) -> Schedule:
        """``"proxy_first"`` if proxy and target would compute on the same CPU cores, where both together are slow."""
        shared = any(isinstance(scorer, OnLane) and scorer.shares_cpu for scorer in self.scorers.values())
        return "proxy_first" if shared and device_of(self.target).type == "cpu" else "overlap"

    def extend(self, call: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """Note the next chunk. Cancel the runs that do not observe: they begin again when the prompt is whole."""
        self._note(call, shape)
        for name in [name for name in self._runs if not self.scorers[name].observes]:
            self._runs.pop(name).cancel()

    def _note(self, call: Mapping[str, Any], shape: tuple[int, int]) -> None:
        mask, positions = call.get("attention_mask"), call.get("position_ids")
        if positions is None:
            seen = sum(chunk.shape[1] for chunk in self._positions)
            positions = torch.arange(seen, seen + shape[1]).expand(shape[0], -1)
        elif positions.ndim == 3:  # multimodal rotary positions `[3, B, q]`: text continues after the largest
            positions = positions.amax(0)
            self._ids_tell_rows = False
        # Images, adapters and the like make rows of the same tokens differ.
        if any(name not in ROW_ARGUMENTS and not isinstance(value, SCALARS) for name, value in call.items()):
            self._ids_tell_rows = False
        self.batch = shape[0]
        self._chunks.append(call.get("input_ids"))
        self._positions.append(positions.expand(shape[0], -1).cpu())
        self._mask = mask
        self._order = None if mask is None else left_padding_order(mask.bool())
        self._pads = () if mask is None else tuple((~mask.bool()).sum(1).tolist())
        self._firsts = self._first_copies()

    def _first_copies(self) -> tuple[int, ...]:
        """For each batch row, the first row with the same content, up to and including the newest chunk.

        Only found if a scorer observes; otherwise, and if unknown, each row is its own first.
        """
        ids, positions = self._chunks[-1], self._positions[-1]
        observed = any(scorer.observes for scorer in self.scorers.values())
        if not observed or self.batch == 1 or ids is None or not self._ids_tell_rows:
            return tuple(range(self.batch))
        before = self._firsts or (0,) * self.batch
        masks = (0,) * self.batch if self._mask is None else [tuple(row) for row in self._mask.tolist()]
        places: dict[object, int] = {}
        return tuple(
            places.setdefault((before[row], masks[row], *ids[row].tolist(), *positions[row].tolist()), row)
            for row in range(self.batch)
        )

    def crop(self, count: int, seen: int) -> None:
        """Note that the last ``count`` of ``seen`` tokens were removed."""
        self._cropped = True
        ids = self._ids()
        self._chunks = [None if ids is None else ids[:, : seen - count]]
        self._positions = [torch.cat(self._positions, dim=1)[:, : seen - count]]
        self._mask = None if self._mask is None else self._mask[:, : seen - count]
        self._drafts = max(0, self._drafts - count)

    def read(self, seen: int) -> tuple[Prompt, Tensor]:
        """The whole prompt after ``seen`` tokens, and the distinct row of each batch row `[B]`.

        Raises:
            InvalidInputError: A row has no tokens, or the context lies outside the prompt.
        """
        return self._read(self._mask, self.context, (self.batch, seen - self._drafts))

    def _read(self, mask: Tensor | None, context: Context | None, shape: tuple[int, int]) -> tuple[Prompt, Tensor]:
        ids = self._ids()
        prompt, rows = read_prompt(
            ids if self._ids_tell_rows else None, mask, torch.cat(self._positions, dim=1), context, shape
        )
        if ids is not None and prompt.input_ids is None:  # every row is distinct
            ids = ids[:, : shape[1]].cpu()
            prompt = replace(prompt, input_ids=ids if prompt.order is None else ids.gather(1, prompt.order))
        return prompt, rows

    def finish(self, prompt: Prompt, rows: Tensor, layers: Sequence[Any]) -> dict[str, Tensor]:
        """Wait for the scores.

        Args:
            prompt: The whole prompt, as `read` returns it.
            rows: `[B]`, the distinct row of each batch row, as `read` returns it.
            layers: The cache's layers, still whole.

        Returns: the scores `[R, L, H, P]` by scorer's name; empty if scoring failed, see ``fallback``.
        """
        self._remove_taps()
        for layer in layers:
            if isinstance(layer, PrunedLayer):
                layer.watch = None
        request = self._scoring_request(prompt, at_once=True)
        view = WholeLayers(self.target, request, rows, layers)
        if not self.geometry.full_layers:
            self._fall_back("every layer of the target has a sliding window, so its cache is bounded already")
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
                self.bytes_peak_proxy = max(self.bytes_peak_proxy, run.bytes_peak)
            except Exception as error:
                self._fail(name, error)
            waited = time.perf_counter() - started
            self._note_wait(waited)
            if len(self.scorers) > 1:
                self.seconds[f"wait {name}"] = waited
        return {} if self.fallback is not None else scores

    def _note_wait(self, seconds: float) -> None:
        self.seconds["wait"] = self.seconds.get("wait", 0.0) + seconds

    def cancel(self) -> None:
        """Cancel the runs and remove the hooks."""
        self._remove_taps()
        while self._runs:
            self._runs.popitem()[1].cancel()

    def _remove_taps(self) -> None:
        while self.taps:
            self.taps.pop().remove()

    def _ids(self) -> Tensor | None:
        known = [chunk for chunk in self._chunks if chunk is not None]
        return torch.cat(known, dim=1) if len(known) == len(self._chunks) else None

    def _first_request(self, shape: tuple[int, int], is_whole: bool, at_once: bool) -> ScoringRequest:
        """The request as far as it is known: more chunks may follow, and the context may lie in them."""
        try:
            prompt, _ = self._read(self._mask, self.context, shape)
        except InvalidInputError:
            if is_whole:
                raise
            prompt, _ = self._read(None, None, shape)
        return self._scoring_request(prompt, at_once)

    def _scoring_request(self, prompt: Prompt, at_once: bool) -> ScoringRequest:
        return ScoringRequest(prompt, self.target, self.geometry, self.tokenizer, self.timeout, at_once)

    def _fail(self, name: str, error: Exception) -> None:
        """Raise if strict, else note the reason and warn."""
        self.cancel()
        if self.strict:
            if isinstance(error, ProxyKVError):
                raise error
            raise ScoringError(f"scorer {name!r} failed: {type(error).__name__}: {error}") from error
        self._fall_back(f"{name}: {type(error).__name__}: {error}")

    def _fall_back(self, reason: str) -> None:
        """Note why there are no scores, and warn once."""
        self.fallback = reason
        warnings.warn(
            f"the cache stays uncompressed: {reason}; with strict=True this is an error", ProxyKVWarning, stacklevel=3
        )


def check_scorable(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    scorers: Iterable[Scorer],
    input_ids: Tensor,
    context: tuple[int, int] | None = None,
) -> None:
    """Let scorers refuse a prompt `[1, n]` that they cannot score, long before they have to score it.

    Raises:
        ValueError, UnsupportedModelError: A scorer refuses the prompt or the target, see `Scorer.begin`.
    """
    prompt, _ = read_prompt(input_ids, None, None, context, (1, input_ids.shape[1]))
    request = ScoringRequest(prompt, target, ModelGeometry.from_config(target.config), tokenizer, at_once=False)
    for scorer in scorers:
        scorer.begin(request).cancel()


class WholeLayers:
    """The layers of a prefilled cache, as scorers read them (`scorers.base.WholeCache`)."""

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
            first = layer.get_seq_length() - layer.keys.shape[2]  # the column of the first stored token
            columns: slice | Tensor = slice(max(0, prompt.pads[row] - first), prompt.columns - first)
            if prompt.order is not None:
                own = prompt.own_columns(row).to(layer.keys.device) - first
                columns = own[own >= 0]
            states.append((layer.keys[batch_row, None, :, columns], layer.values[batch_row, None, :, columns]))
        return states
