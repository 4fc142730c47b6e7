"""What `generate` does with a `DynamicCache` it does with this cache, everything kept: equal, whatever the mask."""

from __future__ import annotations

import pytest
import torch
from families import WORKING, make_family
from tiny import KINDS, random_ids, tiny_model
from transformers import DynamicCache

from proxykv_hf import ProxyPrunedCache, RetentionPolicy, SnapKVScorer, with_proxykv
from proxykv_hf._compat import CACHE_KEYWORDS, call_forward

COLUMNS, NEW = 18, 6
OTHERS = ["phi3", "granite", "olmo2", "qwen3-moe", "gpt-oss", "cohere", "gpt-neox"]
FAMILIES = {kind: lambda kind=kind: tiny_model(kind, attention="eager") for kind in KINDS}
FAMILIES |= {name: WORKING[name] for name in OTHERS}
FAMILIES["mixtral"] = lambda: make_family("Mixtral", num_local_experts=2, num_experts_per_tok=1, sliding_window=None)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in ("llama", "gemma3", "gpt-oss")]
FAMILY = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss", *SLOW])
MASKS = ["ones", "left", "right", "holes"]
POLICIES = [RetentionPolicy(1.0), RetentionPolicy(1.0, allocation="uniform")]


def make(family):
    model = FAMILIES[family]()
    model.set_attn_implementation("eager")
    model.generation_config.pad_token_id = 0
    return with_proxykv(model)


def inputs(kind):
    ids, mask = random_ids(2, COLUMNS, seed=3), torch.ones(2, COLUMNS, dtype=torch.long)
    hidden = {"ones": [], "left": [0, 1, 2, 3], "right": [14, 15, 16, 17], "holes": [1, 2, 9, 16]}[kind]
    ids[1, hidden], mask[1, hidden] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(model, given, policy, seed=0, **options):
    """What `generate` returns with a plain cache and with ours."""
    found = []
    for make_cache in (
        lambda: DynamicCache(config=model.config),
        lambda: ProxyPrunedCache(model, SnapKVScorer(4), policy, strict=True),
    ):
        torch.manual_seed(seed)
        cache = make_cache()
        found.append(model.generate(**given, cache=cache, return_dict_in_generate=True, max_new_tokens=NEW, **options))
        if isinstance(cache, ProxyPrunedCache):
            assert cache.report().fallback is None
            cache.close()
    return found


def assert_equal(plain, ours):
    assert torch.equal(ours.sequences, plain.sequences)
    for name in ("scores", "logits", "hidden_states", "attentions"):
        expected, found = getattr(plain, name, None), getattr(ours, name, None)
        assert (expected is None) == (found is None)
        for one, other in zip(expected or (), found or (), strict=True):
            pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
            for a, b in pairs:
                torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@FAMILY
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "output_scores": True, "output_hidden_states": True, "output_attentions": True},
        {"do_sample": True, "output_logits": True},
        {
            "do_sample": False,
            "num_beams": 2,
            "num_return_sequences": 2,
            "output_scores": True,
            "output_attentions": True,
        },
        {"do_sample": True, "num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "sampled", "beams", "beam-sampled", "several"],
)
def test_generate_returns_what_it_returns_with_a_plain_cache(family, mask, policy, options):
    assert_equal(*both(make(family), inputs(mask), policy, **options))


@FAMILY
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_stop_each_at_its_own_token(family, policy, mask):
    model = make(family)
    free = model.generate(**inputs(mask), cache=DynamicCache(config=model.config), max_new_tokens=NEW, do_sample=False)
    plain, ours = both(model, inputs(mask), policy, do_sample=False, eos_token_id=int(free[0, COLUMNS + 2]))
    assert_equal(plain, ours)


@FAMILY
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
def test_embeddings_alone_and_beside_ids(family, policy):
    model = make(family)
    ids = random_ids(2, COLUMNS, seed=3)
    embeddings = model.get_input_embeddings()(ids)
    assert_equal(*both(model, {"inputs_embeds": embeddings}, policy, do_sample=False))
    assert_equal(*both(model, {"inputs_embeds": embeddings, "input_ids": ids}, policy, do_sample=False))


@FAMILY
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
def test_drafts_by_prompt_lookup_and_by_a_smaller_model(family, policy):
    model = make(family)
    given = {"input_ids": random_ids(1, 6, seed=3).repeat(1, 4)}
    assert_equal(*both(model, given, policy, do_sample=False, prompt_lookup_num_tokens=3))
    assistant = tiny_model("llama", 1, layers=1)
    assert_equal(*both(model, given, policy, do_sample=False, assistant_model=assistant))


@FAMILY
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
@pytest.mark.parametrize("mask", MASKS)
def test_it_goes_on_from_a_returned_cache(family, policy, mask):
    model = make(family)
    found = []
    for cache in (DynamicCache(config=model.config), ProxyPrunedCache(model, SnapKVScorer(4), policy, strict=True)):
        given = inputs(mask)
        first = model.generate(**given, cache=cache, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        returned = next(kept for name in CACHE_KEYWORDS if (kept := getattr(first, name, None)) is not None)
        assert returned is cache
        more = torch.cat([first.sequences, random_ids(2, 4, seed=8)], dim=1)
        grown = torch.cat([given["attention_mask"], torch.ones(2, more.shape[1] - COLUMNS, dtype=torch.long)], dim=1)
        found.append(
            model.generate(
                more, attention_mask=grown, cache=cache, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
            )
        )
    assert_equal(*found)


@FAMILY
@pytest.mark.parametrize("policy", POLICIES, ids=["global", "uniform"])
@pytest.mark.parametrize("mask", MASKS)
def test_plain_forwards_with_and_without_position_ids_and_with_few_logits(family, policy, mask):
    model = make(family)
    given = inputs(mask)
    grown = torch.cat([given["attention_mask"], torch.ones(2, 3, dtype=torch.long)], dim=1)
    for positions in (True, False):
        found = []
        for cache in (DynamicCache(config=model.config), ProxyPrunedCache(model, SnapKVScorer(4), policy, strict=True)):
            logits = []
            for columns, size in ((slice(0, COLUMNS), COLUMNS), (slice(COLUMNS, None), COLUMNS + 3)):
                ids = torch.cat([given["input_ids"], random_ids(2, 3, seed=4)], dim=1)[:, columns]
                more = {"position_ids": (grown.cumsum(1) - 1).clamp(min=0)[:, columns]} if positions else {}
                logits.append(
                    call_forward(
                        model, input_ids=ids, attention_mask=grown[:, :size], cache=cache, use_cache=True,
                        logits_to_keep=2, **more,
                    ).logits[:, -2:]
                )  # fmt: skip
                if isinstance(cache, ProxyPrunedCache):
                    cache.report()
            found.append(logits)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
