"""What a scorer is: the one seam between the cache and the ways to rate its KV pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.prompt import Prompt
from ..geometry import ModelGeometry, device_of, max_positions


@dataclass(frozen=True)
class ScoringRequest:
    """What is to be scored.

    Args:
        prompt: The distinct rows.
        target: The model whose KV pairs are rated.
        geometry: Its geometry.
        tokenizer: The target's, or None if the cache was given none.
        timeout: Seconds that `ScorerRun.finish` may wait, or None.
        at_once: Whether work may start as the target's prefill starts, and not only in `ScorerRun.finish`.
    """

    prompt: Prompt
    target: PreTrainedModel
    geometry: ModelGeometry
    tokenizer: PreTrainedTokenizerBase | None
    timeout: float | None = None
    at_once: bool = True

    @property
    def max_positions(self) -> int | None:
        """Positions that the target has, or None if its config does not say."""
        return max_positions(self.target.config)

    def blank_scores(self, value: float = 0.0, device: torch.device | None = None) -> Tensor:
        """`[R, L, H, N]` of one value, float32, by default where the target computes: for a scorer to fill in."""
        heads = (self.geometry.num_layers, self.geometry.num_key_value_heads)
        shape = (len(self.prompt.lengths), *heads, self.prompt.columns)
        return torch.full(
            shape, value, dtype=torch.float32, device=device_of(self.target) if device is None else device
        )


@dataclass(frozen=True)
class Observation:
    """What a scorer that observes is shown of one full-attention layer, in one forward of the prefill.

    Args:
        layer: Its index.
        query: `[B, Q, q, D]` of this forward's tokens, rotated; copies of rows and padding included.
        key: `[B, H, N, D]`, all so far; None in an observation that is kept.
        hidden: `[B, q, hidden]`, what entered the attention module; None likewise.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits (Gemma 2), or None.
        columns: N.
        pads: `[B]`, padding columns of each batch row so far, in a row that is all padding N; empty without padding.
        firsts: `[B]`, for each batch row the first that holds the same so far; later chunks may tell them apart. Empty
            if no two do, as far as is known.
    """

    layer: int
    query: Tensor
    key: Tensor | None
    hidden: Tensor | None
    scaling: float | None
    softcap: float | None
    columns: int
    pads: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()

    def without_states(self, query: Tensor) -> Observation:
        """To keep: another query, and none of the large tensors."""
        return dataclasses.replace(self, query=query, key=None, hidden=None)


class WholeCache(Protocol):
    """The prefilled, still whole cache, as a scorer reads it."""

    @property
    def target(self) -> PreTrainedModel: ...

    @property
    def request(self) -> ScoringRequest:
        """The prompt as it was in the end, all chunks of a chunked prefill together."""
        ...

    def batch_row(self, row: int) -> int:
        """A row of the batch that is this distinct row."""
        ...

    def states(self, row: int) -> Sequence[tuple[Tensor, Tensor]]:
        """K `[1, H, n, D]` and V `[1, H, n, Dv]` of a distinct row in every layer, views without padding.

        Sliding-window layers hold the last tokens only.
        """
        ...


class ScorerRun:
    """One prompt being scored. The defaults suit a scorer that does all its work in `finish`."""

    needs_cache: ClassVar[bool] = True
    """Whether `finish` reads the prefilled cache. If not, it may be called before the prefill is over."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Time by phase (``proxy``, ``mapper``), for the cache's report."""
        self.devices: dict[str, str] = {}
        """What ran where, for the cache's report."""
        self.bytes_peak = 0
        """The most that features, the proxy's own KV and scores held, for the cache's report."""

    def observe(self, observation: Observation) -> None:
        """Called in each full-attention layer of the target's prefill, chunk after chunk, if the scorer observes."""

    def ready(self) -> bool:
        """Whether `finish` would return scores without waiting. Never blocks."""
        return False

    def wait(self) -> None:
        """Return when `ready`, or when the request's timeout is over."""

    def finish(self, cache: WholeCache) -> Tensor:
        """The scores: `[R, L, H, P]`, higher is kept.

        R distinct rows, L every decoder layer (sliding-window layers' rows are ignored), P columns,
        of which a row's padding is ignored.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop and free everything; the scores are not wanted any more."""


@runtime_checkable
class OnLane(Protocol):
    """A scorer whose proxy computes beside the target."""

    @property
    def shares_cpu(self) -> bool:
        """Whether the proxy computes on the CPU threads that torch uses for everything else."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Rates KV pairs. One scorer may serve many caches, one after another or at once."""

    name: str
    observes: bool
    """Whether runs want `ScorerRun.observe`. Such a run lives through a chunked prefill, where
    others are cancelled and begun again once the whole prompt is known."""

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start scoring as the target's prefill starts; return at once.

        Raises:
            InvalidInputError: What can be refused before the prefill.
            UnsupportedModelError: Likewise, a target that this scorer cannot rate.
        """
        ...
