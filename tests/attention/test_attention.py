from __future__ import annotations

import gc
import math
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from tiny import random_ids, random_scores, tiny_model
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from proxykv_hf import FixedScorer, ProxyPrunedCache, RandomScorer, RetentionPolicy, UnsupportedModelError
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.attention.lease import Lease, _Attachment
from proxykv_hf.cache import ragged
from proxykv_hf.cache.ragged import ragged_attention, tail_mask
from proxykv_hf.cache.storage import RaggedStorage


def plain_attention(query, key, value, see, scaling, softcap):
    """The attention of one query head of one row, in float64. ``see`` `[q, N]` is the mask."""
    logits = query.double() @ key.double().T * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~see, -math.inf).softmax(-1) @ value.double()


def plain_varlen(query, key, value, cu_q, cu_k, max_q, max_k, scale):
    """What the flash kernels compute over packed sequences, one sequence after another."""
    output = query.new_empty(len(query), 1, value.shape[-1])
    lse = torch.empty(1, len(query))
    starts = zip(cu_q.tolist()[:-1], cu_q.tolist()[1:], cu_k.tolist()[:-1], cu_k.tolist()[1:], strict=True)
    for q_start, q_stop, k_start, k_stop in starts:
        assert q_stop - q_start <= max_q
        assert k_stop - k_start <= max_k
        logits = query[q_start:q_stop, 0].double() @ key[k_start:k_stop, 0].double().T * scale
        output[q_start:q_stop, 0] = (logits.softmax(-1) @ value[k_start:k_stop, 0].double()).to(query.dtype)
        lse[0, q_start:q_stop] = logits.logsumexp(-1).float()
    return output, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["plain", "softcap", "in parts", "varlen"])
@pytest.mark.parametrize("rows", [[2, 0, 1, 1], [1, 2, 1, 0], [2, 2, 0, 0]], ids=["all", "apart", "without one"])
@pytest.mark.parametrize(("group", "queries", "tail"), [(1, 1, 1), (2, 1, 5), (3, 7, 7), (7, 3, 10)])
def test_ragged_attention_equals_the_plain_one(group, queries, tail, rows, way, dtype, monkeypatch):
    softcap = 3.0 if way == "softcap" else None
    if way == "in parts":
        monkeypatch.setattr(ragged, "LOGITS_LIMIT", 300)
        monkeypatch.setattr(ragged, "LEAST_PART", 2)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if way == "varlen":
        monkeypatch.setattr(ragged, "_suits_varlen", lambda *_: True)
        monkeypatch.setattr(ragged, "varlen_attention", lambda: plain_varlen)
    generator = torch.Generator().manual_seed(group)
    heads, tokens, dim, value_dim, scaling = 2, 23, 8, 5, 0.41
    keys = torch.randn(3, heads, tokens + tail, dim, generator=generator).to(dtype)
    values = torch.randn(3, heads, tokens + tail, value_dim, generator=generator).to(dtype)
    keep = torch.rand(3, heads, tokens, generator=generator) < 0.4
    keep[..., 0] = True
    keep[0, 0] = False
    keep[0, 0, 7] = True  # one token only
    rows = torch.tensor(rows)
    storage = RaggedStorage.empty(keys, values, keep, torch.arange(3))
    storage.fill(keys, values, keep, [0, 1, 2])
    storage.select(rows)
    query = torch.randn(4, heads * group, queries, dim, generator=generator).to(dtype)
    padding = torch.ones(4, tail, dtype=torch.bool)
    padding[1, : tail // 2] = False
    causal = torch.ones(queries, tail, dtype=torch.bool).tril(tail - queries)
    mask = (causal & padding[:, None])[:, None]  # [B, 1, q, T]
    additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    for given in (mask, additive, padding.long()):
        output = ragged_attention(query, storage, given, scaling, softcap)
        assert output.shape == (4, queries, heads * group, value_dim)
        for b, row in enumerate(rows.tolist()):
            for q in range(heads * group):
                h = q // group
                columns = torch.cat([keep[row, h].nonzero()[:, 0], torch.arange(tokens, tokens + tail)])
                see = torch.cat([torch.ones(queries, int(keep[row, h].sum()), dtype=torch.bool), mask[b, 0]], 1)
                expected = plain_attention(
                    query[b, q], keys[row, h, columns], values[row, h, columns], see, scaling, softcap
                )
                error = (output[b, :, q].double() - expected).abs().max()
                assert error < {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]


def test_without_a_mask_the_tail_is_causal():
    assert tail_mask(None, 2, 2, 4, torch.device("cpu")).int().tolist() == [[[1, 1, 1, 0], [1, 1, 1, 1]]] * 2


def policy():
    return RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)


def test_the_attention_is_replaced_once_and_restored_by_the_last_cache():
    model = tiny_model()
    before = model.config._attn_implementation
    first = ProxyPrunedCache(model, None, policy())
    second = ProxyPrunedCache(model, None, policy())
    assert model.config._attn_implementation == f"proxykv_{before}"
    first.close()
    first.close()
    assert model.config._attn_implementation == f"proxykv_{before}"
    assert f"proxykv_{before}" in AttentionInterface._global_mapping
    del second
    gc.collect()
    assert model.config._attn_implementation == before
    assert f"proxykv_{before}" not in AttentionInterface._global_mapping
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_attention_that_a_user_set_meanwhile_is_not_undone():
    model = tiny_model()
    with Lease(model):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_models_built_from_one_config_do_not_disturb_each_other():
    from transformers import LlamaForCausalLM

    first = tiny_model()
    second = LlamaForCausalLM(first.config).eval()
    ids = random_ids(1, 30)
    one = ProxyPrunedCache(first, FixedScorer(random_scores(first, 1, 30)), policy())
    two = ProxyPrunedCache(second, FixedScorer(random_scores(first, 1, 30)), policy())
    one.prefill(ids)
    one.close()
    two.prefill(ids)
    call_forward(second, input_ids=ids[:, :1], cache=two)
    two.close()
    assert first.config._attn_implementation == "sdpa"


def test_other_forwards_on_the_model_do_not_change():
    model = tiny_model()
    ids = random_ids(2, 20)
    before = model(input_ids=ids).logits
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, 30)), policy()) as cache:
        cache.prefill(random_ids(1, 30, seed=1))
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("by", ["set_attn_implementation", "config"])
def test_the_next_forward_follows_an_attention_implementation_that_was_set(by, allocation):
    def change(model, name):
        if by == "config":
            model.config._attn_implementation = name
        else:
            model.set_attn_implementation(name)

    ids, new = random_ids(1, 30), random_ids(1, 2)
    logits = {}
    for start, names in {"sdpa": ["eager", "sdpa"], "eager": ["sdpa", "eager"]}.items():
        model = tiny_model(attention=start)
        scorer = FixedScorer(random_scores(model, 1, 30))
        with ProxyPrunedCache(
            model, scorer, RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
        ) as cache:
            cache.prefill(ids)
            found = [call_forward(model, input_ids=new, cache=cache).logits]
            for name in names:
                change(model, name)
                found.append(call_forward(model, input_ids=new, cache=cache).logits)
                assert model.config._attn_implementation == f"proxykv_{name}"
            assert cache.report().fallback is None
        assert model.config._attn_implementation == names[-1]
        logits[start] = found
    for ours, theirs in zip(logits["sdpa"], logits["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_an_attention_implementation_that_cannot_be_followed_is_refused_before_the_forward():
    model = tiny_model()
    with ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, 30)), policy()) as cache:
        cache.prefill(random_ids(1, 30))
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(UnsupportedModelError, match="got flex_attention: load the model with one of these"):
            call_forward(model, input_ids=random_ids(1, 2), cache=cache)
        model.config._attn_implementation = "sdpa"
        call_forward(model, input_ids=random_ids(1, 2), cache=cache)
        assert cache.get_seq_length() == 32


def test_a_config_that_two_models_share_is_followed_by_both():
    from transformers import LlamaForCausalLM

    first = tiny_model()
    second = LlamaForCausalLM(first.config).eval()
    ids, new = random_ids(1, 30), random_ids(1, 2)
    one, two = (ProxyPrunedCache(each, FixedScorer(random_scores(each, 1, 30)), policy()) for each in (first, second))
    for cache in (one, two):
        cache.prefill(ids)
    first.config._attn_implementation = "eager"
    call_forward(first, input_ids=new, cache=one)
    one.close()
    call_forward(second, input_ids=new, cache=two)
    two.close()
    assert first.config._attn_implementation == "eager"


def test_a_model_that_bypasses_the_interface_is_refused_in_its_prefill(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = tiny_model()
    forward = modeling_llama.LlamaAttention.forward

    def own_attention(self, *args, **kwargs):
        name, self.config._attn_implementation_internal = self.config._attn_implementation, "sdpa"
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config._attn_implementation_internal = name

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", own_attention)
    with (
        ProxyPrunedCache(model, FixedScorer(random_scores(model, 1, 30)), policy()) as cache,
        pytest.raises(UnsupportedModelError, match="computes attention in its own way"),
    ):
        cache.prefill(random_ids(1, 30))


def test_an_unsupported_attention_is_refused_before_anything_is_changed():
    model = tiny_model()
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="got flex_attention"):
        ProxyPrunedCache(model, None, policy())
    assert model.config._attn_implementation == "flex_attention"
    assert not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch, of itself
@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: torch.compile(model),
        lambda model: model.compile() or model,
        lambda model: setattr(model, "forward", torch.compile(model.forward)) or model,
        lambda model: model.model.layers[1].compile() or model,
    ],
)
def test_a_model_under_torch_compile_is_refused(compiled):
    model = tiny_model()
    with pytest.raises(UnsupportedModelError, match=r"ForCausalLM under torch\.compile|OptimizedModule under torch\.c"):
        ProxyPrunedCache(compiled(model), RandomScorer(), RetentionPolicy(0.5))
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch, of itself
def test_parts_without_attention_may_be_compiled():
    models = tiny_model(), tiny_model()
    for layer in models[1].model.layers:
        layer.mlp.compile(backend="eager")
    logits = []
    for model in models:
        with ProxyPrunedCache(model, RandomScorer(), RetentionPolicy(0.5), strict=True) as cache:
            cache.prefill(random_ids(1, 40))
            logits.append(call_forward(model, input_ids=random_ids(1, 1), cache=cache).logits)
    torch.testing.assert_close(logits[1], logits[0])


def test_threads_with_caches_of_their_own_do_not_disturb_each_other():
    model = tiny_model()
    ids = [random_ids(1, 40, seed=s) for s in range(4)]
    scores = [random_scores(model, 1, 40, seed=s) for s in range(4)]

    def answer(i):
        with torch.no_grad(), ProxyPrunedCache(model, FixedScorer(scores[i]), policy()) as cache:
            cache.prefill(ids[i])
            return torch.cat(
                [call_forward(model, input_ids=ids[i][:, j : j + 1], cache=cache).logits for j in range(9)]
            )

    alone = [answer(i) for i in range(4)]
    together: list = [None] * 4
    errors = []

    def work(i):
        try:
            for _ in range(3):
                together[i] = answer(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b)
    assert model not in _Attachment._of_model


def test_memory_of_many_queries_is_bounded(monkeypatch):
    """In a long follow-up turn, the logits over its own tokens are split like those over the kept block."""
    largest, logits = [], ragged.logits

    def watched(*args):
        found = logits(*args)
        largest.append(found.numel())
        return found

    monkeypatch.setattr(ragged, "logits", watched)
    monkeypatch.setattr(ragged, "LOGITS_LIMIT", 20_000)
    keys = torch.randn(1, 2, 10 + 300, 8)
    keep = torch.ones(1, 2, 10, dtype=torch.bool)
    storage = RaggedStorage.empty(keys, keys, keep, torch.tensor([0]))
    storage.fill(keys, keys, keep, [0])
    query = torch.randn(1, 4, 300, 8)
    output = ragged_attention(query, storage, None)
    assert max(largest) <= 20_000
    monkeypatch.undo()
    torch.testing.assert_close(output, ragged_attention(query, storage, None))


@pytest.mark.parametrize(("ratio", "allocation"), [(1.0, "global"), (0.3, "global"), (0.3, "uniform")])
def test_a_flash_back_end_is_shown_its_own_name(monkeypatch, ratio, allocation):
    """Flash back ends find their kernel by the name in the module's config. Here sdpa stands in for the kernel."""
    name, called = "flash_attention_2", []

    def flash(module, query, key, value, attention_mask, **kwargs):
        assert module.config._attn_implementation == name
        assert isinstance(next(iter(module.modules())), torch.nn.Module)
        called.append(module.layer_idx)
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, flash)
    model, ids = tiny_model("llama", 2), random_ids(1, 30)
    options = {"max_new_tokens": 5, "do_sample": False}
    scorer, policy = RandomScorer(0), RetentionPolicy(ratio, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with ProxyPrunedCache(model, scorer, policy) as cache:
        expected = model.generate(ids, **options, **{cache_keyword(model): cache})
    model.config._attn_implementation_internal = name  # transformers sets it only with flash-attn
    with ProxyPrunedCache(model, scorer, policy, strict=True) as cache:
        assert torch.equal(model.generate(ids, **options, **{cache_keyword(model): cache}), expected)
        assert called[:3] == [0, 1, 2]
        del called[:]
        model.generate(ids, **options)  # without the cache, while it is open
        assert len(called) == 5 * 3
    assert model.config._attn_implementation == name


def test_flash_kernels_over_ragged_heads_are_chosen_only_where_they_run(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(1, 2, 4, 64), device="cuda:0")
    storage = SimpleNamespace(values=on_gpu)
    for capability, suits in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert ragged._suits_varlen(on_gpu, storage, None) is suits
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def without_scale(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("not to be called")

    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr(varlen, "varlen_attn", without_scale)
    assert ragged.varlen_attention.__wrapped__() is None
