"""Files that an earlier state of this version wrote, under transformers 5.24, are read as they were meant."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from tiny import random_ids, random_scores, tiny_model

from proxykv_hf import FixedScorer, HiddenStateScorer, ModelGeometry, ProxyPrunedCache, RetentionPolicy
from proxykv_hf._compat import call_forward
from proxykv_hf.attention.reconstruction import RECIPE
from proxykv_hf.cli import main
from proxykv_hf.evaluation.rows import RowFile
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.training.shards import load_shards

WRITTEN = Path(__file__).parent / "fixtures" / "0.1.0.dev0"
EXPECTED = json.loads((WRITTEN / "expected.json").read_text())
POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)
TOKENS = 40


def kept_positions(cache, name):
    """The positions kept in the layer that ``expected.json`` names, by row and head."""
    rows = range(len(EXPECTED[name]["kept"]))
    return [[head.tolist() for head in cache.kept_indices(EXPECTED[name]["layer"], row)] for row in rows]


@pytest.mark.parametrize(
    ("name", "kind", "allocation"), [("ragged", "llama", "global"), ("sliding", "gemma3", "uniform")]
)
def test_a_saved_cache(name, kind, allocation):
    model, ids = tiny_model(kind), random_ids(2, TOKENS)
    policy = RetentionPolicy(0.3, allocation=allocation, sink_tokens=0, recent_tokens=0)
    with (
        ProxyPrunedCache.load(WRITTEN / f"cache_{name}", target=model) as loaded,
        ProxyPrunedCache(model, FixedScorer(random_scores(model, 2, TOKENS)), policy) as fresh,
    ):
        assert kept_positions(loaded, name) == EXPECTED[name]["kept"]
        assert loaded.report().seen_tokens == EXPECTED[name]["seen"]
        assert loaded.policy == policy
        fresh.prefill(ids)
        logits, expected = (
            call_forward(model, input_ids=random_ids(2, 4, seed=1), cache=cache).logits for cache in (loaded, fresh)
        )
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mapper", "heads"])
def test_a_saved_scorer(name):
    model = tiny_model("llama")
    if name == "mapper":
        with ProxyPrunedCache.from_pretrained(WRITTEN / name, target=model, proxy=tiny_model("qwen2", 1)) as cache:
            scorer = cache.scorer
    else:
        scorer = HiddenStateScorer.from_pretrained(WRITTEN / name, target=model)
    with ProxyPrunedCache(model, None, RetentionPolicy(1.0)) as cache:
        scores = cache.prefill(random_ids(1, TOKENS), prune=False, scorers={name: scorer})[name]
        with cache.compress(scores, POLICY) as pruned:
            assert kept_positions(pruned, name) == EXPECTED[name]["kept"]


def test_a_teachers_shards():
    target = tiny_model("llama", 2)
    documents = list(
        load_shards(
            WRITTEN / "teacher",
            geometry=ModelGeometry.from_config(target.config),
            weights=weights_fingerprint(target),
            score_recipe=RECIPE,
        )
    )
    assert [document.name for document in documents] == [f"doc-{number:06d}" for number in range(11)]
    for document in documents:
        assert document.scores.shape == (3, 2, len(document.input_ids) - document.prefix_tokens)
        assert 0 <= document.scores.min() < document.scores.max() <= 1


def test_an_evaluations_rows_give_the_means_that_their_lines_give(tmp_path):
    assert main(["report", str(WRITTEN / "rows.jsonl"), "--out", str(tmp_path), "--samples", "10"]) == 0
    header, *rows = map(json.loads, (WRITTEN / "rows.jsonl").read_text().splitlines())
    points = {}
    for row in rows:
        points.setdefault((row["method"], row["allocation"], row["ratio"]), []).append(row)
    task = json.loads((tmp_path / "report.json").read_text())["tasks"]["letters"]
    assert (task["metric"], task["examples"], task["questions"]) == ("held", 2, 5)
    figures = {(found["method"], found["allocation"], found["ratio"]): found for found in task["figures"]}
    assert figures.keys() == points.keys()
    assert {method for method, _, _ in points} == set(header["header"]["methods"])
    for point, own in points.items():
        assert figures[point]["questions"] == len(own) == 5
        assert figures[point]["score"]["value"] == pytest.approx(statistics.mean(row["score"] for row in own))
        assert figures[point]["nll"]["value"] == pytest.approx(statistics.mean(row["nll"] for row in own))
        shares = [row["bytes"] / row["bytes_full"] for row in own]
        assert figures[point]["kept"] == pytest.approx(statistics.mean(shares))


def test_an_evaluation_goes_on_in_its_file(tmp_path):
    path = Path(shutil.copy(WRITTEN / "rows.jsonl", tmp_path))
    header = json.loads(path.read_text().splitlines()[0])["header"]
    assert len(RowFile(path, header).rows) == 35
    assert path.read_bytes() == (WRITTEN / "rows.jsonl").read_bytes()
