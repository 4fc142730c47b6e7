"""The cells of an evaluation's grid: methods with their allocations, at retention ratios."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.retention import RetentionPolicy
from .methods import FULL, Allocation


@dataclass(frozen=True)
class Variant:
    """A method with its allocation: a table's row, a plot's curve.

    Args:
        method: A name of `methods.METHODS`, or ``full`` for the full cache.
        allocation: None for the full cache.
    """

    method: str
    allocation: Allocation | None

    def __str__(self) -> str:
        return self.method if self.allocation is None else f"{self.method} ({self.allocation})"

    def at(self, ratio: float) -> Cell:
        """The cell of this variant at a retention ratio."""
        return Cell(self.method, self.allocation, ratio)


@dataclass(frozen=True)
class Cell:
    """A variant at a retention ratio: what a row of the file was measured at.

    Args:
        ratio: The share of the context's KV pairs that is kept.
    """

    method: str
    allocation: Allocation | None
    ratio: float

    def __str__(self) -> str:
        return f"{self.variant} at {self.ratio:g}"

    @property
    def variant(self) -> Variant:
        return Variant(self.method, self.allocation)

    @property
    def policy(self) -> RetentionPolicy:
        """A policy that protects no tokens, so that the method alone decides how the budget is spent."""
        return RetentionPolicy(self.ratio, allocation=self.allocation or "global", sink_tokens=0, recent_tokens=0)


#: The full cache, which every method is compared with.
WHOLE = Cell(FULL, None, 1.0)
