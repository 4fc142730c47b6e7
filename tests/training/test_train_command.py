"""``proxykv train``: what it writes, and what it refuses in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from taught import settings
from tiny import tiny_model, tiny_tokenizer

from proxykv_hf import InvalidInputError, ProxyPrunedCache, cli
from proxykv_hf.training import loop
from proxykv_hf.training.config import TrainingConfig
from proxykv_hf.training.losses import HybridLoss

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value)


def write(path, data):
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in data.items()))
    return path


def run(*arguments):
    with torch.no_grad():
        return cli.main(["train", *map(str, arguments)])


def test_the_command_trains_and_what_it_writes_prunes(home, teacher, tmp_path, capsys):
    path = write(tmp_path / "train.toml", settings(home, teacher, tmp_path / "unused"))
    out = tmp_path / "out"
    assert run(path, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "8 documents for training, 3 held out" in printed
    assert "head prior: head@0.1" in printed
    assert "ridge regression: head@0.1" in printed
    assert "epoch   3, " in printed
    assert sorted(file.name for file in out.iterdir()) == [
        "README.md", "checkpoints", "config.json", "curves.png", "history.json", "model.safetensors", "results.json",
    ]  # fmt: skip
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((out / "results.json").read_text())
    history = json.loads((out / "history.json").read_text())
    assert results["metrics"]["this mapper"] == history[results["best_epoch"] - 1]["metrics"]
    assert results["gain_over_head_prior"]["head@0.1"] == pytest.approx(
        results["metrics"]["this mapper"]["head@0.1"] - results["metrics"]["head prior"]["head@0.1"]
    )
    assert results["documents"] == {"training": 8, "held_out": 3}
    assert TrainingConfig.from_dict(results["config"]) == TrainingConfig.read(path, out=str(out))
    card = (out / "README.md").read_text()
    assert f"| parameters | {results['parameters']:,} " in card
    assert f"{results['flops_per_token']:,.0f} FLOPs" in card
    assert "hybrid loss (binary 1, mse 1, fine " in card
    target, tokenizer = tiny_model("llama", 2), tiny_tokenizer()
    ids = torch.randint(4, 260, (1, 60))
    with ProxyPrunedCache.from_pretrained(out, target=target, tokenizer=tokenizer, retention_ratio=0.3) as cache:
        cache.prefill(ids)
        assert cache.report().fallback is None
    assert run(path, "--out", out) == 2
    assert "continue it (--resume)" in capsys.readouterr().err
    assert run(path, "--out", out, "--resume") == 0
    assert "epoch   1, " not in capsys.readouterr().out


def test_a_proxy_of_its_own_and_its_features_beside_the_shards(home, teacher, tmp_path):
    data = settings(home, teacher, tmp_path / "out", proxy=str(home / "proxy"), epochs=1)
    data["features"] |= {"sources": ["attention", "hidden", "reconstruction"]}
    assert run(write(tmp_path / "train.toml", data)) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["proxy_id"] == str(home / "proxy")
    assert config["target_id"] == "org/tiny"
    assert config["channels"] == 3 * 2 * 2 + 2 * 16 + 2 * 2
    assert len(list(teacher.glob("features-*/*.safetensors"))) == 2
    with ProxyPrunedCache.from_pretrained(
        tmp_path / "out", target=tiny_model("llama", 2), tokenizer=tiny_tokenizer(), retention_ratio=0.3
    ) as cache:
        cache.prefill(torch.randint(4, 260, (1, 60)))
        assert cache.report().fallback is None


def test_what_is_no_config_is_refused(home, teacher, tmp_path, capsys):
    def refused(path, *options):
        assert run(path, *options) == 2
        return capsys.readouterr().err

    assert "there is no nowhere.toml" in refused("nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("title = ")
    assert f"expected a TOML file, but {broken} is not one" in refused(broken)
    good = settings(home, teacher, tmp_path / "out")
    cases = [
        ({"epoch": 3}, "unknown in the file: epoch; expected some of title, target, teacher"),
        ({"mapper": {"widht": 8}}, "unknown in mapper: widht; expected some of bottleneck"),
        ({"mapper": {"width": 9}}, "width: expected a multiple of 8"),
        ({"mapper": {"width": "8"}}, "mapper.width: expected a whole number, got '8'"),
        ({"loss": {"weight": {}}}, "unknown in loss: weight; expected some of weights, ratios"),
        ({"loss": {"weights": {"mass": 1.0}}}, "weights: unknown terms mass"),
        ({"loss": {"weights": {"fine": "much"}}}, "loss.weights: expected a table of numbers"),
        ({"features": {"sources": ["hidden"]}}, "expected a value for features.proxy_layers, got none"),
        ({"epochs": "ten"}, "epochs: expected a whole number, got 'ten'"),
        ({"epochs": True}, "epochs: expected a whole number, got True"),
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
        ({"teacher": []}, "teacher: expected at least one folder"),
        ({"teacher": "folder"}, "teacher: expected a list of text, got 'folder'"),
        ({"learning_rate": 0}, "learning_rate: expected a number above 0, got 0"),
        ({"ema_decay": 1.0}, "ema_decay: expected a number in [0, 1), got 1.0"),
        ({"proxy": ""}, "proxy: expected a folder or an id, or no such key"),
    ]
    for number, (change, message) in enumerate(cases):
        path = write(tmp_path / f"{number}.toml", good | change)
        error = refused(path)
        assert message in error, error
        assert str(path) in error
    del good["title"]
    assert "expected a value for title, got none" in refused(write(tmp_path / "untitled.toml", good))


def test_what_does_not_match_is_refused(home, teacher, tmp_path, capsys):
    def refused(**changes):
        assert run(write(tmp_path / "train.toml", settings(home, teacher, tmp_path / "out", **changes))) == 2
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    assert "expected a folder of teacher shards with a manifest.json" in refused(teacher=[str(tmp_path / "empty")])
    assert "target: expected a folder with a model or an id" in refused(target=str(tmp_path / "empty"))
    assert "proxy: expected a folder with a model or an id" in refused(proxy=str(tmp_path / "empty"))
    assert "target.geometry.num_attention_heads: expected 2, got 4" in refused(target=str(home / "proxy"))
    assert "expected a proxy of at least 9 layers, which the mapper reads, got one of 3" in refused(
        features={"sources": ["attention"], "proxy_layers": 9}, proxy=str(home / "proxy")
    )
    other = tiny_model("llama", 2)
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert "the shards were scored by org/tiny with weights" in refused(target=str(tmp_path / "other"))
    manifest = json.loads((teacher / "manifest.json").read_text())
    (teacher / "manifest.json").write_text(json.dumps(manifest | {"shards": []}))
    assert "expected scored documents, but no shard is finished in" in refused()
    assert not (tmp_path / "out").exists()


def test_a_config_survives_json_and_replaces_only_what_it_is_told(home, teacher, tmp_path):
    path = write(tmp_path / "train.toml", settings(home, teacher, tmp_path, loss={"weights": {"fine": 0.0}}))
    config = TrainingConfig.read(path, out="elsewhere")
    assert config.out == "elsewhere"
    assert config.loss == HybridLoss({"fine": 0.0})
    assert config.mapper["dropout"] == 0.2
    assert TrainingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert {"title", "out", "teacher"}.isdisjoint(config.identity())


def test_a_batch_that_the_processes_cannot_share_is_refused(home, teacher, tmp_path, monkeypatch):
    config = TrainingConfig.from_dict(settings(home, teacher, tmp_path, batch=3))
    monkeypatch.setattr(loop.Accelerator, "num_processes", 2)
    with pytest.raises(InvalidInputError, match="batch: expected a multiple of 2, the number of processes, got 3"):
        loop.make_accelerator(config)


@pytest.mark.parametrize("name", ["qwen2.5-coder", "smollm2"])
def test_the_shipped_mappers_were_trained_as_their_files_say(name):
    root = Path(__file__).parents[2]
    config = TrainingConfig.read(root / "examples" / f"train_{name}.toml")
    assert config.out == f"mappers/{name}"
    results = json.loads((root / config.out / "results.json").read_text())
    assert results["config"] == json.loads(json.dumps(config.to_dict()))
