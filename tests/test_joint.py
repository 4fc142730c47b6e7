"""The mean of a proxy's scores and hidden states' against both scorers alone."""

from __future__ import annotations

import joint_share
import pytest
import torch
from taught import make_home
from test_baselines import POLICY, full_layers, random_heads, scores_of
from test_hidden_state import held_out
from test_proxy import make_mapper
from tiny import pad_left, random_ids, tiny_model
from transformers import AutoModelForCausalLM

from proxykv_hf import (
    GeometryError,
    HiddenStateScorer,
    InvalidInputError,
    JointScorer,
    ProxyKVConfig,
    ProxyPrunedCache,
    ProxyScorer,
    RandomScorer,
    with_proxykv,
)
from proxykv_hf._compat import cache_keyword
from proxykv_hf.prefill import SCHEDULES
from proxykv_hf.pretrained import SELF_PROXY, first_layers
from proxykv_hf.training.hidden_state import agreement
from proxykv_hf.training.metrics import mean_agreement
from proxykv_hf.training.shards import load_shards

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


def test_heads_beside_a_mapper_are_used_by_every_way_in(tmp_path):
    target = tiny_model("llama", 2)
    small = first_layers(target, 2)
    mapper, own = make_mapper(target, small, whole_proxy=target, proxy_id=SELF_PROXY), parts(target)[1]
    mapper.save_pretrained(tmp_path / "mapper")
    own.save_pretrained(tmp_path / "heads")
    options = {"max_new_tokens": 8, "do_sample": False}
    ids, scorer = random_ids(2, TOKENS), JointScorer(ProxyScorer(small, mapper), own)
    with ProxyPrunedCache(target, scorer, POLICY, strict=True) as cache:
        expected = target.generate(ids, **options, **{cache_keyword(target): cache})
        kept = [cache.kept_indices(layer, 1) for layer in range(3)]
    folders = {"mapper": tmp_path / "mapper", "hidden_state": tmp_path / "heads"}
    with ProxyPrunedCache.from_pretrained(
        folders["mapper"], target=target, hidden_state=folders["hidden_state"], policy=POLICY, strict=True
    ) as cache:
        cache.prefill(ids)
        for layer, heads in enumerate(kept):
            assert all(torch.equal(a, b) for a, b in zip(heads, cache.kept_indices(layer, 1), strict=True))
    config = ProxyKVConfig(**folders, policy=POLICY, strict=True)
    for _ in range(2):  # the second time nothing is loaded
        assert torch.equal(with_proxykv(target).generate(ids, proxykv=config, **options), expected)
    config.hidden_state = None
    assert isinstance(config.make_cache(target).scorer, ProxyScorer)
    with pytest.raises(InvalidInputError, match="hidden_state: expected only with a mapper"):
        ProxyKVConfig(scorer=RandomScorer(0), hidden_state=tmp_path / "heads")
    with pytest.raises(InvalidInputError, match="expected a folder of hidden-state heads"):
        ProxyPrunedCache.from_pretrained(tmp_path / "mapper", target=target, hidden_state=tmp_path / "mapper")


def test_the_table_of_shares(tmp_path, capsys):
    home = make_home(tmp_path / "home")
    target = AutoModelForCausalLM.from_pretrained(home / "target")
    folder = held_out(tmp_path / "shards", home)
    make_mapper(target, first_layers(target, 2), whole_proxy=target, proxy_id=SELF_PROXY).save_pretrained(
        home / "mapper"
    )
    own = parts(target)[1]
    own.save_pretrained(home / "heads")
    options = ["--target", str(home / "target"), "--mapper", str(home / "mapper"), "--device", "cpu"]
    options += ["--hidden-state", str(home / "heads"), "--dtype", "float32", "--shares", "0", "1"]
    joint_share.main([*options, "--teacher", str(folder)])
    header, _, proxy, alone = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    documents = [document for document in load_shards(folder) if document.split == "held_out"]
    expected = agreement(target, own.heads, documents)
    assert (proxy[0], alone[0]) == ("| 0.00", "| 1.00")
    assert [float(value) for value in alone[1:-1]] == pytest.approx([expected[name] for name in header[1:-1]], abs=6e-4)
    assert float(alone[-1].strip(" |")) == pytest.approx(mean_agreement(expected), abs=6e-5)
    assert proxy[1:] != alone[1:]
    with pytest.raises(SystemExit, match="expected documents that are held out"):
        joint_share.main([*options, "--teacher", str(home / "teacher")])
