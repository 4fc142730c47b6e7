"""The scorer protocol: the only interface between the cache and the methods that rate its KV pairs."""

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
    """The prompt that a scorer has to score, and the model whose KV pairs it rates.

    Args:
        prompt: The prompt's distinct rows. In `Scorer.begin` it may be only the first chunk of a longer prompt;
            `WholeCache.request` always has the whole prompt.
        target: The model whose KV pairs are rated.
        geometry: The target's geometry.
        tokenizer: The target's tokenizer, or None if the cache was given none.
        timeout: Seconds that a run may wait, in `ScorerRun.wait` and `ScorerRun.finish` together; None for no limit.
        at_once: Whether work may start before `ScorerRun.finish` is called.
    """

    prompt: Prompt
    target: PreTrainedModel
    geometry: ModelGeometry
    tokenizer: PreTrainedTokenizerBase | None
    timeout: float | None = None
    at_once: bool = True

    @property
    def max_positions(self) -> int | None:
        """The number of positions that the target has, or None if its config does not say."""
        return max_positions(self.target.config)

    def blank_scores(self, value: float = 0.0, device: torch.device | None = None) -> Tensor:
        """Scores `[R, L, H, N]`, float32, for a scorer to fill in.

        Args:
            value: The value of all scores.
            device: The device of the scores. By default the device that the target computes on.
        """
        heads = (self.geometry.num_layers, self.geometry.num_key_value_heads)
        shape = (len(self.prompt.lengths), *heads, self.prompt.columns)
        return torch.full(
            shape, value, dtype=torch.float32, device=device_of(self.target) if device is None else device
        )


@dataclass(frozen=True)
class Observation:
    """What the cache shows to an observing scorer: one full-attention layer in one forward of the prefill.

    Padding is always on the left: if the attention mask has padding on the right or holes, the columns are reordered.

    Args:
        layer: The layer's index in the model.
        query: `[B, Q, q, D]`, the queries of this forward's tokens after RoPE. Copies of rows and padding are included.
        key: `[B, H, N, D]`, the keys of all tokens so far after RoPE. None after `without_states`.
        hidden: `[B, q, hidden]`, the hidden states that entered the attention module. None after `without_states`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits (Gemma 2), or None.
        columns: N, the number of columns so far.
        sinks: `[Q]`, the logit of each query head's attention sink (gpt-oss), or None.
        pads: `[B]`, the number of padding columns of each batch row so far. It is N in a row that is all padding. Empty
            without padding.
        firsts: `[B]`, for each batch row, the first row with the same content so far. Later chunks may make such rows
            differ. Empty if no two rows are known to be the same.
    """

    layer: int
    query: Tensor
    key: Tensor | None
    hidden: Tensor | None
    scaling: float | None
    softcap: float | None
    columns: int
    sinks: Tensor | None = None
    pads: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()

    def in_order(self, order: Tensor) -> Observation:
        """The observation of a whole prompt with its columns reordered.

        Args:
            order: `[B, N]`, the column to take for each new column.
        """
        across = order.to(self.query.device)[:, None, :, None]
        key, hidden = self.key, self.hidden
        return dataclasses.replace(
            self,
            query=self.query.gather(2, across.expand_as(self.query)),
            key=None if key is None else key.gather(2, across.expand_as(key)),
            hidden=None if hidden is None else hidden.gather(1, across[:, 0].expand_as(hidden)),
        )

    def without_states(self, query: Tensor) -> Observation:
        """A copy to keep: with another ``query``, and without ``key`` and ``hidden``, which are large."""
        return dataclasses.replace(self, query=query, key=None, hidden=None)


class WholeCache(Protocol):
    """A scorer's view of the prefilled cache, which is not pruned yet."""

    @property
    def target(self) -> PreTrainedModel:
        """The model that prefilled the cache."""
        ...

    @property
    def request(self) -> ScoringRequest:
        """The request with the whole prompt: all chunks of a chunked prefill together."""
        ...

    def batch_row(self, row: int) -> int:
        """The first batch row that holds the distinct row ``row``."""
        ...

    def states(self, row: int) -> Sequence[tuple[Tensor, Tensor]]:
        """K `[1, H, n, D]` and V `[1, H, n, Dv]` of the distinct row ``row`` in every layer, as views without padding.

        Sliding-window layers hold only the last tokens.
        """
        ...


class ScorerRun:
    """The scoring of one prompt. The default methods suit a scorer that does all its work in `finish`."""

    needs_cache: ClassVar[bool] = True
    """Whether `finish` reads the prefilled cache. If not, it may be called before the prefill is over."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase (``proxy``, ``mapper``), for the cache's report."""
        self.devices: dict[str, str] = {}
        """The device of each part, by name (``proxy``), for the cache's report."""
        self.bytes_peak = 0
        """The most bytes that features, the proxy's own KV pairs and scores have held, for the cache's report."""

    def observe(self, observation: Observation) -> None:
        """Read one layer in one forward of the target's prefill.

        If the scorer observes, the cache calls this in every full-attention layer, chunk after chunk.
        """

    def ready(self) -> bool:
        """Whether `finish` would return scores without waiting. Never blocks."""
        return False

    def wait(self) -> None:
        """Wait until the run is `ready`, or until the request's timeout is over."""

    def finish(self, cache: WholeCache) -> Tensor:
        """Return the scores. KV pairs with higher scores are kept.

        Args:
            cache: The prefilled cache, which is not pruned yet. If ``needs_cache`` is false, the prefill may not be
                over, and the cache's states must not be read.

        Returns: `[R, L, H, P]`: R distinct rows, L decoder layers (the scores of sliding-window layers are ignored), H
            KV heads, and P columns (the scores of padding are ignored).
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop the work and free its memory. The scores are no longer wanted."""


@runtime_checkable
class OnLane(Protocol):
    """A scorer whose proxy computes on a lane, beside the target."""

    @property
    def shares_cpu(self) -> bool:
        """Whether the proxy computes on the CPU threads that torch uses for everything else."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """Rates KV pairs. One scorer may serve many caches, one after another or at the same time."""

    name: str
    """The scorer's name in results and messages."""
    observes: bool
    """Whether the cache calls `ScorerRun.observe`. The run of an observing scorer lives through a chunked prefill.
    Other runs are cancelled when another chunk comes, and begin again once the whole prompt is known."""

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to score a prompt, before the target's prefill, and return at once.

        Args:
            request: The prompt and the target.

        Returns: the run, from which the cache later gets the scores.

        Raises:
            InvalidInputError: The scorer cannot score this prompt.
            UnsupportedModelError: The scorer cannot rate this target's KV pairs.
        """
        ...
