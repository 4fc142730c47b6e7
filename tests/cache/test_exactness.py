"""A pruned cache gives the logits of a model whose evicted KV pairs are masked by hand."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, ReferenceRow, slow_selection
from tiny import KINDS, random_ids, random_scores, tiny_model
from transformers import DynamicCache

from proxykv_hf import FixedScorer, ProxyPrunedCache, RetentionPolicy
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.cache import ragged

TOKENS = 40


def bare(ratio, allocation="global", **kwargs):
    return RetentionPolicy(ratio, allocation=allocation, **{"sink_tokens": 0, "recent_tokens": 0} | kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_keeping_everything_changes_nothing_at_all(kind, allocation, attention):
    model = tiny_model(kind, attention=attention)
    ids = random_ids(2, TOKENS)
    arguments = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    keyword = cache_keyword(model)
    plain = model.generate(ids, **{keyword: DynamicCache(config=model.config)}, **arguments)
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 2, TOKENS)), bare(1.0, allocation)) as cache:
        ours = model.generate(ids, **{keyword: cache}, **arguments)
        assert cache.report().fallback is None
    assert torch.equal(plain.sequences, ours.sequences)
    for step, (a, b) in enumerate(zip(plain.logits, ours.logits, strict=True)):
        assert torch.equal(a, b), step


@pytest.mark.parametrize("group", [1, 2, 3, 7])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
def test_continuations_equal_the_masked_reference(kind, allocation, group):
    model = tiny_model(kind, group, attention="eager" if kind == "gemma2" else None)
    reference = Reference(model)
    ids, scores = random_ids(1, TOKENS, seed=group), random_scores(model, 1, TOKENS, seed=group)
    full = [i for i, t in enumerate(getattr(model.config, "layer_types", None) or []) if t != "sliding_attention"]
    full = full or list(range(model.config.num_hidden_layers))
    for ratio in (0.05, 0.3, 0.8):
        keep = torch.ones(scores.shape[1:], dtype=torch.bool)
        keep[full] = slow_selection(scores[0, full], ratio, allocation)
        row = ReferenceRow(ids[0].tolist(), keep)
        for new in (random_ids(1, 1, seed=1), random_ids(1, 7, seed=2)):
            with ProxyPrunedCache(model, FixedScorer(scores), bare(ratio, allocation)) as cache:
                cache.prefill(ids)
                ours = call_forward(model, input_ids=new, cache=cache).logits[0]
                later = call_forward(model, input_ids=new, cache=cache).logits[0]
                assert [[len(head) for head in cache.kept_indices(layer)] for layer in full] == keep[full].sum(
                    -1
                ).tolist()
            tokens = new[0].tolist()
            torch.testing.assert_close(ours, reference.logits(row, tokens), atol=1e-4, rtol=1e-4)
            after = ReferenceRow(row.prompt, keep, tokens)
            torch.testing.assert_close(later, reference.logits(after, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_the_prefills_own_logits_are_untouched(allocation):
    model = tiny_model()
    ids = random_ids(1, TOKENS)
    plain = call_forward(model, input_ids=ids, cache=DynamicCache()).logits
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare(0.1, allocation)) as cache:
        ours = call_forward(model, input_ids=ids, cache=cache).logits
        cache.report()
    assert torch.equal(plain, ours)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_seven_tokens_at_once_equal_one_by_one(kind, allocation):
    model = tiny_model(kind, 3)
    scores = random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        cache.prefill(random_ids(1, TOKENS))
        new = random_ids(1, 7, seed=5)
        twin = cache.fork()
        at_once = call_forward(model, input_ids=new, cache=cache).logits[0]
        singly = [call_forward(model, input_ids=new[:, i : i + 1], cache=twin).logits[0, 0] for i in range(7)]
        twin.close()
    torch.testing.assert_close(at_once, torch.stack(singly), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_half_precision_stays_close_to_the_reference(allocation, dtype):
    model = tiny_model("qwen2", 3).to(dtype)
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    keep = slow_selection(scores[0], 0.3, allocation)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        cache.prefill(ids)
        ours = call_forward(model, input_ids=ids[:, :5], cache=cache).logits[0]
        assert all(t.dtype in (dtype, torch.uint8) for t in cache.tensors())
    reference = Reference(model.float())
    expected = reference.logits(ReferenceRow(ids[0].tolist(), keep), ids[0, :5].tolist())
    uncompressed = reference.logits(ReferenceRow(ids[0].tolist()), ids[0, :5].tolist())
    error = (ours.float() - expected).norm() / expected.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02), error
    assert (uncompressed - expected).norm() / expected.norm() > 0.3  # so the bound tells them apart


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_decodes_over_ragged_heads(kind, monkeypatch):
    """The weighted sums are split into parts, with a rest."""
    monkeypatch.setattr(ragged, "LEAST_PART", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    model = tiny_model(kind, attention="eager" if kind == "gemma2" else None)
    ids, new = random_ids(1, TOKENS), random_ids(1, 5, seed=1)
    logits = []
    for enabled in (False, True):
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=enabled),
            ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare(0.5)) as cache,
        ):
            cache.prefill(ids)
            steps = [call_forward(model, input_ids=token, cache=cache).logits for token in new.split(1, dim=1)]
            logits.append(torch.cat([*steps, call_forward(model, input_ids=new, cache=cache).logits], dim=1).float())
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[0].norm()


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_very_short_contexts_work(tokens, allocation):
    model = tiny_model()
    ids, scores = random_ids(1, tokens), random_scores(model, 1, tokens)
    keep = slow_selection(scores[0], 0.3, allocation)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        out = model.generate(ids, **{cache_keyword(model): cache}, max_new_tokens=4, do_sample=False)
        assert [len(head) for head in cache.kept_indices(0)] == keep[0].sum(-1).tolist()
    assert out.shape == (1, tokens + 4)


def test_tokens_outside_the_context_are_kept_and_do_not_count():
    model = tiny_model()
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    keep = slow_selection(scores[0], 0.25, "global", context=(5, 35))
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.25), context=(5, 35)) as cache:
        cache.prefill(ids)
        kept = [[head.tolist() for head in cache.kept_indices(layer)] for layer in range(3)]
        assert kept == [[head.nonzero()[:, 0].tolist() for head in layer] for layer in keep]
        logits = call_forward(model, input_ids=ids[:, :3], cache=cache).logits[0]
    expected = Reference(model).logits(ReferenceRow(ids[0].tolist(), keep), ids[0, :3].tolist())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
