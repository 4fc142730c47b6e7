"""A small model scores for a large one. The mapper is random: the tests are about the way from prompt to scores."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCABULARY, pad_left, random_ids, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper

from proxykv_hf import (
    FeatureRecipe,
    GeometryError,
    InvalidInputError,
    ModelGeometry,
    ProxyKVWarning,
    ProxyPrunedCache,
    ProxyScorer,
    RandomScorer,
    RetentionPolicy,
    ScoringError,
    StaticAlignmentScorer,
    UnsupportedModelError,
)
from proxykv_hf._compat import cache_keyword, call_forward
from proxykv_hf.cache.prompt import read_prompt
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.proxy import lane
from proxykv_hf.proxy.features import proxy_features
from proxykv_hf.proxy.lane import Cancelled, check_cancelled
from proxykv_hf.proxy.loading import SELF_PROXY, first_layers, load_first_layers
from proxykv_hf.scorers.base import ScoringRequest
from proxykv_hf.scorers.on_lane import LaneUse

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
TOKENS = 50


@pytest.fixture
def target():
    return tiny_model("llama", 3)


@pytest.fixture
def proxy():
    return tiny_model("qwen2", 1, layers=2).model


@pytest.fixture
def scorer(target, proxy):
    return ProxyScorer(proxy, make_mapper(target, proxy))


def kept(cache, row=0):
    return [[head.tolist() for head in cache.kept_indices(layer, row)] for layer in cache.geometry.full_layers]


def test_scores_are_what_the_mapper_makes_of_the_proxys_features(target, proxy, scorer):
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(target, scorer, POLICY) as cache:
        scores = cache.prefill(ids)["proxykv"]
        report = cache.report()
    features = proxy_features(proxy, ids[0], scorer.mapper.config.feature_recipe)
    assert torch.equal(scores, scorer.mapper(features[None]))
    assert scores[0].std(-1).min() > 0.01
    assert report.fallback is None
    assert report.devices == {"target": "cpu", "proxy": "cpu"}
    assert {"prefill", "proxy", "mapper", "wait", "prune"} <= report.seconds.keys()


def test_batches_chunks_beams_and_sampling_keep_what_solo_runs_keep(target, scorer):
    rows = [random_ids(1, n, seed=n)[0] for n in (TOKENS, 23, 37)]
    solo = []
    for row in rows:
        with ProxyPrunedCache(target, scorer, POLICY) as cache:
            cache.prefill(row[None])
            solo.append(kept(cache))
    ids, mask = pad_left(rows)
    for arguments in (
        {},
        {"prefill_chunk_size": 16},
        {"num_beams": 3, "num_return_sequences": 3},
        {"do_sample": True, "num_return_sequences": 2},
    ):
        with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
            target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=4,
                **{"do_sample": False} | arguments,
                **{cache_keyword(target): cache},
            )
            times = arguments.get("num_return_sequences", 1)
            for row in range(3):
                assert kept(cache, row * times) == solo[row], arguments


def test_the_proxy_runs_while_the_target_prefills(target, scorer, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    extract, in_lane, go = module.proxy_features, threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        in_lane.set()
        assert go.wait(30)
        return extract(*args, **kwargs)

    monkeypatch.setattr(module, "proxy_features", slow)
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(target, scorer, POLICY, schedule="overlap") as cache:
        call_forward(target, input_ids=ids, cache=cache)  # it is over, and the proxy still waits
        assert in_lane.wait(30)
        assert not cache._prefill._runs["proxykv"].ready()
        go.set()
        assert cache.report().fallback is None


@pytest.mark.parametrize("fails", [False, True])
def test_features_are_gone_after_finish_on_success_and_on_failure(target, scorer, monkeypatch, fails):
    from proxykv_hf.scorers import proxy as module

    extract, seen = module.proxy_features, []

    def watched(*args, **kwargs):
        features = extract(*args, **kwargs)
        seen.append(weakref.ref(features))
        return features

    monkeypatch.setattr(module, "proxy_features", watched)
    mapper = scorer.mapper.forward
    if fails:
        monkeypatch.setattr(scorer.mapper, "forward", lambda *args: mapper(*args) * torch.nan)
    with ProxyPrunedCache(target, scorer, POLICY) as cache:
        if fails:
            with pytest.warns(ProxyKVWarning, match="hold NaN"):
                cache.prefill(random_ids(1, TOKENS))
        else:
            cache.prefill(random_ids(1, TOKENS))
        gc.collect()
        assert [ref() for ref in seen] == [None]
        alive = [thing for thing in gc.get_objects() if type(thing).__name__ in ("_FeatureLayer", "_LaneRun")]
        assert alive == []


def test_an_error_in_the_proxy_leaves_the_cache_uncompressed_with_one_warning(target, scorer, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(module, "proxy_features", out_of_memory)
    with ProxyPrunedCache(target, scorer, POLICY) as cache:
        with pytest.warns(ProxyKVWarning, match="OutOfMemoryError: none left") as caught:
            cache.prefill(random_ids(1, TOKENS))
        assert len(caught) == 1
        assert cache.report().kept_tokens == [[[TOKENS] * 2] * 3]
    with (
        ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache,
        pytest.raises(ScoringError, match="none left"),
    ):
        cache.prefill(random_ids(1, TOKENS))


def test_waiting_for_the_proxy_ends_after_the_timeout(target, scorer, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    def forever(*args, **kwargs):
        while True:
            check_cancelled()

    monkeypatch.setattr(module, "proxy_features", forever)
    with ProxyPrunedCache(target, scorer, POLICY, timeout=0.2) as cache:
        with pytest.warns(ProxyKVWarning, match=r"TimeoutError: the scores were not there after 0.2 s"):
            cache.prefill(random_ids(1, TOKENS))
        assert not [thread for thread in threading.enumerate() if thread.name == "proxykv-lane"]


@pytest.mark.parametrize(("kind", "asked"), [("proxykv", 2 + 2), ("static_alignment", 2 + 2)])
def test_cancelled_work_stops_at_the_next_layer(target, proxy, kind, asked, monkeypatch):
    """In the pass over the prompt and in the repetition, `cancel` waits for at most one layer, and for the mapper."""
    recipe = FeatureRecipe(("hidden", "reconstruction"), 2, (1,))
    scorer = {
        "proxykv": lambda: ProxyScorer(proxy, make_mapper(target, proxy, recipe), tokenizer=tiny_tokenizer()),
        "static_alignment": lambda: StaticAlignmentScorer(proxy, tiny_tokenizer()),
    }[kind]()
    ids = random_ids(1, TOKENS)
    request = ScoringRequest(
        read_prompt(ids, None, None, None, ids.shape)[0], target, ModelGeometry.from_config(target.config), None
    )

    def run(stop_at):
        checks = []

        def check():
            checks.append(None)
            if len(checks) > stop_at:
                raise Cancelled

        monkeypatch.setattr(lane, "check_cancelled", check)
        try:
            with lane.cancellable(proxy):
                scorer.score_row(ids[0], (0, TOKENS), request, LaneUse(torch.device("cpu")))
        except Cancelled:
            assert len(checks) == stop_at + 1
            return True
        assert len(checks) == asked
        return False

    assert [run(stop_at) for stop_at in range(asked + 1)] == [True] * asked + [False]


def test_prompts_and_models_that_do_not_fit_are_refused_before_the_prefill(target, proxy, scorer):
    calls = []
    handle = target.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    other = tiny_model("llama", 1, layers=2)
    with (
        ProxyPrunedCache(other, scorer, POLICY) as cache,
        pytest.raises(GeometryError, match=r"another target than this: expected num_layers=3.*got num_layers=2"),
    ):
        cache.prefill(random_ids(1, TOKENS))
    embeddings = target.get_input_embeddings()(random_ids(1, 5))
    proxy.config.max_position_embeddings = 40
    strange = copy.deepcopy(tiny_tokenizer())
    strange.add_tokens(["a new one"])
    named = ProxyScorer(proxy, scorer.mapper, tokenizer=tiny_tokenizer())
    with ProxyPrunedCache(target, scorer, POLICY) as cache:
        with pytest.raises(InvalidInputError, match="at most 40 tokens, the proxy's positions, got 50"):
            cache.prefill(random_ids(1, TOKENS))
        with pytest.raises(InvalidInputError, match="input_ids"):
            call_forward(target, inputs_embeds=embeddings, cache=cache)
    proxy.config.max_position_embeddings = 60
    with (
        ProxyPrunedCache(target, StaticAlignmentScorer(proxy, tiny_tokenizer()), POLICY) as cache,
        pytest.raises(InvalidInputError, match=r"at most 60 tokens.*, got \d+, including those that repeat"),
    ):
        cache.prefill(random_ids(1, TOKENS))
    with (
        ProxyPrunedCache(target, named, POLICY, tokenizer=strange) as cache,
        pytest.raises(InvalidInputError, match="is 'a new one' for the target and None for the proxy"),
    ):
        cache.prefill(torch.tensor([strange("a new one").input_ids]))
    proxy.config.vocab_size = 100
    with (
        ProxyPrunedCache(target, scorer, POLICY) as cache,
        pytest.raises(InvalidInputError, match="not in the proxy's vocabulary of 100"),
    ):
        cache.prefill(torch.full((1, 5), VOCABULARY - 1))
    handle.remove()
    assert not calls
    with pytest.raises(GeometryError, match="expected a proxy of 2 layers"):
        ProxyScorer(tiny_model("qwen2", 1, layers=3).model, scorer.mapper)


def test_a_mapper_and_its_proxy_are_loaded_and_checked(target, tmp_path):
    small = tiny_model("qwen2", 1, layers=3)
    small.save_pretrained(tmp_path / "proxy")
    tiny_tokenizer().save_pretrained(tmp_path / "proxy")
    cut = load_first_layers(str(tmp_path / "proxy"), 2, revision=None, dtype=torch.float32, device=torch.device("cpu"))
    mapper = make_mapper(
        target,
        cut,
        whole_proxy=small,
        proxy_id=str(tmp_path / "proxy"),
        target_weights=weights_fingerprint(target),
        proxy_weights=weights_fingerprint(cut),
    )
    mapper.save_pretrained(tmp_path / "mapper")
    ids = random_ids(1, TOKENS)
    with ProxyPrunedCache(target, ProxyScorer(cut, mapper), POLICY) as cache:
        expected = cache.prefill(ids)["proxykv"]
    with ProxyPrunedCache.from_pretrained(
        tmp_path / "mapper", target=target, tokenizer=tiny_tokenizer(), retention_ratio=0.5, threads=1
    ) as cache:
        assert torch.equal(cache.prefill(ids)["proxykv"], expected)
        assert cache.policy == RetentionPolicy(0.5)
    other = tiny_model("qwen2", 1, layers=3)
    other.model.layers[0].mlp.up_proj.weight.data *= 2
    other.save_pretrained(tmp_path / "proxy")
    with pytest.warns(ProxyKVWarning, match=r"other weights of the proxy .* another dtype than torch\.float32\)"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=target, policy=POLICY).close()
    with pytest.raises(GeometryError, match=r"another target than this: expected num_layers=3, got num_layers=2$"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=tiny_model("llama", 3, layers=2))
    tiny_model("qwen2", 1, layers=4).save_pretrained(tmp_path / "larger")
    with pytest.raises(GeometryError, match=r"another proxy than this: expected num_layers=3.*got num_layers=4"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=target, proxy=tmp_path / "larger")
    with pytest.raises(InvalidInputError, match="holds a qwen2"):
        ProxyPrunedCache.from_pretrained(tmp_path / "proxy", target=target)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidInputError, match="expected a folder or Hub id that holds a mapper"):
        ProxyPrunedCache.from_pretrained(tmp_path / "nothing", target=target)
    with pytest.raises(InvalidInputError, match=r"nowhere \(there is no such folder in "):
        ProxyPrunedCache.from_pretrained(tmp_path / "nowhere", target=target)
    with pytest.raises(TypeError, match=r"expected a loaded model, .*got 'a/name'"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target="a/name")
    (tmp_path / "mapper" / "model.safetensors").unlink()
    torch.save(mapper.state_dict(), tmp_path / "mapper" / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match=r"model.safetensors"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=target)
    with pytest.raises(ValueError, match="got both"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=target, policy=POLICY, retention_ratio=0.2)


def test_the_targets_own_first_layers_can_be_the_proxy(target, tmp_path):
    cut = first_layers(target, 2)
    assert {p.data_ptr() for p in cut.parameters()} <= {p.data_ptr() for p in target.parameters()}
    assert not {id(m) for m in cut.modules()} & {id(m) for m in target.modules()}
    ids = random_ids(1, TOKENS)
    states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    hidden = proxy_features(cut, ids[0], FeatureRecipe(("hidden",), 2, (2,)))
    expected = states[2][0] / states[2][0].pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(hidden, expected.T, atol=1e-4, rtol=1e-4)
    mapper = make_mapper(target, cut, proxy_id=SELF_PROXY)
    mapper.save_pretrained(tmp_path)
    with ProxyPrunedCache.from_pretrained(tmp_path, target=target, policy=POLICY, strict=True) as cache:
        out = target.generate(ids, max_new_tokens=4, do_sample=False, **{cache_keyword(target): cache})
        assert cache.report().fallback is None
        assert sum(map(sum, kept_counts(cache))) == round(0.3 * 6 * TOKENS)
    assert out.shape == (1, TOKENS + 4)


@pytest.mark.parametrize("itself", [True, False])
def test_a_proxy_that_repeats_takes_the_targets_tokenizer_where_it_has_none(target, tmp_path, itself):
    cut = first_layers(target, 2)
    recipe = FeatureRecipe(("reconstruction",), 2)
    mapper = make_mapper(target, cut, recipe, whole_proxy=target, proxy_id=SELF_PROXY if itself else "some/proxy")
    mapper.save_pretrained(tmp_path)
    proxy = None if itself else target
    ids = random_ids(1, TOKENS)
    expected = mapper(proxy_features(cut, ids[0], recipe, tokenizer=tiny_tokenizer())[None])
    with ProxyPrunedCache.from_pretrained(
        tmp_path, target=target, tokenizer=tiny_tokenizer(), policy=POLICY, strict=True, proxy=proxy
    ) as cache:
        assert torch.equal(cache.prefill(ids)["proxykv"], expected)
        cache.scorer.proxy.config.max_position_embeddings = 60
        cache.reset()
        with pytest.raises(InvalidInputError, match=r"at most 60 tokens.*including those that repeat"):
            cache.prefill(ids)
    calls = []
    target.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    with (
        ProxyPrunedCache.from_pretrained(tmp_path, target=target, policy=POLICY, proxy=proxy) as cache,
        pytest.raises(InvalidInputError, match=r"asked to repeat the context.*give the cache \(or the scorer\) one"),
    ):
        cache.prefill(ids)
    assert not calls


def test_first_layers_compute_as_the_target_does():
    """Gemma 2 has a cap on logits, which torch's fused attention leaves out. An open cache must not change this."""
    target = tiny_model("gemma2", 2, attention="eager")
    assert first_layers(target, 2).config._attn_implementation == target.config._attn_implementation == "eager"
    with ProxyPrunedCache(target, RandomScorer(), POLICY) as cache:
        cache.prefill(random_ids(1, 20))
        assert first_layers(target, 2).config._attn_implementation == "eager"


def test_a_proxy_on_disk_that_lacks_weights_is_refused(proxy, tmp_path):
    proxy.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInputError, match=r"all weights of .* lacks layers\.1\.mlp\.up_proj"):
        load_first_layers(str(tmp_path), 2, revision=None, dtype=torch.float32, device=torch.device("cpu"))
    cut = load_first_layers(str(tmp_path), 1, revision=None, dtype=torch.float32, device=torch.device("cpu"))
    assert cut.config.num_hidden_layers == 1


def test_first_layers_that_cannot_be_shared_are_refused(target):
    mapper = make_mapper(target, first_layers(target, 2), proxy_id=SELF_PROXY)

    class Wrapped(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

    for wrap in (
        Wrapped,
        lambda layer: torch.nn.Linear(layer.in_features, layer.out_features, device="meta"),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.char(), False)) or layer,
    ):
        other = copy.deepcopy(target)
        other.model.layers[1].self_attn.q_proj = wrap(other.model.layers[1].self_attn.q_proj)
        with pytest.raises(UnsupportedModelError, match=r"as plain weights on one device: they are wrapped"):
            ProxyScorer.from_pretrained(mapper, target=other)


def test_first_layers_stay_where_the_target_has_them(target, monkeypatch):
    monkeypatch.setattr(type(target), "device", torch.device("meta"))  # as a model on several devices may say
    cut = first_layers(target, 2)
    assert {id(parameter) for parameter in cut.parameters()} <= {id(parameter) for parameter in target.parameters()}
    assert {tensor.device for tensor in (*cut.parameters(), *cut.buffers())} == {torch.device("cpu")}


def test_a_proxy_that_is_a_model_may_be_whole(target):
    whole = tiny_model("qwen2", 1, layers=3)
    cut = tiny_model("qwen2", 1, layers=2).model
    cut.load_state_dict(whole.model.state_dict(), strict=False)
    mapper = make_mapper(target, cut, whole_proxy=whole, proxy_id="some/proxy")
    scores = []
    for proxy in (cut, whole, whole.model):
        scorer = ProxyScorer.from_pretrained(mapper, target=target, proxy=proxy)
        with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
            scores.append(cache.prefill(random_ids(1, TOKENS))["proxykv"])
    assert torch.equal(scores[1], scores[0])
    assert torch.equal(scores[2], scores[0])
    with pytest.raises(GeometryError, match=r"another proxy than this: expected num_layers=3.*got num_layers=4"):
        ProxyScorer.from_pretrained(mapper, target=target, proxy=tiny_model("qwen2", 1, layers=4))


def test_the_mapper_goes_where_the_proxy_is(target):
    proxy = tiny_model("qwen2", 1, layers=2).model
    scorer = ProxyScorer.from_pretrained(make_mapper(target, proxy), target=target, proxy=proxy, device="meta")
    assert scorer.mapper.device == scorer.proxy.device == torch.device("cpu")


def test_a_mapper_that_is_given_stays_as_it_was(target):
    proxy = tiny_model("qwen2", 1, layers=2).model
    mapper = make_mapper(target, proxy)
    assert ProxyScorer.from_pretrained(mapper, target=target, proxy=proxy).mapper is mapper
    for given in (mapper.to(torch.bfloat16), make_mapper(target, proxy).train()):
        dtype, training = given.dtype, given.training
        scorer = ProxyScorer.from_pretrained(given, target=target, proxy=proxy)
        assert (given.dtype, given.training) == (dtype, training)
        assert (scorer.mapper.dtype, scorer.mapper.training) == (torch.float32, False)


def kept_counts(cache):
    return [[len(head) for head in layer] for layer in kept(cache)]
