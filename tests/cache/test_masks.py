"""Masks with padding on the right and with holes: each row is pruned as if it were alone."""

from __future__ import annotations

import pytest
import torch
from every_scorer import SCORERS
from reference import Reference, ReferenceRow, slow_selection
from tiny import KINDS, random_ids, random_scores, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper
from transformers import DynamicCache

from proxykv_hf import (
    FixedScorer,
    InvalidInputError,
    ProxyKVWarning,
    ProxyPrunedCache,
    ProxyScorer,
    RandomScorer,
    RetentionPolicy,
    SnapKVScorer,
    prune_dynamic_cache,
    with_proxykv,
)
from proxykv_hf._compat import call_forward

COLUMNS, NEW = 34, 3
MASKS = {
    "right": [list(range(34)), list(range(21)), list(range(27))],
    "holes": [[*range(5), *range(9, 34)], [*range(3, 12), *range(20, 32)], list(range(2, 34, 2))],
    "both": [list(range(10, 34)), list(range(19)), [*range(4), *range(8, 30)]],
}


def policy(ratio=0.4, **kwargs):
    return RetentionPolicy(ratio, sink_tokens=0, recent_tokens=0, **kwargs)


def batch(kind):
    """The rows' own tokens, and ids, mask and position ids `[3, COLUMNS]`. Masked columns hold random other tokens."""
    places = MASKS[kind]
    rows = [random_ids(1, len(own), seed=number)[0] for number, own in enumerate(places)]
    ids, mask = random_ids(3, COLUMNS, seed=9), torch.zeros(3, COLUMNS, dtype=torch.long)
    for number, own in enumerate(places):
        ids[number, own], mask[number, own] = rows[number], 1
    return rows, {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def follow_up(mask, seed=5):
    """The new tokens of the next forward, and all its arguments."""
    new = random_ids(3, NEW, seed=seed)
    grown = torch.cat([mask, torch.ones(3, NEW, dtype=torch.long)], dim=1)
    return new, {"input_ids": new, "attention_mask": grown, "position_ids": (grown.cumsum(1) - 1)[:, -NEW:]}


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holes", MASKS)
def test_logits_equal_the_masked_reference_of_each_row(kind, allocation, holes):
    model = tiny_model(kind)
    rows, inputs = batch(holes)
    alone = [random_scores(model, 1, len(row), seed=number)[0] for number, row in enumerate(rows)]
    scores = torch.full((3, *alone[0].shape[:2], COLUMNS), float("nan"))
    for number, own in enumerate(alone):
        scores[number, :, :, COLUMNS - own.shape[2] :] = own
    with ProxyPrunedCache(model, FixedScorer(scores), policy(allocation=allocation), strict=True) as cache:
        call_forward(model, cache=cache, **inputs)
        report = cache.report()
        assert report.seen_tokens == [len(row) for row in rows]
        full = list(cache.geometry.full_layers)
        new, more = follow_up(inputs["attention_mask"])
        ours = call_forward(model, cache=cache, **more).logits
        for number, row in enumerate(rows):
            keep = torch.ones(alone[number].shape, dtype=torch.bool)
            keep[full] = slow_selection(alone[number][full], 0.4, allocation)
            for layer in full:
                expected = [head.nonzero()[:, 0].tolist() for head in keep[layer]]
                assert [head.tolist() for head in cache.kept_indices(layer, number)] == expected
            if kind not in ("gemma2", "gemma3"):  # their sliding windows count columns, not tokens
                expected = Reference(model).logits(ReferenceRow(row.tolist(), keep), new[number].tolist())
                torch.testing.assert_close(ours[number], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holes", MASKS)
def test_with_everything_kept_the_cache_equals_dynamic_cache(kind, allocation, holes):
    model = tiny_model(kind)
    _, inputs = batch(holes)
    plain = DynamicCache(config=model.config)
    with ProxyPrunedCache(model, RandomScorer(), policy(1.0, allocation=allocation)) as cache:
        for seed in (None, 5, 6):
            if seed is not None:
                _, inputs = follow_up(inputs["attention_mask"], seed)
            expected = call_forward(model, cache=plain, use_cache=True, **inputs).logits
            assert torch.equal(call_forward(model, cache=cache, use_cache=True, **inputs).logits, expected)
            cache.report()
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)


@pytest.mark.parametrize("holes", ["right", "both"])
@pytest.mark.parametrize("name", [*SCORERS, "proxykv"])
def test_every_scorer_keeps_of_a_row_what_it_keeps_of_the_row_alone(name, holes):
    model = tiny_model()
    if name == "proxykv":
        proxy = tiny_model("qwen2", 1, layers=2).model
        scorer = ProxyScorer(proxy, make_mapper(model, proxy), tokenizer=tiny_tokenizer())
    else:
        scorer = SCORERS[name](model)
    rows, inputs = batch(holes)
    with ProxyPrunedCache(model, scorer, policy(), strict=True) as cache:
        call_forward(model, cache=cache, use_cache=True, **inputs)
        together = [[cache.kept_indices(layer, row) for layer in range(3)] for row in range(3)]
    for number, row in enumerate(rows):
        with ProxyPrunedCache(model, scorer, policy(), strict=True) as cache:
            call_forward(model, input_ids=row[None], cache=cache, use_cache=True)
            for layer in range(3):
                for ours, expected in zip(together[number][layer], cache.kept_indices(layer), strict=True):
                    assert torch.equal(ours, expected)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("ratio", [0.4, 1.0])
@pytest.mark.parametrize("holes", MASKS)
def test_generate_keeps_of_each_row_what_it_keeps_of_the_row_alone(holes, ratio, allocation):
    model = with_proxykv(tiny_model())
    rows, inputs = batch(holes)
    options = {"max_new_tokens": 6, "do_sample": False}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ratio == 1.0:
        plain = model.generate(ids, attention_mask=mask, cache=DynamicCache(config=model.config), **options)
        with ProxyPrunedCache(model, RandomScorer(), policy(1.0, allocation=allocation)) as cache:
            assert torch.equal(model.generate(ids, attention_mask=mask, cache=cache, **options), plain)
        return
    # Only what is kept is compared: the first new token follows the last column, which may be padding.
    with ProxyPrunedCache(model, SnapKVScorer(8), policy(allocation=allocation), strict=True) as cache:
        model.generate(ids, attention_mask=mask, cache=cache, **options)
        assert cache.report().seen_tokens == [len(row) + 5 for row in rows]
        kept = [cache.kept_indices(1, row) for row in range(3)]
    for number, row in enumerate(rows):
        with ProxyPrunedCache(model, SnapKVScorer(8), policy(allocation=allocation), strict=True) as cache:
            cache.prefill(row[None])
            for ours, expected in zip(kept[number], cache.kept_indices(1), strict=True):
                assert torch.equal(ours, expected)


def test_prefill_takes_a_mask_with_holes():
    model = tiny_model()
    rows, inputs = batch("holes")
    scorer = SnapKVScorer(8)
    with ProxyPrunedCache(model, scorer, policy(), strict=True) as cache:
        cache.prefill(inputs["input_ids"], inputs["attention_mask"])
        new, more = follow_up(inputs["attention_mask"])
        ours = call_forward(model, cache=cache, **more).logits
    for number, row in enumerate(rows):
        with ProxyPrunedCache(model, scorer, policy(), strict=True) as cache:
            cache.prefill(row[None])
            expected = call_forward(model, input_ids=new[number : number + 1], cache=cache).logits
        torch.testing.assert_close(ours[number : number + 1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_cache_with_holes_is_forked_reordered_cropped_and_saved(tmp_path, allocation):
    model = tiny_model()
    _, inputs = batch("both")
    with ProxyPrunedCache(model, SnapKVScorer(8), policy(allocation=allocation), strict=True) as cache:
        call_forward(model, cache=cache, use_cache=True, **inputs)
        cache.report()
        cache.save(tmp_path)
        order = torch.tensor([2, 0])
        mask = inputs["attention_mask"]
        _, more = follow_up(mask)
        expected = call_forward(model, cache=cache.fork(), **more).logits[order]
        with ProxyPrunedCache.load(tmp_path, target=model) as loaded:
            loaded.reorder_cache(order)
            some = {name: value[order] for name, value in more.items()}
            torch.testing.assert_close(call_forward(model, cache=loaded, **some).logits, expected, atol=1e-5, rtol=1e-4)
            loaded.crop(-NEW)
            torch.testing.assert_close(call_forward(model, cache=loaded, **some).logits, expected, atol=1e-5, rtol=1e-4)
            for row, place in enumerate(order.tolist()):
                for ours, theirs in zip(loaded.kept_pairs(1, row), cache.kept_pairs(1, place), strict=True):
                    assert torch.equal(ours[0][: len(theirs[0])], theirs[0])


def test_a_whole_cache_with_holes_is_cropped_into_its_prompt():
    model = tiny_model()
    _, inputs = batch("both")
    with ProxyPrunedCache(model, RandomScorer(), policy(1.0)) as cache:
        call_forward(model, cache=cache, use_cache=True, **inputs)
        cache.report()
        cache.crop(-10)
        mask = inputs["attention_mask"][:, :-10]
        assert cache.report().seen_tokens == mask.sum(1).tolist()
        short = {name: value[:, :-10] for name, value in inputs.items()}
        plain = DynamicCache(config=model.config)
        call_forward(model, cache=plain, use_cache=True, **short)
        _, more = follow_up(mask)
        expected = call_forward(model, cache=plain, **more).logits
        torch.testing.assert_close(call_forward(model, cache=cache, **more).logits, expected)
        for row in range(3):
            keys = cache.kept_pairs(0, row)[1][0]
            own = torch.cat([mask[row].nonzero()[:, 0], torch.arange(24, 24 + NEW)])
            torch.testing.assert_close(keys, cache.layers[0].keys[row, 1, own])


def test_rows_of_the_same_tokens_under_different_masks_give_the_same_logits():
    model = tiny_model()
    row = random_ids(1, 20)[0]
    ids, mask = torch.zeros(2, 24, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long)
    ids[0, :20], mask[0, :20] = row, 1
    ids[1, 4:], mask[1, 4:] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for ratio in (0.4, 1.0):
        with ProxyPrunedCache(model, SnapKVScorer(8), policy(ratio), strict=True) as cache:
            call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
            grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            new = random_ids(1, 1).expand(2, -1)
            more = {"input_ids": new, "attention_mask": grown, "position_ids": torch.full((2, 1), 20)}
            logits = call_forward(model, cache=cache, **more).logits
        torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_plain_cache_is_pruned_by_any_mask(allocation):
    model = tiny_model()
    rows, inputs = batch("both")
    plain = DynamicCache(config=model.config)
    call_forward(model, cache=plain, use_cache=True, **inputs)
    alone = [random_scores(model, 1, len(row), seed=number)[0] for number, row in enumerate(rows)]
    scores = torch.full((3, *alone[0].shape[:2], COLUMNS), float("nan"))
    for number, own in enumerate(alone):
        scores[number][:, :, inputs["attention_mask"][number].bool()] = own
    prune_dynamic_cache(
        plain, scores, policy(allocation=allocation), target=model, attention_mask=inputs["attention_mask"]
    )
    new, more = follow_up(inputs["attention_mask"])
    ours = call_forward(model, cache=plain, **more).logits
    for number, row in enumerate(rows):
        keep = slow_selection(alone[number], 0.4, allocation)
        expected = Reference(model).logits(ReferenceRow(row.tolist(), keep), new[number].tolist())
        torch.testing.assert_close(ours[number], expected, atol=1e-4, rtol=1e-4)


def test_a_chunked_prompt_with_holes_is_scored_only_by_scorers_that_do_not_observe():
    model = tiny_model()
    rows, inputs = batch("both")

    def chunks(cache):
        for part in (slice(0, 20), slice(20, COLUMNS)):
            call_forward(
                model,
                input_ids=inputs["input_ids"][:, part],
                attention_mask=inputs["attention_mask"][:, : part.stop],
                position_ids=inputs["position_ids"][:, part],
                cache=cache,
                use_cache=True,
            )
        return cache.report()

    with ProxyPrunedCache(model, SCORERS["kvzip"](model), policy(), strict=True) as cache:
        assert chunks(cache).fallback is None
        kept = [cache.kept_indices(1, row) for row in range(3)]
    for number, row in enumerate(rows):
        with ProxyPrunedCache(model, SCORERS["kvzip"](model), policy(), strict=True) as cache:
            cache.prefill(row[None])
            for ours, expected in zip(kept[number], cache.kept_indices(1), strict=True):
                assert torch.equal(ours, expected)
    with ProxyPrunedCache(model, SnapKVScorer(8), policy()) as cache:
        with pytest.warns(ProxyKVWarning, match="expected left padding for a scorer that observes a chunked prompt"):
            report = chunks(cache)
        assert report.fallback is not None
        assert report.bytes_kept >= report.bytes_full


def test_a_row_without_tokens_is_refused_and_the_cache_stays_usable():
    model = tiny_model()
    ids, mask = random_ids(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1] = 0
    with ProxyPrunedCache(model, RandomScorer(), policy()) as cache:
        cache.expect(10)
        with pytest.raises(InvalidInputError, match="row 1 of the prompt has no tokens"):
            call_forward(model, input_ids=ids, attention_mask=mask, cache=cache)
        cache.prefill(ids)
