"""The target is restored whatever happens: after closing, after garbage collection and after exceptions."""

from __future__ import annotations

import gc

import pytest
import torch
from model_state import snapshot
from tiny import random_ids, random_scores, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    KVzipScorer,
    ProxyPrunedCache,
    RetentionPolicy,
    SnapKVScorer,
    prune_dynamic_cache,
)
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers


def policy(**kwargs):
    return RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0, **kwargs)


class Boom(Exception):
    pass


def explode(model, error, after_calls=0):
    """Make the model's second layer raise, after a number of calls."""
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) > after_calls:
            raise error

    return model.model.layers[1].mlp.register_forward_pre_hook(hook)


@pytest.mark.parametrize("scorer", [KVzipScorer, SnapKVScorer, None])
@pytest.mark.parametrize("ending", ["close", "collect", "with", "reset"])
def test_the_model_is_restored_after_closing_or_collecting(ending, scorer):
    model = tiny_model()
    before = snapshot(model)
    choice = FixedScorer(random_scores(model, 1, 40)) if scorer is None else scorer()
    cache = ProxyPrunedCache(model, choice, policy(), tokenizer=tiny_tokenizer())
    model.generate(random_ids(1, 40), **{cache_keyword(model): cache}, max_new_tokens=4, do_sample=False)
    fork = cache.fork()
    if ending == "with":
        with cache:
            pass
    elif ending == "reset":
        cache.reset()
        cache.close()
    elif ending == "close":
        cache.close()
    fork.close()
    del cache, fork
    gc.collect()
    assert snapshot(model) == before


def use(how, model, cache, ids):
    if how == "prefill":
        cache.prefill(ids)
        for _ in range(3):
            call_forward(model, input_ids=ids[:, :1], cache=cache)
    else:
        model.generate(ids, **{cache_keyword(model): cache}, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("scorer", [KVzipScorer, SnapKVScorer])
@pytest.mark.parametrize("how", ["prefill", "generate"])
@pytest.mark.parametrize("after_calls", [0, 1, 3])
def test_the_model_is_restored_after_an_exception(error, scorer, how, after_calls):
    """The exception comes in the prefill, in KVzip's own pass, or during decoding."""
    model = tiny_model()
    before = snapshot(model)
    cache = ProxyPrunedCache(model, scorer(), policy(), tokenizer=tiny_tokenizer(), strict=True)
    handle = explode(model, error, after_calls)
    ids = random_ids(1, 40)
    try:
        with pytest.raises((error, RuntimeError)):
            use(how, model, cache, ids)
    finally:
        handle.remove()
    if after_calls == 0 and (how == "prefill" or error is Boom):  # at once, while the cache still lives
        assert snapshot(model) == before
        with pytest.raises(CacheStateError, match=r"call reset\(\)"):
            cache.report()
        cache.reset()
        cache.prefill(ids)
        assert cache.report().fallback is None
    del cache
    gc.collect()
    assert snapshot(model) == before


def test_an_exception_spoils_only_its_own_cache():
    model = tiny_model()
    ids = random_ids(1, 40)
    scores = random_scores(model, 1, 40)
    with ProxyPrunedCache(model, FixedScorer(scores), policy()) as other:
        other.prefill(ids)
        expected = call_forward(model, input_ids=ids[:, :3], cache=other.fork()).logits
        cache = ProxyPrunedCache(model, FixedScorer(scores), policy())
        handle = explode(model, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            call_forward(model, input_ids=ids, cache=cache)
        handle.remove()
        assert torch.equal(call_forward(model, input_ids=ids[:, :3], cache=other).logits, expected)
        with pytest.raises(CacheStateError):
            call_forward(model, input_ids=ids, cache=cache)


def test_a_refused_input_spoils_nothing():
    model = tiny_model()
    ids = random_ids(1, 40)
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, 40)), policy()) as cache:
        cache.prefill(ids)
        with pytest.raises(ValueError, match="attention_mask"):
            call_forward(model, input_ids=ids[:, :1], attention_mask=torch.ones(1, 13), cache=cache)
        call_forward(model, input_ids=ids[:, :1], cache=cache)
        assert cache.report().seen_tokens == [41]


def test_a_pruned_dynamic_cache_restores_the_model_when_collected():
    from transformers import DynamicCache

    model = tiny_model()
    before = snapshot(model)
    cache = DynamicCache()
    call_forward(model, input_ids=random_ids(1, 40), cache=cache)
    prune_dynamic_cache(cache, random_scores(model, 1, 40), policy(), target=model)
    call_forward(model, input_ids=random_ids(1, 2), cache=cache)
    del cache
    gc.collect()
    assert snapshot(model) == before


def test_a_proxy_of_the_targets_own_layers_leaves_frozen_parameters_frozen(tmp_path):
    model = tiny_model()
    mapper = make_mapper(model, first_layers(model, 2), whole_proxy=model, proxy_id=SELF_PROXY)
    mapper.save_pretrained(tmp_path)
    model.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    before = snapshot(model)
    with ProxyPrunedCache.from_pretrained(tmp_path, target=model, policy=policy()) as cache:
        cache.prefill(random_ids(1, 30))
    assert snapshot(model) == before
