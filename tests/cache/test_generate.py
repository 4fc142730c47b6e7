"""Everything that stock ``generate`` does, on a pruned cache, compared with the masked reference."""

from __future__ import annotations

import copy

import pytest
import torch
from reference import Reference, ReferenceRow, slow_selection
from tiny import pad_left, random_ids, random_scores, tiny_model
from transformers import DynamicCache, TextStreamer

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    InvalidInputError,
    ProxyPrunedCache,
    RetentionPolicy,
    SnapKVScorer,
)
from proxykv_hf._compat import cache_keyword, call_forward

TOKENS = 70


def bare(ratio=0.3, allocation="global"):
    return RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)


def generate(model, ids, cache, **kwargs):
    arguments = {"max_new_tokens": 12, "do_sample": False, cache_keyword(model): cache}
    return model.generate(ids, **arguments | kwargs)


def kept(cache, row=0):
    return [[head.tolist() for head in cache.kept_indices(layer, row)] for layer in cache.geometry.full_layers]


def places(keep):
    return [[head.nonzero()[:, 0].tolist() for head in layer] for layer in keep]


def reference_greedy(model, row: ReferenceRow, steps: int) -> list[int]:
    """Greedy decoding the slow way; the first token comes from the whole prompt."""
    reference = Reference(model)
    whole = ReferenceRow(row.prompt[:-1])
    token = int(reference.logits(whole, row.prompt[-1:])[-1].argmax())
    out = [token]
    row = ReferenceRow(row.prompt, row.keep)
    for _ in range(steps - 1):
        token = int(reference.logits(row, [token])[-1].argmax())
        row.tail.append(out[-1])
        out.append(token)
    return out


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_greedy_equals_the_reference(kind, allocation):
    model = tiny_model(kind)
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        full = list(cache.geometry.full_layers)
        keep = torch.ones(scores.shape[1:], dtype=torch.bool)
        keep[full] = slow_selection(scores[0, full], 0.3, allocation)
        out = generate(model, ids, cache)
        assert kept(cache) == places(keep[full])
    assert out[0, TOKENS:].tolist() == reference_greedy(model, ReferenceRow(ids[0].tolist(), keep), 12)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_follow_up_turn_sees_the_first_turn_at_true_positions(allocation):
    model = tiny_model()
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    keep = slow_selection(scores[0], 0.3, allocation)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        first = generate(model, ids, cache)
        turn = torch.cat([first, random_ids(1, 7, seed=3)], dim=1)
        second = generate(model, turn, cache)
        assert cache.get_seq_length() == second.shape[1] - 1
    reference, out = Reference(model), []
    for step in range(12):
        row = ReferenceRow(
            ids[0].tolist(), keep, turn[0, TOKENS:-1].tolist() + ([] if not step else [int(turn[0, -1]), *out[:-1]])
        )
        out.append(int(reference.logits(row, [out[-1] if out else int(turn[0, -1])])[-1].argmax()))
    assert second[0, turn.shape[1] :].tolist() == out


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("scorer", ["fixed", "snapkv"])
def test_chunked_prefill_prunes_once_and_as_one_shot_does(scorer, allocation):
    model = tiny_model()
    ids = random_ids(1, TOKENS)

    def make():
        choice = SnapKVScorer(window_tokens=16) if scorer == "snapkv" else FixedScorer(random_scores(model, 1, TOKENS))
        return ProxyPrunedCache(model, choice, bare(0.3, allocation))

    with make() as one_shot, make() as chunked:
        expected = generate(model, ids, one_shot)
        prunes = count_prunes(chunked)
        out = generate(model, ids, chunked, prefill_chunk_size=32)
        assert kept(chunked) == kept(one_shot)
        assert prunes == [TOKENS]
        assert chunked.report().kept_tokens == one_shot.report().kept_tokens
    assert torch.equal(out, expected)


def count_prunes(cache):
    """A list to which each prune adds the number of tokens seen."""
    prunes, prune = [], cache._prune_layers

    def counted(*args):
        prunes.append(cache.get_seq_length())
        return prune(*args)

    cache._prune_layers = counted
    return prunes


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("draft", [2, 5])
def test_prompt_lookup_decoding_prunes_once_and_as_one_shot_does(draft, kind, allocation):
    model = tiny_model(kind)
    ids = random_ids(1, 10).repeat(1, 7)  # so that there is something to look up
    scores = random_scores(model, 1, TOKENS)
    with (
        ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as plain,
        ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as assisted,
    ):
        generate(model, ids, plain)
        prunes = count_prunes(assisted)
        out = generate(model, ids, assisted, prompt_lookup_num_tokens=draft)
        report = assisted.report()
        assert kept(assisted) == kept(plain)
        assert len(prunes) == 1
        assert report.fallback is None
    # The tokens that the drafting forward accepted were predicted from the whole prompt.
    keep = torch.ones(scores.shape[1:], dtype=torch.bool)
    full = list(plain.geometry.full_layers)
    keep[full] = slow_selection(scores[0, full], 0.3, allocation)
    accepted = prunes[0] - TOKENS
    reference, prompt, tokens = Reference(model), ids[0].tolist(), out[0, TOKENS:].tolist()
    for step, token in enumerate(tokens):
        row = ReferenceRow(prompt + tokens[:step]) if step <= accepted else ReferenceRow(prompt, keep, tokens[:step])
        last = (row.tail or row.prompt).pop()
        assert int(reference.logits(row, [last])[-1].argmax()) == token, step


def test_accepted_drafts_are_never_scored_nor_evicted():
    """The drafting forward holds the prompt and drafts. Accepted drafts belong to the answer."""
    model = tiny_model()
    ids, scores = random_ids(1, 30), random_scores(model, 1, 30)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.5)) as cache:
        cache.activate_past_recording()
        drafted = torch.cat([ids, random_ids(1, 5, seed=9)], dim=1)
        call_forward(model, input_ids=drafted, cache=cache, logits_to_keep=6)
        cache.crop(-3)
        call_forward(model, input_ids=ids[:, :4], cache=cache)
        assert cache.report().fallback is None
        assert cache.report().seen_tokens == [36]
        assert sum(map(sum, cache.report().kept_tokens[0])) == round(0.5 * 30 * 6) + 6 * 6
        assert max(int(head.max()) for layer in range(3) for head in cache.kept_indices(layer)) < 30


def test_assisted_decoding_with_a_small_model_prunes_the_prompt():
    model, assistant = tiny_model(), tiny_model("llama", 1, layers=1)
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), bare()) as cache:
        out = generate(model, ids, cache, assistant_model=assistant)
        assert kept(cache) == places(slow_selection(scores[0], 0.3, "global"))
    assert out.shape[1] == TOKENS + 12


@pytest.mark.parametrize("how", ["lookup", "assistant"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("pads", [0, 3])
def test_assisted_decoding_over_a_filled_cache_answers_as_plain_decoding_does(kind, allocation, how, pads):
    """The first forward of assisted decoding brings all tokens again. Those that were seen must not be read twice."""
    model = tiny_model(kind)
    assistance = (
        {"prompt_lookup_num_tokens": 4} if how == "lookup" else {"assistant_model": tiny_model("llama", 1, layers=1)}
    )
    document = torch.cat([torch.zeros(1, pads, dtype=torch.long), random_ids(1, 10).repeat(1, 5)], 1)
    mask = (document > 0).long()
    with ProxyPrunedCache(model, SnapKVScorer(), bare(0.3, allocation)) as cache:
        cache.prefill(document, mask)
        outputs, reports = [], []
        for arguments in ({}, assistance):
            with cache.fork() as fork:
                out, grown = document, mask
                for turn in (random_ids(1, 5, seed=5), random_ids(1, 6, seed=6)):
                    out = torch.cat([out, turn], 1)
                    grown = torch.nn.functional.pad(grown, (0, out.shape[1] - grown.shape[1]), value=1)
                    out = generate(model, out, fork, attention_mask=grown, **arguments)
                outputs.append(out)
                fork.crop(out.shape[1] - 1 - fork.get_seq_length())  # a last draft may have been accepted
                reports.append(fork.report())
    assert torch.equal(outputs[0], outputs[1])
    assert reports[0].seen_tokens == reports[1].seen_tokens == [50 + 5 + 12 + 6 + 11]
    assert reports[0].kept_tokens == reports[1].kept_tokens


def test_assisted_decoding_over_a_filled_cache_needs_all_tokens():
    model = tiny_model()
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare()) as cache:
        cache.prefill(random_ids(1, TOKENS))
        for tokens in (5, TOKENS):
            with pytest.raises(InvalidInputError, match=rf"expected more than the {TOKENS} seen, got {tokens}"):
                generate(model, random_ids(1, tokens), cache, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_beams_equal_beams_over_the_masked_model(allocation):
    """A beam search of our own over reference logits finds what generate finds on the pruned cache."""
    model = tiny_model()
    ids, scores = random_ids(1, 24), random_scores(model, 1, 24)
    keep = slow_selection(scores[0], 0.4, allocation)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.4, allocation)) as cache:
        out = generate(model, ids, cache, num_beams=3, max_new_tokens=6)
        assert len(cache.report().kept_tokens) == 3
        if allocation == "global":  # the beams share what was kept
            assert cache.layers[0].storage.block.lengths == (tuple(keep[0].sum(-1).tolist()),)
    reference, prompt = Reference(model), ids[0].tolist()
    first = reference.logits(ReferenceRow(prompt[:-1]), prompt[-1:])[-1].log_softmax(-1)
    beams = [(float(first[t]), [int(t)]) for t in first.topk(3).indices]
    for _ in range(5):
        grown = []
        for score, tokens in beams:
            step = reference.logits(ReferenceRow(prompt, keep, tokens[:-1]), tokens[-1:])[-1].log_softmax(-1)
            grown += [(score + float(step[t]), [*tokens, int(t)]) for t in step.topk(3).indices]
        beams = sorted(grown, reverse=True)[:3]
    assert out[0, 24:].tolist() == beams[0][1]


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_sampled_return_sequences_all_keep_the_same_of_the_prompt(allocation):
    model = tiny_model()
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
        torch.manual_seed(0)
        out = generate(model, ids, cache, do_sample=True, num_return_sequences=3)
        report = cache.report()
        assert report.seen_tokens == [TOKENS + 11] * 3
        assert kept(cache, 2) == places(slow_selection(scores[0], 0.3, allocation))
    assert out.shape == (3, TOKENS + 12)
    assert len({tuple(row) for row in out.tolist()}) > 1


def test_streaming_shows_every_token(capsys):
    from tiny import tiny_tokenizer

    model = tiny_model()
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare()) as cache:
        out = generate(model, random_ids(1, TOKENS), cache, streamer=TextStreamer(tiny_tokenizer(), skip_prompt=True))
    assert capsys.readouterr().out.rstrip("\n") == tiny_tokenizer().decode(out[0, TOKENS:]).rstrip("\n")


@pytest.mark.parametrize("scorer", ["fixed", "snapkv"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rows_of_a_left_padded_batch_equal_solo_runs(kind, allocation, scorer):
    model = tiny_model(kind)
    lengths = [50, 23, 50, 31]
    rows = [
        random_ids(1, n, seed=i % 3)[0] for i, n in enumerate(lengths)
    ]  # the first and the last begin with the same tokens
    rows[2] = rows[0].clone()  # a copy
    ids, mask = pad_left(rows)
    scores = random_scores(model, 4, 50)
    new = random_ids(4, 5, seed=9)

    def make(part):
        return ProxyPrunedCache(
            model, SnapKVScorer(8) if scorer == "snapkv" else FixedScorer(part), bare(0.4, allocation)
        )

    distinct = [0, 1, 3]
    with make(scores[distinct]) as batch:
        batch.prefill(ids, mask)
        grown = torch.cat([mask, torch.ones(4, 5, dtype=torch.long)], dim=1)
        positions = (grown.cumsum(1) - 1)[:, -5:]
        logits = call_forward(model, input_ids=new, attention_mask=grown, position_ids=positions, cache=batch).logits
        batch_kept = [kept(batch, row) for row in range(4)]
        report = batch.report()
    assert report.seen_tokens == [n + 5 for n in lengths]
    for row, n in enumerate(lengths):
        own = scores[0 if row == 2 else row][None, :, :, 50 - n :]
        with make(own) as solo:
            solo.prefill(rows[row][None])
            expected = call_forward(model, input_ids=new[row : row + 1], cache=solo).logits[0]
            assert batch_kept[row] == kept(solo), row
            assert report.kept_tokens[row] == solo.report().kept_tokens[0], row
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_a_padded_batch_through_stock_generate_equals_solo_runs(allocation):
    model = tiny_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 22)]
    ids, mask = pad_left(rows)
    scores = random_scores(model, 2, 40)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.4, allocation)) as cache:
        out = generate(model, ids, cache, attention_mask=mask)
    for row, tokens in enumerate(rows):
        own = FixedScorer(scores[row : row + 1, :, :, 40 - len(tokens) :])
        with ProxyPrunedCache(model, own, bare(0.4, allocation)) as solo:
            assert generate(model, tokens[None], solo)[0, len(tokens) :].tolist() == out[row, 40:].tolist()


def test_prefill_takes_right_padding():
    model = tiny_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 22)]
    left_ids, left_mask = pad_left(rows)
    right_ids = torch.stack([torch.nn.functional.pad(row, (0, 40 - len(row))) for row in rows])
    right_mask = torch.stack([torch.arange(40) < len(row) for row in rows]).long()
    with (
        ProxyPrunedCache(model, SnapKVScorer(8), bare()) as left,
        ProxyPrunedCache(model, SnapKVScorer(8), bare()) as right,
    ):
        left.prefill(left_ids, left_mask)
        right.prefill(right_ids, right_mask)
        assert [kept(left, r) for r in (0, 1)] == [kept(right, r) for r in (0, 1)]
        turn = random_ids(2, 3, seed=1)
        full = torch.cat([right_mask, torch.ones(2, 3, dtype=torch.long)], 1)
        a = generate(model, torch.cat([right_ids, turn], 1), right, attention_mask=full)
        full = torch.cat([left_mask, torch.ones(2, 3, dtype=torch.long)], 1)
        b = generate(model, torch.cat([left_ids, turn], 1), left, attention_mask=full)
    assert torch.equal(a[:, 43:], b[:, 43:])


def test_many_questions_are_answered_over_one_prefill():
    model = tiny_model()
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    keep = slow_selection(scores[0], 0.3, "global")
    questions = [random_ids(1, n, seed=n) for n in (3, 5)]
    with ProxyPrunedCache(model, FixedScorer(scores), bare()) as cache:
        cache.prefill(ids)
        before = cache.report()
        for question in questions:
            with cache.fork() as fork:
                out = generate(model, torch.cat([ids, question], 1), fork, max_new_tokens=1)
            row = ReferenceRow(ids[0].tolist(), keep)
            assert int(out[0, -1]) == int(Reference(model).logits(row, question[0].tolist())[-1].argmax())
        assert cache.report().kept_tokens == before.kept_tokens
        both = cache.fork(2)
        turns = torch.cat([random_ids(1, 4, seed=6), random_ids(1, 4, seed=7)])
        logits = call_forward(model, input_ids=turns, cache=both).logits
        both.close()
    for row in range(2):
        expected = Reference(model).logits(ReferenceRow(ids[0].tolist(), keep), turns[row].tolist())
        torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def test_one_prefill_serves_many_methods_and_ratios():
    model = tiny_model()
    ids = random_ids(2, TOKENS)
    ours = {"a": random_scores(model, 2, TOKENS, 1), "b": random_scores(model, 2, TOKENS, 2)}
    with ProxyPrunedCache(model, None, bare(1.0)) as cache:
        got = cache.prefill(ids, prune=False, scorers={name: FixedScorer(s) for name, s in ours.items()})
        assert {name: torch.equal(scores, ours[name]) for name, scores in got.items()} == {"a": True, "b": True}
        for name, scores in got.items():
            for ratio in (0.2, 1.0):
                with cache.compress(scores, bare(ratio)) as pruned:
                    assert kept(pruned, 1) == places(slow_selection(ours[name][1], ratio, "global"))
        plain = call_forward(model, input_ids=ids[:, :4], cache=cache.fork()).logits
        expected = DynamicCache()
        call_forward(model, input_ids=ids, cache=expected)
        assert torch.equal(plain, call_forward(model, input_ids=ids[:, :4], cache=expected).logits)


def test_a_report_after_max_new_tokens_1_ends_the_prefill():
    model = tiny_model()
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(scores), bare()) as cache:
        out = generate(model, ids, cache, max_new_tokens=1)
        assert sum(map(sum, cache.report().kept_tokens[0])) == round(0.3 * 6 * TOKENS)
        generate(model, torch.cat([out, random_ids(1, 3)], 1), cache)
        assert kept(cache) == places(slow_selection(scores[0], 0.3, "global"))


def test_a_deep_copy_shares_target_and_scorer_and_is_independent():
    model = tiny_model()
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare()) as cache:
        cache.prefill(ids)
        twin = copy.deepcopy(cache)
        assert twin.target is model
        assert twin.scorer is cache.scorer
        a = generate(model, torch.cat([ids, ids[:, :4]], 1), twin)
        assert cache.get_seq_length() == TOKENS
        b = generate(model, torch.cat([ids, ids[:, :4]], 1), cache)
        twin.close()
    assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_inference_mode_no_grad_and_autograd_may_follow_each_other(allocation, kind):
    model = tiny_model(kind)
    ids, scores = random_ids(1, TOKENS), random_scores(model, 1, TOKENS)
    logits = []
    for first, later in [
        (torch.no_grad, torch.no_grad),
        (torch.inference_mode, torch.no_grad),
        (torch.enable_grad,) * 2,
    ]:
        with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
            with first():
                call_forward(model, input_ids=ids, cache=cache)
                call_forward(model, input_ids=ids[:, :1], cache=cache)
            with later():
                call_forward(model, input_ids=ids[:, :3], cache=cache)
                logits.append(call_forward(model, input_ids=ids[:, :2], cache=cache).logits.detach())
            assert not any(tensor.requires_grad for tensor in cache.tensors())
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2])


def test_padding_in_a_follow_up_turn_is_not_seen():
    """The rows of one cache get next turns of different lengths, padded on the left."""
    model = tiny_model()
    scores = random_scores(model, 2, TOKENS)
    ids = random_ids(2, TOKENS)
    turns = [random_ids(1, n, seed=n)[0] for n in (6, 2)]
    turn, turn_mask = pad_left(turns)
    mask = torch.cat([torch.ones(2, TOKENS, dtype=torch.long), turn_mask], 1)
    positions = (mask.cumsum(1) - 1)[:, -6:]
    for allocation in ("global", "uniform"):
        with ProxyPrunedCache(model, FixedScorer(scores), bare(0.3, allocation)) as cache:
            cache.prefill(ids)
            logits = call_forward(
                model, input_ids=turn, attention_mask=mask, position_ids=positions, cache=cache
            ).logits
        for row, tokens in enumerate(turns):
            keep = slow_selection(scores[row], 0.3, allocation)
            expected = Reference(model).logits(ReferenceRow(ids[row].tolist(), keep), tokens.tolist())
            torch.testing.assert_close(logits[row, -len(tokens) :], expected, atol=1e-4, rtol=1e-4)


def test_chunked_prefill_of_a_padded_batch_equals_one_shot():
    model = tiny_model("gemma3")
    ids, mask = pad_left([random_ids(1, n, seed=n)[0] for n in (TOKENS, 21)])  # the first chunk is padding only
    scores = random_scores(model, 2, TOKENS)
    outs, sets = [], []
    for chunk in (None, 32):
        with ProxyPrunedCache(model, FixedScorer(scores), bare()) as cache:
            outs.append(generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=chunk))
            sets.append([kept(cache, row) for row in (0, 1)])
    assert sets[0] == sets[1]
    assert torch.equal(outs[0], outs[1])


def test_contexts_are_per_row_and_in_the_rows_own_positions():
    model = tiny_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 22)]
    ids, mask = pad_left(rows)
    scores = random_scores(model, 2, 40)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.5)) as cache:
        cache.prefill(ids, mask, context=[(10, 30), (2, 22)])
        assert kept(cache, 0) == places(slow_selection(scores[0], 0.5, "global", (10, 30)))
        assert kept(cache, 1) == places(slow_selection(scores[1, :, :, 18:], 0.5, "global", (2, 22)))


def test_contexts_per_row_are_expanded_as_generate_expands_its_rows():
    model = tiny_model()
    ids, scores = random_ids(3, TOKENS), random_scores(model, 3, TOKENS)
    spans = [(0, 30), (0, 20), (3, 33)]
    for how in ({"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}):
        with ProxyPrunedCache(model, FixedScorer(scores), bare(0.5), context=spans) as cache:
            generate(model, ids, cache, **how)
            for row in range(6):
                assert kept(cache, row) == places(slow_selection(scores[row // 2], 0.5, "global", spans[row // 2]))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("prune", [True, False])
def test_a_right_padded_mask_is_understood_after_a_right_padded_prefill(kind, prune):
    model = tiny_model(kind)
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 22)]
    turn, new = random_ids(2, 3, seed=1), torch.ones(2, 3, dtype=torch.long)
    left = pad_left(rows)
    right = (
        torch.stack([torch.nn.functional.pad(row, (0, 40 - len(row))) for row in rows]),
        torch.stack([torch.arange(40) < len(row) for row in rows]).long(),
    )
    outs = []
    for ids, mask in (left, right):
        with ProxyPrunedCache(model, SnapKVScorer(8), bare(0.4)) as cache:
            cache.prefill(ids, mask, prune=prune)
            out = generate(model, torch.cat([ids, turn], 1), cache, attention_mask=torch.cat([mask, new], 1))
            outs.append(out[:, 43:])
    assert torch.equal(*outs)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_rows_of_the_same_tokens_are_no_copies_if_anything_else_differs(allocation):
    """Here positions differ. In the next test, images in a vision-language model do."""
    model = tiny_model()
    ids = random_ids(1, 30).expand(2, -1)
    positions = torch.arange(30).repeat(2, 1)
    positions[1, 5:15] += 2
    scores, new = random_scores(model, 2, 30), random_ids(2, 3, seed=1)
    later = torch.arange(30, 33).expand(2, -1)
    solo = []
    for row in (0, 1):
        with ProxyPrunedCache(model, FixedScorer(scores[row : row + 1]), bare(0.4, allocation)) as cache:
            call_forward(model, input_ids=ids[:1], position_ids=positions[row : row + 1], cache=cache)
            cache.report()
            solo.append(call_forward(model, input_ids=new[row : row + 1], position_ids=later[:1], cache=cache).logits)
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.4, allocation), strict=True) as cache:
        call_forward(model, input_ids=ids, position_ids=positions, cache=cache)
        cache.report()
        both = call_forward(model, input_ids=new, position_ids=later, cache=cache).logits
    torch.testing.assert_close(both, torch.cat(solo), atol=1e-4, rtol=1e-4)


def test_images_make_rows_differ():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        projection_dim=32,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=3, image_seq_length=4)
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.cat([torch.full((1, 4), 3), random_ids(1, 20)], 1).expand(2, -1)
    images = torch.randn(2, 3, 8, 8)
    scores = torch.rand(2, 2, 2, 24)
    arguments = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with ProxyPrunedCache(model, FixedScorer(scores), bare(0.5), strict=True) as cache:
        both = generate(model, ids, cache, pixel_values=images, **arguments).logits
    for row in (0, 1):
        with ProxyPrunedCache(model, FixedScorer(scores[row : row + 1]), bare(0.5), strict=True) as cache:
            solo = generate(model, ids[:1], cache, pixel_values=images[row : row + 1], **arguments).logits
        for a, b in zip(both, solo, strict=True):
            torch.testing.assert_close(a[row], b[0], atol=1e-3, rtol=1e-3)


def test_reset_makes_the_cache_new():
    model = tiny_model("gemma3")
    ids, other = random_ids(1, TOKENS), random_ids(1, TOKENS, seed=4)
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, TOKENS)), bare()) as cache:
        first = generate(model, ids, cache)
        fork = cache.fork()
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.report().bytes_kept == 0
        generate(model, other, cache)
        cache.reset()
        assert torch.equal(generate(model, ids, cache), first)
        assert fork.get_seq_length() == TOKENS + 11  # untouched
        fork.close()
        with pytest.raises(CacheStateError):
            fork.reset()
