"""H2O (arXiv 2306.14048): the heavy hitters of the prompt's own attention, and its most recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.logits import causal_weights
from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache
from .observing import ObservingRun


class H2OScorer:
    """Attention that each key receives, summed over all queries of the prompt, and recency, half and half.

    The paper's cache of k tokens is k / 2 recent ones and the k / 2 heaviest. Scores are made before anybody knows k,
    and serve several ratios, so they tell the order in which tokens come in: the latest, the heaviest, the second
    latest, the second heaviest, and so on. Whatever k is, the best k are the last m tokens of the context and the m
    heaviest, with m as large as fits (a token that is both takes one place).

    Being ranks, the scores are the same numbers in every head: each keeps as many tokens as the next one, as in the
    paper, under either allocation. The sum is the paper's, and favours early tokens, which more queries see. The
    paper evicts again with every token that is generated; here, as everywhere in this package, the prompt is cut once.

    Args:
        recent_share: Share of the budget that goes to recent tokens, 0 to 1.
    """

    name = "h2o"
    observes = True

    def __init__(self, recent_share: float = 0.5) -> None:
        if not 0 <= recent_share <= 1:
            raise InvalidInputError(f"recent_share: expected a number from 0 to 1, got {recent_share!r}")
        self.recent_share = recent_share

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to sum."""
        return _H2ORun(self, request)


class _H2ORun(ObservingRun[Tensor]):
    """What is folded is the attention received, `[H, n]`."""

    def __init__(self, scorer: H2OScorer, request: ScoringRequest) -> None:
        super().__init__(request)
        self.scorer = scorer

    def fold(
        self, observation: Observation, row: int, pad: int, start: int, stop: int, before: Tensor | None
    ) -> Tensor:
        assert observation.key is not None
        first = observation.columns - observation.query.shape[2]
        query = observation.query[row, :, start - first : stop - first]
        key = observation.key[row, :, pad:stop]
        received = received_attention(query, key, observation.scaling, observation.softcap)
        if before is not None:
            received[:, : before.shape[1]] += before
        return received

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, geometry = cache.request.prompt, cache.request.geometry
        scores = cache.request.blank_scores()
        for row, (pad, (start, stop)) in enumerate(zip(prompt.pads, prompt.contexts, strict=True)):
            for layer in geometry.full_layers:
                received = self.folded(layer, cache.batch_row(row))
                assert received is not None  # a row has tokens
                order = entry_order(received[:, start:stop], self.scorer.recent_share)
                scores[row, layer, :, pad + start : pad + stop] = order
        return scores


def received_attention(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    """What each key receives from some queries together, mean over the query heads of a group, `[H, N]`, float32.

    Args:
        query: `[Q, q, D]`, of the last q of N tokens.
        key: `[H, N, D]`.
        scaling: See `logits.scaled_logits`.
        softcap: The same.
    """
    heads, tokens, _ = key.shape
    received = query.new_zeros(heads, tokens, dtype=torch.float32)
    for head, _, stop, weights in causal_weights(query, key, scaling, softcap):
        received[head, :stop] += weights.sum(1).mean(0)
    return received


def entry_order(received: Tensor, recent_share: float) -> Tensor:
    """Minus the budget at which a token comes in, as one of the recent or of the heavy ones.

    Args:
        received: `[H, n]`, attention of the tokens that compete.
        recent_share: Share of any budget that is the recent ones'.

    Returns: `[H, n]`, float32.
    """
    heads, tokens = received.shape
    latest = torch.arange(tokens, 0, -1, device=received.device, dtype=torch.float32)  # 1 is the last token
    order = received.argsort(dim=-1, descending=True, stable=True)
    heaviest = torch.empty_like(received).scatter_(1, order, latest.flip(0).expand(heads, -1))  # 1 is the heaviest
    return -torch.minimum((latest - 0.5) / recent_share, heaviest / (1 - recent_share))
