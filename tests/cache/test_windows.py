"""Sliding windows that are as large as all positions, and models whose layers all have a real sliding window."""

from __future__ import annotations

import pytest
import torch
from reference import Reference, ReferenceRow, slow_selection
from tiny import random_ids
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM

from proxykv_hf import (
    CacheStateError,
    FixedScorer,
    ModelGeometry,
    ProxyKVWarning,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    UnsupportedModelError,
    with_proxykv,
)
from proxykv_hf._compat import call_forward

TOKENS = 40
#: The fields that make the models small. All other fields are those of the released configs.
SMALL = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def longrope(rotated):
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0 + place for place in range(rotated // 2)],
        "short_factor": [1.0] * (rotated // 2),
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": rotated / 16,
    }


def phi35_mini():
    """Phi-3.5-mini-instruct: 131,072 positions, a window of 262,144, as many KV heads as query heads."""
    return Phi3ForCausalLM(
        Phi3Config(
            **SMALL, num_key_value_heads=4, max_position_embeddings=131072, original_max_position_embeddings=4096,
            sliding_window=262144, rope_parameters=longrope(16),
        )
    )  # fmt: skip


def phi4_mini():
    """Phi-4-mini-instruct: the same window, grouped heads, and three quarters of each head rotated."""
    return Phi3ForCausalLM(
        Phi3Config(
            **SMALL, num_key_value_heads=2, max_position_embeddings=131072, original_max_position_embeddings=4096,
            sliding_window=262144, partial_rotary_factor=0.75, tie_word_embeddings=True, rope_parameters=longrope(12),
        )
    )  # fmt: skip


BOUNDED = "every layer of the target has a sliding window"


def mistral(window):
    """Mistral-7B-v0.1 has 32,768 positions and a window of 4,096."""
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=32768, sliding_window=window)
    return MistralForCausalLM(config).eval()


def sharpen(model):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("make", [phi35_mini, phi4_mini])
def test_a_window_of_more_than_all_positions_is_full_attention(make, allocation):
    model = sharpen(make())
    geometry = ModelGeometry.from_config(model.config)
    assert geometry.sliding_windows == (None, None)
    scores = torch.rand(1, 2, geometry.num_key_value_heads, TOKENS, generator=torch.Generator().manual_seed(1))
    ids, new = random_ids(1, TOKENS), random_ids(1, 4, seed=1)
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with ProxyPrunedCache(model, FixedScorer(scores), policy, strict=True) as cache:
        cache.prefill(ids)
        ours = call_forward(model, input_ids=new, cache=cache).logits[0]
    keep = slow_selection(scores[0], 0.3, allocation)
    expected = Reference(model).logits(ReferenceRow(ids[0].tolist(), keep), new[0].tolist())
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [16, 4096])
@pytest.mark.parametrize("way", ["prefill", "generate"])
def test_a_model_with_real_windows_only_works_unpruned_with_one_warning(window, way):
    model = with_proxykv(mistral(window))
    ids = random_ids(2, TOKENS)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **options)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.3)) as cache:
        if way == "prefill":
            with pytest.warns(ProxyKVWarning, match=BOUNDED) as told:
                assert cache.prefill(ids[:, :-1]) == {}
            answer = model.generate(ids, cache=cache, **options)
        else:
            with pytest.warns(ProxyKVWarning, match=BOUNDED) as told:
                answer = model.generate(ids, cache=cache, **options)
        assert len(told) == 1
        assert torch.equal(answer, expected)
        report = cache.report()
        assert report.fallback is not None
        assert BOUNDED in report.fallback
        assert report.seen_tokens == [TOKENS + 7] * 2
        assert "uncompressed" in str(report)
        with pytest.raises(CacheStateError, match="sliding windows only"):
            cache.compress(torch.rand(1, 2, 2, TOKENS), RetentionPolicy(0.3))


def test_a_model_with_real_windows_only_is_refused_where_something_must_be_pruned():
    model = mistral(16)
    with pytest.raises(UnsupportedModelError, match="MistralConfig with sliding windows only"):
        ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.3), strict=True)
    with pytest.raises(UnsupportedModelError, match="MistralConfig with sliding windows only"):
        ModelGeometry.from_config(model.config)
