"""Hidden-state heads with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from proxykv_hf import HiddenStateHeads, ModelGeometry


def random_heads(model: PreTrainedModel, seed: int = 0, **fields: Any) -> HiddenStateHeads:
    """Heads for this target; ``fields`` are further fields of `HiddenStateHeads`."""
    geometry = ModelGeometry.from_config(model.config)
    heads = (geometry.num_layers, geometry.num_key_value_heads)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(*heads, model.config.hidden_size, generator=generator)
    return HiddenStateHeads(weights, torch.randn(heads, generator=generator), geometry, **fields)
