"""Which KV pairs of a prompt are kept: the decision, and how it follows the batch's rows."""

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

    An object is never changed, so a cache and its forks may share one.

    Args:
        prompt: The prompt's R distinct rows of P columns, without their tokens.
        rows: `[B]`, the distinct row of each batch row.
        geometry: The target's.
        packed: `[R, L_full, H, ceil(P / 8)]`, the kept mask as bits, see `retention.pack_mask`; None while everything
            is kept.
        over_budget: KV pairs that protection keeps beyond the budget.
    """

    prompt: Prompt
    rows: Tensor
    geometry: ModelGeometry
    packed: Tensor | None = None
    over_budget: int = 0

    def decide(self, scores: Tensor, policy: RetentionPolicy) -> tuple[Kept, Pruner | None]:
        """Decide what is kept by a policy.

        Args:
            scores: `[R, L, H, P]`, see `checked_scores`.
            policy: The budget of every row.

        Returns: the decision, and what prunes the layers by it; None if everything is kept.

        """
        kept, keep = self._masked(scores, [policy] * len(self.prompt.lengths))
        return kept, None if keep.all() else kept.pruner(keep, is_ragged(keep, self.prompt))

    def decide_each_way(self, scores: Tensor, policies: Sequence[RetentionPolicy]) -> tuple[Kept, Pruner]:
        """Decide what is kept of one row in n ways, which become n rows.

        Args:
            scores: `[n, L, H, P]`.
            policies: n of them.

        Raises:
            CacheStateError: There are several rows.
            InvalidPolicyError: There is no policy.
            ScoringError: Scores of a wrong shape, or with NaN.
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
        """The decision, and its mask `[R, L_full, H, P]` where the scores are."""
        keep, over_budget = keep_masks(scores[:, list(self.geometry.full_layers)], self.prompt, policies)
        return dataclasses.replace(self, packed=pack_mask(keep).cpu(), over_budget=over_budget), keep

    def pruner(self, keep: Tensor, ragged: bool) -> Pruner:
        """What prunes layers by the mask ``keep`` `[R, L_full, H, P]`."""
        return Pruner(keep, self.rows, ragged, self.geometry.full_layers)

    def mask(self) -> Tensor:
        """The kept mask `[R, L_full, H, P]`, bool; padding is never kept."""
        if self.packed is not None:
            return unpack_mask(self.packed, self.prompt.columns)
        columns = torch.arange(self.prompt.columns)
        real = columns >= torch.tensor(self.prompt.pads)[:, None]
        layers, heads = len(self.geometry.full_layers), self.geometry.num_key_value_heads
        return real[:, None, None].expand(-1, layers, heads, -1)

    def indices(self, layer: int, row: int) -> list[Tensor]:
        """Per head of a full-attention layer the kept positions of a batch row, ascending, padding not counted.

        Raises:
            InvalidInputError: No such layer, or one with a sliding window.
        """
        if layer not in self.geometry.full_layers:
            raise InvalidInputError(
                f"expected a full-attention layer, one of {list(self.geometry.full_layers)}, got layer {layer}"
            )
        distinct = int(self.rows[row])
        mask = self.mask()[distinct, self.geometry.full_layers.index(layer)]
        return [head.nonzero()[:, 0] - self.prompt.pads[distinct] for head in mask]

    def counts(self, after: int) -> list[list[list[int]]]:
        """`[B][L_full][H]`: KV pairs held, those of ``after`` later tokens included."""
        counts = (self.mask().sum(-1) + after).tolist()
        return [counts[row] for row in self.rows.tolist()]

    def select(self, rows: Tensor) -> Kept:
        """The same for the batch rows ``rows`` `[B']`."""
        return dataclasses.replace(self, rows=self.rows[rows])

    def crop(self, columns: int) -> Kept:
        """The same without the prompt's last ``columns`` columns, of a prompt that is whole."""
        return dataclasses.replace(self, prompt=self.prompt.cropped(columns))

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold memory for as long as the cache lives."""
        if self.packed is not None:
            yield self.packed
