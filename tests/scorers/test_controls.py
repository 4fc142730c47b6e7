"""The two controls that a trained mapper has to beat."""

from __future__ import annotations

import pytest
import torch
from tiny import pad_left, random_ids, tiny_model, tiny_tokenizer
from whole_attention import kvzip_twin

from proxykv_hf import (
    GeometryError,
    HeadPriorScorer,
    InvalidInputError,
    ModelGeometry,
    ProxyPrunedCache,
    RetentionPolicy,
    StaticAlignmentScorer,
)
from proxykv_hf.scorers.static_alignment import align, proportional_layers

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)


@pytest.mark.parametrize("group", [1, 3, 7])
def test_static_alignment_is_the_proxys_kvzip_carried_over(group):
    target, proxy = tiny_model("llama", 2, layers=5), tiny_model("qwen2", group, layers=3)
    ids = random_ids(1, 40)
    with ProxyPrunedCache(target, StaticAlignmentScorer(proxy.model, tiny_tokenizer()), POLICY, strict=True) as cache:
        scores = cache.prefill(ids, context=(4, 40))["static_alignment"]
    twin = kvzip_twin(proxy, ids[0].tolist(), (4, 40), 2048)
    torch.testing.assert_close(scores[0], twin[[0, 0, 1, 2, 2]], atol=1e-4, rtol=1e-4)


def geometry(*sliding):
    """A geometry with one layer for each of ``sliding``, which says whether the layer has a sliding window."""
    return ModelGeometry(len(sliding), 4, 8, 8, tuple(16 if window else None for window in sliding))


def test_layers_and_heads_are_mapped_in_proportion():
    target, proxy = geometry(0, 0, 0, 0), geometry(0, 0, 0)
    scores = torch.arange(6.0).view(3, 2, 1)
    layers = proportional_layers(proxy, target)
    assert layers == [0, 1, 1, 2]
    assert align(scores, target, layers)[:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert align(scores, target, [2, 2, 0, 1])[:, 0, 0].tolist() == [4, 4, 0, 2]
    assert proportional_layers(proxy, geometry(0)) == [0]


def test_full_attention_layers_are_mapped_among_themselves():
    proxy = geometry(1, 0, 1, 0, 1, 0)
    every = proportional_layers(proxy, geometry(1, 1, 0, 1, 1, 0, 0, 1))
    assert [every[layer] for layer in (2, 5, 6)] == [1, 3, 5]
    assert proportional_layers(proxy, geometry(0, 0, 0, 0)) == [1, 3, 3, 5]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_layer_of_full_attention_is_scored(kind):
    target, proxy = tiny_model(kind, 2, layers=4), tiny_model("gemma3", 1, layers=6)
    with ProxyPrunedCache(target, StaticAlignmentScorer(proxy.model, tiny_tokenizer()), POLICY, strict=True) as cache:
        scores = cache.prefill(random_ids(1, 40))["static_alignment"]
        assert (scores[0, list(cache.geometry.full_layers)] > 0).all()


@pytest.mark.parametrize(
    ("layer_map", "message"),
    [
        ([0, 1], "expected 3 of the proxy's layers, 0 to 3"),
        ([0, 1, 4], "expected 3 of the proxy's layers, 0 to 3"),
        ([1, 2, 3], r"got the proxy's layers \[2\], which have a sliding window.*full attention: \[1, 3\]"),
    ],
)
def test_layer_maps_that_do_not_fit_are_refused_before_the_prefill(layer_map, message):
    target, proxy, calls = tiny_model(), tiny_model("gemma3", layers=4), []
    target.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    scorer = StaticAlignmentScorer(proxy.model, tiny_tokenizer(), layer_map=layer_map)
    with ProxyPrunedCache(target, scorer, POLICY) as cache, pytest.raises(InvalidInputError, match=message):
        cache.prefill(random_ids(1, 40))
    assert not calls


def test_a_sliding_layer_of_the_proxy_may_stand_for_one_of_the_target():
    target, proxy = tiny_model("gemma3", 2, layers=4), tiny_model("gemma3", layers=4)
    scorer = StaticAlignmentScorer(proxy.model, tiny_tokenizer(), layer_map=[0, 1, 2, 3])
    with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
        assert cache.prefill(random_ids(1, 40))


def test_the_head_prior_fills_the_best_heads_first():
    model = tiny_model()
    prior = torch.tensor([[1.0, 5], [2, 0], [4, 3]])
    with ProxyPrunedCache(model, HeadPriorScorer(prior), POLICY, strict=True) as cache:
        cache.prefill(random_ids(2, 40))
        assert cache.report().kept_tokens[1] == [[1, 40], [1, 1], [28, 1]]
        assert cache.kept_indices(2)[0].tolist() == list(range(28))
    with (
        ProxyPrunedCache(model, HeadPriorScorer(prior[:2]), POLICY) as cache,
        pytest.raises(GeometryError, match=r"expected a prior \[L, H\] = \[3, 2\], got \[2, 2\]"),
    ):
        cache.prefill(random_ids(1, 40))


@pytest.mark.parametrize("group", [1, 3, 7])
def test_the_head_prior_is_one_number_per_head(group):
    """The number is the same for all tokens of all rows, and for padding."""
    model, prior = tiny_model("qwen2", group), torch.tensor([[1.0, 5], [2, 0], [4, 3]])
    ids, mask = pad_left([random_ids(1, n)[0] for n in (17, 9)])
    with ProxyPrunedCache(model, HeadPriorScorer(prior), POLICY, strict=True) as cache:
        scores = cache.prefill(ids, mask, prune=False)["head_prior"]
    assert scores.shape == (2, 3, 2, 17)
    for layer in range(3):
        for head in range(2):
            assert set(scores[:, layer, head].flatten().tolist()) == {float(prior[layer, head])}
