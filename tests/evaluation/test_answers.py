"""Answers of many pruned copies in one batch equal those of plain ``generate``, one copy and question at a time."""

from __future__ import annotations

import pytest
import torch
from tiny import random_ids, random_scores, tiny_model

from proxykv_hf import FixedScorer, ProxyPrunedCache, RetentionPolicy
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.evaluation.answers import Turn, ask, batches, end_tokens

TOKENS, END = 40, 7
POLICIES = [
    RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)
    for ratio in (0.1, 0.4, 0.95)
    for allocation in ("global", "uniform")
]


def ids_of(tokens, seed):
    return tuple(random_ids(1, tokens, seed=seed)[0].tolist())


def prefilled(model):
    cache = ProxyPrunedCache(model, None, RetentionPolicy(1.0))
    cache.prefill(random_ids(1, TOKENS), prune=False, scorers={"any": FixedScorer(random_scores(model, 1, TOKENS))})
    return cache


def answer_alone(model, cache, turn):
    """The answer by plain ``generate`` on a copy of the cache."""
    ids = torch.cat([random_ids(1, TOKENS), torch.tensor([turn.ids])], dim=1)
    with cache.fork() as fork:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=turn.max_new_tokens,
            pad_token_id=0,
            **{cache_keyword(model): fork},
        )
    return tuple(out[0, ids.shape[1] :].tolist())


def nll_alone(model, cache, turn):
    """The reference's nll, fed one token at a time to a copy of the cache."""
    losses, given = [], list(turn.ids)
    with cache.fork() as fork:
        for token in turn.reference:
            logits = call_forward(model, cache=fork, input_ids=torch.tensor([given]), use_cache=True).logits[0, -1]
            losses.append(-logits.double().log_softmax(-1)[token])
            given = [token]
    return float(torch.stack(losses).mean())


@pytest.fixture(params=["llama", "qwen3"])
def model(request):
    model = tiny_model(request.param)
    model.generation_config.eos_token_id = [END, *range(100, 130)]  # some answers end early
    return model


def turns_with(drafts):
    """Turns whose questions and references differ in length."""
    return [
        Turn(ids_of(3 + 4 * place, seed=place), ids_of(1 + 3 * place, seed=50 + place), 6 + place, draft)
        for place, draft in enumerate(drafts)
    ]


@pytest.mark.parametrize("drafted", ["nothing", "the full cache's", "nonsense", "too long"])
def test_the_same_answers_and_likelihoods_as_one_by_one(model, drafted):
    with prefilled(model) as whole:
        bare = turns_with([()] * 4)
        full = [answer.tokens for answer in ask(model, whole, bare)[0]]
        assert full == [answer_alone(model, whole, turn) for turn in bare]
        drafts = {
            "nothing": [()] * 4,
            "the full cache's": full,
            "nonsense": [ids_of(9, seed=place) for place in range(4)],
            "too long": [tokens + ids_of(30, seed=1) for tokens in full],
        }[drafted]
        turns = turns_with(drafts)
        with whole.compress(random_scores(model, len(POLICIES), TOKENS, seed=1), POLICIES) as pruned:
            before = pruned.report()
            found = ask(model, pruned, turns)
            assert pruned.report() == before
            for way in range(len(POLICIES)):
                with pruned.fork() as row:
                    row.batch_select_indices(torch.tensor([way]))
                    for turn, answer in zip(turns, found[way], strict=True):
                        assert answer.tokens == answer_alone(model, row, turn)
                        assert answer.nll == pytest.approx(nll_alone(model, row, turn), abs=1e-4)
                        assert answer.tokens_nll == len(turn.reference)
        answers = [answer.tokens for row in found for answer in row]
        assert any(tokens[-1] in end_tokens(model) for tokens in answers)
        assert len(set(answers)) > 8
        if drafted == "the full cache's":
            agreed = [row[place].tokens == full[place] for row in found for place in range(4)]
            assert any(agreed)
            assert not all(agreed)


@pytest.mark.parametrize("begins", ["as the draft", "as the draft and goes on", "as a part of the draft", "otherwise"])
def test_a_reference_may_begin_as_the_draft_does(model, begins):
    draft = ids_of(5, seed=9)
    reference = {
        "as the draft": draft,
        "as the draft and goes on": draft + ids_of(3, seed=2),
        "as a part of the draft": draft[:3],
        "otherwise": draft[:2] + ids_of(4, seed=3),
    }[begins]
    turns = [Turn(ids_of(6, seed=1), reference, 5, draft), Turn(ids_of(9, seed=2), (), 5, draft)]
    with prefilled(model) as whole, whole.compress(random_scores(model, 1, TOKENS), POLICIES[1:2]) as pruned:
        answers = ask(model, pruned, turns)[0]
        assert answers[0].nll == pytest.approx(nll_alone(model, pruned, turns[0]), abs=1e-4)
        assert (answers[1].nll, answers[1].tokens_nll) == (None, 0)


def test_a_draft_that_is_right_costs_one_forward(model):
    with prefilled(model) as whole:
        bare = Turn(ids_of(6, seed=1), (), 8)
        right = ask(model, whole, [bare])[0][0].tokens
        lengths = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        for draft in (right, right[:3], (1, *right)):
            ask(model, whole, [Turn(bare.ids, (), 8, draft)])
            lengths.append("")
        hook.remove()
    expected = [6 + len(right) - 1, "", 8, *[1] * (len(right) - 3), "", 6 + len(right[:7]), *[1] * (len(right) - 1), ""]
    assert lengths == expected


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_sliding_windows_see_what_they_would_alone(kind):
    """Without padding and drafts, which would take places in the window."""
    model = tiny_model(kind, attention="eager" if kind == "gemma2" else None)  # sdpa has no softcap on every version
    turns = [Turn(ids_of(6, seed=place), ids_of(4, seed=9), 8) for place in range(2)]
    with prefilled(model) as whole:
        scores = random_scores(model, len(POLICIES), TOKENS, seed=1)
        with whole.compress(scores, POLICIES) as pruned:
            found = ask(model, pruned, turns)
        for way, policy in enumerate(POLICIES):
            with whole.compress(scores[way, None], policy) as alone:
                for turn, answer in zip(turns, found[way], strict=True):
                    assert answer.tokens == answer_alone(model, alone, turn)
                    assert answer.nll == pytest.approx(nll_alone(model, alone, turn), abs=1e-4)


@pytest.mark.parametrize("batch_tokens", [1, 20, 64, 10_000])
def test_batches_ask_everything_once_within_the_budget(batch_tokens):
    turns = turns_with([(), (1, 2, 3), (), (1,), ()])
    seen = []
    for places, ways in batches(turns, 7, batch_tokens):
        size = len(places) * len(ways) * max(turns[place].tokens for place in places)
        assert size <= batch_tokens or (len(places), len(ways)) == (1, 1)
        seen += [(place, way) for place in places for way in ways]
    assert sorted(seen) == [(place, way) for place in range(5) for way in range(7)]


def test_end_tokens_are_those_of_generate(model):
    assert END in end_tokens(model)
    model.generation_config.eos_token_id = END
    assert end_tokens(model) == {END}
    model.generation_config.eos_token_id = None
    assert end_tokens(model) == set()
