"""The bytes that a cache holds, counted by storage over every tensor that the cache can reach."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import pad_left, random_ids, random_scores, tiny_model
from transformers import DynamicCache

from proxykv_hf import CacheStateError, FixedScorer, ProxyPrunedCache, RandomScorer, RetentionPolicy
from proxykv_hf._compat import call_forward

TOKENS = 1000


def bare(ratio, allocation):
    return RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)


def reachable_bytes(cache) -> int:
    """Bytes of all tensors behind a cache's attributes, apart from its model and scorer."""
    seen, storages, todo = set(), {}, [vars(cache)]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (torch.nn.Module, FixedScorer, RandomScorer, type, str)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple)):
            todo += thing
        else:
            todo += [getattr(thing, "__dict__", {})]
            todo += [getattr(thing, slot) for slot in getattr(type(thing), "__slots__", ()) if hasattr(thing, slot)]
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_ratio_of_0_3_holds_at_most_32_percent_of_the_bytes(allocation, dtype):
    model = tiny_model(layers=4).to(dtype)
    ids = random_ids(1, TOKENS)
    plain = DynamicCache()
    call_forward(model, input_ids=ids, cache=plain)
    full = sum(
        layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes() for layer in plain.layers
    )
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, allocation)) as cache:
        cache.prefill(ids)
        assert reachable_bytes(cache) <= 0.32 * full
        report = cache.report()
        assert report.bytes_full == full
        assert abs(report.bytes_kept - reachable_bytes(cache)) < 100  # apart from a few integers
        # The scores were ready before the prefill, so the peak is what is kept and one whole layer.
        assert report.bytes_kept < report.bytes_peak <= report.bytes_kept + 1.01 * full / 4
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, allocation)) as cache:
        call_forward(model, input_ids=ids, cache=cache)  # nothing says here that the prompt is over
        # The peak is the whole cache and what is kept of one layer.
        assert full < cache.report().bytes_peak <= full * (1 + 0.35 / 4)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_bytes_follow_the_ratio(ratio):
    model = tiny_model(layers=4)
    with ProxyPrunedCache(model, RandomScorer(), bare(ratio, "global")) as cache:
        cache.prefill(random_ids(1, TOKENS))
        bits = 4 * 2 * TOKENS / 8
        report = cache.report()
        assert report.bytes_kept - bits == pytest.approx(ratio * report.bytes_full, rel=0.01)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_growing_leaves_little_slack(allocation):
    model = tiny_model(layers=4)
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, allocation)) as cache:
        cache.prefill(random_ids(1, TOKENS))
        before = cache.report().bytes_kept
        call_forward(model, input_ids=random_ids(1, 1), cache=cache)
        per_token = 4 * 2 * (8 + 8) * 4
        assert cache.report().bytes_kept - before <= 17 * per_token


def test_the_full_buffers_are_gone_after_the_prune():
    model = tiny_model("gemma3")
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, "global")) as cache:
        cache.prefill(random_ids(1, 200), prune=False)
        kept_whole = [weakref.ref(tensor) for tensor in cache.tensors()]
        pruned = cache.compress(torch.rand(1, 3, 2, 200), bare(0.3, "global"))
        cache.close()
        gc.collect()
        full = list(pruned.geometry.full_layers)
        assert all(ref() is None for layer, ref in enumerate(kept_whole) if layer // 2 in full)
        # A sliding layer's view of the whole prompt would be 200 tokens; its window is 16.
        sliding = next(layer for layer in pruned.layers if layer.is_sliding)
        assert sliding.keys.untyped_storage().nbytes() == 15 * 2 * 8 * 4
        pruned.close()


def test_rows_that_are_copies_share_what_is_kept():
    model = tiny_model()
    ids = random_ids(1, 100)
    sizes = []
    for copies in (1, 5):
        with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, 100)), bare(0.3, "global")) as cache:
            cache.prefill(ids.expand(copies, -1))
            sizes.append(cache.report().bytes_kept)
    assert sizes[0] == sizes[1]


def test_forks_share_until_they_write():
    model = tiny_model()
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, "global")) as cache:
        cache.prefill(random_ids(1, 500))
        forks = [cache.fork() for _ in range(10)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for c in forks for t in c.tensors()}
        assert sum(storages.values()) == cache.report().bytes_kept
        for fork in forks:
            fork.close()


@pytest.mark.parametrize("held", ["whole", "uniform", "global"])
def test_many_rows_of_a_fork_take_no_more_memory_than_one(held):
    model = tiny_model(group=3)
    ids, questions = random_ids(1, 200), random_ids(6, 4, seed=3)
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, "uniform" if held == "uniform" else "global")) as cache:
        cache.prefill(ids, prune=held != "whole")
        before = cache.report().bytes_kept
        with cache.fork(6) as many:
            storages = {t.untyped_storage().data_ptr(): t.nbytes for c in (cache, many) for t in c.tensors()}
            assert sum(storages.values()) == before
            together = call_forward(model, input_ids=questions, cache=many).logits
            more = call_forward(model, input_ids=questions[:, :1], cache=many).logits
            assert many.report().bytes_kept < before + 6 * 21 * 3 * 2 * (8 + 8) * 4
            with pytest.raises(CacheStateError, match="only the last 5 lie after"):
                many.crop(-6)
            if held == "whole":
                with pytest.raises(CacheStateError, match="whose rows are not shared"):
                    many.compress(torch.rand(1, 3, 2, 200), bare(0.3, "global"))
        for row in range(6):
            with cache.fork() as alone:
                one = call_forward(model, input_ids=questions[row : row + 1], cache=alone).logits
                torch.testing.assert_close(together[row : row + 1], one, atol=1e-4, rtol=1e-4)
                one = call_forward(model, input_ids=questions[row : row + 1, :1], cache=alone).logits
                torch.testing.assert_close(more[row : row + 1], one, atol=1e-4, rtol=1e-4)
        assert cache.report().bytes_kept == before


def test_rows_of_a_fork_of_a_padded_whole_cache_are_shared_too():
    model = tiny_model()
    ids, mask = pad_left([random_ids(1, 100)[0], random_ids(1, 60, seed=1)[0]])
    question = random_ids(6, 2, seed=2)
    longer = torch.cat([mask.repeat_interleave(3, 0), torch.ones(6, 2, dtype=mask.dtype)], 1)
    with ProxyPrunedCache(model, RandomScorer(), bare(0.3, "global")) as cache:
        cache.prefill(ids, mask, prune=False)
        with cache.fork(3) as many:
            assert many.report().bytes_kept < cache.report().bytes_kept
            together = call_forward(model, input_ids=question, attention_mask=longer, cache=many).logits
        with cache.fork() as copied:
            copied.batch_repeat_interleave(3)
            expected = call_forward(model, input_ids=question, attention_mask=longer, cache=copied).logits
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
