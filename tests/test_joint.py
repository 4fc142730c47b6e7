"""The mean of a proxy's scores and hidden states' against both scorers alone."""

from __future__ import annotations

import pytest
import torch
from test_baselines import POLICY, full_layers, random_heads, scores_of
from test_proxy import make_mapper
from tiny import pad_left, random_ids, tiny_model

from proxykv_hf import GeometryError, HiddenStateScorer, InvalidInputError, JointScorer, ProxyPrunedCache, ProxyScorer
from proxykv_hf.prefill import SCHEDULES

TOKENS = 45
PADS = (0, 11, 4)


def parts(target):
    proxy = tiny_model("qwen2", 1, layers=2).model
    return ProxyScorer(proxy, make_mapper(target, proxy)), HiddenStateScorer(random_heads(target))


def full(target, scores):
    return scores[:, full_layers(target)]


@pytest.mark.parametrize(("family", "groups"), [("llama", 1), ("qwen2", 7), ("qwen3", 3), ("gemma3", 2)])
@pytest.mark.parametrize("chunks", [(), (7,), (1, 30)])
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_scores_are_the_mean_of_both(family, groups, chunks, schedule):
    target = tiny_model(family, groups)
    proxy, own = parts(target)
    ids, mask = pad_left([row[pad:] for row, pad in zip(random_ids(3, TOKENS), PADS, strict=True)])
    a, b = (full(target, scores_of(target, scorer, ids, mask, chunks)) for scorer in (proxy, own))
    joint = full(target, scores_of(target, JointScorer(proxy, own, 0.25), ids, mask, chunks, schedule=schedule))
    for row, pad in enumerate(PADS):
        expected = 0.75 * a[row, ..., pad:].double() + 0.25 * b[row, ..., pad:].double()
        torch.testing.assert_close(joint[row, ..., pad:].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("share", "index"), [(0, 0), (1, 1), (0.0, 0), (1.0, 1)])
def test_a_share_of_nothing_or_all_is_one_of_them(share, index):
    target = tiny_model("llama", 2)
    both, ids = parts(target), random_ids(1, TOKENS)
    joint, alone = (scores_of(target, scorer, ids) for scorer in (JointScorer(*both, share), both[index]))
    torch.testing.assert_close(joint, alone)


def test_the_proxy_reads_a_prompt_of_one_chunk_once(monkeypatch):
    from proxykv_hf.scorers import proxy as module

    extract, read = module.proxy_features, []

    def noted(proxy, ids, *rest, **named):
        read.append(len(ids))
        return extract(proxy, ids, *rest, **named)

    monkeypatch.setattr(module, "proxy_features", noted)
    target = tiny_model("llama", 2)
    scores_of(target, JointScorer(*parts(target)), random_ids(1, TOKENS))
    assert read == [TOKENS]


def test_the_report_tells_of_the_proxy():
    target = tiny_model("llama", 2)
    with ProxyPrunedCache(target, JointScorer(*parts(target)), POLICY, strict=True) as cache:
        cache.prefill(random_ids(1, TOKENS))
        report = cache.report()
    assert {"proxy", "mapper"} <= report.seconds.keys()
    assert report.devices["proxy"] == "cpu"
    assert report.bytes_peak_proxy > 0


def test_what_fits_neither_is_refused_before_the_prefill():
    target, other = tiny_model("llama", 2), tiny_model("llama", 2, layers=5)
    (proxy, own), (strange_proxy, strange_own) = parts(target), parts(other)
    for scorer, message in (
        (JointScorer(strange_proxy, own), "the mapper was trained for"),
        (JointScorer(proxy, strange_own), "the heads were trained for"),
    ):
        with ProxyPrunedCache(target, scorer, POLICY) as cache, pytest.raises(GeometryError, match=message):
            cache.prefill(random_ids(1, TOKENS))
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="share: expected a number from 0 to 1, got"):
            JointScorer(proxy, own, share)


def test_a_prefill_that_is_dropped_stops_the_proxy(monkeypatch):
    from test_schedule import run_until_cancelled

    stopped = run_until_cancelled(monkeypatch)
    target = tiny_model("llama", 2)
    target.model.layers[-1].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no more")))
    scorer = JointScorer(*parts(target))
    with ProxyPrunedCache(target, scorer, POLICY, schedule="overlap") as cache, pytest.raises(RuntimeError):
        cache.prefill(random_ids(1, TOKENS))
    assert stopped.wait(30)
