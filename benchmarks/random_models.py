"""Models with real geometries and random weights, built without a download, for what depends only on shapes."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from proxykv_hf import FeatureRecipe, HybridAxialMapper, HybridAxialMapperConfig, ModelGeometry

#: Geometries as in the models' config.json. The tiny pair runs the same code in a second.
GEOMETRIES: dict[str, dict[str, int]] = {
    "qwen2.5-7b": {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "qwen2.5-1.5b": {
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    },
    "tiny": {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 300,
    },
    "tiny-proxy": {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 300,
    },
}


def geometry_config(name: str, **changes: int) -> Qwen2Config:
    """The config of one of ``GEOMETRIES``."""
    rest: dict[str, Any] = {"max_position_embeddings": 131072, "bos_token_id": None, "eos_token_id": None}
    return Qwen2Config(**GEOMETRIES[name] | changes | rest)


def random_target(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A causal language model, whose weights are created on ``device``."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(geometry_config(name), dtype=dtype)
    return model.eval()


def random_proxy(name: str, layers: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The first ``layers`` layers of a decoder, without a language-model head."""
    with torch.device(device):
        model: PreTrainedModel = AutoModel.from_config(geometry_config(name, num_hidden_layers=layers), dtype=dtype)
    return model.eval()


def random_mapper(
    target: PreTrainedModel, proxy: PreTrainedModel, proxy_name: str, recipe: FeatureRecipe
) -> HybridAxialMapper:
    """A random mapper for a pair. Its output weights are large enough that the text decides what is kept."""
    config = HybridAxialMapperConfig(
        target_geometry=ModelGeometry.from_config(target.config).to_dict(),
        proxy_geometry=ModelGeometry.from_config(geometry_config(proxy_name)).to_dict(),
        proxy_id=proxy_name,
        features=recipe.to_dict(),
        channels=recipe.channels(proxy.config),
    )
    with torch.device(target.device):
        mapper = HybridAxialMapper(config)
    with torch.no_grad():
        mapper.heads.output.normal_(std=1.0)
    return mapper.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, for kvzip's repetition prompt if there is no real tokenizer."""
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
