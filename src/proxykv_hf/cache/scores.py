"""The check of the scores that a scorer returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ScoringError
from ..geometry import ModelGeometry
from .prompt import Prompt


def checked_scores(scores: Any, geometry: ModelGeometry, prompt: Prompt) -> Tensor:
    """Check that scores are `[R, L, H, P]` and hold no NaN where they are read; return them detached.

    Raises:
        ScoringError: The scores have another shape, or hold NaN.
    """
    expected = [len(prompt.lengths), geometry.num_layers, geometry.num_key_value_heads, prompt.columns]
    if not isinstance(scores, Tensor) or [*scores.shape] != expected:
        got = [*scores.shape] if isinstance(scores, Tensor) else type(scores).__name__
        raise ScoringError(f"expected scores [R, L, H, N] = {expected}, got {got}")
    full = list(geometry.full_layers)
    for row, pad in enumerate(prompt.pads):
        if scores[row, full, :, pad:].isnan().any():
            raise ScoringError(f"expected scores that are numbers, but the scores of row {row} hold NaN")
    return scores.detach()
