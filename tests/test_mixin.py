"""``generate(proxykv=...)``."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import pickle
import subprocess
import sys

import pytest
import torch
from tiny import random_ids, random_scores, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, pipeline

from proxykv_hf import (
    FixedScorer,
    InvalidInputError,
    InvalidPolicyError,
    KVzipScorer,
    ProxyKVConfig,
    ProxyKVGenerationMixin,
    ProxyPrunedCache,
    ProxyScorer,
    RandomScorer,
    RetentionPolicy,
    with_proxykv,
)
from proxykv_hf._compat import CACHE_KEYWORDS, cache_keyword
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers

TOKENS = 50
POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


class ProxyKVLlama(ProxyKVGenerationMixin, LlamaForCausalLM):
    """As a user writes it."""


def expected(model, scorer, ids, **kwargs):
    with ProxyPrunedCache(model, scorer, POLICY, tokenizer=tiny_tokenizer()) as cache:
        return model.generate(ids, **{cache_keyword(model): cache}, **GREEDY | kwargs)


@pytest.mark.parametrize("how", ["wrapped", "subclass"])
def test_generate_prunes_when_asked_and_only_then(how):
    plain = tiny_model()
    ids, scorer = random_ids(1, TOKENS), RandomScorer(1)
    pruned, whole = expected(plain, scorer, ids), plain.generate(ids, **GREEDY)
    if how == "wrapped":
        model = with_proxykv(plain)
        assert with_proxykv(model) is plain
    else:
        model = ProxyKVLlama(plain.config).eval()
        model.load_state_dict(plain.state_dict())
    assert torch.equal(model.generate(ids, **GREEDY), whole)
    assert torch.equal(model.generate(ids, **GREEDY, proxykv=ProxyKVConfig(scorer=scorer, policy=POLICY)), pruned)
    assert torch.equal(
        model.generate(input_ids=ids, **GREEDY, proxykv=ProxyKVConfig(scorer=scorer, policy=POLICY)), pruned
    )
    assert model.config._attn_implementation == "sdpa"


def test_the_cache_is_returned_if_asked_for_and_closed_otherwise():
    model = with_proxykv(tiny_model())
    config = ProxyKVConfig(scorer=RandomScorer(), policy=POLICY)
    out = model.generate(random_ids(1, TOKENS), **GREEDY, proxykv=config, return_dict_in_generate=True)
    cache = next(getattr(out, name) for name in CACHE_KEYWORDS if getattr(out, name, None) is not None)
    assert cache.report().seen_tokens == [TOKENS + 7]
    cache.close()
    model.generate(random_ids(1, TOKENS), **GREEDY, proxykv=config)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(random_ids(1, TOKENS), **GREEDY, proxykv=config)
    handle.remove()
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("tokens", [33, 64])
def test_a_last_chunk_of_one_token_is_part_of_the_prompt(tokens):
    model = with_proxykv(tiny_model())
    ids, scores = random_ids(1, tokens), random_scores(model, 1, tokens)
    config = ProxyKVConfig(scorer=FixedScorer(scores), policy=POLICY, strict=True)
    out = model.generate(ids, **GREEDY, proxykv=config, prefill_chunk_size=32)
    assert torch.equal(out, expected(model, FixedScorer(scores), ids))


def test_drafts_are_told_from_the_prompt():
    model = with_proxykv(tiny_model())
    ids = random_ids(1, 10).repeat(1, 5)
    config = ProxyKVConfig(scorer=KVzipScorer(tiny_tokenizer()), policy=POLICY, strict=True)
    out = model.generate(ids, **GREEDY, proxykv=config, prompt_lookup_num_tokens=4)
    assert torch.equal(out, expected(model, config.scorer, ids, prompt_lookup_num_tokens=4))


@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_embeddings_are_the_prompt_where_tokens_are_given_beside_them(tokens):
    model = with_proxykv(tiny_model())
    ids = random_ids(1, TOKENS)
    inputs = {"input_ids": ids[:, :tokens], "inputs_embeds": model.get_input_embeddings()(ids)}
    scorer = FixedScorer(random_scores(model, 1, TOKENS))
    config = ProxyKVConfig(scorer=scorer, policy=POLICY, strict=True)
    out = model.generate(**inputs, **GREEDY, proxykv=config, return_dict_in_generate=True)
    cache = next(getattr(out, name) for name in CACHE_KEYWORDS if getattr(out, name, None) is not None)
    with ProxyPrunedCache(model, scorer, POLICY) as plain:
        plain.prefill(ids)
        for layer in range(3):
            for ours, theirs in zip(cache.kept_indices(layer), plain.kept_indices(layer), strict=True):
                assert torch.equal(ours, theirs)
    assert cache.report().seen_tokens == [TOKENS + 7]
    cache.close()


def test_a_config_means_what_it_says_now(tmp_path):
    model = with_proxykv(tiny_model("llama", 3))
    config = ProxyKVConfig(scorer=RandomScorer(), retention_ratio=0.3)
    config.retention_ratio = 0.1
    for same in (config, dataclasses.replace(config, strict=True)):
        with same.make_cache(model) as cache:
            assert cache.policy == RetentionPolicy(0.1)
    config.policy = POLICY
    with pytest.raises(InvalidPolicyError, match="got both"):
        config.make_cache(model)
    config.retention_ratio = None
    for number in (0, 1):
        mapper = make_mapper(model, first_layers(model, 2), proxy_id=SELF_PROXY, target_id=f"target {number}")
        mapper.save_pretrained(tmp_path / str(number))
        config.scorer, config.mapper = None, tmp_path / str(number)
        with config.make_cache(model) as cache:
            assert cache.scorer.mapper.config.target_id == f"target {number}"
    config.scorer = RandomScorer()
    with pytest.raises(InvalidInputError, match="got both"):
        config.make_cache(model)


def test_a_mapper_is_loaded_once_for_a_model(tmp_path, monkeypatch):
    model = with_proxykv(tiny_model("llama", 3))
    make_mapper(model, first_layers(model, 2), proxy_id=SELF_PROXY).save_pretrained(tmp_path)
    loads, load = [], ProxyScorer.from_pretrained

    def counted(*args, **kwargs):
        loads.append(kwargs["threads"])
        return load(*args, **kwargs)

    monkeypatch.setattr(ProxyScorer, "from_pretrained", counted)
    config = ProxyKVConfig(mapper=tmp_path, retention_ratio=0.5, strict=True, options={"threads": 1})
    ids = random_ids(1, TOKENS)
    first = model.generate(ids, **GREEDY, proxykv=config)
    assert torch.equal(model.generate(ids, **GREEDY, proxykv=config), first)
    assert loads == [1]


def test_a_config_goes_to_another_process(tmp_path):
    model = with_proxykv(tiny_model("llama", 3))
    make_mapper(model, first_layers(model, 2), proxy_id=SELF_PROXY).save_pretrained(tmp_path)
    config = ProxyKVConfig(mapper=tmp_path, retention_ratio=0.5)
    answer = model.generate(random_ids(1, TOKENS), **GREEDY, proxykv=config)  # has loaded the mapper
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert torch.equal(model.generate(random_ids(1, TOKENS), **GREEDY, proxykv=again), answer)


def test_saving_writes_the_plain_architecture(tmp_path):
    for number, model in enumerate((with_proxykv(tiny_model()), ProxyKVLlama(tiny_model().config))):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert type(AutoModelForCausalLM.from_pretrained(folder)) is LlamaForCausalLM
        assert isinstance(model, ProxyKVGenerationMixin)


class Reduced(LlamaForCausalLM):
    """Its class says how it is pickled, and where its state goes."""

    def __reduce__(self):
        return type(self)._remade, (self.config,), self.state_dict()

    @classmethod
    def _remade(cls, config):
        return cls(config).eval()

    def __setstate__(self, state):
        self.load_state_dict(state)


@pytest.mark.parametrize("plain", [LlamaForCausalLM, Reduced])
@pytest.mark.parametrize("again", [lambda model: pickle.loads(pickle.dumps(model)), copy.deepcopy, copy.copy])
def test_a_model_is_pickled_and_copied_as_before(plain, again):
    model = tiny_model()
    model.__class__ = plain
    model, other = with_proxykv(model), with_proxykv(plain(model.config))
    assert type(other) is type(model)
    copied = again(model)
    assert type(copied) is type(model)
    assert copied is not model
    ids, config = random_ids(1, TOKENS), ProxyKVConfig(scorer=RandomScorer(1), policy=POLICY)
    assert torch.equal(copied.generate(ids, **GREEDY, proxykv=config), model.generate(ids, **GREEDY, proxykv=config))


def test_a_model_is_sent_to_a_process_that_begins_afresh(tmp_path):
    torch.save(with_proxykv(tiny_model()), tmp_path / "model.pt")
    code = f"import torch; print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)).__mro__[:3])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ProxyKVGenerationMixin" in done.stdout


def test_the_class_keeps_its_name_and_a_pipeline_knows_it(monkeypatch):
    from transformers.pipelines import base

    model, told = tiny_model(), []
    plain = type(model)
    monkeypatch.setattr(base.logger, "error", told.append)
    pipe = pipeline("text-generation", model=with_proxykv(model), tokenizer=tiny_tokenizer())
    assert told == []
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(model), name) == getattr(plain, name)
    assert type(model) is not plain
    config = ProxyKVConfig(scorer=RandomScorer(), policy=POLICY)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    answer = pipe("abcdefgh" * 4, proxykv=config, return_full_text=False, **options)
    ids = tiny_tokenizer()("abcdefgh" * 4, return_tensors="pt").input_ids
    expected = model.generate(ids, proxykv=config, **options)[0, ids.shape[1] :]
    assert answer[0]["generated_text"] == tiny_tokenizer().decode(expected)


@pytest.mark.parametrize("keyword", CACHE_KEYWORDS)
def test_a_cache_has_either_name_on_every_release(keyword):
    """Warnings are errors here: a name that the release deprecates would fail."""
    plain, model = tiny_model(), with_proxykv(tiny_model())
    ids = random_ids(1, TOKENS)
    expected = plain.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY, **{keyword: DynamicCache(config=model.config)}), expected)
    with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(1.0)) as cache:
        assert torch.equal(model.generate(ids, **GREEDY, **{keyword: cache}), expected)


def test_what_contradicts_itself_is_refused():
    model = with_proxykv(tiny_model())
    with pytest.raises(InvalidInputError, match="got neither"):
        ProxyKVConfig()
    with pytest.raises(InvalidInputError, match="got both"):
        ProxyKVConfig(mapper="a/b", scorer=RandomScorer())
    with pytest.raises(InvalidPolicyError, match="got both"):
        ProxyKVConfig(scorer=RandomScorer(), policy=POLICY, retention_ratio=0.1)
    with pytest.raises(InvalidPolicyError, match="retention_ratio"):
        ProxyKVConfig(scorer=RandomScorer(), retention_ratio=2.0)
    with pytest.raises(InvalidInputError, match=r"expected a ProxyKVConfig.*got 0\.3"):
        model.generate(random_ids(1, 5), proxykv=0.3)
    with pytest.raises(InvalidInputError, match="proxykv or a cache, got both"):
        model.generate(
            random_ids(1, 5), proxykv=ProxyKVConfig(scorer=RandomScorer()), **{cache_keyword(model): DynamicCache()}
        )
