"""Attention matrices over everything that was seen, compared with the masked reference, and the kept pairs."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, ReferenceRow, slow_selection
from tiny import KINDS, pad_left, random_ids, random_scores, tiny_model
from transformers import DynamicCache

from proxykv_hf import FixedScorer, ProxyPrunedCache, RandomScorer, RetentionPolicy, with_proxykv
from proxykv_hf._compat import call_forward

TOKENS, NEW = 30, 4


def policy(ratio=0.3, **kwargs):
    return RetentionPolicy(ratio, sink_tokens=0, recent_tokens=0, **kwargs)


def keep_of(cache, scores, ratio, allocation):
    full = list(cache.geometry.full_layers)
    keep = torch.ones(scores.shape, dtype=torch.bool)
    keep[full] = slow_selection(scores[full], ratio, allocation)
    return keep


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_matrices_equal_those_of_the_masked_reference(kind, allocation, group):
    model = tiny_model(kind, group, attention="eager")
    ids, new = random_ids(1, TOKENS), random_ids(1, NEW, seed=1)
    scores = random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), policy(allocation=allocation), strict=True) as cache:
        cache.prefill(ids)
        call_forward(model, input_ids=new[:, :2], cache=cache)
        out = call_forward(model, input_ids=new[:, 2:], output_attentions=True, cache=cache)
        full = cache.geometry.full_layers
        keep = keep_of(cache, scores[0], 0.3, allocation)
    row = ReferenceRow(ids[0].tolist(), keep, new[0, :2].tolist())
    expected = Reference(model).attentions(row, new[0, 2:].tolist())
    assert len(out.attentions) == len(expected)
    for layer in full:
        ours = out.attentions[layer][0]
        assert ours.shape == (2 * group, 2, TOKENS + NEW)
        torch.testing.assert_close(ours, expected[layer], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.sum(-1), torch.ones(2 * group, 2))
        evicted = ~keep[layer].repeat_interleave(group, 0)
        assert not ours[..., :TOKENS][evicted[:, None].expand(-1, 2, -1)].any()


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_padded_batch_has_attention_matrices_by_column(allocation):
    model = tiny_model(attention="eager")
    rows = [random_ids(1, length, seed=length)[0] for length in (30, 21, 25)]
    ids, mask = pad_left(rows)
    scores = random_scores(model, 3, TOKENS)
    new = random_ids(3, NEW, seed=1)
    grown = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], dim=1)
    with ProxyPrunedCache(model, FixedScorer(scores), policy(allocation=allocation), strict=True) as cache:
        cache.prefill(ids, mask)
        positions = (grown.cumsum(1) - 1)[:, TOKENS:]
        out = call_forward(
            model, input_ids=new, attention_mask=grown, position_ids=positions, output_attentions=True, cache=cache
        )
        for place, row in enumerate(rows):
            pad = TOKENS - len(row)
            keep = keep_of(cache, scores[place, :, :, pad:], 0.3, allocation)
            expected = Reference(model).attentions(ReferenceRow(row.tolist(), keep), new[place].tolist())
            for layer, weights in enumerate(expected):
                ours = out.attentions[layer][place]
                assert not ours[..., :pad].any()
                torch.testing.assert_close(ours[..., pad:], weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_with_everything_kept_generate_returns_the_attention_matrices_of_dynamic_cache(allocation):
    model = with_proxykv(tiny_model(attention="eager"))
    ids, mask = pad_left([random_ids(1, 20)[0], random_ids(1, 12, seed=1)[0]])
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    options |= {"output_attentions": True, "return_dict_in_generate": True}
    plain = model.generate(ids, cache=DynamicCache(config=model.config), **options)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(1.0, allocation=allocation)) as cache:
        ours = model.generate(ids, cache=cache, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.attentions) == len(plain.attentions) == 5
    for step, expected in zip(ours.attentions, plain.attentions, strict=True):
        for one, other in zip(step, expected, strict=True):
            assert torch.equal(one, other)


def test_copies_of_a_row_have_attention_matrices_too():
    model = tiny_model(attention="eager")
    ids, new = random_ids(1, TOKENS), random_ids(3, NEW, seed=1)
    scores = random_scores(model, 1, TOKENS)
    for allocation in ("global", "uniform"):
        with ProxyPrunedCache(model, FixedScorer(scores), policy(allocation=allocation), strict=True) as cache:
            cache.prefill(ids)
            call_forward(model, input_ids=new[:1, :2], cache=cache)
            forked = cache.fork(3)
            out = call_forward(model, input_ids=new[:, 2:], output_attentions=True, cache=forked)
            keep = keep_of(cache, scores[0], 0.3, allocation)
            for copy in range(3):
                row = ReferenceRow(ids[0].tolist(), keep, new[0, :2].tolist())
                expected = Reference(model).attentions(row, new[copy, 2:].tolist())
                for layer, weights in enumerate(expected):
                    torch.testing.assert_close(out.attentions[layer][copy], weights, atol=1e-5, rtol=1e-4)
            forked.close()


def test_layers_note_no_places_for_a_forward_without_attention_matrices():
    for attention, asked in (("eager", False), ("sdpa", True)):
        model = tiny_model(attention=attention)
        with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
            cache.prefill(random_ids(1, TOKENS))
            out = call_forward(model, input_ids=random_ids(1, 2), output_attentions=asked, cache=cache)
            assert not any(weights is not None for weights in out.attentions or ())
            assert all(layer.places is None for layer in cache.layers)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("hidden", [[], [0, 1, 2], [27, 28, 29], [0, 5, 6, 29]], ids=["none", "left", "right", "holes"])
def test_prefill_and_a_plain_forward_have_the_same_columns(hidden, ratio):
    model = tiny_model(attention="eager")
    ids, mask = random_ids(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, hidden] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    grown = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], dim=1)
    more = {"attention_mask": grown, "position_ids": (grown.cumsum(1) - 1)[:, -NEW:]}
    found = []
    for by_prefill in (True, False):
        with ProxyPrunedCache(model, RandomScorer(), policy(ratio), strict=True) as cache:
            if by_prefill:
                cache.prefill(ids, mask)
            else:
                call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
                cache.report()
            out = call_forward(model, input_ids=random_ids(2, NEW, seed=1), output_attentions=True, cache=cache, **more)
        found.append(out)
    assert torch.equal(found[0].logits, found[1].logits)
    for one, other in zip(found[0].attentions, found[1].attentions, strict=True):
        assert torch.equal(one, other)
        assert not one[0, ..., hidden].any()
    if ratio == 1.0:
        plain = DynamicCache(config=model.config)
        call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=plain, use_cache=True)
        expected = call_forward(model, input_ids=random_ids(2, NEW, seed=1), cache=plain, **more)
        assert torch.equal(found[0].logits, expected.logits)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("padded", [False, True])
def test_kept_pairs_are_those_of_a_whole_cache_at_the_kept_positions(padded, allocation, ratio):
    model = tiny_model()
    rows = [random_ids(1, length, seed=length)[0] for length in ((30, 21) if padded else (30, 30))]
    ids, mask = pad_left(rows)
    whole = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=whole, use_cache=True)
    with ProxyPrunedCache(model, RandomScorer(), policy(ratio, allocation=allocation)) as cache:
        cache.prefill(ids, mask)
        for layer in cache.geometry.full_layers:
            for row, own in enumerate(rows):
                kept = cache.kept_indices(layer, row)
                for head, (keys, values) in enumerate(cache.kept_pairs(layer, row)):
                    columns = kept[head] + TOKENS - len(own)
                    torch.testing.assert_close(keys, whole.layers[layer].keys[row, head, columns])
                    torch.testing.assert_close(values, whole.layers[layer].values[row, head, columns])


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_with_everything_kept_a_padded_cache_reads_as_dynamic_cache(allocation):
    model = tiny_model()
    ids, mask = pad_left([random_ids(1, 30)[0], random_ids(1, 21, seed=1)[0]])
    plain = DynamicCache(config=model.config)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    expected = call_forward(model, cache=plain, use_cache=True, **inputs).logits
    with ProxyPrunedCache(model, RandomScorer(), policy(1.0, allocation=allocation)) as cache:
        assert torch.equal(call_forward(model, cache=cache, use_cache=True, **inputs).logits, expected)
        cache.report()
        assert len(cache) == len(plain)
        assert cache.get_seq_length() == plain.get_seq_length()
        assert cache.get_mask_sizes(3, 0) == plain.get_mask_sizes(3, 0)
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        for ours, theirs in zip(cache, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))
