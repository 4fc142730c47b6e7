from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from reference import slow_selection

from proxykv_hf import InvalidPolicyError, RetentionPolicy
from proxykv_hf.cache.retention import first_argmax, pack_mask, select, top_k_mask, unpack_mask


def bare(ratio=None, **kwargs):
    return RetentionPolicy(ratio, **{"sink_tokens": 0, "recent_tokens": 0} | kwargs)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("seed", range(12))
def test_select_equals_sorting_by_hand(seed, allocation):
    generator = torch.Generator().manual_seed(seed)
    layers, heads, tokens = (int(torch.randint(1, high, (), generator=generator)) for high in (4, 4, 24))
    scores = torch.randint(0, 4, (layers, heads, tokens), generator=generator).float()  # many ties
    for ratio in (0.05, 0.1, 0.3, 0.5, 0.9, 1.0):
        expected = slow_selection(scores, ratio, allocation)
        assert torch.equal(select(scores, bare(ratio, allocation=allocation), (0, tokens)).keep, expected), ratio


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_select_with_protection_and_context_equals_sorting_by_hand(allocation):
    scores = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(0))
    policy = RetentionPolicy(0.4, allocation=allocation, sink_tokens=4, recent_tokens=3, protected=((10, 14),))
    protected = {*range(4), *range(37, 40), *range(10, 14)}
    for context in ((0, 40), (2, 40), (6, 30)):
        inside = {n for n in protected if context[0] <= n < context[1]}
        expected = slow_selection(scores, 0.4, allocation, context, inside)
        assert torch.equal(select(scores, policy, context).keep, expected), context


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.3, 0.5, 0.7, 0.9])
def test_budgets_are_exact(ratio):
    scores = torch.rand(4, 3, 100)
    assert select(scores, bare(ratio), (0, 100)).keep.sum() == round(ratio * 1200)
    uniform = select(scores, bare(ratio, allocation="uniform"), (0, 100)).keep.sum(-1)
    assert (uniform == round(ratio * 100)).all()


def test_every_head_keeps_its_best_even_if_others_are_better():
    scores = torch.rand(2, 2, 50)
    scores[0, 0] = -torch.rand(50)
    scores[0, 0, 17] = -1e-6
    keep = select(scores, bare(0.1), (0, 50)).keep
    assert keep.sum() == 20
    assert keep[0, 0].nonzero().tolist() == [[17]]


def test_max_tokens_is_an_average_over_heads_and_no_more_than_there_are():
    scores = torch.rand(4, 3, 100)
    assert select(scores, bare(max_tokens=7), (0, 100)).keep.sum() == 7 * 12
    assert (select(scores, bare(max_tokens=7, allocation="uniform"), (0, 100)).keep.sum(-1) == 7).all()
    assert select(scores, bare(max_tokens=1000), (0, 100)).keep.all()


def test_protection_beyond_the_budget_is_kept_and_counted():
    policy = RetentionPolicy(0.05, sink_tokens=4, recent_tokens=8)
    selection = select(torch.rand(2, 3, 100), policy, (0, 100))
    assert (selection.keep.sum(-1) == 12).all()
    assert selection.over_budget == 2 * 3 * 12 - round(0.05 * 600)


def test_a_short_context_is_left_whole():
    scores = torch.rand(2, 2, 30)
    assert select(scores, bare(0.1, min_context=31), (0, 30)).keep.all()
    assert not select(scores, bare(0.1, min_context=30), (0, 30)).keep.all()


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_scores_do_not_outrank_protection(value):
    scores = torch.zeros(1, 1, 20)
    scores[..., 5:15] = value
    policy = RetentionPolicy(0.2, sink_tokens=2, recent_tokens=2)
    assert select(scores, policy, (0, 20)).keep.nonzero()[:, 2].tolist() == [0, 1, 18, 19]


def test_top_k_mask_and_first_argmax_prefer_the_earlier_of_equals():
    scores = torch.tensor([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    assert top_k_mask(scores, 2).int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert first_argmax(scores).tolist() == [[1], [0]]


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 100])
def test_packed_masks_come_back(tokens):
    mask = torch.rand(2, 3, tokens) < 0.5
    packed = pack_mask(mask)
    assert packed.shape == (2, 3, math.ceil(tokens / 8))
    assert torch.equal(unpack_mask(packed, tokens), mask)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "got neither"),
        ({"retention_ratio": 0.3, "max_tokens": 5}, "got both"),
        ({"retention_ratio": 0.0}, r"\(0, 1\], got 0.0"),
        ({"retention_ratio": 1.01}, r"\(0, 1\], got 1.01"),
        ({"retention_ratio": -0.5}, r"\(0, 1\], got -0.5"),
        ({"retention_ratio": math.nan}, r"\(0, 1\], got nan"),
        ({"retention_ratio": "0.3"}, "got '0.3'"),
        ({"retention_ratio": True}, "got True"),
        ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, got 0"),
        ({"max_tokens": 2.5}, "got 2.5"),
        ({"retention_ratio": 0.3, "allocation": "heads"}, "expected 'global' or 'uniform', got 'heads'"),
        ({"retention_ratio": 0.3, "sink_tokens": -1}, "sink_tokens: .* got -1"),
        ({"retention_ratio": 0.3, "min_context": 1.5}, "min_context: .* got 1.5"),
        ({"retention_ratio": 0.3, "protected": ((5, 5),)}, r"protected: .* got \(5, 5\)"),
        ({"retention_ratio": 0.3, "protected": (0, 5)}, "protected: expected a tuple of spans .* got 0 in it"),
    ],
)
def test_wrong_policies_say_what_is_wrong(kwargs, message):
    with pytest.raises(InvalidPolicyError, match=message):
        RetentionPolicy(**kwargs)


def test_a_policy_survives_json():
    policy = RetentionPolicy(0.3, protected=[[1, 4]])
    assert RetentionPolicy(**json.loads(json.dumps(policy.to_dict()))) == policy


def test_numbers_of_numpy_become_pythons():
    counts = RetentionPolicy(0.5, sink_tokens=np.int64(1), recent_tokens=np.int64(2), min_context=np.int64(3))
    assert RetentionPolicy(**json.loads(json.dumps(counts.to_dict()))) == counts
    policy = RetentionPolicy(np.float64(0.25), protected=[(np.int64(1), np.int64(4))])
    assert policy == RetentionPolicy(0.25, protected=((1, 4),))
    assert json.dumps(RetentionPolicy(max_tokens=np.int32(7)).to_dict())
