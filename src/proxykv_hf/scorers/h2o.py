"""H2O (arXiv 2306.14048): the tokens that get most of the prompt's own attention, and the most recent tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.logits import causal_weights
from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache
from .observing import ObservingRun


class H2OScorer:
    """Keeps recent tokens and heavy hitters, half of each. A heavy hitter is a key that receives much attention.

    The attention that a key receives is summed over all queries of the prompt. In the paper, a cache of k tokens holds
    the k / 2 most recent tokens and the k / 2 heaviest. Scores are computed before k is known and serve several ratios,
    so they rank the tokens: the latest, the heaviest, the second latest, the second heaviest, and so on. For any k, the
    best k tokens are the last m tokens of the context and the m heaviest, with m as large as possible (a token that is
    both counts once).

    Because the scores are ranks, they are the same numbers in every head. Every head keeps the same number of tokens
    under either allocation, as in the paper. The sum over queries is also the paper's; it favours early tokens, which
    more queries see. The paper evicts again with every generated token. Here the prompt is pruned once, as everywhere
    in this package.

    Args:
        recent_share: The share of the budget that goes to recent tokens, 0 to 1.

    Raises:
        InvalidInputError: ``recent_share`` is not from 0 to 1.
    """

    name = "h2o"
    observes = True

    def __init__(self, recent_share: float = 0.5) -> None:
        if not 0 <= recent_share <= 1:
            raise InvalidInputError(f"recent_share: expected a number from 0 to 1, got {recent_share!r}")
        self.recent_share = recent_share

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to sum the attention that each key receives."""
        return _H2ORun(self, request)


class _H2ORun(ObservingRun[Tensor]):
    """Folds queries into the attention that each key has received, `[H, n]`."""

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
        received = received_attention(query, key, observation.scaling, observation.softcap, observation.sinks)
        if before is not None:
            received[:, : before.shape[1]] += before
        return received

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, geometry = cache.request.prompt, cache.request.geometry
        scores = cache.request.blank_scores()
        for row, (pad, (start, stop)) in enumerate(zip(prompt.pads, prompt.contexts, strict=True)):
            for layer in geometry.full_layers:
                received = self.folded(layer, cache.batch_row(row))
                assert received is not None  # every row has a token
                order = entry_order(received[:, start:stop], self.scorer.recent_share)
                scores[row, layer, :, pad + start : pad + stop] = order
        return scores


def received_attention(
    query: Tensor, key: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None = None
) -> Tensor:
    """The attention that each key receives: the sum over some queries, and the mean over the query heads of a group.

    Args:
        query: `[Q, q, D]`, the queries of the last q of N tokens.
        key: `[H, N, D]`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: `[H, N]`, float32.
    """
    heads, tokens, _ = key.shape
    received = query.new_zeros(heads, tokens, dtype=torch.float32)
    for head, _, stop, weights in causal_weights(query, key, scaling, softcap, sinks=sinks):
        received[head, :stop] += weights.sum(1).mean(0)
    return received


def entry_order(received: Tensor, recent_share: float) -> Tensor:
    """Minus the smallest budget at which a token is kept, as a recent token or as a heavy one.

    Args:
        received: `[H, n]`, the attention that the tokens of the context receive.
        recent_share: The share of every budget that goes to recent tokens.

    Returns: `[H, n]`, float32.
    """
    heads, tokens = received.shape
    latest = torch.arange(tokens, 0, -1, device=received.device, dtype=torch.float32)  # 1 is the last token
    order = received.argsort(dim=-1, descending=True, stable=True)
    heaviest = torch.empty_like(received).scatter_(1, order, latest.flip(0).expand(heads, -1))  # 1 is the heaviest
    return -torch.minimum((latest - 0.5) / recent_share, heaviest / (1 - recent_share))
