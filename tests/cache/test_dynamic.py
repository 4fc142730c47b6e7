from __future__ import annotations

import copy
import gc

import pytest
import torch
from reference import Reference, ReferenceRow, slow_selection
from tiny import pad_left, random_ids, random_scores, tiny_model
from transformers import DynamicCache, StaticCache

from proxykv_hf import (
    CacheStateError,
    InvalidInputError,
    InvalidPolicyError,
    ProxyKVWarning,
    ProxyPrunedCache,
    RetentionPolicy,
    ScoringError,
    prune_dynamic_cache,
)
from proxykv_hf._compat import cache_keyword, call_forward

TOKENS = 40


def policy(allocation="uniform", ratio=0.3, **kwargs):
    return RetentionPolicy(ratio, allocation=allocation, **{"sink_tokens": 0, "recent_tokens": 0} | kwargs)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize(("kind", "with_config"), [("llama", True), ("llama", False), ("gemma3", True)])
def test_a_plain_cache_shrinks_and_continues_like_the_reference(kind, allocation, with_config):
    model = tiny_model(kind)
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    call_forward(model, input_ids=ids, cache=cache)
    full = [i for i, layer in enumerate(cache.layers) if not layer.is_sliding]
    before = sum(cache.layers[i].keys.nbytes for i in full)
    prune_dynamic_cache(cache, scores, policy(allocation), target=model if allocation == "global" else None)
    keep = torch.ones(scores.shape[1:], dtype=torch.bool)
    keep[full] = slow_selection(scores[0, full], 0.3, allocation)
    held = sum(next(iter(cache.layers[i].tensors())).untyped_storage().nbytes() for i in full)
    assert held == pytest.approx(0.3 * before, rel=0.01)
    assert cache.get_seq_length() == TOKENS
    row = ReferenceRow(ids[0].tolist(), keep)
    new = random_ids(1, 5, seed=1)
    logits = call_forward(model, input_ids=new, cache=cache).logits[0]
    torch.testing.assert_close(logits, Reference(model).logits(row, new[0].tolist()), atol=1e-4, rtol=1e-4)
    more = torch.cat([ids, new, random_ids(1, 2, seed=2)], 1)
    out = model.generate(more, **{cache_keyword(model): cache}, max_new_tokens=4, do_sample=False)
    assert out.shape[1] == TOKENS + 11


def test_a_padded_batch_needs_the_model_and_equals_a_pruned_cache():
    model = tiny_model()
    ids, mask = pad_left([random_ids(1, n, seed=n)[0] for n in (40, 25)])
    scores = random_scores(model, 2, TOKENS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
    with pytest.raises(InvalidInputError, match="pass target=model"):
        prune_dynamic_cache(cache, scores, policy(), attention_mask=mask)
    prune_dynamic_cache(cache, scores, policy(), target=model, attention_mask=mask)
    new, grown = random_ids(2, 3), torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    inputs = {"input_ids": new, "attention_mask": grown, "position_ids": (grown.cumsum(1) - 1)[:, -3:]}
    logits = call_forward(model, cache=cache, **inputs).logits
    from proxykv_hf import FixedScorer

    with ProxyPrunedCache(model, FixedScorer(scores), policy()) as ours:
        ours.prefill(ids, mask)
        torch.testing.assert_close(call_forward(model, cache=ours, **inputs).logits, logits)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_crop_stops_at_the_pruned_part(allocation):
    model = tiny_model()
    cache = DynamicCache()
    call_forward(model, input_ids=random_ids(1, TOKENS), cache=cache)
    prune_dynamic_cache(cache, random_scores(model, 1, TOKENS), policy(allocation), target=model)
    call_forward(model, input_ids=random_ids(1, 2), cache=cache)
    with pytest.raises(CacheStateError, match="only the last 2 lie after the pruned part"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [TOKENS + 2] * 3
    cache.crop(-2)


@pytest.mark.parametrize("layers", [2, 4])
def test_a_deep_copy_outlives_the_original(layers):
    model = tiny_model("gemma3", layers=layers)  # with one full-attention layer, and with two
    ids, scores, new = random_ids(1, TOKENS), random_scores(model, 1, TOKENS), random_ids(1, 3, seed=1)
    cache = DynamicCache(config=model.config)
    call_forward(model, input_ids=ids, cache=cache)
    prune_dynamic_cache(cache, scores, policy("global"), target=model)
    twin = copy.deepcopy(cache)
    expected = call_forward(model, input_ids=new, cache=cache).logits
    del cache
    gc.collect()
    assert torch.equal(call_forward(model, input_ids=new, cache=twin).logits, expected)
    del twin
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


def test_the_mask_must_cover_all_that_the_cache_holds():
    model = tiny_model()
    cache = DynamicCache()
    model.generate(random_ids(1, TOKENS), **{cache_keyword(model): cache}, max_new_tokens=4, do_sample=False)
    seen = cache.get_seq_length()
    scores = random_scores(model, 1, seen)
    for shape in ((1, TOKENS), (2, seen), (seen,)):
        with pytest.raises(InvalidInputError, match=rf"expected attention_mask \[1, {seen}\]"):
            prune_dynamic_cache(cache, scores, policy(), target=model, attention_mask=torch.ones(shape))
    assert cache.layers[0].keys.shape[2] == seen
    prune_dynamic_cache(cache, scores, policy(), target=model, attention_mask=torch.ones(1, seen))


def test_wrong_arguments_are_refused_and_leave_the_cache_whole():
    model = tiny_model()
    scores = random_scores(model, 1, TOKENS)
    with pytest.raises(CacheStateError, match="expected a prefilled cache"):
        prune_dynamic_cache(DynamicCache(), scores, policy())
    with pytest.raises(CacheStateError, match="got StaticCache"):
        prune_dynamic_cache(StaticCache(config=model.config, max_cache_len=8), scores, policy())
    with ProxyPrunedCache(model, None, policy()) as ours, pytest.raises(CacheStateError, match=r"has compress\(\)"):
        prune_dynamic_cache(ours, scores, policy())
    cache = DynamicCache()
    call_forward(model, input_ids=random_ids(1, TOKENS), cache=cache)
    cache.offloading = True  # such a cache cannot be made without a GPU
    with pytest.raises(CacheStateError, match=r"got one with offloading=True.*without offloading"):
        prune_dynamic_cache(cache, scores, policy())
    cache.offloading = False
    with pytest.raises(ScoringError, match=r"= \[1, 3, 2, 40\], got \[1, 3, 2, 39\]"):
        prune_dynamic_cache(cache, scores[..., 1:], policy())
    with pytest.raises(ScoringError, match="NaN"):
        prune_dynamic_cache(cache, scores * torch.nan, policy())
    with pytest.raises(InvalidInputError, match="pass target=model"):
        prune_dynamic_cache(cache, scores, policy("global"))
    with pytest.raises(InvalidInputError, match="context"):
        prune_dynamic_cache(cache, scores, policy(), context=(0, 99))
    with pytest.raises(InvalidPolicyError, match=r"got 0.3: pass RetentionPolicy\(retention_ratio=0.3\)"):
        prune_dynamic_cache(cache, scores, 0.3)
    assert cache.layers[0].keys.shape[2] == TOKENS
    prune_dynamic_cache(cache, scores, policy(ratio=1.0))
    with pytest.warns(ProxyKVWarning, match="do not fit"):
        prune_dynamic_cache(cache, scores, policy(ratio=0.05, sink_tokens=4))
    with pytest.raises(
        CacheStateError, match="whose full-attention layers are whole, got one that is empty or pruned already"
    ):
        prune_dynamic_cache(cache, scores, policy())
