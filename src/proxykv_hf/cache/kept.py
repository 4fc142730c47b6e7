"""The decision which KV pairs of a prompt are kept, and how it follows the rows of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CacheStateError, InvalidInputError, InvalidPolicyError
from ..geometry import ModelGeometry
from .prompt import Prompt
from .pruning import Pruner, is_ragged, keep_masks
from .retention import RetentionPolicy, pack_mask, unpack_mask
from .scores import checked_scores


@dataclass(frozen=True)
class Kept:
    """M of the paper (arXiv 2605.16360): what a cache keeps of its prompt, for each distinct row, layer and head.

    An instance is never changed, so a cache and its forks can share it.

    Args:
        prompt: The prompt's R distinct rows of P columns, without token ids.
        rows: `[B]`, the distinct row of each batch row.
        geometry: The target's geometry.
        packed: `[R, L_full, H, ceil(P / 8)]`, the kept mask as bits, see `retention.pack_mask`. None while everything
            is kept.
        over_budget: Number of KV pairs that are kept beyond the budget because they are protected.
    """

    prompt: Prompt
    rows: Tensor
    geometry: ModelGeometry
    packed: Tensor | None = None
    over_budget: int = 0

    def decide(self, scores: Tensor, policy: RetentionPolicy) -> tuple[Kept, Pruner | None]:
        """Decide what is kept, by the same policy in every row.

        Args:
            scores: `[R, L, H, P]`, see `checked_scores`.
            policy: How much of each row is kept.

        Returns: the decision, and the `Pruner` that prunes layers by it, or None if everything is kept.
        """
        kept, keep = self._masked(scores, [policy] * len(self.prompt.lengths))
        whole = torch.equal(keep, self.mask().to(keep.device))
        return kept, None if whole else kept.pruner(keep, is_ragged(keep, self.prompt))

    def decide_each_way(self, scores: Tensor, policies: Sequence[RetentionPolicy]) -> tuple[Kept, Pruner]:
        """Decide in n ways what is kept of one row. Each way becomes a row of the result.

        Args:
            scores: `[n, L, H, P]`, the scores of each way.
            policies: The n policies, one for each way.

        Returns: the decision for n rows, and the `Pruner` that prunes layers by it.

        Raises:
            CacheStateError: The cache has several rows.
            InvalidPolicyError: ``policies`` is empty.
            ScoringError: The scores have a wrong shape, or hold NaN.
        """
        if len(self.rows) != 1:
            raise CacheStateError(f"expected one row, to be kept in several ways, got a cache of {len(self.rows)}")
        if not policies:
            raise InvalidPolicyError("expected a policy, or a list of at least one, got an empty list")
        prompt = self.prompt.repeated(int(self.rows[0]), len(policies))
        several = dataclasses.replace(self, prompt=prompt, rows=torch.arange(len(policies)))
        kept, keep = several._masked(checked_scores(scores, self.geometry, prompt), policies)
        return kept, kept.pruner(keep, ragged=True)

    def _masked(self, scores: Tensor, policies: Sequence[RetentionPolicy]) -> tuple[Kept, Tensor]:
        """The decision, and its kept mask `[R, L_full, H, P]` on the device of the scores."""
        keep, over_budget = keep_masks(scores[:, list(self.geometry.full_layers)], self.prompt, policies)
        return dataclasses.replace(self, packed=pack_mask(keep).cpu(), over_budget=over_budget), keep

    def pruner(self, keep: Tensor, ragged: bool) -> Pruner:
        """The `Pruner` for the kept mask ``keep`` `[R, L_full, H, P]`."""
        return Pruner(self.prompt.in_cache(keep), self.rows, ragged, self.geometry.full_layers)

    def mask(self) -> Tensor:
        """The kept mask `[R, L_full, H, P]`, bool; padding is never kept."""
        if self.packed is not None:
            return unpack_mask(self.packed, self.prompt.columns)
        columns = torch.arange(self.prompt.columns)
        real = columns >= torch.tensor(self.prompt.pads)[:, None]
        layers, heads = len(self.geometry.full_layers), self.geometry.num_key_value_heads
        return real[:, None, None].expand(-1, layers, heads, -1)

    def indices(self, layer: int, row: int) -> list[Tensor]:
        """For each head of a full-attention layer, the kept positions `[K]` of a batch row.

        The positions are ascending, and padding is not counted.

        Raises:
            InvalidInputError: There is no such layer, or it has a sliding window.
        """
        if layer not in self.geometry.full_layers:
            raise InvalidInputError(
                f"expected a full-attention layer, one of {list(self.geometry.full_layers) or 'none'}, got layer "
                f"{layer}: layers with sliding windows are not pruned"
            )
        distinct = int(self.rows[row])
        mask = self.mask()[distinct, self.geometry.full_layers.index(layer)]
        return [head.nonzero()[:, 0] - self.prompt.pads[distinct] for head in mask]

    def places(self) -> dict[int, Tensor]:
        """For each full-attention layer, which of the cache's columns each head of a batch row keeps: `[B, H, P]`."""
        masks = self.prompt.in_cache(self.mask())[self.rows]
        return {layer: masks[:, place] for place, layer in enumerate(self.geometry.full_layers)}

    def counts(self, after: int) -> list[list[list[int]]]:
        """`[B][L_full][H]`: the number of KV pairs held, with those of ``after`` tokens after the prompt."""
        counts = (self.mask().sum(-1) + after).tolist()
        return [counts[row] for row in self.rows.tolist()]

    def select(self, rows: Tensor) -> Kept:
        """The decision for the batch rows ``rows`` `[B']`."""
        return dataclasses.replace(self, rows=self.rows[rows])

    def crop(self, columns: int) -> Kept:
        """The decision without the prompt's last ``columns`` columns. Only for a prompt that is kept whole."""
        return dataclasses.replace(self, prompt=self.prompt.cropped(columns), packed=None)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory for as long as the cache lives."""
        if self.packed is not None:
            yield self.packed
