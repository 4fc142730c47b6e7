"""The fingerprint of a model's weights."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from torch import nn

from proxykv_hf.geometry import weights_fingerprint


def numbered(kind="llama"):
    """A tiny model whose weights are the same numbers everywhere."""
    model = tiny_model(kind)
    for place, (_, parameter) in enumerate(sorted(model.named_parameters())):
        parameter.data.copy_((torch.arange(parameter.numel()).view_as(parameter) % 97 - 48) / 64 + place)
    return model


@pytest.mark.parametrize(("kind", "expected"), [("llama", "3b91dbab980be94b"), ("gemma3", "0ed3b4b45e8df5fd")])
def test_plain_weights_keep_their_fingerprint(kind, expected):
    """Mappers and caches on disk name it."""
    model = numbered(kind)
    assert weights_fingerprint(model) == expected
    model.model.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))
    model.model.register_buffer("places", torch.arange(9))
    assert weights_fingerprint(model) == expected
    assert weights_fingerprint(model.bfloat16()) != expected


class Packed(nn.Module):
    """A linear layer as GPTQ and AWQ keep it: all of it buffers."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("qweight", (linear.weight.data * 8).to(torch.int32))
        self.register_buffer("scales", torch.ones(len(linear.weight)))


def quantized(how, factor=1):
    model = numbered()
    for layer in model.model.layers:
        linear = layer.mlp.up_proj
        if how == "packed":
            layer.mlp.up_proj = Packed(linear)
            layer.mlp.up_proj.qweight.mul_(factor)
        else:
            linear.weight = nn.Parameter((linear.weight.data * 8).to(how) * factor, requires_grad=False)
    return model


@pytest.mark.parametrize("how", ["packed", torch.int8, torch.uint8])
def test_quantized_weights_count(how):
    model = quantized(how)
    found = weights_fingerprint(model)
    assert found == weights_fingerprint(quantized(how))
    assert len({found, weights_fingerprint(numbered()), weights_fingerprint(quantized(how, -1))}) == 3


def test_scales_of_quantized_weights_count():
    one, other = quantized("packed"), quantized("packed")
    other.model.layers[1].mlp.up_proj.scales.mul_(2)
    assert weights_fingerprint(one) != weights_fingerprint(other)
