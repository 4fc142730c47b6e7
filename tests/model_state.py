"""The state of a model and of transformers' registries that a cache must restore."""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All that a cache could have changed; equal snapshots mean that it left nothing behind."""
    hooks = [name for name in vars(model) if name.endswith("hooks") or "hooks_" in name]
    return {
        "modules": [
            (name, id(module), type(module), sorted(vars(module)), {h: dict(getattr(module, h)) for h in hooks})
            for name, module in model.named_modules()
        ],
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "config": model.config.to_dict(),
        "parameters": [(name, id(p), p._version, p.requires_grad) for name, p in model.named_parameters()],
        "training": model.training,
        "registries": [dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)],
    }
