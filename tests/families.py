"""Small random models of architectures that `tiny` does not cover."""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

COMMON = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
NO_KV_HEADS = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
SMALL_GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None}
SMALL_MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def make_family(name: str, common: dict[str, Any] = COMMON, model: str | None = None, **fields: Any) -> PreTrainedModel:
    """A model in eval mode.

    Args:
        name: The architecture as transformers' class names begin: ``"Olmo2"``.
        common: Fields of its config.
        model: The model's class, if it is not ``{name}ForCausalLM``.
        fields: More fields of its config.
    """
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**common | fields)
    return getattr(transformers, model or f"{name}ForCausalLM")(config).eval()


def make_gpt_oss() -> PreTrainedModel:
    """Every second layer has a sliding window, and all have attention sinks, which matter here."""
    model = make_family("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=8)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    return model


#: The architectures whose cache can be pruned.
WORKING = {
    "phi3": lambda: make_family("Phi3"),
    "olmo2": lambda: make_family("Olmo2"),
    "cohere": lambda: make_family("Cohere"),
    "cohere2": lambda: make_family("Cohere2", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "granite": lambda: make_family("Granite"),
    "gpt-neox": lambda: make_family("GPTNeoX", NO_KV_HEADS),
    "gpt2": lambda: make_family("GPT2", SMALL_GPT2, "GPT2LMHeadModel"),
    "qwen3-moe": lambda: make_family("Qwen3Moe", **SMALL_MOE),
    "gpt-oss": lambda: make_gpt_oss(),
    "falcon": lambda: make_family("Falcon", NO_KV_HEADS, num_kv_heads=2, new_decoder_architecture=True),
    "falcon-mqa": lambda: make_family("Falcon", NO_KV_HEADS),
}

#: The second is Falcon's before 5.25, whose config does not say that its heads share one K and V.
OWN_WAY = "computes attention in its own way|expected 4 KV heads as the config says, got 1"


def computes_by_the_interface(model: PreTrainedModel) -> bool:
    """Whether this transformers' file of the model calls `AttentionInterface`: Falcon's does since 5.25."""
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
