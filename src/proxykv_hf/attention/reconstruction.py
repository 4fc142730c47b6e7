"""KVzip's scores (arXiv 2505.23416): how much attention a model gives to each KV pair while it repeats its context.

This file is the only place that defines the recipe. The oracle and the teacher run it on the target, and some scorers
run it on the proxy. Recipe ``kvzip-1``:

- the context is split into chunks of 2048 tokens;
- for each chunk, the model runs one forward over ``repeat prompt + chat suffix + chunk``, at positions that follow the
  prefill;
- in every layer, the attention of these queries is taken over exactly [4 sink tokens, the chunk, the queries themselves
  (causal)];
- the score of a KV pair is the largest weight that any query of any query head of its group gives to it.

The softmax of a chunk runs over that chunk alone. In a short last chunk, fewer tokens share the weight, so they score
higher than the tokens of a full chunk. As far as we know this is KVzip's own chunking. We keep it, because the scores
of teachers and of shipped mappers follow this recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .._compat import Cache, call_forward
from ..chat import chat_affixes, encode
from ..geometry import ModelGeometry, device_of
from .functions import AttentionCall, AttentionOutput
from .lease import Lease
from .logits import attention_weights, scaled_logits
from .passing import PassingLayer

RECIPE = "kvzip-1"
CHUNK_TOKENS = 2048
SINK_TOKENS = 4
#: The repeat prompt of a later chunk quotes this many last tokens of the chunk before it.
QUOTED_TOKENS = 8
#: Queries that are scored at once. It bounds the attention weights in memory to block x (chunk + repeat).
QUERY_BLOCK = 256

#: The repeat prompts: for the first chunk, and for later chunks, where the quoted tokens follow it. Another wording is
#: another recipe.
PROMPTS = (
    "\n\nRepeat the previous context exactly.",
    "\n\nRepeat the part of the previous context exactly, starting with",
)


def repeat_inputs(
    tokenizer: PreTrainedTokenizerBase,
    context_ids: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    prompts: tuple[str, str] = PROMPTS,
) -> list[tuple[int, int, Tensor]]:
    """Make the inputs that ask a model to repeat its context.

    Args:
        tokenizer: The model's tokenizer.
        context_ids: `[n]`, the context.
        chunk_tokens: Context tokens per chunk.
        prompts: The repeat prompts, see ``PROMPTS``.

    Returns: for each chunk, ``start`` and ``stop`` in the context, and the token ids to feed to the model.
    """
    first, later = prompts
    suffix = encode(tokenizer, chat_affixes(tokenizer)[1])
    inputs = []
    for start in range(0, len(context_ids), chunk_tokens):
        stop = min(start + chunk_tokens, len(context_ids))
        if start == 0:
            ask = encode(tokenizer, first)
        else:
            quoted = context_ids[max(0, start - QUOTED_TOKENS) : start].tolist()
            ask = encode(tokenizer, later) + quoted
        ids = torch.cat([torch.tensor(ask + suffix, dtype=torch.long), context_ids[start:stop].cpu()])
        inputs.append((start, stop, ids))
    return inputs


def repeat_length(
    tokenizer: PreTrainedTokenizerBase,
    context_ids: Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    prompts: tuple[str, str] = PROMPTS,
) -> int:
    """The length in tokens of the longest of `repeat_inputs`: the number of positions needed after the prompt."""
    inputs = repeat_inputs(tokenizer, context_ids, chunk_tokens, prompts)
    return max((len(ids) for _, _, ids in inputs), default=0)


@torch.no_grad()
def reconstruction_scores(
    model: PreTrainedModel,
    states: Sequence[tuple[Tensor, Tensor]],
    input_ids: Tensor,
    context: tuple[int, int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    next_position: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    sink_tokens: int = SINK_TOKENS,
    prompts: tuple[str, str] = PROMPTS,
) -> Tensor:
    """Score the context of one prefilled prompt.

    The pass holds at most one layer's copy of K and V and ``QUERY_BLOCK`` rows of attention at a time, so its memory is
    linear in the chunk.

    Args:
        model: The model that prefilled the prompt.
        states: K `[1, H, n, D]` and V `[1, H, n, Dv]` of each layer, which are only read. Sliding-window layers hold
            only the last tokens.
        input_ids: `[n]`, the prompt.
        context: The span ``(start, stop)`` of the prompt that is scored.
        tokenizer: The model's tokenizer.
        next_position: The position id after the prompt. By default n.
        chunk_tokens: Context tokens that are repeated in one forward.
        sink_tokens: The number of first tokens of the prompt that the scored attention sees besides the chunk.
        prompts: The repeat prompts, see ``PROMPTS``.

    Returns: the scores `[L, H, n]`, float32, on the model's device. They are zero outside the context and in
        sliding-window layers.
    """
    geometry = ModelGeometry.from_config(model.config)
    tokens = len(input_ids)
    position = tokens if next_position is None else next_position
    scores = torch.zeros(
        geometry.num_layers, geometry.num_key_value_heads, tokens, dtype=torch.float32, device=device_of(model)
    )
    decoder = model.base_model  # without the logits, which would be far larger than everything else
    with Lease(model):
        for start, stop, ids in repeat_inputs(tokenizer, input_ids[slice(*context)], chunk_tokens, prompts):
            chunk = (context[0] + start, context[0] + stop)
            layers: list[Any] = [
                _ScoringLayer(keys, values, tokens, chunk, min(sink_tokens, chunk[0]))
                if window is None
                else _ReadOnlyLayer(keys, values, tokens, is_sliding=True)
                for (keys, values), window in zip(states, geometry.sliding_windows, strict=True)
            ]
            ids = ids.to(device_of(model))
            positions = position + torch.arange(len(ids), device=device_of(model))
            call_forward(
                decoder, input_ids=ids[None], position_ids=positions[None], cache=Cache(layers=layers), use_cache=True
            )
            for index in geometry.full_layers:
                scores[index, :, slice(*chunk)] = layers[index].scores
    return scores


class _ReadOnlyLayer(PassingLayer):
    """A layer of the prefilled cache, for one forward whose own K and V are not kept."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, seen: int, is_sliding: bool) -> None:
        super().__init__(is_sliding)
        self.keys, self.values, self.seen = keys, values, seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = (torch.cat(pair, dim=2) for pair in ((self.keys, key_states), (self.values, value_states)))
        return super().update(keys, values, *args, **kwargs)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        stored = self.keys.shape[2]
        return stored + query_length, self.seen - stored


class _ScoringLayer(_ReadOnlyLayer):
    """A full-attention layer that also scores the KV pairs of ``chunk``."""

    def __init__(self, keys: Tensor, values: Tensor, seen: int, chunk: tuple[int, int], sinks: int) -> None:
        super().__init__(keys, values, seen, is_sliding=False)
        self.chunk, self.sinks = chunk, sinks
        self.scores: Tensor | None = None  # [H, chunk]

    def attend(self, call: AttentionCall) -> AttentionOutput:
        start, stop = self.chunk
        key = call.key[0]
        seen_keys = torch.cat([key[:, : self.sinks], key[:, start:stop]], dim=1)
        scores = largest_attention(
            call.query[0], seen_keys, key[:, self.seen :], call.scaling, call.softcap, call.sinks
        )
        self.scores = scores[:, self.sinks :]
        return call.by_backend()


def largest_attention(
    query: Tensor,
    seen_keys: Tensor,
    own_keys: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The largest weight that each seen key gets from any query of its group, `[H, S]`, float32.

    Args:
        query: `[Q, q, D]`.
        seen_keys: `[H, S, D]`, the keys that every query sees.
        own_keys: `[H, q, D]`, the keys of the queries' own tokens, which they see causally.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.
    """
    heads, seen, _ = seen_keys.shape
    grouped = query.unflatten(0, (heads, -1))  # [H, G, q, D]
    keys = torch.cat([seen_keys, own_keys], dim=1).unsqueeze(1)  # [H, 1, S + q, D]
    best = query.new_zeros(heads, seen, dtype=torch.float32)
    places = torch.arange(query.shape[1], device=query.device)
    for block in places.split(QUERY_BLOCK):
        visible = seen + int(block[-1]) + 1  # later keys are masked for the whole block
        logits = scaled_logits(grouped[:, :, block], keys[:, :, :visible], scaling, softcap)
        logits[..., seen:].masked_fill_(places[: visible - seen] > block[:, None], float("-inf"))
        own_sinks = None if sinks is None else sinks.view(heads, -1, 1, 1)
        best = torch.maximum(best, attention_weights(logits, own_sinks)[..., :seen].amax(dim=(1, 2)))
    return best
