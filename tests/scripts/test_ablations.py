"""The benchmarks that say what a mapper's parts are worth and what it can reach, on tiny models."""

from __future__ import annotations

import json
import sys

import ablations
import pytest
import teacher_ceiling
import torch
from ablated_mappers import LinearPathAlone, NeighbourMLP, NoEncoder, NoLinearPath, StaticHeadMap
from taught import settings
from tiny import random_ids, tiny_model, tiny_tokenizer
from tiny_mappers import MIXED, mapper_config

from proxykv_hf import FeatureRecipe, HybridAxialMapper
from proxykv_hf.attention.reconstruction import PROMPTS
from proxykv_hf.proxy.features import proxy_features
from proxykv_hf.proxy.loading import first_layers
from proxykv_hf.training.config import TrainingConfig
from proxykv_hf.training.shards import ScoredDocument
from proxykv_hf.training.teacher import teacher_scores

KINDS = [NoEncoder, StaticHeadMap, NoLinearPath, LinearPathAlone, NeighbourMLP, HybridAxialMapper]
TOKENIZER = tiny_tokenizer()

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def far_mapper(kind):
    """Of a kind, every parameter that it trains far from its start."""
    torch.manual_seed(0)
    mapper = kind(mapper_config(MIXED)).eval()
    for parameter in mapper.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    return mapper


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapper_without_a_stage_trains_all_that_it_has(kind):
    mapper = far_mapper(kind)
    with torch.enable_grad():
        scores = mapper(torch.randn(1, 7, 20))
        scores.pow(2).sum().backward()
    assert scores.shape == (1, 4, 3, 20)
    assert not scores[:, [1, 3]].any()
    for name, parameter in mapper.named_parameters():
        assert (parameter.grad is not None and parameter.grad.any()) == parameter.requires_grad, name


@pytest.mark.parametrize(
    ("kind", "reach"),
    [(NoEncoder, 2), (NeighbourMLP, 1), (LinearPathAlone, 0), (StaticHeadMap, 19), (HybridAxialMapper, 19)],
)
def test_how_far_along_the_text_each_looks(kind, reach):
    mapper = far_mapper(kind)
    features = torch.randn(1, 7, 20)
    other = features.clone()
    other[..., 0] += 3.0
    changed = (mapper(features) - mapper(other)).abs().amax(dim=(0, 1, 2)) > 1e-6
    assert changed.nonzero().max() == reach


def test_a_static_head_map_mixes_the_same_shares_everywhere_and_a_mapper_does_not():
    """Its answer is additive in what the head tokens hold."""
    for kind, expected in ((StaticHeadMap, True), (HybridAxialMapper, False)):
        mapper = far_mapper(kind)
        one, two = torch.randn(2, 1, 5, 3, 16)

        def stage(x, mapper=mapper):
            return mapper.heads(mapper.key(x), mapper.value(x))

        assert torch.allclose(stage(one) + stage(two), stage(one + two), atol=1e-4) == expected


def test_fewer_layers_and_sources_are_channels_of_the_whole_proxys():
    model = tiny_model("llama", 2, layers=4)
    whole = FeatureRecipe(("attention", "hidden", "reconstruction"), 4, (1, 2, 4))
    ids = random_ids(1, 50)[0]

    def features(recipe):
        return proxy_features(first_layers(model, recipe.proxy_layers), ids, recipe, tokenizer=TOKENIZER)

    everything = features(whole)
    for recipe in (
        FeatureRecipe(("attention", "hidden"), 3, (1, 2)),
        FeatureRecipe(("reconstruction",), 2),
        FeatureRecipe(("hidden",), 4, (2, 4)),
        FeatureRecipe(("attention", "hidden", "reconstruction"), 2, (2,)),
        whole,
    ):
        channels = ablations.channels_of(recipe, whole, model.config)
        torch.testing.assert_close(everything[channels], features(recipe), atol=1e-5, rtol=1e-4)
    assert ablations.channels_of(FeatureRecipe(("hidden",), 3, (3,)), whole, model.config) is None
    assert ablations.channels_of(FeatureRecipe(("attention",), 5), whole, model.config) is None


def test_every_row_changes_what_it_says_and_nothing_else():
    base = TrainingConfig.read(ablations.CONFIG)
    rows = ablations.table_of_rows(base, depth=24)
    assert len({row.name for row in rows}) == len(rows)
    same = rows[0].config(base, seed=3).to_dict()
    assert same == base.to_dict() | {"seed": 3, "patience": base.epochs}
    for row in rows[1:]:
        changed = row.config(base, seed=3).to_dict()
        differing = {key for key in same if same[key] != changed[key]}
        assert differing <= {*row.changes, *(("epochs", "patience") if row.every > 1 else ())}
        assert differing or row.kind is not HybridAxialMapper or row.name == "10 layers"
    named = {row.name: row.config(base, 0) for row in rows}
    assert named["no fine"].loss.weights == {"binary": 1.0, "mse": 1.0, "fine": 0.0, "global": 1.0, "cosine": 1.0}
    assert named["hidden, 10 layers"].features == FeatureRecipe(("hidden",), 10, (2, 6, 10))
    assert named["10 layers"].features == base.features
    assert named["24 layers"].features == FeatureRecipe(("attention", "hidden"), 24, (5, 14, 24))
    assert named["a quarter of the documents, as many steps"].epochs == 4 * base.epochs


def test_rows_are_run_once_and_rows_of_another_run_are_refused(home, tmp_path, monkeypatch, capsys):
    sizes = settings(home, home, home)["mapper"]
    lines = [
        "[features]",
        'sources = ["attention", "hidden"]',
        "proxy_layers = 2",
        "hidden_layers = [1, 2]",
        "[mapper]",
    ]
    named = {"title": "Tiny", "target": home / "target", "proxy": home / "proxy", "out": tmp_path / "out"}
    lines = [*(f'{key} = "{value}"' for key, value in named.items()), 'teacher = ["nowhere"]', "epochs = 3", *lines]
    toml = tmp_path / "run.toml"
    toml.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in sizes.items())]))

    def run(*more):
        command = [
            "ablations",
            "--config",
            toml,
            "--teacher",
            home / "teacher",
            "--out",
            tmp_path / "rows.jsonl",
            *more,
        ]
        monkeypatch.setattr(sys, "argv", [str(part) for part in command])
        ablations.main()
        return ablations.read_results(tmp_path / "rows.jsonl"), capsys.readouterr().out

    wanted = ["base", "ridge regression", "reconstruction, 3 layers", "a half of the documents, as many steps"]
    rows, out = run("--epochs", "1", "--documents", "6", "--seeds", "0", "1", "--rows", *wanted)
    assert [(row["row"], row["seed"], row["epochs"], row["documents"]) for row in rows] == [
        ("base", 0, 1, 6), ("ridge regression", 0, 0, 6), ("reconstruction, 3 layers", 0, 1, 6), (wanted[3], 0, 2, 3),
        ("base", 1, 1, 6), ("reconstruction, 3 layers", 1, 1, 6), (wanted[3], 1, 2, 3),
    ]  # fmt: skip
    assert "| a half of the documents, as many steps |" in out
    again, out = run("--epochs", "1", "--documents", "6", "--seeds", "0", "1", "--rows", *wanted)
    assert again == rows
    assert run("--table")[1] == out
    with pytest.raises(SystemExit):
        run("--epochs", "2", "--documents", "6")
    assert "other documents or settings" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("--epochs", "1", "--documents", "6", "--rows", "no such row")
    assert "no such rows: no such row; there are base, no binary" in capsys.readouterr().err


def test_the_table_pairs_seeds():
    def row(name, seed, agreement, group="stages"):
        metrics = {f"{where}@{ratio}": agreement for where in ("head", "global") for ratio in ablations.RATIOS}
        common = {"metrics": metrics, "agreement": agreement, "parameters": 2_000_000, "cost": 0.1, "cpu_seconds": 60}
        return {"group": group, "row": name, "seed": seed} | common

    lines = ablations.table(
        [row("base", 0, 0.5, "base"), row("less", 0, 0.4), row("base", 1, 0.7, "base"), row("less", 1, 0.5)]
    ).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| **base**", "| base", "| **stages**", "| less"]
    assert lines[5].split(" | ")[1:] == [*["0.450"] * 8, "0.4500", "-0.1500", "2.00", "10.0", "60", "0, 1 |"]
    assert lines[3].split(" | ")[9:11] == ["0.6000", ""]


# The ceiling.


def scored_document(model):
    ids = random_ids(1, 70)[0]
    return ScoredDocument(
        "doc-000000", ids.int(), teacher_scores(model, TOKENIZER, ids.tolist(), 6), "essay", (), "train"
    )


def test_the_ceiling_compares_wordings_and_dtypes(monkeypatch):
    model = tiny_model("gemma3")  # of three layers one is not sliding
    document = scored_document(model)
    found = teacher_ceiling.compare(model, TOKENIZER, document)
    assert 0.3 < found["wording"]["head@0.3"] < 1
    assert all(value == pytest.approx(1.0) for key, value in found["stored"].items() if not key.startswith("mass"))
    half = teacher_ceiling.compare(tiny_model("gemma3").bfloat16(), TOKENIZER, document)
    assert 0.5 < half["stored"]["head@0.3"] < 1
    monkeypatch.setattr(teacher_ceiling, "OTHER_PROMPTS", PROMPTS)
    assert teacher_ceiling.compare(model, TOKENIZER, document)["wording"]["head@0.3"] == 1


def test_ceilings_are_means_over_documents():
    def row(value):
        metrics = {"head@0.1": value, "global@0.1": value / 2}
        return {"tokens": 10, "wording": metrics, "stored": metrics}

    found = teacher_ceiling.means([row(0.5), row(0.7)])
    assert json.loads(json.dumps(found)) == {
        "documents": 2,
        "tokens": 20,
        "wording": {"head@0.1": 0.6, "global@0.1": 0.3},
        "stored": {"head@0.1": 0.6, "global@0.1": 0.3},
    }
