"""Other model families: they agree with the reference, or are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from families import NO_KV_HEADS, OWN_WAY, SMALL_GPT2, WORKING, computes_by_the_interface, make_family
from reference import Reference, ReferenceRow, slow_selection
from tiny import random_ids
from watcher import Watcher

from proxykv_hf import FixedScorer, ProxyPrunedCache, RandomScorer, RetentionPolicy, UnsupportedModelError
from proxykv_hf._compat import call_forward

TOKENS = 30


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("name", WORKING)
def test_other_families_equal_the_reference(name, allocation):
    model = WORKING[name]()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids, new = random_ids(1, TOKENS), random_ids(1, 4, seed=1)
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
    if not computes_by_the_interface(model):
        with (
            ProxyPrunedCache(model, RandomScorer(), policy) as cache,
            pytest.raises(UnsupportedModelError, match=OWN_WAY),
        ):
            cache.prefill(ids)
        return
    with ProxyPrunedCache(model, RandomScorer(), policy, strict=True) as cache:
        full = list(cache.geometry.full_layers)
        shape = (cache.geometry.num_layers, cache.geometry.num_key_value_heads, TOKENS)
        scores = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        cache.scorer = FixedScorer(scores[None])
        cache.reset()
        cache.prefill(ids)
        ours = call_forward(model, input_ids=new, cache=cache).logits[0]
    keep = torch.ones(shape, dtype=torch.bool)
    keep[full] = slow_selection(scores[full], 0.3, allocation)
    expected = Reference(model).logits(ReferenceRow(ids[0].tolist(), keep), new[0].tolist())
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neox", "phi3"])
def test_observers_are_shown_the_hidden_states_of_other_families(name):
    model = WORKING[name]()
    watcher = Watcher(torch.rand(1, 2, 2 if name == "phi3" else 4, TOKENS))
    with ProxyPrunedCache(model, watcher, RetentionPolicy(0.5), strict=True) as cache:
        cache.prefill(random_ids(1, TOKENS))
    assert [tuple(seen.hidden.shape) for seen in watcher.shown] == [(1, TOKENS, 32)] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("falcon-alibi", f"a mask for each head|{OWN_WAY}"),
        ("bloom", OWN_WAY),
        ("diffllama", "attends to other values than it cached"),
        ("doge", "a mask for each head"),
        ("openai-gpt", "stored nothing in its cache"),
        ("qwen3-next", "got LinearAttentionLayer in layer 0"),
    ],
)
def test_a_model_that_cannot_be_pruned_is_refused_with_the_reason(name, message):
    model = {
        "falcon-alibi": lambda: make_family("Falcon", NO_KV_HEADS, alibi=True),
        "bloom": lambda: make_family("Bloom", {"vocab_size": 260, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        "diffllama": lambda: make_family("DiffLlama"),
        "doge": lambda: make_family("Doge", keep_window_size=8),
        "openai-gpt": lambda: make_family("OpenAIGPT", SMALL_GPT2 | {"afn": "gelu"}, "OpenAIGPTLMHeadModel"),
        "qwen3-next": lambda: make_family("Qwen3Next"),
    }[name]()

    def prefill():
        with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.3)) as cache:
            cache.prefill(random_ids(1, TOKENS))

    with pytest.raises(UnsupportedModelError, match=message):
        prefill()
    assert model.config._attn_implementation in ("eager", "sdpa")
