"""A target whose weights are on disk between forwards, as ``device_map`` can place them."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import disk_offload
from every_scorer import SCORERS
from tiny import random_ids, random_scores, tiny_model
from tiny_mappers import make_mapper
from transformers import AutoModelForCausalLM

from proxykv_hf import FixedScorer, ProxyPrunedCache, RetentionPolicy, UnsupportedModelError
from proxykv_hf._compat import call_forward
from proxykv_hf.geometry import device_of, weights_fingerprint
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers
from proxykv_hf.scorers.proxy import ProxyScorer

TOKENS = 30
POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")


@pytest.fixture(params=["some", "all"])
def offloaded(request, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    if request.param == "all":
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return disk_offload(model, tmp_path / "offload", execution_device=torch.device("cpu"))
    places = {part: "disk" if part.startswith("model.layers.1") else "cpu" for part in (*PARTS, "lm_head")}
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )


def test_an_offloaded_target_prefills_saves_and_loads_like_one_in_memory(offloaded, tmp_path):
    model = tiny_model()
    ids, more, scorer = random_ids(1, TOKENS), random_ids(1, 3, seed=1), FixedScorer(random_scores(model, 1, TOKENS))
    with ProxyPrunedCache(model, scorer, POLICY) as cache:
        cache.prefill(ids)
        cache.save(tmp_path / "whole")
        expected = call_forward(model, input_ids=more, cache=cache).logits
    with ProxyPrunedCache(offloaded, scorer, POLICY, strict=True) as cache:
        cache.prefill(ids)
        assert cache.report().devices["target"] == "cpu"
        cache.save(tmp_path / "offloaded")
        torch.testing.assert_close(call_forward(offloaded, input_ids=more, cache=cache).logits, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # weights that cannot be read do not count as different
        for target, folder in ((offloaded, "whole"), (offloaded, "offloaded"), (model, "offloaded")):
            with ProxyPrunedCache.load(tmp_path / folder, target=target) as loaded:
                logits = call_forward(target, input_ids=more, cache=loaded).logits
                torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_rates_an_offloaded_target_like_one_in_memory(offloaded, name):
    ids, scores = random_ids(1, TOKENS), []
    for target in (tiny_model(), offloaded):
        with ProxyPrunedCache(target, SCORERS[name](target), POLICY, strict=True) as cache:
            scores += cache.prefill(ids, prune=False).values()
    torch.testing.assert_close(scores[1], scores[0])


def test_an_offloaded_target_has_a_device_but_no_fingerprint(offloaded):
    assert weights_fingerprint(offloaded) is None
    assert {device_of(module) for module in offloaded.modules()} == {torch.device("cpu")}


def test_an_offloaded_targets_own_layers_are_refused_as_its_proxy(offloaded):
    model, proxy = tiny_model(), tiny_model("qwen2", 1, layers=2).model
    own = make_mapper(model, first_layers(model, 2), proxy_id=SELF_PROXY)
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        ProxyScorer.from_pretrained(own, target=offloaded)
    mapper = make_mapper(model, proxy, target_weights=weights_fingerprint(model))
    scorer = ProxyScorer.from_pretrained(mapper, target=offloaded, proxy=proxy)
    assert scorer.mapper.device == torch.device("cpu")
    with ProxyPrunedCache(offloaded, scorer, POLICY) as cache:
        assert cache._prefill.schedule == "proxy_first"  # both compute on the CPU
