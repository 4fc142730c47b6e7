"""The slow, plain reference: a model without a cache, whose evicted KV pairs are masked by hand.

It runs one forward over all tokens of one row. Queries after the prompt do not see the KV pairs that were evicted in
their layer and head. The prompt's own queries see everything before them. Positions are true. The reference shares no
code with the package.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

NAME = "masked_reference"


@dataclasses.dataclass
class ReferenceRow:
    """The tokens of one row of a cache, and which KV pairs are kept.

    Args:
        prompt: The token ids of the prefill.
        keep: `[L, H, len(prompt)]`, bool; None while everything is kept.
        tail: The token ids after the prompt.
        early: How many tokens of the tail came before the prune, and so see everything.
    """

    prompt: list[int]
    keep: Tensor | None = None
    tail: list[int] = dataclasses.field(default_factory=list)
    early: int = 0

    def copy(self) -> ReferenceRow:
        return dataclasses.replace(self, tail=list(self.tail))


class Reference:
    """Computes the logits of a model whose cache was pruned, the slow way."""

    def __init__(self, model: PreTrainedModel) -> None:
        AttentionInterface.register(NAME, self._dispatch)
        self.model = copy.deepcopy(model)
        for module in self.model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = NAME
        self.model._reference = self

    @staticmethod
    def _dispatch(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
        window = kwargs.get("sliding_window")
        if window is not None and window >= module.config.max_position_embeddings:
            window = None
        visible = module.config._reference_visible
        total = query.shape[2]
        past = torch.arange(total)[:, None] - torch.arange(total)[None, :]
        see = past >= 0
        if window is not None:
            see = see & (past < window)
        see = see.expand(key.shape[1], -1, -1).clone()  # [H, N, N]
        if window is None and visible is not None:
            keep, prompt, early = visible
            see[:, prompt + early :, :prompt] &= keep[module.layer_idx][:, None, :]
        group = query.shape[1] // key.shape[1]
        outputs, weights = [], []
        for head in range(query.shape[1]):
            logits = query[0, head].double() @ key[0, head // group].double().T
            logits = logits * (scaling if scaling is not None else query.shape[-1] ** -0.5)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits[~see[head // group]] = -torch.inf
            if (sinks := kwargs.get("s_aux")) is None:
                weights.append(logits.softmax(-1))
            else:  # a logit of its own, whose weight goes nowhere
                sink = sinks[head].double().expand(total, 1)
                weights.append(torch.cat([logits, sink], dim=1).softmax(-1)[:, :total])
            outputs.append(weights[-1] @ value[0, head // group].double())
        module._reference_weights = torch.stack(weights).to(query.dtype)
        return torch.stack(outputs, dim=1)[None].to(query.dtype), None

    @torch.no_grad()
    def logits(self, row: ReferenceRow, new: list[int]) -> Tensor:
        """`[len(new), V]`: the next-token logits after each of ``new``, which follow the row."""
        ids = row.prompt + row.tail + new
        self.model.config._reference_visible = None if row.keep is None else (row.keep, len(row.prompt), row.early)
        return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(ids) - len(new) :]

    def attentions(self, row: ReferenceRow, new: list[int]) -> list[Tensor]:
        """For each layer, the attention weights of ``new`` over everything that was seen, `[Q, len(new), N]`."""
        self.logits(row, new)
        modules = [module for module in self.model.modules() if hasattr(module, "_reference_weights")]
        return [module._reference_weights[:, -len(new) :] for module in modules]


def slow_selection(
    scores: Tensor,
    ratio: float,
    allocation: str,
    context: tuple[int, int] | None = None,
    protected: set[int] = frozenset(),
) -> Tensor:
    """The kept mask `[L, H, N]`, bool, for scores `[L, H, N]`, by sorting Python lists.

    Args:
        scores: `[L, H, N]`.
        ratio: The retention ratio.
        allocation: ``"global"`` or ``"uniform"``.
        context: The span that may be evicted. By default everything.
        protected: Positions in the context that are kept in any case.
    """
    layers, heads, tokens = scores.shape
    start, stop = context or (0, tokens)
    keep = torch.ones(layers, heads, tokens, dtype=torch.bool)
    places = [(layer, head, n) for layer in range(layers) for head in range(heads) for n in range(start, stop)]
    for place in places:
        keep[place] = False

    def best(candidates: list, budget: int) -> list:
        must = [c for c in candidates if c[2] in protected]
        for layer, head in {c[:2]: None for c in candidates}:
            own = [c for c in candidates if c[:2] == (layer, head)]
            if not any(c in must for c in own):
                must.append(max(own, key=lambda c: (float(scores[c]), -c[2])))
        rest = sorted((c for c in candidates if c not in must), key=lambda c: (-float(scores[c]), c))
        return must + rest[: max(0, budget - len(must))]

    if allocation == "global":
        chosen = best(places, round(ratio * len(places)))
    else:
        chosen = []
        for layer in range(layers):
            for head in range(heads):
                own = [c for c in places if c[:2] == (layer, head)]
                chosen += best(own, round(ratio * len(own)))
    for place in chosen:
        keep[place] = True
    return keep
