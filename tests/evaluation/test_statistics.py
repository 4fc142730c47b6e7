"""The bootstrap over contexts, against small cases by hand and a plain loop over the same draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from proxykv_hf.evaluation import statistics
from proxykv_hf.evaluation.statistics import Estimate, Resampler, Sampled, draw


@pytest.fixture
def of_any_number(monkeypatch):
    """Allow intervals from any number of contexts, for cases that are worked out by hand."""
    monkeypatch.setattr(statistics, "LEAST_CONTEXTS", 1)


@pytest.mark.usefixtures("of_any_number")
def test_means_of_two_contexts_by_hand(monkeypatch):
    """Contexts a (scores 1, 0) and b (1, 1, 1); the resamples are a twice, one of each (two times), and b twice."""
    monkeypatch.setattr(statistics, "draw", lambda *_: np.array([[0, 0], [0, 1], [1, 0], [1, 1]]))
    resampler = Resampler(["a", "b", "b", "a", "b"], samples=4, seed=[0])
    found = resampler.mean(np.array([1.0, 1.0, 1.0, 0.0, 1.0]))
    assert resampler.examples == 2
    assert found.value == pytest.approx(4 / 5)
    np.testing.assert_allclose(found.resamples, [1 / 2, 4 / 5, 4 / 5, 1])
    # The quantiles at 2.5 % and 97.5 % of 0.5, 0.8, 0.8, 1.0.
    assert found.estimate().low == pytest.approx(0.5 + 0.075 * 0.3)
    assert found.estimate().high == pytest.approx(1.0 - 0.075 * 0.2)


def test_what_is_missing_is_left_out_of_mean_and_draws(monkeypatch):
    """Context a has no value: resamples draw from b, with its one question that has a value, and c."""
    asked = []
    monkeypatch.setattr(statistics, "draw", lambda examples, *_: asked.append(examples) or np.array([[0], [1], [1]]))
    resampler = Resampler(["a", "b", "b", "c"], samples=3, seed=[0])
    found = resampler.mean(np.array([math.nan, 1.0, math.nan, 0.0]))
    assert (found.value, asked) == (0.5, [2])
    np.testing.assert_allclose(found.resamples, [1.0, 0.0, 0.0])
    assert resampler.mean(np.full(4, math.nan)) is None


def test_figures_of_the_same_contexts_use_the_same_draws():
    resampler = Resampler([f"{place}" for place in range(9)], samples=50, seed=[0])
    values = np.where(np.arange(9) < 5, np.arange(9.0), math.nan)
    once, doubled = resampler.mean(values), resampler.mean(2 * values)
    np.testing.assert_allclose((doubled / once).resamples[once.resamples > 0], 2.0)
    assert not np.isnan((once + resampler.mean(np.arange(9.0))).resamples).any()


@pytest.mark.usefixtures("of_any_number")
@pytest.mark.parametrize("missing", [(), (0, 7, 8, 9)])
def test_means_and_intervals_are_those_of_a_plain_loop(missing):
    rng = np.random.default_rng(3)
    examples = [f"{example:05}" for example in range(7) for _ in range(1 + example % 4)]
    values = rng.random(len(examples))
    values[list(missing)] = math.nan
    found = Resampler(examples, samples=200, seed=[5, 6]).mean(values)
    names = sorted({example for example, value in zip(examples, values, strict=True) if not math.isnan(value)})
    assert len(names) == (6 if missing else 7)
    means = []
    for resample in draw(len(names), 200, [5, 6]):
        taken = []
        for place in resample:
            for example, value in zip(examples, values, strict=True):
                if example == names[place] and not math.isnan(value):
                    taken.append(value)
        means.append(sum(taken) / len(taken))
    np.testing.assert_allclose(found.resamples, means)
    assert found.value == pytest.approx(np.nanmean(values))
    means.sort()
    for level, end in ((0.025, found.estimate().low), (0.975, found.estimate().high)):
        place = level * 199
        below = means[int(place)]
        assert end == pytest.approx(below + (place % 1) * (means[int(place) + 1] - below))


@pytest.mark.usefixtures("of_any_number")
def test_contexts_are_drawn_not_questions():
    """Ten equal questions for each of four contexts give the same interval as one question each."""
    scores = [1.0, 0.0, 1.0, 0.0]
    once = Resampler(["a", "b", "c", "d"], 500, [0]).mean(np.array(scores)).estimate()
    tenfold = Resampler([name for name in "abcd" for _ in range(10)], 500, [0])
    assert tenfold.mean(np.repeat(scores, 10)).estimate() == once
    assert (once.low, once.high) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("contexts", "missing", "least"), [(2, 0, 0.87), (4, 0, 0.92), (10, 0, 0.93), (4, 2, 0.86), (10, 6, 0.92)]
)
def test_intervals_of_few_contexts_hold_what_they_promise(contexts, missing, least):
    """The true mean over seven tasks, 0, is in about 95 % of the intervals from a thousand samples."""
    rng, inside = np.random.default_rng(0), 0
    resamplers = [Resampler([f"{place}" for place in range(contexts)], 400, [task]) for task in range(7)]
    for _ in range(1000):
        values = [rng.standard_normal(contexts) for _ in resamplers]
        for value in values:
            value[contexts - missing :] = math.nan
        means = [resampler.mean(value) for resampler, value in zip(resamplers, values, strict=True)]
        found = sum(means[1:], means[0]).estimate()
        inside += found.low <= 0 <= found.high
    assert least <= inside / 1000 <= 0.98


def test_few_contexts_give_no_interval():
    """An interval from four contexts would hold the truth in 82 % of cases, one from two contexts in half of them."""

    def mean(contexts, missing=0):
        values = np.where(np.arange(contexts) < missing, math.nan, np.arange(contexts) % 3)
        return Resampler([f"{place}" for place in range(contexts)], 50, [contexts]).mean(values)

    assert mean(8).estimate().low is not None
    assert mean(7).estimate() == Estimate(6 / 7)
    assert mean(9, missing=2).estimate().high is None
    assert (mean(5) + mean(3)).estimate().low is not None  # the number of contexts in the whole sum counts
    assert ((mean(5) + mean(2)) / 2).estimate().low is None


def test_draws_are_seeded_and_the_order_of_rows_does_not_matter():
    np.testing.assert_array_equal(draw(5, 20, [1, 2]), draw(5, 20, [1, 2]))
    assert (draw(5, 20, [1, 2]) != draw(5, 20, [1, 3])).any()
    assert set(draw(3, 100, [0]).ravel()) == {0, 1, 2}
    assert draw(3, 100, [0]).shape == (100, 2)
    assert draw(1, 100, [0]).shape == (100, 1)
    first = Resampler(["a", "b", "c"], 50, [0]).mean(np.array([0.1, 0.5, 0.7]))
    turned = Resampler(["c", "a", "b"], 50, [0]).mean(np.array([0.7, 0.1, 0.5]))
    np.testing.assert_allclose(first.resamples, turned.resamples)


@pytest.mark.usefixtures("of_any_number")
def test_neither_a_single_context_nor_a_mean_with_it_has_an_interval():
    alone = Resampler(["a", "a"], 50, [0]).mean(np.array([1.0, 0.0]))
    assert alone.estimate() == Estimate(0.5)
    two = Resampler(["a", "b"], 50, [0])
    assert two.mean(np.array([1.0, math.nan])).estimate() == Estimate(1.0)
    assert (alone + two.mean(np.array([1.0, 0.0]))).estimate() == Estimate(1.0)


def test_quotients_are_taken_in_each_resample():
    above, below = Sampled(2.0, np.array([1.0, 2.0, 3.0]), 9), Sampled(4.0, np.array([0.0, 4.0, 2.0]), 9)
    np.testing.assert_allclose((above / below).resamples, [math.nan, 0.5, 1.5])
    assert (above / below).value == 0.5
    assert math.isnan((above / Sampled(0.0, np.zeros(3), 9)).value)
    np.testing.assert_allclose((above / 2.0).resamples, [0.5, 1.0, 1.5])
    assert above.estimate().low is not None
    assert (above / below).estimate() == Estimate(0.5)  # not every resample has a quotient


def test_an_interval_excludes_zero_or_not():
    assert Estimate(1.0, 0.1, 2.0).excludes_zero
    assert Estimate(-1.0, -2.0, -0.1).excludes_zero
    assert not Estimate(1.0, 0.0, 2.0).excludes_zero
    assert not Estimate(1.0, 4.9e-18, 2.0).excludes_zero  # a rounding error: the difference of equal means of fifths
    assert not Estimate(-1.0, -2.0, -4.9e-18).excludes_zero
    assert not Estimate(1.0).excludes_zero
