"""H2O, StreamingLLM and expected attention compared with plain loops, and the rules for all observing scorers."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from every_scorer import OBSERVERS
from families import OWN_WAY, WORKING, computes_by_the_interface
from model_state import snapshot
from tiny import pad_left, random_ids, tiny_model, tiny_tokenizer
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention
from whole_attention import attentions

from proxykv_hf import (
    ExpectedAttentionScorer,
    H2OScorer,
    InvalidInputError,
    ModelGeometry,
    ProxyPrunedCache,
    RandomScorer,
    RetentionPolicy,
    Scorer,
    StreamingLLMScorer,
    UnsupportedModelError,
)
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.attention import logits
from proxykv_hf.attention.rotary import Rotary
from proxykv_hf.scorers.expected_attention import expected_weights
from proxykv_hf.scorers.h2o import entry_order, received_attention
from proxykv_hf.scorers.moments import Moments
from proxykv_hf.scorers.observing import ObservingRun
from proxykv_hf.scorers.snapkv import window_scores

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
MODELS = [("llama", 1), ("qwen2", 7), ("qwen3", 3), ("gemma3", 2)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Spy:
    """Wraps a scorer, and keeps its scores in ``scores``."""

    def __init__(self, scorer):
        self.scorer, self.name, self.observes, self.scores = scorer, scorer.name, scorer.observes, None

    def begin(self, request):
        run = self.scorer.begin(request)
        finish = run.finish

        def keep(cache):
            self.scores = finish(cache)
            return self.scores

        run.finish = keep
        return run


def scores_of(model, scorer, ids, mask=None, chunks=(), **kwargs):
    """Scores `[R, L, H, P]` of a prompt that comes at once, or in chunks that end before the columns ``chunks``."""
    spy = Spy(scorer)
    with ProxyPrunedCache(model, spy, POLICY, tokenizer=tiny_tokenizer(), strict=True, **kwargs) as cache:
        if not chunks:
            cache.prefill(ids, mask, prune=False)
            return spy.scores
        for start, stop in zip((0, *chunks), (*chunks, ids.shape[1]), strict=True):
            seen = None if mask is None else mask[:, :stop]
            positions = None if mask is None else (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
            call_forward(model, input_ids=ids[:, start:stop], attention_mask=seen, position_ids=positions, cache=cache)
        cache.report()
        return spy.scores


def full_layers(model):
    return list(ModelGeometry.from_config(model.config).full_layers)


# ---------------------------------------------------------------- plain loops


def causal_loops(query, key, scaling, softcap):
    """Attention weights `[Q][q][N]`, computed with Python's floats."""
    group = len(query) // len(key)
    matrices = []
    for head, rows in enumerate(query.double().tolist()):
        keys = key[head // group].double().tolist()
        first = len(keys) - len(rows)
        matrix = []
        for place, row in enumerate(rows):
            products = [scaling * sum(a * b for a, b in zip(row, k, strict=True)) for k in keys[: first + place + 1]]
            if softcap:
                products = [softcap * math.tanh(value / softcap) for value in products]
            largest = max(products)
            powers = [math.exp(value - largest) for value in products]
            matrix.append([power / sum(powers) for power in powers] + [0.0] * (len(keys) - len(powers)))
        matrices.append(matrix)
    return matrices


def random_states(group, queries, tokens, dtype, heads=2, size=6):
    generator = torch.Generator().manual_seed(group + tokens)
    query = torch.randn(heads * group, queries, size, generator=generator)
    key = torch.randn(heads, tokens, size, generator=generator)
    return query.to(dtype), key.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize(("queries", "tokens", "softcap"), [(1, 1, None), (13, 13, None), (4, 17, 2.0), (17, 17, 0.5)])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_h2o_sums_what_plain_loops_sum(group, queries, tokens, softcap, block, dtype, monkeypatch):
    if block:
        monkeypatch.setattr(logits, "IN_CACHE", block * group * tokens)
    query, key = random_states(group, queries, tokens, dtype)
    ours = received_attention(query, key, 0.7, softcap)
    matrices = causal_loops(query, key, 0.7, softcap)
    for head in range(2):
        for place in range(tokens):
            own = matrices[head * group : (head + 1) * group]
            expected = sum(row[place] for matrix in own for row in matrix) / group
            assert float(ours[head, place]) == pytest.approx(expected, abs=TOLERANCE[dtype] * queries)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_any_budget_of_h2o_is_the_latest_and_the_heaviest(share):
    received = torch.rand(3, 19, generator=torch.Generator().manual_seed(0))
    received[1, 4:9] = 0.5  # equal ones: the earlier is heavier
    order = entry_order(received, share)
    assert order.isfinite().all()
    for head in range(3):
        heavy = sorted(range(19), key=lambda place: (-float(received[head, place]), place))
        splits = [(latest, heaviest) for latest in range(20) for heaviest in range(20)]
        for size in range(1, 20):
            ours = set(order[head].topk(size).indices.tolist())
            fitting = [
                (latest, heaviest)
                for latest, heaviest in splits
                if ours == set(range(19 - latest, 19)) | set(heavy[:heaviest])
            ]
            # The sizes of the two parts have the ratio of the shares, up to one token.
            assert any(abs(latest * (1 - share) - heaviest * share) < 1 for latest, heaviest in fitting), (head, size)


@pytest.mark.parametrize("kind_and_group", [*MODELS, ("gemma2", 2)])
def test_h2o_equals_whole_attention_matrices(kind_and_group):
    kind, group = kind_and_group
    model = tiny_model(kind, group, attention="eager" if kind == "gemma2" else None)
    ids = random_ids(1, 33, seed=group)
    ours = scores_of(model, H2OScorer(), ids, context=(3, 30))[0]
    for layer in full_layers(model):
        weights = attentions(model, ids)[layer].double().unflatten(0, (2, -1)).mean(1).sum(1)  # [H, N]
        for head in range(2):
            heavy = sorted(range(3, 30), key=lambda place: -float(weights[head, place]))
            for place in range(3, 30):
                expected = -min(2 * (30 - place) - 1, 2 * (heavy.index(place) + 1))
                assert float(ours[layer, head, place]) == expected


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_h2o_keeps_as_many_tokens_in_every_head(allocation):
    model, ids = tiny_model(), random_ids(1, 50)
    policy = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0, allocation=allocation)
    with ProxyPrunedCache(model, H2OScorer(), policy, strict=True) as cache:
        cache.prefill(ids)
        kept = cache.report().kept_tokens[0]
    assert {count for layer in kept for count in layer} == {15}


def test_streaming_llm_keeps_sinks_and_the_latest():
    model = tiny_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (40, 23)]
    policy = RetentionPolicy(max_tokens=10, sink_tokens=0, recent_tokens=0)
    for sinks, first in ((4, [0, 1, 2, 3]), (0, [])):
        with ProxyPrunedCache(model, StreamingLLMScorer(sinks), policy, strict=True) as cache:
            cache.prefill(*pad_left(rows))
            for row, tokens in enumerate(rows):
                latest = list(range(len(tokens) - 10 + len(first), len(tokens)))
                for layer in range(3):
                    assert [head.tolist() for head in cache.kept_indices(layer, row)] == [first + latest] * 2


def turned(vector, position, theta, size):
    """RoPE of a list of numbers, whose two halves are paired."""
    half, out = size // 2, [0.0] * size
    for i in range(half):
        angle = position * theta ** (-2 * i / size)
        out[i] = vector[i] * math.cos(angle) - vector[half + i] * math.sin(angle)
        out[half + i] = vector[half + i] * math.cos(angle) + vector[i] * math.sin(angle)
    return out


def expected_attention_loops(queries, keys, values, theta, scaling, future, sinks, epsilon):
    """One layer's scores in float64, from queries before RoPE `[Q, n, D]` and keys after RoPE `[H, n, D]`."""
    heads, tokens, size = keys.shape
    group = len(queries) // heads
    unit = torch.eye(size, dtype=torch.float64)
    mean_turn = (
        sum(
            torch.tensor([turned(row, tokens + t, theta, size) for row in unit.tolist()], dtype=torch.float64)
            for t in range(future)
        )
        / future
    )  # row i is where unit vector i goes
    scores = torch.full((heads, tokens), math.inf, dtype=torch.float64)
    for head in range(heads):
        weights = torch.zeros(tokens - sinks, dtype=torch.float64)
        for query in queries[head * group : (head + 1) * group].double():
            own = query[sinks:]
            mean = sum(own) / len(own)
            covariance = sum(torch.outer(row - mean, row - mean) for row in own) / len(own)
            mean, covariance = mean_turn.T @ mean, mean_turn.T @ covariance @ mean_turn
            powers = torch.stack(
                [
                    torch.exp(scaling * (mean @ key) + scaling**2 * (key @ covariance @ key) / 2)
                    for key in keys[head, sinks:].double()
                ]
            )
            weights += powers / powers.sum() / group
        for place in range(sinks, tokens):
            length = math.sqrt(sum(float(v) ** 2 for v in values[head, place]))
            scores[head, place] = (weights[place - sinks] + epsilon) * length
    return scores


def queries_before_rope(model, ids):
    """Each layer's queries `[Q, n, D]`, read from its projection, and each layer's K and V."""
    found, handles = [], []
    for layer in model.model.layers:
        module = getattr(layer.self_attn, "q_norm", None) or layer.self_attn.q_proj
        size = layer.self_attn.head_dim

        def note(module, args, output, size=size):
            heads = output[0].reshape(ids.shape[1], -1, size).transpose(0, 1)
            turned_over = output[0] if output.ndim == 4 and output.shape[1] != ids.shape[1] else heads
            found.append(turned_over)

        handles.append(module.register_forward_hook(note))
    plain = DynamicCache(config=model.config)
    call_forward(model, input_ids=ids, cache=plain)
    for handle in handles:
        handle.remove()
    return found, [(layer.keys[0], layer.values[0]) for layer in plain.layers]


@pytest.mark.parametrize(("sinks", "epsilon", "future"), [(4, 1e-2, 12), (0, 0.0, 1)])
@pytest.mark.parametrize(("kind", "group"), MODELS)
def test_expected_attention_equals_plain_loops(kind, group, sinks, epsilon, future):
    model = tiny_model(kind, group)
    ids = random_ids(1, 29, seed=group)
    ours = scores_of(model, ExpectedAttentionScorer(future, sinks, epsilon), ids)[0]
    queries, states = queries_before_rope(model, ids)
    scaling = 24**-0.5 if kind == "gemma3" else 8**-0.5
    for layer in full_layers(model):
        parameters = model.config.rope_parameters
        theta = parameters.get("full_attention", parameters)["rope_theta"]
        twin = expected_attention_loops(queries[layer], *states[layer], theta, scaling, future, sinks, epsilon)
        torch.testing.assert_close(ours[layer].double(), twin, atol=1e-5, rtol=1e-3)
        assert twin[twin.isfinite()].std() > 1e-3


@pytest.mark.parametrize("group", [1, 3, 7])
def test_expected_weights_are_the_mean_of_exponentials(group):
    """The closed form is compared with the mean of exp(q'k) over very many Gaussian queries."""
    generator = torch.Generator().manual_seed(group)
    keys = torch.randn(2, 5, 4, generator=generator)
    mean, root = torch.randn(2 * group, 4, generator=generator), torch.randn(2 * group, 4, 4, generator=generator) / 2
    ours = expected_weights(keys, mean, root @ root.mT, 0.5)
    queries = mean[:, None] + torch.randn(2 * group, 200_000, 4, generator=generator) @ root.mT
    powers = (0.5 * queries @ keys.repeat_interleave(group, 0).mT).exp().mean(1)  # [Q, n]
    drawn = (powers / powers.sum(-1, keepdim=True)).unflatten(0, (2, group)).mean(1)
    torch.testing.assert_close(ours, drawn, atol=2e-2, rtol=0)


def test_expected_attention_gives_sink_tokens_infinite_scores():
    scores = scores_of(tiny_model(), ExpectedAttentionScorer(8), *pad_left([random_ids(1, n)[0] for n in (3, 9)]))
    assert scores[0].isinf().all()
    assert scores[1, :, :, :4].isinf().all()
    assert scores[1, :, :, 4:].isfinite().all()


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapkv_votes_as_plain_loops_do(dtype, group):
    query, key = random_states(group, 4, 15, dtype)
    ours = window_scores(query, key, 3, 0.7, None)
    matrices = causal_loops(query, key, 0.7, None)
    for head in range(2):
        own = matrices[head * group : (head + 1) * group]
        votes = [sum(row[place] for matrix in own for row in matrix) / (4 * group) for place in range(11)]
        for place in range(11):
            expected = sum(votes[max(0, place - 1) : place + 2]) / 3
            assert float(ours[head, place]) == pytest.approx(expected, abs=TOLERANCE[dtype])
        assert ours[head, 11:].tolist() == [2, 3, 4, 5]  # above any vote, the latest most


@pytest.mark.parametrize("group", [1, 3, 7])
def test_random_scores_are_uniform_and_do_not_depend_on_query_heads(group):
    scores = scores_of(tiny_model("llama", group), RandomScorer(5), random_ids(1, 700))
    assert torch.equal(scores, scores_of(tiny_model("llama", 2), RandomScorer(5), random_ids(1, 700)))
    shares = torch.histc(scores, 10, 0, 1) / scores.numel()
    torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.02, rtol=0)
    assert scores.flatten().unique().numel() > 0.99 * scores.numel()


# ---------------------------------------------------------------- undoing the rotation


@pytest.mark.parametrize("name", [*sorted(set(WORKING) - {"gpt2", "gpt-oss"}), "llama3", "yarn"])
def test_undone_queries_are_those_before_the_rotation(name, monkeypatch):
    import sys

    if name in WORKING:
        model = WORKING[name]()
        if not computes_by_the_interface(model):
            with pytest.raises(UnsupportedModelError, match=OWN_WAY):
                Rotary.of(model)
            return
    else:
        model = tiny_model()
        scaled = {"rope_type": name, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
        model.config.rope_parameters = scaled | (
            {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if name == "llama3" else {}
        )
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    rotary = Rotary.of(model)
    before, after = [], []
    attention_module = next(m for m in model.modules() if hasattr(m, "layer_idx") and "Attention" in type(m).__name__)
    space = sys.modules[type(attention_module).__module__]
    apply = space.apply_rotary_pos_emb

    def noting(query, *args, **kwargs):
        turned_over = apply(query, *args, **kwargs)
        before.append(query[0])
        after.append(turned_over[0][0])
        return turned_over

    monkeypatch.setattr(space, "apply_rotary_pos_emb", noting)
    model.base_model(random_ids(1, 20))
    monkeypatch.undo()
    rotating = [layer for layer in range(model.config.num_hidden_layers) if layer not in rotary._still_layers]
    assert len(before) == len(rotating) > 0
    for layer, original, moved in zip(rotating, before, after, strict=True):
        undone = rotary.undo(layer, moved, torch.arange(20))
        torch.testing.assert_close(undone, original, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(moved[:, 1:], original[:, 1:], atol=1e-3)


def test_angles_are_on_the_layers_device():
    """In a model on several devices, the embedding returns angles on its own device."""
    rotary = Rotary.of(tiny_model())
    rotary._embedding = lambda like, positions, **_: (torch.ones(1, 3, 8), torch.ones(1, 3, 8))
    assert {angles.device.type for angles in rotary._angles(0, torch.zeros(3, device="meta"))} == {"meta"}


def test_a_layer_that_rotates_nothing_is_left_alone():
    model = WORKING["cohere2"]()  # rotary positions in its sliding windows only
    rotary = Rotary.of(model)
    states = torch.randn(4, 3, 8)
    assert torch.equal(rotary.undo(1, states, torch.arange(3)), states)
    assert torch.equal(rotary.mean_turn(1, torch.arange(3), 8), torch.eye(8))


class OwnAttention(LlamaAttention):
    """Rotates queries as Llama does, but its file has an ``apply_rotary_pos_emb`` that does something else."""


def apply_rotary_pos_emb(query, key, cos, sin):
    return (query * cos + query.roll(1, -1) * sin,) * 2


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"), "frequencies are fixed, got dynamic"),
        (lambda model: setattr(model.model, "rotary_emb", None), "expected a model with rotary positions"),
        (
            lambda model: setattr(model.model.layers[0].self_attn, "__class__", OwnAttention),
            "expected LlamaForCausalLM to rotate queries .* but layer 0 does not",
        ),
    ],
)
def test_models_whose_positions_cannot_be_undone_are_refused_before_the_prefill(break_it, words):
    model = tiny_model()
    break_it(model)
    before = snapshot(model)
    cache = ProxyPrunedCache(model, ExpectedAttentionScorer(), POLICY)
    with pytest.raises(UnsupportedModelError, match=words):
        cache.prefill(random_ids(1, 20))
    cache.close()
    assert snapshot(model) == before


# ---------------------------------------------------------------- all observing scorers


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_rows_of_a_padded_batch_are_scored_as_alone(kind, name):
    model = tiny_model(kind)
    rows = [random_ids(1, n, seed=n)[0] for n in (50, 23, 40)]
    ids, mask = pad_left([*rows, rows[1]])  # the last is a copy
    batch = scores_of(model, OBSERVERS[name](model), ids, mask)
    assert len(batch) == 3
    for row, tokens in enumerate(rows):
        solo = scores_of(model, OBSERVERS[name](model), tokens[None])[0]
        for layer in full_layers(model):
            own = batch[row, layer, :, 50 - len(tokens) :]
            torch.testing.assert_close(own, solo[layer], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("chunks", [(25,), (7, 9, 38)])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_prompt_in_chunks_is_scored_as_one(kind, chunks, name):
    """The batch is padded, so that a row may be nothing but padding in the first chunk."""
    model = tiny_model(kind)
    ids, mask = pad_left([random_ids(1, n, seed=n)[0] for n in (40, 22)])
    whole = scores_of(model, OBSERVERS[name](model), ids, mask)
    parts = scores_of(model, OBSERVERS[name](model), ids, mask, chunks)
    for row, pad in enumerate((0, 18)):
        for layer in full_layers(model):
            torch.testing.assert_close(parts[row, layer, :, pad:], whole[row, layer, :, pad:], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", OBSERVERS)
def test_half_precision_scores_about_as_float32(name):
    model, ids = tiny_model(), random_ids(1, 40)
    exact = scores_of(model, OBSERVERS[name](model), ids)
    scorer = OBSERVERS[name](model)
    half = scores_of(model.to(torch.bfloat16), scorer, ids)
    assert half.dtype == torch.float32
    ranks = [scores.clamp(max=1e4).flatten(0, 2).argsort(-1).argsort(-1).double() for scores in (exact, half)]
    for one, other in zip(*ranks, strict=True):
        assert torch.corrcoef(torch.stack([one, other]))[0, 1] > 0.9


@pytest.mark.parametrize("name", OBSERVERS)
def test_drafts_of_assisted_decoding_do_not_change_the_scores(name):
    model = tiny_model()
    ids = random_ids(1, 8).repeat(1, 5)
    kept = []
    for drafts in ({}, {"prompt_lookup_num_tokens": 3}):
        with ProxyPrunedCache(model, OBSERVERS[name](model), POLICY, strict=True) as cache:
            model.generate(ids, **{cache_keyword(model): cache}, max_new_tokens=6, do_sample=False, **drafts)
            prompt = [[head[head < 40].tolist() for head in cache.kept_indices(layer)] for layer in range(3)]
        kept.append(prompt)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_cropped_prompt_is_scored_to_its_end(name):
    model, ids = tiny_model(), random_ids(1, 60)
    spy = Spy(OBSERVERS[name](model))
    with ProxyPrunedCache(model, spy, POLICY, strict=True) as cache:
        call_forward(model, input_ids=ids, cache=cache)
        cache.crop(-5)
        assert max(int(head.max()) for layer in range(3) for head in cache.kept_indices(layer)) < 55
    assert spy.scores.shape[-1] == 55


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_model_is_left_as_it_was(name):
    model = tiny_model()
    before = snapshot(model)
    cache = ProxyPrunedCache(model, OBSERVERS[name](model), POLICY, strict=True)
    model.generate(random_ids(1, 40), **{cache_keyword(model): cache}, max_new_tokens=4, do_sample=False)
    cache.close()
    del cache
    gc.collect()
    assert snapshot(model) == before


@pytest.mark.parametrize("make", [*OBSERVERS.values(), lambda model: StreamingLLMScorer()])
def test_observers_and_streaming_llm_follow_the_protocol(make):
    scorer = make(tiny_model())
    assert isinstance(scorer, Scorer)
    assert scorer.name.isidentifier()


@pytest.mark.parametrize(
    "make",
    [
        lambda: H2OScorer(1.5),
        lambda: H2OScorer(-0.1),
        lambda: StreamingLLMScorer(-1),
        lambda: ExpectedAttentionScorer(0),
        lambda: ExpectedAttentionScorer(sink_tokens=-1),
        lambda: ExpectedAttentionScorer(epsilon=-1.0),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(InvalidInputError, match="expected"):
        make()


@pytest.mark.parametrize("shift", [0.0, 1e3])
@pytest.mark.parametrize("parts", [(1,), (4, 1, 12)])
def test_added_moments_are_those_of_all_vectors(parts, shift):
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(3, n, 5, generator=generator) + shift for n in parts]
    moments = Moments.of(vectors[0])
    for more in vectors[1:]:
        moments = moments + Moments.of(more)
    every = torch.cat(vectors, dim=1).double()
    mean = every.mean(1)
    spread = torch.stack([sum(torch.outer(v - mean[i], v - mean[i]) for v in every[i]) for i in range(3)]) / sum(parts)
    assert moments.count == sum(parts)
    torch.testing.assert_close(moments.mean.double(), mean, atol=1e-6 * max(1, shift), rtol=1e-6)
    torch.testing.assert_close(moments.covariance.double(), spread, atol=2e-3 if shift else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("chunks", [(), (16,), (16, 19, 31)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["h2o", "expected_attention"])
def test_copies_are_folded_once_until_a_chunk_tells_them_apart(name, padded, chunks, monkeypatch):
    """Six batch rows: a prompt three times, a prompt that differs from it from column 20 on twice, and another one."""
    model, folds = tiny_model(), []
    for kind in ObservingRun.__subclasses__():

        def counted(run, observation, row, *args, fold=kind.fold):
            folds.append((observation.layer, row))
            return fold(run, observation, row, *args)

        monkeypatch.setattr(kind, "fold", counted)
    one, parted, other = random_ids(3, 40)
    parted = torch.cat([one[:20], parted[20:]])
    rows = [one, parted, one, other, one, parted]
    ids, mask = pad_left([row[5:] if padded and row is other else row for row in rows])
    ours = scores_of(model, OBSERVERS[name](model), ids, mask if padded else None, chunks)
    together = sum(stop <= 20 for stop in chunks)  # chunks in which the first two prompts are the same
    assert len(folds) == 3 * (2 * together + 3 * (len(chunks) + 1 - together))
    for place, row in enumerate((one, parted, other[5:] if padded else other)):
        alone = scores_of(model, OBSERVERS[name](model), row[None], chunks=[stop - 40 + len(row) for stop in chunks])
        torch.testing.assert_close(ours[place, :, :, 40 - len(row) :], alone[0], atol=1e-4, rtol=1e-4)
