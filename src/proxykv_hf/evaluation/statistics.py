"""Means over questions and their intervals, by a bootstrap over contexts. Pure functions of arrays.

The questions of one context share its prefill and its evictions, so they are not independent. Each resample therefore
draws whole contexts with replacement, with all of their questions (the cluster bootstrap: Davison and Hinkley,
Bootstrap Methods and their Application, 1997, section 3.8), and the interval lies between percentiles of the resamples.
A resample draws one context fewer than there are (McCarthy and Snowden, The Bootstrap and Finite Population Sampling,
1985). With as many draws as contexts, the variance of the means would be too small by the factor (E - 1) / E, which
makes the interval far too narrow for the few contexts of a task. Figures of the same contexts use the same draws, so
that their quotients are those of paired samples. A figure that lacks a value for some contexts is resampled from the
other contexts only.

Letters: U questions asked, E examples (contexts), S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The quantiles at the ends of an interval.
LEVELS = (0.025, 0.975)
#: The fewest contexts, over all tasks of a figure, for an interval: one from 4 contexts holds the truth 4 times in 5.
LEAST_CONTEXTS = 8
#: The largest rounding error in means of numbers up to some tens.
ROUNDING = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval.

    Args:
        value: The figure.
        low: The lower end of the interval; None if there is no interval, because there are too few contexts or because
            a quotient has no value in some resample.
        high: The upper end of the interval; None in the same cases.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes zero by more than a rounding error."""
        return self.low is not None and self.high is not None and (self.low > ROUNDING or self.high < -ROUNDING)


@dataclass(frozen=True)
class Sampled:
    """A figure and its value in each resample.

    Args:
        value: The figure.
        resamples: `[S]`; NaN where the divisor of a quotient is 0; all NaN if the spread is unknown.
        contexts: The number of contexts behind the figure. A sum adds those of its parts, which share no contexts.
    """

    value: float
    resamples: Floats
    contexts: int

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.value + other.value, self.resamples + other.resamples, self.contexts + other.contexts)

    def __truediv__(self, other: Sampled | float) -> Sampled:
        """The quotient of two figures of the same contexts; NaN, not infinite, where ``other`` is zero."""
        by = (other.value, other.resamples) if isinstance(other, Sampled) else (other, np.float64(other))
        with np.errstate(divide="ignore", invalid="ignore"):
            value, resamples = np.float64(self.value) / by[0], self.resamples / by[1]
        resamples = np.where(np.isfinite(resamples), resamples, np.nan)
        return Sampled(float(value) if np.isfinite(value) else np.nan, resamples, self.contexts)

    def estimate(self) -> Estimate:
        """The figure with its interval.

        There is no interval if a resample has no value: the resamples that have one are not a random selection.
        """
        if self.contexts < LEAST_CONTEXTS or np.isnan(self.resamples).any():
            return Estimate(self.value)
        low, high = np.quantile(self.resamples, LEVELS)
        return Estimate(self.value, float(low), float(high))


def draw(examples: int, samples: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """`[S, max(1, E - 1)]`: the indices of the examples in each resample, drawn with replacement.

    Args:
        examples: The number of examples, E.
        samples: The number of resamples, S.
        seed: Integers of at least 0 that determine the draws.
    """
    return np.random.default_rng(list(seed)).integers(examples, size=(samples, max(1, examples - 1)))


class Resampler:
    """Resamples the examples of one task.

    Args:
        examples: `[U]`, the name of each question's example.
        samples: The number of resamples, S.
        seed: See `draw`.
    """

    def __init__(self, examples: Sequence[str], samples: int, seed: Sequence[int]) -> None:
        names, self._example = np.unique(np.asarray(examples), return_inverse=True)  # [U]
        self.examples = len(names)
        self._samples, self._seed = samples, seed
        self._times: dict[int, Floats] = {}

    def mean(self, values: Floats) -> Sampled | None:
        """The mean over questions, in the sample and in each resample.

        Args:
            values: `[U]`; NaN where a question has no value. Such questions are left out, and so are examples in which
                no question has a value.

        Returns: None if all values are NaN. If they are all from one example, the spread is unknown and the resamples
            are NaN.
        """
        there = ~np.isnan(values)
        if not there.any():
            return None
        numbers = np.bincount(self._example[there], minlength=self.examples).astype(np.float64)  # [E]
        having = numbers > 0
        sums = np.bincount(self._example[there], values[there], self.examples)[having]  # [E'], of examples with values
        numbers = numbers[having]
        resamples = np.full(self._samples, np.nan)
        if len(numbers) > 1:
            times = self._drawn(len(numbers))
            resamples = (times @ sums) / (times @ numbers)
        return Sampled(float(values[there].mean()), resamples, len(numbers))

    def _drawn(self, examples: int) -> Floats:
        """`[S, E']`: how often each of E' examples is in each resample; always the same for the same E'."""
        if examples not in self._times:
            drawn = draw(examples, self._samples, self._seed) + examples * np.arange(self._samples)[:, None]
            times = np.bincount(drawn.ravel(), minlength=self._samples * examples)
            self._times[examples] = times.reshape(self._samples, examples).astype(np.float64)
        return self._times[examples]
