"""When the proxy runs, and what is pruned while the target still prefills."""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny import pad_left, random_ids, random_scores, tiny_model, tiny_tokenizer
from tiny_mappers import make_mapper
from transformers import DynamicCache

from proxykv_hf import (
    FeatureRecipe,
    FixedScorer,
    InvalidInputError,
    ProxyKVConfig,
    ProxyKVWarning,
    ProxyPrunedCache,
    ProxyScorer,
    RetentionPolicy,
    ScoringError,
    StaticAlignmentScorer,
    with_proxykv,
)
from proxykv_hf._compat import call_forward
from proxykv_hf.cache.prefill import SCHEDULES
from proxykv_hf.cache.pruning import Pruner
from proxykv_hf.proxy.lane import Job, check_cancelled

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
TOKENS = 60


@pytest.fixture
def target():
    return tiny_model("llama", 2)


@pytest.fixture
def scorer(target):
    proxy = tiny_model("qwen2", 1, layers=2).model
    return ProxyScorer(proxy, make_mapper(target, proxy))


def kept(cache, row=0):
    return [[head.tolist() for head in cache.kept_indices(layer, row)] for layer in cache.geometry.full_layers]


def log_events(monkeypatch, target):
    """A list to which the proxy's pass and the target's prefill add their names as they end, and the hook's handle."""
    from proxykv_hf.scorers import proxy as module

    extract, events = module.proxy_features, []

    def logged(*args, **kwargs):
        features = extract(*args, **kwargs)
        events.append("proxy")
        return features

    monkeypatch.setattr(module, "proxy_features", logged)
    handle = target.model.layers[-1].register_forward_hook(lambda *_: events.append("target"))
    return events, handle


def run_until_cancelled(monkeypatch):
    """Make the proxy run until it is cancelled. The event that is returned is set when it has stopped."""
    from proxykv_hf.scorers import proxy as module

    stopped = threading.Event()

    def forever(*args, **kwargs):
        try:
            while True:
                check_cancelled()
        finally:
            stopped.set()

    monkeypatch.setattr(module, "proxy_features", forever)
    return stopped


@pytest.mark.parametrize(
    ("schedule", "order"), [("proxy_first", ["proxy", "target"]), ("sequential", ["target", "proxy"])]
)
def test_a_schedule_decides_which_model_runs_first(target, scorer, schedule, order, monkeypatch):
    events, handle = log_events(monkeypatch, target)
    with ProxyPrunedCache(target, scorer, POLICY, schedule=schedule) as cache:
        cache.prefill(random_ids(1, TOKENS))
        assert events == order
        cache.reset()
        call_forward(target, input_ids=random_ids(1, TOKENS), cache=cache)  # the prompt's end is not known here
        cache.report()
        assert events == order * 2
    handle.remove()


def test_proxies_on_the_same_cores_run_one_after_another(target, scorer, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    extract, running, most = module.proxy_features, [], []

    def slow(*args, **kwargs):
        running.append(None)
        time.sleep(0.05)
        most.append(len(running))
        features = extract(*args, **kwargs)
        running.pop()
        return features

    monkeypatch.setattr(module, "proxy_features", slow)
    with ProxyPrunedCache(target, scorer, POLICY, schedule="proxy_first") as cache:
        cache.prefill(random_ids(1, TOKENS), prune=False, scorers={"one": scorer, "other": scorer, "third": scorer})
    assert most == [1, 1, 1]


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_all_schedules_keep_the_same(target, scorer, allocation):
    ids, mask = pad_left([random_ids(1, TOKENS)[0], random_ids(1, 41)[0]])
    policy = RetentionPolicy(0.3, allocation=allocation)
    found = []
    for schedule in SCHEDULES:
        with ProxyPrunedCache(target, scorer, policy, schedule=schedule) as cache:
            scores = cache.prefill(ids, mask)["proxykv"]
            logits = call_forward(
                target,
                input_ids=random_ids(2, 3),
                attention_mask=torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1),
                cache=cache,
            ).logits
            found.append((scores, logits, [kept(cache, 0), kept(cache, 1)], cache.report().bytes_kept))
    for scores, logits, indices, size in found[1:]:
        assert torch.equal(scores, found[0][0])
        assert torch.equal(logits, found[0][1])
        assert indices == found[0][2]
        assert size == found[0][3]


def test_the_full_cache_never_exists_if_the_proxy_runs_first():
    target = tiny_model("qwen2", 3, layers=12)
    proxy = tiny_model("qwen2", 1, layers=2).model
    scorer = ProxyScorer(proxy, make_mapper(target, proxy))
    with ProxyPrunedCache(target, scorer, POLICY, schedule="proxy_first") as cache:
        cache.prefill(random_ids(1, 1000))
        report = cache.report()
    assert report.bytes_peak <= report.bytes_kept + 1.01 * report.bytes_full / 12
    assert report.bytes_peak < 0.42 * report.bytes_full
    features = 4 * scorer.mapper.config.channels * 1000
    scores = 4 * 12 * 2 * 1000
    states = 4 * 2 * 2 * 8 * 1000  # K and V of one of its layers
    assert report.bytes_peak_proxy == features + states + scores


def test_what_a_proxy_holds_at_once_is_counted_together(target):
    """The scores of all rows are held beside what the longest row needs."""
    ids, mask = pad_left([random_ids(1, TOKENS)[0], random_ids(1, 41)[0]])
    proxy = tiny_model("qwen2", 1, layers=2).model
    recipe = FeatureRecipe(("reconstruction",), 2)
    scores = 4 * 3 * 2 * TOKENS
    states = 4 * 2 * 2 * 2 * 8 * TOKENS  # K and V
    own = features = 4 * 2 * 2 * TOKENS  # the proxy's KVzip scores, and the features made of them
    for scorer, expected in (
        (ProxyScorer(proxy, make_mapper(target, proxy, recipe)), 2 * scores + features + states + own),
        (StaticAlignmentScorer(proxy, tiny_tokenizer()), 2 * scores + states + own + scores),
    ):
        with ProxyPrunedCache(target, scorer, POLICY, strict=True, tokenizer=tiny_tokenizer()) as cache:
            cache.prefill(ids, mask)
            assert cache.report().bytes_peak_proxy == expected


@pytest.mark.parametrize("ready_after", [0, 1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_that_arrive_during_the_prefill_prune_every_layer(kind, ready_after, allocation, padded):
    """The result equals pruning at the end, whichever layer is being computed when the scores arrive."""

    class Late(FixedScorer):
        def begin(self, request):
            run = super().begin(request)
            run.ready = lambda: arrived.is_set()
            return run

    target = tiny_model(kind, layers=4)
    ids, mask = pad_left([random_ids(1, TOKENS)[0], random_ids(1, 33 if padded else TOKENS, seed=1)[0]])
    scores, arrived = random_scores(target, 2, TOKENS), threading.Event()
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=1, recent_tokens=2)
    more = random_ids(2, 3, seed=5)
    longer = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
    outcomes = []
    for late in (False, True):
        arrived.clear()
        with ProxyPrunedCache(target, Late(scores), policy) as cache:
            layer = target.model.layers[ready_after]
            handle = layer.register_forward_pre_hook(lambda *_, late=late: arrived.set() if late else None)
            cache.expect(TOKENS)
            prefill = call_forward(target, input_ids=ids, attention_mask=mask, cache=cache).logits
            handle.remove()
            assert all(bool(layer.offset) == late for layer in cache._full_layers())
            logits = call_forward(target, input_ids=more, attention_mask=longer, cache=cache).logits
            report = cache.report()
            outcomes.append((prefill[mask.bool()], logits, [kept(cache, 0), kept(cache, 1)], report))
    (prefill, logits, indices, whole), (prefill_late, logits_late, indices_late, early) = outcomes
    assert torch.equal(prefill_late, prefill)
    assert torch.equal(logits_late, logits)
    assert indices_late == indices
    assert early.kept_tokens == whole.kept_tokens
    assert early.bytes_kept == whole.bytes_kept
    assert early.bytes_peak < whole.bytes_peak
    assert early.seconds["prune"] > 0


def test_with_the_mixin_layers_are_pruned_during_the_prefill(target, scorer):
    model = with_proxykv(target)
    config = ProxyKVConfig(scorer=scorer, policy=POLICY, schedule="proxy_first")
    out = model.generate(
        random_ids(1, 500), proxykv=config, max_new_tokens=4, return_dict_in_generate=True, do_sample=False
    )
    cache = getattr(out, "past_key_values", None) or out.cache
    report = cache.report()
    assert report.bytes_peak < 0.7 * report.bytes_full
    cache.close()


@pytest.mark.parametrize(("threads", "schedule"), [(None, "proxy_first"), (1, "overlap")])
def test_two_models_on_the_same_cores_take_turns_by_default(target, scorer, threads, schedule):
    lane = ProxyScorer(scorer.proxy, scorer.mapper, threads=threads)
    with ProxyPrunedCache(target, lane, POLICY) as cache:
        assert cache._prefill.schedule == schedule


def test_an_unknown_schedule_is_refused(target, scorer):
    with pytest.raises(InvalidInputError, match=r"schedule: expected one of overlap, proxy_first, sequential, got 'x'"):
        ProxyPrunedCache(target, scorer, POLICY, schedule="x")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refusals_come_before_any_work(target, scorer, schedule):
    calls = []
    handle = target.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(None))
    with ProxyPrunedCache(target, scorer, POLICY, schedule=schedule) as cache:
        cache.expect(TOKENS)
        with pytest.raises(InvalidInputError, match="came as inputs_embeds"):
            call_forward(target, inputs_embeds=torch.randn(1, TOKENS, target.config.hidden_size), cache=cache)
    with ProxyPrunedCache(target, scorer, POLICY, schedule=schedule, context=(3, 999)) as cache:
        cache.expect(TOKENS)
        with pytest.raises(InvalidInputError, match="context"):
            call_forward(target, input_ids=random_ids(1, TOKENS), cache=cache)
    handle.remove()
    assert calls == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strict", [False, True])
def test_scores_that_are_nan_leave_the_cache_whole_or_raise(target, scorer, schedule, strict, monkeypatch):
    mapper = scorer.mapper.forward
    monkeypatch.setattr(scorer.mapper, "forward", lambda *args: mapper(*args) * torch.nan)
    with ProxyPrunedCache(target, scorer, POLICY, schedule=schedule, strict=strict) as cache:
        if strict:
            with pytest.raises(ScoringError, match="hold NaN"):
                cache.prefill(random_ids(1, TOKENS))
        else:
            with pytest.warns(ProxyKVWarning, match="hold NaN") as caught:
                cache.prefill(random_ids(1, TOKENS))
            assert len(caught) == 1
            assert cache.report().kept_tokens == [[[TOKENS] * 2] * 3]
        monkeypatch.undo()
        cache.reset()
        cache.prefill(random_ids(1, TOKENS))
        assert cache.report().fallback is None


def test_a_proxy_without_memory_beside_the_target_runs_after_it(target, scorer, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    extract, attempts, left = module.proxy_features, [], []

    def crowded(*args, **kwargs):
        attempts.append(None)
        if len(attempts) == 1:
            large = torch.ones(1000)
            left.append(weakref.ref(large))
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert [ref() for ref in left] == [None]  # the tensors of the failed run are freed
        return extract(*args, **kwargs)

    monkeypatch.setattr(module, "proxy_features", crowded)
    with ProxyPrunedCache(target, scorer, POLICY, schedule="overlap") as cache:
        with pytest.warns(ProxyKVWarning, match=r"no memory beside the target \(CUDA out of memory\)"):
            cache.prefill(random_ids(1, TOKENS))
        assert cache.report().fallback is None
    with warnings.catch_warnings(), ProxyPrunedCache(target, scorer, POLICY) as plain:
        plain.prefill(random_ids(1, TOKENS))
        assert len(attempts) == 3


def test_an_interrupt_while_the_proxy_runs_first_stops_it(target, scorer, monkeypatch):
    from proxykv_hf.proxy.lane import Job

    stopped = run_until_cancelled(monkeypatch)

    def interrupt(job, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "wait", interrupt)
    with ProxyPrunedCache(target, scorer, POLICY, schedule="proxy_first") as cache:
        with pytest.raises(KeyboardInterrupt):
            cache.prefill(random_ids(1, TOKENS))
        assert stopped.is_set()
        assert not [thread for thread in threading.enumerate() if thread.name == "proxykv-lane"]
        monkeypatch.undo()
        cache.reset()
        cache.prefill(random_ids(1, TOKENS))
        assert cache.report().fallback is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_proxy_runs_over_a_chunk_that_is_known_to_be_only_a_part(target, scorer, schedule, monkeypatch):
    from proxykv_hf.scorers import proxy as module

    extract, passes = module.proxy_features, []

    def counted(proxy, ids, *args, **kwargs):
        passes.append(len(ids))
        return extract(proxy, ids, *args, **kwargs)

    monkeypatch.setattr(module, "proxy_features", counted)
    model = with_proxykv(target)
    config = ProxyKVConfig(scorer=scorer, policy=POLICY, schedule=schedule)
    model.generate(random_ids(1, TOKENS), proxykv=config, max_new_tokens=3, do_sample=False, prefill_chunk_size=40)
    assert passes == [TOKENS]


def test_a_timeout_is_not_counted_twice(target, scorer, monkeypatch):
    run_until_cancelled(monkeypatch)
    waits = []

    def noting(method):
        def noted(job, timeout=None):
            waits.append(timeout)
            return method(job, timeout)

        return noted

    monkeypatch.setattr(Job, "wait", noting(Job.wait))
    monkeypatch.setattr(Job, "result", noting(Job.result))
    cache = ProxyPrunedCache(target, scorer, POLICY, timeout=0.5, schedule="proxy_first")
    with cache, pytest.warns(ProxyKVWarning, match=r"not there after 0.5 s"):
        cache.prefill(random_ids(1, TOKENS))
    assert waits == [0.5, 0.0]  # all of it was used before the target's prefill


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize(("schedule", "reserved"), [("proxy_first", True), ("sequential", False)])
def test_what_is_kept_is_allocated_before_the_activations(target, scorer, allocation, schedule, reserved, monkeypatch):
    """If the scores come first, all layers are allocated at once. Else only one is, so that less is held beside it."""
    rooms = []
    prune = Pruner.prune

    def noting(pruner, place, *args):
        rooms.append(sorted(pruner._reserved))
        return prune(pruner, place, *args)

    monkeypatch.setattr(Pruner, "prune", noting)
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with ProxyPrunedCache(target, scorer, policy, schedule=schedule) as cache:
        cache.prefill(random_ids(1, TOKENS))
        layers = len(cache.layers)
        assert rooms == [list(range(place, layers)) if reserved else [] for place in range(layers)]
        report = cache.report()
        assert report.bytes_kept == sum(tensor.nbytes for tensor in cache.tensors())


@pytest.mark.parametrize("ragged", [False, True])
def test_storage_is_reserved_on_each_layers_device(ragged):
    """Layers 0 and 3 are on one device, layers 2 and 4 on another, and the device of layer 1 is not known."""
    cpu, other = torch.device("cpu"), torch.device("meta")
    devices, asked = [cpu, None, other, cpu, other], []
    pruner = Pruner(torch.ones(1, 5, 2, 9, dtype=torch.bool), torch.zeros(1, dtype=torch.long), ragged, range(5))
    rooms = []
    for place, device in enumerate(devices):
        keys = torch.empty(1, 2, 9, 8, device=device or cpu)
        pruner._reserve(place, keys, keys, lambda: asked.append(None) or devices)
        rooms.append({at: storage.keys.device for at, storage in pruner._reserved.items()})
        del pruner._reserved[place]
    assert rooms == [
        {0: cpu, 1: cpu, 3: cpu},
        {1: cpu, 3: cpu},
        {3: cpu, 2: other, 4: other},
        {3: cpu, 4: other},
        {4: other},
    ]
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_devices_of_the_layers_are_found_in_the_target(kind):
    target = tiny_model(kind, layers=4)
    full = [index for index, layer in enumerate(target.model.layers) if kind == "llama" or index % 2]
    target.model.layers[3].to("meta")
    for part in target.model.layers[3].modules():
        part._hf_hook = SimpleNamespace(execution_device="cuda:1")
    with ProxyPrunedCache(target, None, POLICY) as cache:
        expected = [torch.device("cuda:1") if index == 3 else torch.device("cpu") for index in full]
        assert cache._devices_of_layers() == expected


def test_a_cache_that_is_dropped_stops_its_lane(target, scorer, monkeypatch):
    stopped = run_until_cancelled(monkeypatch)
    cache = ProxyPrunedCache(target, scorer, POLICY, schedule="overlap")
    call_forward(target, input_ids=random_ids(1, TOKENS), cache=cache)
    del cache
    gc.collect()
    assert stopped.wait(10)


def test_keys_that_no_attention_received_are_forgotten(target):
    """An interrupt between a layer's update and its attention must not affect a later forward."""
    for use in ("reset", "close", "drop"):
        cache = ProxyPrunedCache(target, FixedScorer(random_scores(target, 1, TOKENS)), POLICY)
        cache.prefill(random_ids(1, TOKENS))
        layer = cache.layers[1]
        update = layer.update

        def interrupted(*args, update=update, **kwargs):
            update(*args, **kwargs)
            raise KeyboardInterrupt

        layer.update = interrupted
        with pytest.raises(KeyboardInterrupt):
            call_forward(target, input_ids=random_ids(1, 1), cache=cache)
        if use == "reset":
            cache.reset()
        elif use == "close":
            cache.close()
        else:
            del cache
            gc.collect()
        with ProxyPrunedCache(target, FixedScorer(random_scores(target, 1, TOKENS)), POLICY) as other:
            other.prefill(random_ids(1, TOKENS))
            call_forward(target, input_ids=random_ids(1, 1), cache=other)
        if use == "reset":
            cache.close()


@pytest.mark.parametrize("allocation", ["global", "uniform"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_whole_cache_is_usable_after_scoring_failed_strictly(kind, allocation):
    """Nothing of the prefill is left that prunes the cache in a later forward, or that keeps its activations."""

    class FailsOnce(FixedScorer):
        fails = True

        def begin(self, request):
            run = super().begin(request)
            run.ready = lambda: not self.fails
            finish = run.finish

            def late(cache):
                if self.fails:
                    self.fails = False
                    raise TimeoutError("late")
                return finish(cache)

            run.finish = late
            return run

    target = tiny_model(kind)
    ids, more = random_ids(1, TOKENS), random_ids(1, 3, seed=1)
    policy = RetentionPolicy(0.3, allocation=allocation)
    plain = DynamicCache(config=target.config)
    call_forward(target, input_ids=ids, cache=plain)
    expected = call_forward(target, input_ids=more, cache=plain).logits
    with ProxyPrunedCache(target, FailsOnce(random_scores(target, 1, TOKENS)), policy, strict=True) as cache:
        with pytest.raises(ScoringError, match="late"):
            cache.prefill(ids)
        assert cache.report().bytes_kept == sum(tensor.nbytes for tensor in cache.tensors())
        assert torch.equal(call_forward(target, input_ids=more, cache=cache).logits, expected)
        assert cache.report().kept_tokens == [[[TOKENS + 3] * 2] * len(cache.geometry.full_layers)]
