"""Scores as a scorer has to return them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import ScoringError
from ..geometry import ModelGeometry
from .prompt import Prompt


def checked_scores(scores: Any, geometry: ModelGeometry, prompt: Prompt) -> Tensor:
    """``scores``, detached, if they are `[R, L, H, P]` and hold no NaN where one is read.

    Raises:
        ScoringError: They are not, or do.
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
