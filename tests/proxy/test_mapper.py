"""The mapper compared with a plain loop, its windows, its files, and new heads for another target."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mapper_scaling
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_mappers import FULL, MIXED, TINY, mapper_config, random_mapper
from torch.nn import functional
from transformers import modeling_utils

from proxykv_hf import GeometryError, InvalidInputError, ProxyKVWarning
from proxykv_hf.proxy import mapper
from proxykv_hf.proxy.features import FeatureRecipe
from proxykv_hf.proxy.loading import load_mapper
from proxykv_hf.proxy.mapper import HybridAxialMapper, HybridAxialMapperConfig

SHIPPED = Path(__file__).resolve().parents[2] / "mappers" / "qwen2.5-coder"


@torch.no_grad()
def twin(model, features):
    """The scores `[L, H, N]` of one row, token by token and head by head, in one window."""
    sizes, (_, tokens) = model.config, features.shape
    standard = ((features - model.channel_mean[:, None]) / model.channel_std[:, None]).clamp(-8, 8)
    compressed = torch.stack([model.compress(standard[:, place]) for place in range(tokens)])
    margin = sizes.kernel_size // 2
    stem_input = functional.pad(functional.gelu(compressed), (0, 0, margin, margin))
    stemmed = []
    for place in range(tokens):
        seen = stem_input[place : place + sizes.kernel_size]  # [k, R]
        out = torch.einsum("kr,ork->o", seen, model.stem.weight) + model.stem.bias
        stemmed.append(out.view(sizes.head_tokens, sizes.width))
    waves = torch.logspace(math.log10(4), math.log10(sizes.window), sizes.width // 2)
    streams = []
    for m in range(sizes.head_tokens):
        states = torch.stack([step[m] for step in stemmed])
        phase = 2 * math.pi * torch.arange(tokens)[:, None] / waves
        states = states + torch.cat([phase.sin(), phase.cos()], dim=1)
        for block in model.encoder:
            query, key, value = block.qkv(block.attention_norm(states)).chunk(3, dim=-1)
            size = sizes.width // sizes.encoder_heads
            mixed = []
            for head in range(sizes.encoder_heads):
                part = slice(head * size, (head + 1) * size)
                weights = (query[:, part] @ key[:, part].T / math.sqrt(size)).softmax(-1)
                mixed.append(weights @ value[:, part])
            states = states + block.out(torch.cat(mixed, dim=1))
            states = states + block.down(functional.gelu(block.up(block.mlp_norm(states))))
        streams.append(model.encoder_norm(states))
    geometry, heads = sizes.target, model.heads
    scores = torch.zeros(geometry.num_layers, geometry.num_key_value_heads, tokens)
    for row, layer in enumerate(geometry.full_layers):
        for head in range(geometry.num_key_value_heads):
            t = row * geometry.num_key_value_heads + head
            for place in range(tokens):
                logits = [heads.query[t] @ model.key(stream[place]) / math.sqrt(sizes.width) for stream in streams]
                values = [heads.output[t] @ model.value(stream[place]) for stream in streams]
                mixed = (torch.stack(logits).softmax(0) * torch.stack(values)).sum()
                scores[layer, head, place] = mixed + heads.bias[t] + heads.linear[t] @ compressed[place]
    return scores


@pytest.mark.parametrize("tokens", [1, 2, 31])
@pytest.mark.parametrize("geometry", [FULL, MIXED], ids=["full", "mixed"])
def test_a_mapper_equals_plain_loops(geometry, tokens):
    model = random_mapper(geometry, channels=9)
    features = torch.randn(2, 9, tokens)
    ours = model(features)
    assert ours.shape == (2, geometry.num_layers, geometry.num_key_value_heads, tokens)
    for row in range(2):
        torch.testing.assert_close(ours[row], twin(model, features[row]), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("kernel", "head_tokens", "layers"), [(1, 1, 0), (3, 5, 1), (7, 2, 3)])
def test_mappers_of_other_sizes_equal_plain_loops(kernel, head_tokens, layers):
    model = random_mapper(kernel_size=kernel, head_tokens=head_tokens, encoder_layers=layers)
    features = torch.randn(1, 7, 11)
    torch.testing.assert_close(model(features)[0], twin(model, features[0]), atol=2e-4, rtol=1e-4)


def test_scores_are_float32_and_sliding_rows_are_zero():
    model = random_mapper(MIXED).bfloat16()
    scores = model(torch.randn(1, 7, 50).half())
    assert scores.dtype == torch.float32
    assert not scores[:, [1, 3]].any()
    assert scores[:, [0, 2]].all()


def test_windows_equal_one_window_away_from_seams():
    torch.manual_seed(0)
    sizes = {name: getattr(HybridAxialMapperConfig(), name) for name in TINY}
    model = HybridAxialMapper(mapper_config(channels=20, **sizes)).eval()
    features = torch.randn(1, 20, 1300)
    windowed = model(features)
    model.config.window, spans = 1300, mapper._windows(1300, 512, 64)
    monolith = _at_wavelengths(model, features, 512)
    assert spans == [(0, 512), (448, 960), (788, 1300)]
    torch.testing.assert_close(windowed, monolith, atol=1e-2, rtol=0)
    assert (windowed - monolith).abs().max() > 0  # there were several windows
    short = features[..., :512]
    whole = _at_wavelengths(model, short, 512)
    model.config.window = 512
    torch.testing.assert_close(model(short), whole, atol=0, rtol=0)


def test_a_shipped_mappers_seams_do_not_show():
    """Compared with the same weights in one window, scores differ little, and no more near a seam than elsewhere."""
    model = HybridAxialMapper.from_pretrained(SHIPPED).eval()
    noise = torch.randn(model.config.channels, 1300, generator=torch.Generator().manual_seed(0))
    features = model.channel_mean[:, None] + model.channel_std[:, None] * noise
    for rows in mapper_scaling.compare_windows(model, features[None]).values():
        at_seam, *elsewhere = rows.pop("difference")
        assert 0 < at_seam <= 1.25 * max(elsewhere)
        assert max(at_seam, *elsewhere) < 1e-2
        for both_keep in rows.values():
            assert min(both_keep) > 0.95


def _at_wavelengths(model, features, window):
    """Scores from one window of any length, with the positions for windows of length ``window``."""
    plain = mapper._positions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapper, "_positions", lambda places, width, longest: plain(places, width, window))
        return model(features)


def test_seams_sum_up_smoothly():
    """If two windows disagree, the blend goes from one to the other in even steps."""
    spans = mapper._windows(56, 32, 8)
    assert spans == [(0, 32), (24, 56)]
    first, second = (mapper._seam_weight(start, stop, 56, 8) for start, stop in spans)
    torch.testing.assert_close(first[24:] + second[:8], torch.ones(8))
    steps = second[:9].diff()
    torch.testing.assert_close(steps, torch.full((8,), 1 / 9))
    assert (first[:24] == 1).all()
    assert (second[8:] == 1).all()


@pytest.mark.parametrize("tokens", [32, 33, 55, 56, 57, 200])
def test_windows_cover_everything(tokens):
    spans = mapper._windows(tokens, 32, 8)
    assert spans[0][0] == 0
    assert spans[-1][1] == tokens
    assert all(stop - start == 32 for start, stop in spans)
    assert all(before[1] - after[0] >= 8 for before, after in itertools.pairwise(spans))


def test_a_long_text_is_encoded_in_windows_only(monkeypatch):
    model = random_mapper(channels=3, bottleneck=4, head_tokens=1, width=4, encoder_heads=1, encoder_layers=1)
    lengths = []
    encode = model._encode
    monkeypatch.setattr(model, "_encode", lambda part, start: lengths.append(part.shape[1]) or encode(part, start))
    with torch.no_grad():
        assert model(torch.randn(1, 3, 20_000)).shape == (1, 3, 2, 20_000)
    assert set(lengths) == {32 + 4}  # the window and the kernel's margins
    assert len(lengths) == math.ceil((20_000 - 32) / 24) + 1


def test_scores_do_not_depend_on_time_blocks(monkeypatch):
    model = random_mapper()
    features = torch.randn(1, 7, 90)
    whole = model(features)
    monkeypatch.setattr(mapper, "TIME_BLOCK", 13)
    torch.testing.assert_close(model(features), whole)


def test_an_untrained_mapper_scores_about_the_head_prior():
    model = HybridAxialMapper(mapper_config(MIXED)).eval()
    prior = torch.randn(2, 3)
    model.set_head_prior(prior)
    expected = torch.zeros(4, 3)
    expected[[0, 2]] = prior
    torch.testing.assert_close(model.head_prior(), expected)
    features = torch.randn(1, 7, 12)
    torch.testing.assert_close(model(features), expected[None, ..., None].expand(1, 4, 3, 12), atol=0.1, rtol=0)
    model.heads.output.data.zero_()
    torch.testing.assert_close(model(features), expected[None, ..., None].expand(1, 4, 3, 12))
    model.heads.bias.data.add_(1.0)  # what training does leaves the prior as it was
    torch.testing.assert_close(model.head_prior(), expected)


def test_a_saved_mapper_scores_the_same_after_loading(tmp_path):
    model = random_mapper(MIXED)
    model.set_head_prior(torch.randn(2, 3))
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = HybridAxialMapper.from_pretrained(tmp_path, use_safetensors=True)
    features = torch.randn(2, 7, 77)
    torch.testing.assert_close(loaded(features), model(features), atol=0, rtol=0)
    torch.testing.assert_close(loaded.head_prior(), model.head_prior(), atol=0, rtol=0)
    assert not loaded.training
    assert loaded.config.target == MIXED


def test_a_full_disk_leaves_the_mapper_that_was_there(tmp_path, monkeypatch):
    random_mapper().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors, path, **arguments):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match=rf"the mapper cannot be written into {tmp_path}: .*No space left on device"):
        random_mapper(MIXED).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _config(**changes):
    def change(folder):
        path = folder / "config.json"
        data = json.loads(path.read_text())
        path.write_text(json.dumps(data | {name: data[name] | value for name, value in changes.items()}))

    return change


def _weights(change):
    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return changed


def _cut(size):
    return lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut(0), "is damaged"),
        (_cut(-100), "is damaged"),
        (_weights(lambda tensors: (tensors.pop("prior"), tensors.pop("heads.bias"))), r"missing: heads\.bias, prior"),
        (_weights(lambda tensors: tensors.update(more=torch.zeros(1))), "unknown: more"),
        (_config(target_geometry={"sliding_windows": [None, 8, None]}), r"of another size: heads\.bias, heads\.linear"),
        (_config(target_geometry={"extra": 1}), r"is damaged \(.*extra"),
        (_config(proxy_geometry={"extra": 1}), r"is damaged \(.*extra"),
        (_config(features={"extra": 1}), r"is damaged \(.*extra"),
    ],
)
def test_a_damaged_mapper_is_refused(tmp_path, damage, message):
    random_mapper().save_pretrained(tmp_path)
    load_mapper(tmp_path)
    damage(tmp_path)
    with pytest.raises(InvalidInputError, match=message):
        load_mapper(tmp_path)


def test_a_config_survives_json(tmp_path):
    before = mapper_config(MIXED)
    before.save_pretrained(tmp_path)
    for after in (
        HybridAxialMapperConfig.from_pretrained(tmp_path),
        HybridAxialMapperConfig(**json.loads(before.to_json_string())),
    ):
        assert after.target == MIXED
        assert after.proxy == FULL
        assert after.feature_recipe == FeatureRecipe(("hidden",), 3, (1, 2))
        assert after.training == {"steps": 3, "ratios": [0.1, 0.2]}
        assert {name: getattr(after, name) for name in TINY} == TINY
        assert (after.proxy_id, after.proxy_weights, after.target_weights) == ("org/small", "0123456789abcdef", None)
        assert after.score_recipe == "kvzip-1"
        assert after.mapper_version == 1


def test_resizing_replaces_the_target_heads_and_nothing_else():
    model = random_mapper()
    features = torch.randn(1, 7, 40)
    with torch.no_grad():
        compressed = model.project(features)
    kept = {
        name: value.clone() for name, value in model.state_dict().items() if not name.startswith(("heads", "prior"))
    }
    model.resize_target_heads(MIXED)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"heads.query", "heads.output", "heads.bias", "heads.linear"}
    assert model.config.target == MIXED
    assert model.config.target_id is None
    assert model.head_prior().shape == (4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.enable_grad():
        before = model(features)
        (before - 1).pow(2).mean().backward()
    assert before.shape == (1, 4, 3, 40)
    optimizer.step()
    assert not torch.equal(model(features), before)
    for name, value in kept.items():
        assert torch.equal(model.state_dict()[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(model.project(features), compressed, atol=0, rtol=0)


def test_resized_heads_are_saved(tmp_path):
    model = random_mapper()
    model.resize_target_heads(MIXED)
    model.save_pretrained(tmp_path)
    features = torch.randn(1, 7, 9)
    loaded = HybridAxialMapper.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(features), model(features))


@pytest.mark.parametrize("shape", [(1, 6, 10), (7, 10), (1, 10, 7)])
def test_wrong_features_say_what_is_wrong(shape):
    with pytest.raises(InvalidInputError, match=r"expected \[B, C = 7, N\], got .*feature recipe"):
        random_mapper()(torch.randn(shape))


def test_a_wrong_prior_says_what_is_wrong():
    with pytest.raises(GeometryError, match=r"values: expected \[2, 3\], a row per full-attention layer, got \[4, 3\]"):
        random_mapper(MIXED).set_head_prior(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kernel_size": 4}, "kernel_size: expected an odd number, got 4"),
        ({"width": 18}, r"width: expected a multiple of 4 \(twice encoder_heads\), got 18"),
        ({"overlap": 17}, r"overlap: expected 0 to 16 \(half of window\), got 17"),
        ({"dropout": 1.0}, "dropout"),
        ({"head_tokens": 0}, "head_tokens: expected at least 1, got 0"),
        ({"encoder_layers": -1}, "encoder_layers: expected at least 0, got -1"),
    ],
)
def test_wrong_sizes_say_what_is_wrong(sizes, message):
    with pytest.raises(InvalidInputError, match=message):
        mapper_config(**sizes)


def test_an_empty_config_is_valid_but_makes_no_mapper():
    with pytest.raises(InvalidInputError, match="target_geometry: expected a dict, got None"):
        HybridAxialMapper(HybridAxialMapperConfig(channels=4))
    with pytest.raises(InvalidInputError, match="channels: expected C of the feature recipe, got 0"):
        HybridAxialMapper(HybridAxialMapperConfig(target_geometry=FULL.to_dict()))


def test_a_newer_format_warns():
    with pytest.warns(ProxyKVWarning, match="format 2"):
        mapper_config(mapper_version=2)
