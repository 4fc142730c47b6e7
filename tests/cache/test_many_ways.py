"""One prompt is pruned in several ways at once. Each row equals the prompt pruned in that way alone."""

from __future__ import annotations

import pytest
import torch
from tiny import KINDS, pad_left, random_ids, random_scores, tiny_model

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    InvalidPolicyError,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    ScoringError,
)
from proxykv_hf._compat import call_forward

TOKENS = 40
WHOLE = RetentionPolicy(1.0)


def bare(ratio, allocation="global"):
    return RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)


WAYS = [bare(0.3), bare(0.3, "uniform"), bare(0.6, "uniform"), bare(1.0), RetentionPolicy(0.5, protected=((3, 9),))]


def prefilled(model, rows=1, context=(4, TOKENS)):
    cache = ProxyPrunedCache(model, None, WHOLE)
    scores = {"any": FixedScorer(random_scores(model, rows, TOKENS))}
    cache.prefill(random_ids(rows, TOKENS), context=context, prune=False, scorers=scores)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ways", [WAYS, WAYS[1:2], WAYS[3:4], [WAYS[1]] * 2])
def test_each_row_equals_pruning_in_its_way_alone(kind, ways):
    model = tiny_model(kind, attention="eager" if kind == "gemma2" else None)  # sdpa has no softcap on every version
    scores, next_ids = random_scores(model, len(ways), TOKENS, seed=1), random_ids(1, 5, seed=2)
    with prefilled(model) as whole, whole.compress(scores, ways) as together:
        held = whole.report()
        inputs = {"input_ids": next_ids.expand(len(ways), -1), "use_cache": True}
        logits = call_forward(model, cache=together, **inputs).logits
        for row, policy in enumerate(ways):
            with whole.compress(scores[row, None], policy) as alone:
                expected = call_forward(model, cache=alone, input_ids=next_ids, use_cache=True).logits[0]
                torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)
                assert together.report().kept_tokens[row] == alone.report().kept_tokens[0]
                full_attention = whole.geometry.full_layers[-1]
                for ours, theirs in zip(
                    together.kept_indices(full_attention, row), alone.kept_indices(full_attention), strict=True
                ):
                    assert torch.equal(ours, theirs)
        assert whole.report().kept_tokens == held.kept_tokens


def test_a_row_of_a_batch_is_kept_in_several_ways():
    model = tiny_model()
    ids, mask = pad_left([random_ids(1, 25)[0], random_ids(1, TOKENS, seed=1)[0]])
    scores = random_scores(model, len(WAYS), TOKENS, seed=1)
    with ProxyPrunedCache(model, None, WHOLE) as batch, ProxyPrunedCache(model, None, WHOLE) as alone:
        fixed = {"any": FixedScorer(random_scores(model, 2, TOKENS))}
        batch.prefill(ids, mask, context=[(4, 20), (4, TOKENS)], prune=False, scorers=fixed)
        batch.batch_select_indices(torch.tensor([1]))
        alone.prefill(ids[1:], context=(4, TOKENS), prune=False, scorers={"any": RandomScorer()})
        with batch.compress(scores, WAYS) as ours, alone.compress(scores, WAYS) as expected:
            assert ours.report().kept_tokens == expected.report().kept_tokens
            assert ours.report().seen_tokens == [TOKENS] * len(WAYS)
            for row in range(len(WAYS)):
                for mine, theirs in zip(ours.kept_indices(2, row), expected.kept_indices(2, row), strict=True):
                    assert torch.equal(mine, theirs)
            more = {"input_ids": random_ids(len(WAYS), 3, seed=2), "use_cache": True}
            logits = call_forward(model, cache=expected, **more).logits
            torch.testing.assert_close(call_forward(model, cache=ours, **more).logits, logits, atol=1e-4, rtol=1e-4)


def test_a_fork_multiplies_the_rows_before_and_after_saving(tmp_path):
    model = tiny_model()
    ids = random_ids(2 * len(WAYS), 3, seed=3)
    with prefilled(model) as whole, whole.compress(random_scores(model, len(WAYS), TOKENS), WAYS) as together:
        together.save(tmp_path)
        with together.fork(2) as fork, ProxyPrunedCache.load(tmp_path, model) as loaded, loaded.fork(2) as again:
            logits = call_forward(model, cache=fork, input_ids=ids, use_cache=True).logits
            assert torch.equal(call_forward(model, cache=again, input_ids=ids, use_cache=True).logits, logits)
        for row in range(len(ids)):
            with together.fork() as single:
                single.batch_select_indices(torch.tensor([row // 2]))
                expected = call_forward(model, cache=single, input_ids=ids[row, None], use_cache=True).logits[0]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_nothing_but_what_is_kept_is_held():
    model = tiny_model()
    with prefilled(model, context=(0, TOKENS)) as whole:
        ways = [bare(0.25), bare(0.5)]
        with whole.compress(random_scores(model, 2, TOKENS), ways) as together:
            pairs = sum(sum(sum(heads) for heads in row) for row in together.report().kept_tokens)
            assert pairs == (0.25 + 0.5) * TOKENS * 3 * 2
            storages = [tensor for layer in together.layers for tensor in layer.tensors()]
            assert sum(tensor.untyped_storage().nbytes() for tensor in storages) == pairs * 2 * 8 * 4


def test_wrong_policies_scores_and_batches_are_refused():
    model = tiny_model()
    with prefilled(model) as whole:
        with pytest.raises(InvalidPolicyError, match="a list of at least one, got an empty list"):
            whole.compress(random_scores(model, 1, TOKENS), [])
        for wrong in (0.3, [0.3], [WAYS[0], 0.3]):
            with pytest.raises(InvalidPolicyError, match=r"expected a RetentionPolicy, got 0.3"):
                whole.compress(random_scores(model, 1, TOKENS), wrong)
        with pytest.raises(
            ScoringError, match=r"expected scores \[R, L, H, N\] = \[2, 3, 2, 40\], got \[1, 3, 2, 40\]"
        ):
            whole.compress(random_scores(model, 1, TOKENS), WAYS[:2])
    with prefilled(model, rows=2) as whole, pytest.raises(CacheStateError, match=r"expected one row, .* a cache of 2"):
        whole.compress(random_scores(model, 2, TOKENS), WAYS[:2])
