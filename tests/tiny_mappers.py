"""Tiny mappers with random weights."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from proxykv_hf import FeatureRecipe, HybridAxialMapper, HybridAxialMapperConfig, ModelGeometry

FULL = ModelGeometry(3, 2, 4, 16, (None, None, None))
MIXED = ModelGeometry(4, 3, 6, 16, (None, 32, None, 32))
#: Sizes of a mapper.
TINY = {"bottleneck": 12, "head_tokens": 3, "width": 16, "encoder_heads": 2, "window": 32, "overlap": 8}


def mapper_config(geometry: ModelGeometry = FULL, channels: int = 7, **changes) -> HybridAxialMapperConfig:
    """A config of `TINY` sizes whose every field is set; ``changes`` replace fields."""
    return HybridAxialMapperConfig(
        target_geometry=geometry.to_dict(),
        proxy_geometry=FULL.to_dict(),
        target_id="org/large",
        proxy_id="org/small",
        proxy_revision="main",
        proxy_weights="0123456789abcdef",
        features=FeatureRecipe(("hidden",), 3, (2, 1)).to_dict(),
        channels=channels,
        training={"steps": 3, "ratios": (0.1, 0.2)},
        **{**TINY, **changes},
    )


def random_mapper(geometry: ModelGeometry = FULL, channels: int = 7, **changes) -> HybridAxialMapper:
    """A mapper of `mapper_config`. Every parameter is far from its initial value, so no result is right by being 0."""
    torch.manual_seed(0)
    model = HybridAxialMapper(mapper_config(geometry, channels, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.set_channel_statistics(torch.randn(channels), torch.rand(channels) + 0.5)
    model.heads.output.data.add_(torch.randn_like(model.heads.output))
    return model


def make_mapper(
    target: PreTrainedModel,
    proxy: PreTrainedModel,
    recipe: FeatureRecipe | None = None,
    whole_proxy: PreTrainedModel | None = None,
    **fields,
) -> HybridAxialMapper:
    """A mapper from ``proxy`` to ``target``. Its output vectors are large, so the scores depend on the text.

    Args:
        target: The model whose cache is pruned.
        proxy: The model that the features come from.
        recipe: The features; by default attention and hidden states of two layers.
        whole_proxy: The model that ``proxy`` is the first layers of, if it is cut.
        fields: More fields of the config.
    """
    recipe = recipe or FeatureRecipe(("attention", "hidden"), 2, (1, 2))
    torch.manual_seed(0)
    config = HybridAxialMapperConfig(
        target_geometry=ModelGeometry.from_config(target.config).to_dict(),
        proxy_geometry=ModelGeometry.from_config((whole_proxy or proxy).config).to_dict(),
        features=recipe.to_dict(),
        channels=recipe.channels(proxy.config),
        bottleneck=16,
        head_tokens=2,
        width=16,
        encoder_heads=2,
        window=32,
        overlap=8,
        **fields,
    )
    mapper = HybridAxialMapper(config).eval()
    torch.nn.init.normal_(mapper.heads.output)
    return mapper
