"""Linear heads on hidden states: how they predict, how they are fitted, saved and checked, and the training script."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
import train_hidden_state
from heads import random_heads
from taught import DOCUMENTS, make_home
from tiny import random_ids, tiny_model
from transformers import AutoModelForCausalLM

from proxykv_hf import (
    GeometryError,
    HiddenStateScorer,
    InvalidInputError,
    ModelGeometry,
    ProxyKVWarning,
    ProxyPrunedCache,
    RetentionPolicy,
)
from proxykv_hf.geometry import weights_fingerprint
from proxykv_hf.scorers.moments import Moments
from proxykv_hf.training.hidden_state import (
    CHOOSING_EVERY,
    agreement,
    document_moments,
    solve,
    squared_error,
    train,
)
from proxykv_hf.training.metrics import mean_metrics, measure
from proxykv_hf.training.shards import load_shards

POLICY = RetentionPolicy(0.3, sink_tokens=0, recent_tokens=0)


def attention_inputs(model, ids):
    """The normalised states `[n, hidden]` that enter each layer's attention, from the states between the layers."""
    states = model.model(ids, output_hidden_states=True).hidden_states
    return [layer.input_layernorm(state)[0] for layer, state in zip(model.model.layers, states, strict=False)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def target(home):
    return AutoModelForCausalLM.from_pretrained(home / "target").eval()


@pytest.mark.parametrize(("kind", "group"), [("llama", 1), ("qwen2", 7), ("qwen3", 3), ("gemma3", 2)])
def test_scores_are_linear_in_what_enters_the_attention(kind, group):
    model = tiny_model(kind, group)
    heads, ids = random_heads(model), random_ids(1, 21)
    with ProxyPrunedCache(model, HiddenStateScorer(heads), POLICY, strict=True) as cache:
        ours = cache.prefill(ids, prune=False)["hidden_state"][0]
    for layer in heads.geometry.full_layers:
        states = attention_inputs(model, ids)[layer].double().tolist()
        for head in range(2):
            line = heads.weights[layer, head].double().tolist()
            for place, state in enumerate(states):
                expected = float(heads.bias[layer, head]) + sum(a * b for a, b in zip(line, state, strict=True))
                assert float(ours[layer, head, place]) == pytest.approx(expected, abs=1e-4, rel=1e-4)


def vectors(count, channels, heads, seed=0):
    """Correlated channels of very different sizes, and scores that are nearly linear in them."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, channels, generator=generator) @ torch.randn(channels, channels, generator=generator)
    x = mixed * 10 ** torch.linspace(-2, 2, channels) + 5
    lines = torch.randn(channels, heads, generator=torch.Generator().manual_seed(9))
    return x.double(), (mixed @ lines + 0.3 * torch.randn(count, heads, generator=generator) - 4).double()


@pytest.mark.parametrize("strength", [1e-3, 0.3])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_closed_form_is_where_the_gradient_of_the_plain_loss_is_zero(heads, strength):
    x, y = vectors(80, 6, heads)
    weights, bias = solve(Moments.of(torch.cat([x, y], 1)), 6, strength)
    scale = torch.stack([column.std(correction=0) for column in x.T])
    weights.requires_grad_(True)
    bias.requires_grad_(True)
    with torch.enable_grad():
        loss = sum(((y[i] - weights @ x[i] - bias) ** 2).sum() for i in range(80)) / 80
        loss = loss + strength * ((weights * scale) ** 2).sum()  # on standardised channels
        gradients = torch.autograd.grad(loss, (weights, bias))
    for gradient in gradients:
        assert gradient.abs().max() < 1e-6 * scale.max()


def test_the_squared_error_is_that_of_every_token():
    x, y = vectors(50, 5, 2)
    weights, bias = torch.randn(2, 5).double(), torch.randn(2).double()
    expected = sum(float(((y[i] - weights @ x[i] - bias) ** 2).mean()) for i in range(50)) / 50
    assert squared_error(Moments.of(torch.cat([x, y], 1)), weights, bias) == pytest.approx(expected, rel=1e-9)


def test_moments_of_a_document_are_those_of_its_own_tokens(home, target):
    document = next(iter(load_shards(home / "teacher")))
    start = document.prefix_tokens
    assert start > 0
    states = attention_inputs(target, document.input_ids.long()[None])
    for layer, moments in document_moments(target, document).items():
        logs = [[math.log(max(float(s), 1e-7)) for s in head] for head in document.scores[layer]]
        every = torch.cat([states[layer][start:].double(), torch.tensor(logs).double().T], dim=1)
        assert moments.count == len(every)
        torch.testing.assert_close(moments.mean, every.mean(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(moments.covariance, every.T.cov(correction=0), atol=1e-4, rtol=1e-4)
    assert set(document_moments(target, document)) == {0, 1, 2}


def test_training_chooses_strengths_on_documents_apart_and_fits_all(home, target):
    documents = list(load_shards(home / "teacher"))
    strengths = (1e-3, 0.1, 10.0)
    heads = train(target, iter(documents), target_id="org/tiny", strengths=strengths)
    apart = [document for number, document in enumerate(documents) if number % CHOOSING_EVERY == 1]
    assert len(apart) == 1
    for layer in range(3):
        parts = [document_moments(target, document)[layer] for document in documents]
        fitting = sum(parts[2:], parts[0])
        errors = {s: squared_error(parts[1], *solve(fitting, target.config.hidden_size, s)) for s in strengths}
        best = min(errors, key=errors.get)
        assert heads.training["strengths"][layer] == best
        weights, bias = solve(sum(parts[1:], parts[0]), target.config.hidden_size, best)
        torch.testing.assert_close(heads.weights[layer], weights.float(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(heads.bias[layer], bias.float(), atol=1e-4, rtol=1e-3)
    assert heads.target_id == "org/tiny"
    assert heads.target_weights == weights_fingerprint(target)
    assert heads.score_recipe == "kvzip-1"
    assert (heads.training["documents"], heads.training["dtype"]) == (DOCUMENTS, "float32")


def test_trained_heads_agree_with_the_teacher_better_than_their_bias(home, target):
    documents = list(load_shards(home / "teacher"))
    heads = train(target, documents, target_id="org/tiny")
    found = agreement(target, heads, documents)
    expected = []
    for document in documents:
        states = attention_inputs(target, document.input_ids.long()[None])
        ours = torch.stack([heads.predict(layer, states[layer][document.prefix_tokens :]) for layer in range(3)])
        expected.append(measure(ours, document.scores.float().clamp(min=1e-7).log()))
    assert found == pytest.approx(mean_metrics(expected), abs=0.02)
    blind = agreement(target, dataclasses.replace(heads, weights=torch.zeros_like(heads.weights)), documents)
    assert found["spearman"] > blind["spearman"] + 0.2
    assert found["head@0.3"] > blind["head@0.3"] + 0.1


def test_training_needs_two_documents(home, target):
    for count in (0, 1):
        with pytest.raises(InvalidInputError, match=f"expected at least 2 scored documents to train on, got {count}"):
            train(target, list(load_shards(home / "teacher"))[:count], target_id="org/tiny")


def test_training_leaves_sliding_windows_out(home):
    model = tiny_model("gemma3")
    documents = list(load_shards(home / "teacher"))[:4]
    heads = train(model, documents, target_id="org/tiny")
    assert heads.weights[1].any()
    assert not heads.weights[[0, 2]].any()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_saved_heads_come_back(tmp_path):
    model = tiny_model()
    training = {"summary": "a little", "strengths": [0.1] * 3}
    heads = random_heads(
        model,
        target_id="org/tiny",
        target_weights=weights_fingerprint(model),
        score_recipe="kvzip-1",
        training=training,
    )
    HiddenStateScorer(heads).save_pretrained(tmp_path / "new" / "heads")
    again = HiddenStateScorer.from_pretrained(tmp_path / "new" / "heads", target=model).heads
    assert torch.equal(again.weights, heads.weights)
    assert torch.equal(again.bias, heads.bias)
    for field in ("geometry", "target_id", "target_weights", "score_recipe", "training"):
        assert getattr(again, field) == getattr(heads, field)
    assert sorted(path.name for path in (tmp_path / "new" / "heads").iterdir()) == ["config.json", "model.safetensors"]


def test_heads_of_another_target_are_refused_and_other_weights_are_a_warning(tmp_path):
    model, other, deeper = tiny_model(), tiny_model(), tiny_model(layers=4)
    torch.nn.init.ones_(other.model.layers[1].mlp.up_proj.weight)
    random_heads(model, target_id="org/tiny", target_weights=weights_fingerprint(model)).save_pretrained(tmp_path)
    with pytest.warns(ProxyKVWarning, match="trained with other weights of the target"):
        HiddenStateScorer.from_pretrained(tmp_path, target=other)
    words = "trained for org/tiny, another target than this: expected num_layers=3.*got num_layers=4"
    with pytest.raises(GeometryError, match=words):
        HiddenStateScorer.from_pretrained(tmp_path, target=deeper)
    with (
        ProxyPrunedCache(deeper, HiddenStateScorer.from_pretrained(tmp_path), POLICY) as cache,
        pytest.raises(GeometryError, match=words),
    ):
        cache.prefill(random_ids(1, 20))


def test_heads_of_another_width_are_refused(tmp_path):
    model = tiny_model()
    heads = random_heads(model)
    narrow = dataclasses.replace(heads, weights=heads.weights[..., :-1])
    words = "another target than this: expected hidden_size=31, got hidden_size=32"
    with ProxyPrunedCache(model, HiddenStateScorer(narrow), POLICY) as cache:
        for _ in range(2):  # nothing was done, and the cache is empty as before
            with pytest.raises(GeometryError, match=words):
                cache.prefill(random_ids(1, 20))
    narrow.save_pretrained(tmp_path)
    with pytest.raises(GeometryError, match=words):
        HiddenStateScorer.from_pretrained(tmp_path, target=model)
    with pytest.raises(GeometryError, match=r"expected weights \[L, H, hidden\] and bias \[L, H\] of L, H = \[3, 2\]"):
        dataclasses.replace(heads, bias=heads.bias[:2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "JSONDecodeError"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "is of a llama"),
        (lambda folder: (folder / "model.safetensors").unlink(), "No such file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12345678901"), "SafetensorError"),
    ],
)
def test_a_folder_that_holds_no_heads_is_refused(tmp_path, damage, words):
    random_heads(tiny_model()).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(InvalidInputError, match=f"expected a folder of hidden-state heads.*{words}"):
        HiddenStateScorer.from_pretrained(tmp_path)


def test_heads_of_a_newer_format_warn(tmp_path):
    random_heads(tiny_model()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"version": 2, "later": True}))
    with pytest.warns(ProxyKVWarning, match="format 2, newer than 1"):
        HiddenStateScorer.from_pretrained(tmp_path)


def test_the_shipped_heads_are_of_the_mappers_target():
    """Their card has the right numbers, too."""
    folder = Path(__file__).resolve().parents[2] / "mappers" / "qwen2.5-coder-hidden_state"
    heads = HiddenStateScorer.from_pretrained(folder).heads
    mapper = json.loads((folder.parent / "qwen2.5-coder" / "config.json").read_text())
    assert heads.geometry == ModelGeometry.from_dict(mapper["target_geometry"])
    assert heads.target_id == mapper["target_id"]
    assert heads.target_weights == mapper["target_weights"]
    assert heads.weights.isfinite().all()
    card = (folder / "README.md").read_text()
    assert f"{heads.weights.numel() + heads.bias.numel():,} (" in card
    assert f"{heads.training['documents']} documents, {heads.training['tokens']:,} tokens" in card
    assert heads.target_weights in card


def held_out(folder, home):
    """A copy of the shards' folder whose second shard is marked as held out."""
    from proxykv_hf.training.shards import ShardFolder, read_manifest

    manifest = read_manifest(home / "teacher")
    identity = {key: value for key, value in manifest.items() if key not in ("shards", "format")}
    shards = ShardFolder(folder, identity)
    documents = list(load_shards(home / "teacher"))
    for number, (part, split) in enumerate(((documents[:8], "train"), (documents[8:], "held_out"))):
        shards.keep(number, [dataclasses.replace(document, split=split) for document in part])
        shards.finish(number)
    return Path(folder)


def test_the_script_trains_and_says_how_well(home, target, tmp_path, monkeypatch, capsys):
    folder = held_out(tmp_path / "shards", home)
    monkeypatch.setattr(train_hidden_state, "load", lambda name, dtype: (target, None))
    argv = ["x", "--target", "smollm2-135m", "--teacher", str(folder), "--out", str(tmp_path / "heads")]
    monkeypatch.setattr("sys.argv", argv)
    train_hidden_state.main()
    lines = capsys.readouterr().out.splitlines()
    assert "8 documents" in lines[0]
    found = json.loads(lines[-1])
    heads = HiddenStateScorer.from_pretrained(tmp_path / "heads", target=target).heads
    assert found["training"] == heads.training
    assert heads.target_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    apart = [document for document in load_shards(folder) if document.split == "held_out"]
    assert found["held_out"] == pytest.approx(agreement(target, heads, apart))


def test_the_script_refuses_shards_of_one_side_before_it_trains(home, target, tmp_path, monkeypatch):
    monkeypatch.setattr(train_hidden_state, "load", lambda name, dtype: (target, None))
    argv = ["x", "--target", "smollm2-135m", "--teacher", str(home / "teacher"), "--out", str(tmp_path / "heads")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit, match="found none that are held_out: run `proxykv teacher --split held_out`"):
        train_hidden_state.main()
    assert not (tmp_path / "heads").exists()


def test_the_script_refuses_another_targets_shards(home, tmp_path, monkeypatch):
    monkeypatch.setattr(train_hidden_state, "load", lambda name, dtype: (tiny_model("llama", 2, layers=4), None))
    argv = ["x", "--target", "smollm2-135m", "--teacher", str(home / "teacher"), "--out", str(tmp_path / "heads")]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit, match=r"ShardError: .*num_layers"):
        train_hidden_state.main()
    assert not (tmp_path / "heads").exists()
