"""A cache layer that stores nothing, for one forward whose attention is only read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._compat import DynamicLayer
from .functions import AttentionCall, AttentionOutput, hand_over


class PassingLayer(DynamicLayer):
    """Passes a forward's own K and V on to the attention, and keeps none of them.

    A subclass reads the attention in `attend`.

    Args:
        is_sliding: Whether the model's layer has a sliding window. It decides which mask the model builds.
    """

    is_initialized = True

    def __init__(self, is_sliding: bool = False) -> None:
        self.is_sliding = is_sliding

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return K `[B, H, q, D]` and V `[B, H, q, Dv]`, and announce them, so that `attend` is called with them."""
        hand_over(key_states, value_states, self)
        return key_states, value_states

    def attend(self, call: AttentionCall) -> AttentionOutput:
        """See `functions.AttendingLayer`."""
        return call.by_backend()

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """0, because nothing was seen before this forward."""
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The mask covers this forward's own tokens."""
        return query_length, 0
