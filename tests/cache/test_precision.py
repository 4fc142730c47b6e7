"""Scores are float32, whatever default dtype and whatever autocast the caller has set."""

from __future__ import annotations

import pytest
import torch
from every_scorer import SCORERS
from heads import random_heads
from tiny import random_ids, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper, random_mapper

from proxykv_hf import FeatureRecipe, ProxyPrunedCache, ProxyScorer, RetentionPolicy, StaticAlignmentScorer
from proxykv_hf._compat import call_forward
from proxykv_hf.scorers.moments import Moments

TOKENS = 40
POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)


def proxykv(target):
    proxy, recipe = (
        tiny_model("qwen2", 1, layers=2).model,
        FeatureRecipe(("attention", "hidden", "reconstruction"), 2, (1, 2)),
    )
    return ProxyScorer(proxy, make_mapper(target, proxy, recipe), tokenizer=tiny_tokenizer())


ALL = SCORERS | {
    "proxykv": proxykv,
    "static_alignment": lambda model: StaticAlignmentScorer(tiny_model("qwen2", 1).model, tiny_tokenizer()),
}


@pytest.mark.parametrize("name", ALL)
def test_a_default_dtype_of_bfloat16_changes_no_score(name):
    target, ids = tiny_model(), random_ids(1, TOKENS)
    scorer, found = ALL[name](target), []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
                found += cache.prefill(ids, prune=False).values()
        finally:
            torch.set_default_dtype(torch.float32)
    assert [scores.dtype for scores in found] == [torch.float32] * 2
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", [name for name in ALL if name != "kvzip"])
def test_scores_that_are_made_under_autocast_are_those_made_without(name):
    """KVzip is left out: its scores are the target's own attention, which autocast is meant to round."""
    target = tiny_model()
    scorer, found = ALL[name](target), []
    for enabled in (False, True):
        with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
            call_forward(target, input_ids=random_ids(1, TOKENS), cache=cache)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                found.append(cache._settle(prune=False)[name])
    assert found[1].dtype == torch.float32
    if name == "snapkv":
        torch.testing.assert_close(found[1], found[0], atol=5e-3, rtol=0.1)
    else:
        assert torch.equal(found[0], found[1])


def test_hidden_state_heads_and_moments_compute_in_float32_under_autocast():
    heads, states = random_heads(tiny_model()), torch.randn(2, 9, tiny_model().config.hidden_size)
    expected = heads.predict(1, states), Moments.of(states[0]) + Moments.of(states[1] + 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = heads.predict(1, states), Moments.of(states[0]) + Moments.of(states[1] + 1)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].scatter, expected[1].scatter)


def test_a_mapper_tells_scores_apart_under_autocast():
    """In bfloat16, the linear path with a prior of -6 would give numbers 1/32 apart."""
    mapper = random_mapper(window=512)
    mapper.heads.bias.data.fill_(-6.0)
    features = torch.randn(1, 7, 900)
    expected = mapper(features)
    with torch.autocast("cpu", torch.bfloat16):
        found = mapper(features)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.02 * expected.std()
    assert found.unique().numel() > 0.9 * expected.unique().numel()
