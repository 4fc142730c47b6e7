"""Means over questions and how sure they are: a bootstrap over contexts. Pure functions of arrays.

The questions of one context share its prefill and what was evicted of it, so they are not independent. What is drawn
with replacement are therefore contexts, each with all of its questions (the cluster bootstrap: Davison and Hinkley,
Bootstrap Methods and their Application, 1997, section 3.8); the interval is the percentiles'. One fewer is drawn than
there are (McCarthy and Snowden, The Bootstrap and Finite Population Sampling, 1985): as many would give means
(E - 1) / E of their variance, which for the few contexts of a task is far too sure. Figures of the same contexts are
taken from the same draws, so that quotients of them are those of paired samples; a figure that some contexts have no
value for is of a smaller sample, and drawn from that.

Letters: U questions asked, E examples (contexts), S resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: The quantiles between which an interval lies.
LEVELS = (0.025, 0.975)
#: Of fewer, over all tasks of a figure, there is no interval: of four it would hold the truth four times in five.
LEAST_CONTEXTS = 8
#: Of means of numbers that are no larger than some tens.
ROUNDING = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval.

    Args:
        value: The figure.
        low: The interval's lower end; None where there is no interval, for want of contexts, or since a quotient has
            no value in some resample.
        high: Its upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """By more than what rounding makes of a difference of equal means."""
        return self.low is not None and self.high is not None and (self.low > ROUNDING or self.high < -ROUNDING)


@dataclass(frozen=True)
class Sampled:
    """A figure and what it is in each resample.

    Args:
        value: The figure.
        resamples: `[S]`; NaN where a quotient's divisor is 0, and all of them where nothing is known of the spread.
        contexts: How many it is taken from, those of a sum's parts together: each part is of other ones.
    """

    value: float
    resamples: Floats
    contexts: int

    def __add__(self, other: Sampled) -> Sampled:
        return Sampled(self.value + other.value, self.resamples + other.resamples, self.contexts + other.contexts)

    def __truediv__(self, other: Sampled | float) -> Sampled:
        """NaN, not infinite, where ``other`` is zero. Both are of the same contexts."""
        by = (other.value, other.resamples) if isinstance(other, Sampled) else (other, np.float64(other))
        with np.errstate(divide="ignore", invalid="ignore"):
            value, resamples = np.float64(self.value) / by[0], self.resamples / by[1]
        resamples = np.where(np.isfinite(resamples), resamples, np.nan)
        return Sampled(float(value) if np.isfinite(value) else np.nan, resamples, self.contexts)

    def estimate(self) -> Estimate:
        """The figure with its interval, which is of all resamples or none: those without a value are no random few."""
        if self.contexts < LEAST_CONTEXTS or np.isnan(self.resamples).any():
            return Estimate(self.value)
        low, high = np.quantile(self.resamples, LEVELS)
        return Estimate(self.value, float(low), float(high))


def draw(examples: int, samples: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """`[S, max(1, E - 1)]`: in each resample one example fewer than there are, drawn with replacement.

    Args:
        examples: E.
        samples: S.
        seed: Numbers of at least 0; other draws for others.
    """
    return np.random.default_rng(list(seed)).integers(examples, size=(samples, max(1, examples - 1)))


class Resampler:
    """The draws of one task's examples.

    Args:
        examples: `[U]`, each question's example, by name.
        samples: S.
        seed: As of `draw`.
    """

    def __init__(self, examples: Sequence[str], samples: int, seed: Sequence[int]) -> None:
        names, self._example = np.unique(np.asarray(examples), return_inverse=True)  # [U]
        self.examples = len(names)
        self._samples, self._seed = samples, seed
        self._times: dict[int, Floats] = {}

    def mean(self, values: Floats) -> Sampled | None:
        """The mean over questions, in the sample and in each resample.

        Args:
            values: `[U]`; NaN where there is none: left out, and so are examples that have none.

        Returns: None if all are NaN. Values of a single example say nothing of the spread: their resamples are NaN.
        """
        there = ~np.isnan(values)
        if not there.any():
            return None
        numbers = np.bincount(self._example[there], minlength=self.examples).astype(np.float64)  # [E]
        having = numbers > 0
        sums = np.bincount(self._example[there], values[there], self.examples)[having]  # [E'], of those that have any
        numbers = numbers[having]
        resamples = np.full(self._samples, np.nan)
        if len(numbers) > 1:
            times = self._drawn(len(numbers))
            resamples = (times @ sums) / (times @ numbers)
        return Sampled(float(values[there].mean()), resamples, len(numbers))

    def _drawn(self, examples: int) -> Floats:
        """`[S, E']`: how often each of E' examples is in each resample; for as many always the same."""
        if examples not in self._times:
            drawn = draw(examples, self._samples, self._seed) + examples * np.arange(self._samples)[:, None]
            times = np.bincount(drawn.ravel(), minlength=self._samples * examples)
            self._times[examples] = times.reshape(self._samples, examples).astype(np.float64)
        return self._times[examples]
