"""Small random models of real architectures, and a byte tokenizer, all made in memory."""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

KINDS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
VOCABULARY = 260
KV_HEADS = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def tiny_model(kind: str = "llama", group: int = 2, layers: int = 3, attention: str | None = None) -> PreTrainedModel:
    """A model in eval mode. Gemma models have a sliding window of 16 in some layers, and Gemma 2 has a softcap."""
    torch.manual_seed(group)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * KV_HEADS * group,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": KV_HEADS * group,
        "num_key_value_heads": KV_HEADS,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    sliding = {
        "sliding_window": 16,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "query_pre_attn_scalar": 24,  # so that the scaling is not head_dim ** -0.5
    }
    config = {
        "llama": lambda: LlamaConfig(**common),
        "qwen2": lambda: Qwen2Config(**common),
        "qwen3": lambda: Qwen3Config(**common),
        "gemma2": lambda: Gemma2Config(**common, **sliding, attn_logit_softcapping=2.0),
        "gemma3": lambda: Gemma3TextConfig(**common, **sliding),
    }[kind]()
    if attention is not None:
        config._attn_implementation = attention
    model = {
        "llama": LlamaForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
        "gemma2": Gemma2ForCausalLM,
        "gemma3": Gemma3ForCausalLM,
    }[kind](config).eval()
    for name, parameter in model.named_parameters():  # sharper attention than the default initialization gives
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and a chat template. Ids 0 to 3 are special tokens."""
    special = ["<pad>", "<user>", "</s>", "<bot>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def random_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `[batch, tokens]`, without padding tokens."""
    return torch.randint(4, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def random_scores(model: PreTrainedModel, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random scores `[rows, L, H, tokens]`."""
    shape = (rows, model.config.num_hidden_layers, model.config.num_key_value_heads, tokens)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def pad_left(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows `[n]` of different lengths on the left; return ids and mask `[B, N]`."""
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return ids, mask
