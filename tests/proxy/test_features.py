"""The features of the proxy, compared with whole attention matrices and plain loops."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from tiny import random_ids, tiny_model, tiny_tokenizer
from transformers import DynamicCache
from whole_attention import kvzip_twin

from proxykv_hf import InvalidInputError
from proxykv_hf._compat import call_forward
from proxykv_hf.attention import logits
from proxykv_hf.proxy import features
from proxykv_hf.proxy.features import LOG_FLOOR, NEIGHBOURHOOD, WINDOW, FeatureRecipe, proxy_features
from proxykv_hf.proxy.lane import Lane, cancellable

TOKENIZER = tiny_tokenizer()


def log_scale(weights):
    return weights.clamp(min=math.exp(LOG_FLOOR)).log()


def attention_twin(model, ids):
    """The attention features `[L * 3 * Q, n]`, token by token, from the matrices of an eager forward."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    matrices = call_forward(model, input_ids=ids, cache=DynamicCache(), output_attentions=True).attentions
    model.set_attn_implementation(backend)
    layers = []
    for (weights,) in matrices:
        tokens = weights.shape[-1]
        rows = torch.zeros(3, weights.shape[0], tokens)
        for head in range(weights.shape[0]):
            for place in range(tokens):
                later = range(place + NEIGHBOURHOOD, tokens)
                seen = [float(weights[head, query, place]) for query in later]
                last = [float(weights[head, query, place]) for query in later if query >= tokens - WINDOW]
                rows[0, head, place] = max(seen, default=0.0)
                rows[1, head, place] = sum(seen) / max(1, len(seen))
                rows[2, head, place] = sum(last) / min(WINDOW, tokens)
        layers.append(log_scale(rows.flatten(0, 1)))
    return torch.cat(layers)


def hidden_twin(model, ids, layers):
    states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
    parts = [states[layer][0] for layer in layers]
    return torch.cat([(part / part.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()).T for part in parts])


@pytest.mark.parametrize("block", [None, 7])
@pytest.mark.parametrize("tokens", [1, 5, 17, 90])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_features_equal_whole_matrices(tokens, group, block, monkeypatch):
    if block:
        monkeypatch.setattr(logits, "IN_CACHE", block * group * tokens)
    model = tiny_model("qwen2", group)
    ids = random_ids(1, tokens, seed=tokens)
    ours = proxy_features(model.model, ids[0], FeatureRecipe(("attention",), 3))
    torch.testing.assert_close(ours, attention_twin(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_layers_with_a_sliding_window_see_no_further(kind, monkeypatch):
    monkeypatch.setattr(logits, "IN_CACHE", 23 * 2 * 60)
    model = tiny_model(kind, 2, layers=4, attention="eager" if kind == "gemma2" else None)
    ids = random_ids(1, 60)
    recipe = FeatureRecipe(("attention", "hidden", "reconstruction"), 4, (1, 2, 3))
    ours = proxy_features(model.model, ids[0], recipe, tokenizer=TOKENIZER)
    scores = kvzip_twin(model, ids[0].tolist(), (0, 60), 2048)
    scores[::2] = 0  # the sliding layers are not scored
    hidden = hidden_twin(model, ids, (1, 2, 3))
    expected = torch.cat([attention_twin(model, ids), hidden, log_scale(scores.flatten(0, 1))])
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_sources_combine_in_their_order():
    model = tiny_model("qwen3", 2, layers=4)
    ids = random_ids(1, 40)
    recipe = FeatureRecipe(("reconstruction", "hidden", "attention"), 4, (3, 1))
    ours = proxy_features(model.model, ids[0], recipe, tokenizer=TOKENIZER)
    assert ours.shape == (recipe.channels(model.config), 40)
    scores = kvzip_twin(model, ids[0].tolist(), (0, 40), 2048)
    expected = torch.cat([attention_twin(model, ids), hidden_twin(model, ids, (1, 3)), log_scale(scores.flatten(0, 1))])
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


def test_hidden_states_alone_compute_no_attention_features(monkeypatch):
    model = tiny_model(layers=3)
    monkeypatch.setattr(features, "received_attention", None)
    ids = random_ids(1, 30)
    ours = proxy_features(model.model, ids[0], FeatureRecipe(("hidden",), 3, (2,)))
    torch.testing.assert_close(ours, hidden_twin(model, ids, (2,)))


def test_the_proxy_is_left_as_it_was_and_a_cancelled_pass_stops():
    model = tiny_model(layers=3)
    entered, in_second, go = [], threading.Event(), threading.Event()

    def enter(layer):
        entered.append(layer)
        if layer == 1:
            in_second.set()
            go.wait(10)

    handles = [
        layer.register_forward_pre_hook(lambda *_, index=index: enter(index))
        for index, layer in enumerate(model.model.layers)
    ]

    def work():
        with cancellable(model):
            return proxy_features(model.model, random_ids(1, 30)[0], FeatureRecipe(("hidden",), 3, (1,)))

    job = Lane(torch.device("cpu")).submit(work)
    assert in_second.wait(10)
    threading.Timer(0.05, go.set).start()
    job.cancel()
    assert entered == [0, 1]
    for handle in handles:
        handle.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_passes_over_one_proxy_at_once_do_not_mix():
    proxy = tiny_model(layers=3).model
    recipe = FeatureRecipe(("attention", "hidden"), 3, (1, 3))
    prompts = [random_ids(1, 60, seed=seed)[0] for seed in range(4)]
    alone = [proxy_features(proxy, ids, recipe) for ids in prompts]
    together: list = [[] for _ in prompts]

    def work(place):
        together[place] = [proxy_features(proxy, prompts[place], recipe) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, got in zip(alone, together, strict=True):
        assert len(got) == 5
        for features_ in got:
            torch.testing.assert_close(features_, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("guess",), 3), "sources: expected some of attention, hidden, reconstruction"),
        (((), 3), "sources"),
        ((("attention",), 0), "proxy_layers: expected at least 1, got 0"),
        ((("hidden",), 3), "hidden_layers: expected with the source"),
        ((("attention",), 3, (1,)), "hidden_layers: expected with the source"),
        ((("hidden",), 3, (1, 2, 1)), r"hidden_layers: expected each layer once, got \(1, 2, 1\)"),
        ((("hidden",), 3, (4,)), r"expected 1 to 3 \(proxy_layers\), got \(4,\)"),
    ],
)
def test_wrong_recipes_say_what_is_wrong(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        FeatureRecipe(*arguments)


def test_reconstruction_needs_a_tokenizer():
    with pytest.raises(InvalidInputError, match="give its tokenizer"):
        proxy_features(tiny_model().model, random_ids(1, 9)[0], FeatureRecipe(("reconstruction",), 3))


def test_a_recipe_survives_json():
    recipe = FeatureRecipe(("hidden", "attention"), 5, (4, 2))
    assert FeatureRecipe(**recipe.to_dict()) == recipe
    assert recipe.sources == ("attention", "hidden")
