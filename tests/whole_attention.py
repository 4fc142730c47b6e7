"""Whole attention matrices of a model, and KVzip's scores computed from them the slow way."""

from __future__ import annotations

import torch
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from proxykv_hf._compat import call_forward
from proxykv_hf.chat import chat_affixes, encode

PROMPTS = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with",
)


def attentions(model: PreTrainedModel, ids: Tensor, past: DynamicCache | None = None) -> list[Tensor]:
    """Attention weights `[Q, q, N]` of each layer, from an eager forward over ``ids`` `[1, q]`."""
    backend = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = call_forward(model, input_ids=ids, cache=past or DynamicCache(config=model.config), output_attentions=True)
    model.set_attn_implementation(backend)
    return [weights[0] for weights in out.attentions]


def kvzip_twin(
    model: PreTrainedModel,
    prompt: list[int],
    context: tuple[int, int],
    chunk_tokens: int,
    sinks: int = 4,
    prompts: tuple[str, str] = PROMPTS,
) -> Tensor:
    """The paper's scores `[L, H, N]`, chunk by chunk, by renormalising whole attention matrices.

    Args:
        model: The target.
        prompt: N token ids.
        context: The first token that is scored, and the one after the last.
        chunk_tokens: Tokens of the context that the model repeats at a time.
        sinks: First tokens of the prompt that every chunk attends to.
        prompts: What asks the model to repeat the first chunk, and a later one.
    """
    tokenizer = tiny_tokenizer()
    start, stop = context
    suffix = encode(tokenizer, chat_affixes(tokenizer)[1])
    heads = model.config.num_key_value_heads
    scores = torch.zeros(model.config.num_hidden_layers, heads, len(prompt))
    for first in range(start, stop, chunk_tokens):
        last = min(first + chunk_tokens, stop)
        if first == start:
            ask = encode(tokenizer, prompts[0])
        else:
            ask = encode(tokenizer, prompts[1])
            ask += prompt[max(start, first - 8) : first]
        repeat = ask + suffix + prompt[first:last]
        matrices = attentions(model, torch.tensor([prompt + repeat]))
        for layer, weights in enumerate(matrices):
            own = weights[:, len(prompt) :]
            seen = [*range(min(sinks, first)), *range(first, last), *range(len(prompt), len(prompt) + len(repeat))]
            sink = 1 - own.double().sum(-1, keepdim=True)  # what an attention sink takes
            sink[sink < 1e-5] = 0  # rounding, where there is none
            share = own[:, :, first:last] / (own.double()[:, :, seen].sum(-1, keepdim=True) + sink)
            scores[layer, :, first:last] = share.unflatten(0, (heads, -1)).amax(dim=(1, 2)).float()
    return scores
