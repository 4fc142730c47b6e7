"""Scorers compared with slow, plain versions of themselves."""

from __future__ import annotations

import pytest
import torch
from families import WORKING
from tiny import pad_left, random_ids, random_scores, tiny_model, tiny_tokenizer
from transformers import DynamicCache
from watcher import Watcher
from whole_attention import attentions, kvzip_twin

from proxykv_hf import (
    FixedScorer,
    InvalidInputError,
    KVzipScorer,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    Scorer,
    SnapKVScorer,
)
from proxykv_hf._compat import call_forward
from proxykv_hf.attention.logits import causal_weights
from proxykv_hf.chat import chat_affixes

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
TOKENIZER = tiny_tokenizer()


def scores_of(model, scorer, ids, mask=None, **kwargs):
    with ProxyPrunedCache(model, scorer, POLICY, tokenizer=TOKENIZER) as cache:
        return cache.prefill(ids, mask, prune=False, **kwargs)[scorer.name]


@pytest.mark.parametrize("context", [(0, 60), (2, 60), (9, 50)])
@pytest.mark.parametrize("chunk_tokens", [2048, 20, 7])
@pytest.mark.parametrize(("kind", "group"), [("llama", 1), ("qwen2", 7), ("qwen3", 3), ("gemma2", 2)])
def test_kvzip_equals_whole_attention_matrices(kind, group, chunk_tokens, context):
    model = tiny_model(kind, group, attention="eager" if kind == "gemma2" else None)
    ids = random_ids(1, 60, seed=group)
    ours = scores_of(model, KVzipScorer(chunk_tokens=chunk_tokens), ids, context=context)
    twin = kvzip_twin(model, ids[0].tolist(), context, chunk_tokens)
    for layer, kind_of_layer in enumerate(getattr(model.config, "layer_types", None) or ["full_attention"] * 3):
        if kind_of_layer == "full_attention":
            torch.testing.assert_close(ours[0, layer], twin[layer], atol=1e-4, rtol=1e-4)
            assert twin[layer].amax() > 0.05


def test_attention_sinks_take_their_share_of_every_score():
    """gpt-oss: the weights of a query do not sum to one."""
    model, ids = WORKING["gpt-oss"](), random_ids(1, 60)
    full = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    whole = [attentions(model, ids)[layer].double() for layer in full]
    assert all(weights.sum(-1).max() < 0.99 for weights in whole)
    with_chunks = scores_of(model, KVzipScorer(chunk_tokens=25), ids)[0]
    twin = kvzip_twin(model, ids[0].tolist(), (0, 60), 25)
    snapkv = scores_of(model, SnapKVScorer(8, kernel_size=1), ids)[0]
    for layer, weights in zip(full, whole, strict=True):
        torch.testing.assert_close(with_chunks[layer], twin[layer], atol=1e-5, rtol=1e-4)
        votes = weights.unflatten(0, (2, -1))[:, :, -8:, :-8].mean((1, 2))
        torch.testing.assert_close(snapkv[layer, :, :-8].double(), votes, atol=1e-6, rtol=1e-4)
    query, key = torch.randn(4, 20, 8), torch.randn(2, 20, 8)
    sinks = torch.randn(4)
    logits = torch.einsum("qid,qjd->qij", query, key.repeat_interleave(2, 0)) * 0.5
    logits.masked_fill_(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    plain = torch.cat([logits, sinks[:, None, None].expand(-1, 20, 1)], -1).softmax(-1)[..., :-1]
    found = torch.zeros(2, 2, 20, 20)
    for head, start, stop, weights in causal_weights(query, key, 0.5, None, sinks=sinks):
        found[head, :, start:stop, :stop] = weights
    torch.testing.assert_close(found.flatten(0, 1), plain)


def test_kvzip_can_ask_in_other_words():
    model, ids, words = tiny_model(), random_ids(1, 60), ("\n\nAgain:", "\n\nAgain, from")
    ours = scores_of(model, KVzipScorer(chunk_tokens=40, prompts=words), ids)
    torch.testing.assert_close(
        ours[0], kvzip_twin(model, ids[0].tolist(), (0, 60), 40, prompts=words), atol=1e-4, rtol=1e-4
    )
    assert not torch.allclose(ours, scores_of(model, KVzipScorer(chunk_tokens=40), ids), atol=1e-3)


def test_kvzip_blocks_of_queries_change_nothing(monkeypatch):
    from proxykv_hf.attention import reconstruction

    model, ids = tiny_model(), random_ids(1, 90)
    whole = scores_of(model, KVzipScorer(), ids)
    monkeypatch.setattr(reconstruction, "QUERY_BLOCK", 17)
    torch.testing.assert_close(scores_of(model, KVzipScorer(), ids), whole, atol=1e-6, rtol=1e-5)


def test_kvzip_leaves_the_cache_as_it_was():
    model, ids = tiny_model("gemma3"), random_ids(1, 60)
    with ProxyPrunedCache(model, KVzipScorer(TOKENIZER), POLICY) as cache:
        cache.prefill(ids, prune=False)
        plain = DynamicCache(config=model.config)
        call_forward(model, input_ids=ids, cache=plain)
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


def test_kvzip_scores_rows_of_a_padded_batch_as_alone():
    model = tiny_model("gemma3")
    rows = [random_ids(1, n, seed=n)[0] for n in (50, 23, 40)]
    ids, mask = pad_left(rows)
    batch = scores_of(model, KVzipScorer(), ids, mask, context=[(5, 45), (0, 23), (3, 40)])
    for row, (tokens, context) in enumerate(zip(rows, [(5, 45), (0, 23), (3, 40)], strict=True)):
        solo = scores_of(model, KVzipScorer(), tokens[None], context=context)[0]
        torch.testing.assert_close(batch[row, :, :, 50 - len(tokens) :], solo, atol=1e-5, rtol=1e-4)


def test_kvzip_knows_the_positions_that_a_padded_prefill_used():
    """A forward without position ids counts padding in its positions; generate and prefill do not."""
    model = tiny_model()
    row = random_ids(1, 30)[0]
    ids, mask = pad_left([row, random_ids(1, 44, seed=1)[0]])
    kept = []
    for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
        with ProxyPrunedCache(model, KVzipScorer(TOKENIZER), POLICY) as cache:
            call_forward(model, input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache)
            kept.append([[head.tolist() for head in cache.kept_indices(layer)] for layer in range(3)])
    assert kept[0] == kept[1]


def snapkv_twin(model, prompt, window, kernel):
    heads, tokens = model.config.num_key_value_heads, len(prompt)
    window = min(window, tokens)
    scores = torch.zeros(model.config.num_hidden_layers, heads, tokens)
    scores[:, :, tokens - window :] = 2 + torch.arange(window)  # above any vote, the latest most
    for layer, weights in enumerate(attentions(model, torch.tensor([prompt]))):
        for head in range(heads):
            group = weights.unflatten(0, (heads, -1))[head]
            votes = group[:, tokens - window :, : tokens - window].mean(1)  # [G, n - w]
            for place in range(tokens - window):
                near = range(place - kernel // 2, place + kernel // 2 + 1)
                total = sum(float(votes[:, n].mean()) for n in near if 0 <= n < tokens - window)
                scores[layer, head, place] = total / kernel
    return scores


@pytest.mark.parametrize(("window", "kernel"), [(8, 5), (1, 1), (64, 3)])
@pytest.mark.parametrize(("kind", "group"), [("llama", 1), ("qwen2", 7), ("qwen3", 3), ("gemma2", 2)])
def test_snapkv_equals_whole_attention_matrices(kind, group, window, kernel):
    model = tiny_model(kind, group, attention="eager" if kind == "gemma2" else None)
    ids = random_ids(1, 40, seed=group)
    ours = scores_of(model, SnapKVScorer(window, kernel), ids)[0]
    twin = snapkv_twin(model, ids[0].tolist(), window, kernel)
    for layer, kind_of_layer in enumerate(getattr(model.config, "layer_types", None) or ["full_attention"] * 3):
        if kind_of_layer == "full_attention":
            torch.testing.assert_close(ours[layer], twin[layer], atol=1e-5, rtol=1e-4)


def test_random_scores_depend_on_seed_and_tokens_not_on_the_batch():
    model = tiny_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (30, 20)]
    batch = scores_of(model, RandomScorer(3), *pad_left(rows))
    solo = scores_of(model, RandomScorer(3), rows[1][None])
    assert torch.equal(batch[1, :, :, 10:], solo[0])
    assert not torch.equal(scores_of(model, RandomScorer(4), rows[1][None]), solo)
    assert not torch.equal(batch[0, :, :, 10:], solo[0])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_observers_see_queries_keys_and_what_entered_the_attention(kind):
    model = tiny_model(kind)
    ids = random_ids(2, 30)
    watcher = Watcher(random_scores(model, 2, 30))
    entered = {}
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda m, a, k: entered.setdefault(m.layer_idx, []).append(k["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    with ProxyPrunedCache(model, watcher, POLICY) as cache:
        call_forward(model, input_ids=ids[:, :20], cache=cache)
        call_forward(model, input_ids=ids[:, 20:], cache=cache)
        report = cache.report()
        full = list(cache.geometry.full_layers)
        call_forward(model, input_ids=ids[:, :1], cache=cache)  # the prefill is over
    for handle in handles:
        handle.remove()
    assert watcher.events == ["begin", "finish"]
    assert report.seconds["proxy"] == 1.5
    assert report.devices["proxy"] == "abacus"
    assert [o.layer for o in watcher.shown] == full * 2
    assert [o.query.shape[2] for o in watcher.shown] == [20] * len(full) + [10] * len(full)
    assert [o.columns for o in watcher.shown] == [20] * len(full) + [30] * len(full)
    for place, o in enumerate(watcher.shown):
        assert torch.equal(o.hidden, entered[o.layer][place // len(full)])
        assert o.key.shape[2] == o.columns
        assert o.scaling == (24**-0.5 if kind == "gemma3" else 8**-0.5)


def test_nothing_of_what_observers_saw_stays_behind():
    from proxykv_hf.attention import functions as attention

    model = tiny_model("gemma3")
    with ProxyPrunedCache(model, SnapKVScorer(8), POLICY) as cache:
        cache.prefill(random_ids(2, 60))
        assert attention._thread.hidden is None
        assert attention._thread.handed is None


def test_snapkv_goes_on_with_fewer_queries_when_the_prompt_is_cropped():
    model = tiny_model()
    ids = random_ids(1, 60)
    with ProxyPrunedCache(model, SnapKVScorer(8), POLICY, strict=True) as cache:
        call_forward(model, input_ids=ids, cache=cache)
        cache.crop(-3)
        kept = [head.tolist() for head in cache.kept_indices(1)]
    with ProxyPrunedCache(model, SnapKVScorer(5), POLICY, strict=True) as shorter:
        shorter.prefill(ids[:, :57])
        assert kept == [head.tolist() for head in shorter.kept_indices(1)]


def test_other_scorers_are_cancelled_and_begun_again_when_a_chunk_follows():
    model = tiny_model()
    ids = random_ids(1, 30)
    scorer = Watcher(random_scores(model, 1, 30))
    scorer.observes = False
    with ProxyPrunedCache(model, scorer, POLICY) as cache:
        call_forward(model, input_ids=ids[:, :20], cache=cache)
        assert scorer.events == ["begin"]
        call_forward(model, input_ids=ids[:, 20:], cache=cache)
        assert scorer.events == ["begin", "cancel"]
        cache.report()
    assert scorer.events == ["begin", "cancel", "begin", "finish"]
    assert not scorer.shown


@pytest.mark.parametrize("scorer", [KVzipScorer(), SnapKVScorer(), RandomScorer(), FixedScorer(torch.empty(0))])
def test_shipped_scorers_follow_the_protocol(scorer):
    assert isinstance(scorer, Scorer)
    assert scorer.name.isidentifier()


@pytest.mark.parametrize(
    "make", [lambda: KVzipScorer(chunk_tokens=0), lambda: SnapKVScorer(0), lambda: SnapKVScorer(kernel_size=4)]
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(InvalidInputError, match="expected"):
        make()


def test_without_a_chat_template_the_suffix_is_a_line_break():
    import copy

    plain = copy.deepcopy(TOKENIZER)
    plain.chat_template = None
    assert chat_affixes(plain) == ("", "\n")
    assert chat_affixes(TOKENIZER) == ("<user>", "</s><bot>")


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_snapkv_keeps_the_latest_of_its_window_where_not_all_of_it_fits(allocation):
    policy = RetentionPolicy(0.1, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with ProxyPrunedCache(tiny_model(), SnapKVScorer(16), policy) as cache:
        cache.prefill(random_ids(1, 60))
        for layer in range(3):
            for head in cache.kept_indices(layer):
                assert head.tolist() == [*range(54, 60)]
