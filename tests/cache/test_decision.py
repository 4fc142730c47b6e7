"""`Kept`, the decision what is kept, without a model and a cache."""

from __future__ import annotations

import pytest
import torch
from reference import slow_selection

from proxykv_hf import CacheStateError, InvalidInputError, InvalidPolicyError, ModelGeometry, RetentionPolicy
from proxykv_hf.cache.kept import Kept
from proxykv_hf.cache.prompt import read_prompt

HEADS, TOKENS = 2, 13
#: Layers 0 and 2 are pruned, layer 1 has a sliding window.
GEOMETRY = ModelGeometry(3, HEADS, 4, 8, (None, 16, None))


def make_kept(rows, mask=None):
    ids = torch.tensor(rows)
    prompt, distinct = read_prompt(ids, mask, None, None, ids.shape)
    return Kept(prompt.without_ids(), distinct, GEOMETRY)


def row(seed, tokens=TOKENS):
    return torch.randint(1, 100, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def scores_of(rows, seed=0):
    return torch.rand(rows, 3, HEADS, TOKENS, generator=torch.Generator().manual_seed(seed))


def policy(ratio=0.4, **kwargs):
    return RetentionPolicy(ratio, sink_tokens=0, recent_tokens=0, **kwargs)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_the_mask_is_the_slow_selection_of_each_distinct_row(allocation):
    whole = make_kept([row(0), row(1), row(0)])
    assert whole.rows.tolist() == [0, 1, 0]
    scores = scores_of(2)
    kept, pruner = whole.decide(scores, policy(allocation=allocation))
    assert pruner is not None
    assert kept.over_budget == 0
    for distinct in (0, 1):
        expected = slow_selection(scores[distinct, [0, 2]], 0.4, allocation)
        assert torch.equal(kept.mask()[distinct], expected)
    for batch_row, distinct in enumerate([0, 1, 0]):
        for place, layer in enumerate(GEOMETRY.full_layers):
            expected = [head.nonzero()[:, 0].tolist() for head in kept.mask()[distinct, place]]
            assert [head.tolist() for head in kept.indices(layer, batch_row)] == expected
    assert kept.counts(5) == [(kept.mask()[distinct].sum(-1) + 5).tolist() for distinct in (0, 1, 0)]
    assert whole.packed is None, "a decision does not change the object, so that forks can share it"
    assert whole.mask().all()


def test_padding_is_never_kept_and_not_counted_in_positions():
    pad = 4
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[0, :pad] = 0
    whole = make_kept([row(0)], mask)
    assert whole.mask().sum(-1).unique().tolist() == [TOKENS - pad]
    kept, _ = whole.decide(scores_of(1), policy(0.5))
    assert not kept.mask()[..., :pad].any()
    positions = torch.cat(kept.indices(0, 0))
    assert positions.min() >= 0
    assert positions.max() < TOKENS - pad


def test_everything_kept_needs_no_pruner():
    kept, pruner = make_kept([row(0)]).decide(scores_of(1), policy(1.0))
    assert pruner is None
    assert kept.mask().all()
    assert kept.crop(3).mask().shape[-1] == TOKENS - 3


def test_one_row_can_be_decided_in_several_ways():
    whole, scores = make_kept([row(0)]), scores_of(3)
    policies = [policy(0.2), policy(0.5, allocation="uniform"), policy(1.0)]
    kept, _ = whole.decide_each_way(scores, policies)
    assert kept.rows.tolist() == [0, 1, 2]
    for way, each in enumerate(policies):
        alone, _ = whole.decide(scores[way : way + 1], each)
        assert torch.equal(kept.mask()[way], alone.mask()[0])
    with pytest.raises(CacheStateError, match="expected one row, to be kept in several ways, got a cache of 2"):
        make_kept([row(0), row(1)]).decide_each_way(scores, policies)
    with pytest.raises(InvalidPolicyError, match="got an empty list"):
        whole.decide_each_way(scores, [])


def test_rows_follow_the_batch():
    kept, _ = make_kept([row(0), row(1)]).decide(scores_of(2), policy())
    again = kept.select(torch.tensor([1, 1, 0]))
    assert again.rows.tolist() == [1, 1, 0]
    assert again.counts(0) == [kept.counts(0)[place] for place in (1, 1, 0)]


def test_only_full_attention_layers_have_indices():
    kept, _ = make_kept([row(0)]).decide(scores_of(1), policy())
    with pytest.raises(InvalidInputError, match=r"expected a full-attention layer, one of \[0, 2\], got layer 1"):
        kept.indices(1, 0)


def test_what_protection_keeps_beyond_the_budget_is_counted():
    kept, _ = make_kept([row(0)]).decide(scores_of(1), RetentionPolicy(0.1, sink_tokens=4, recent_tokens=4))
    pairs = 2 * HEADS
    assert kept.over_budget == 8 * pairs - round(0.1 * pairs * TOKENS)
