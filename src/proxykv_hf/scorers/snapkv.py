"""SnapKV (arXiv 2404.14469): the attention that the prompt's last queries give, without a second pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.logits import attention_weights, scaled_logits
from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache


class SnapKVScorer:
    """Scores a KV pair by its mean attention from the prompt's last queries, the observation window.

    The attention is smoothed over neighbouring tokens and averaged over the query heads of the group.

    Args:
        window_tokens: The number of last queries of the prompt that form the window. The tokens of the window itself
            get the highest scores, and the last token the highest of all.
        kernel_size: The number of tokens that the average pooling spans. Odd.

    Raises:
        InvalidInputError: ``window_tokens`` is less than 1, or ``kernel_size`` is even or less than 1.
    """

    name = "snapkv"
    observes = True

    def __init__(self, window_tokens: int = 64, kernel_size: int = 5) -> None:
        if window_tokens < 1 or kernel_size < 1 or kernel_size % 2 == 0:
            raise InvalidInputError(
                f"expected window_tokens of at least 1 and an odd kernel_size, got {window_tokens}, {kernel_size}"
            )
        self.window_tokens = window_tokens
        self.kernel_size = kernel_size

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to note the last queries."""
        return _SnapKVRun(self, request.prompt.columns)


class _SnapKVRun(ScorerRun):
    def __init__(self, scorer: SnapKVScorer, first_columns: int) -> None:
        super().__init__()
        self.scorer = scorer
        self.first_columns = first_columns
        self.drafts: int | None = None
        self.last: dict[int, Observation] = {}

    def observe(self, observation: Observation) -> None:
        if self.drafts is None:  # drafts of assisted decoding come after the prompt
            self.drafts = max(0, observation.columns - self.first_columns)
        query = observation.query
        if observation.layer in self.last:
            query = torch.cat([self.last[observation.layer].query, query], dim=2)
        wanted = self.scorer.window_tokens + self.drafts
        query = query[:, :, -wanted:].clone()  # a copy, so that the other queries are freed
        self.last[observation.layer] = observation.without_states(query)

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        for row, length in enumerate(prompt.lengths):
            states = cache.states(row)
            window = min(self.scorer.window_tokens, length)
            for layer, last in self.last.items():
                first = last.columns - last.query.shape[2]  # the column of the first noted query
                columns = slice(max(0, prompt.columns - window - first), prompt.columns - first)
                query = last.query[cache.batch_row(row), :, columns]
                keys = states[layer][0][0]
                scores[row, layer, :, prompt.pads[row] :] = window_scores(
                    query, keys, self.scorer.kernel_size, last.scaling, last.softcap, last.sinks
                )
        return scores

    def cancel(self) -> None:
        self.last.clear()


def window_scores(
    query: Tensor,
    keys: Tensor,
    kernel_size: int,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The scores of one layer for one row.

    Before the window, scores are means of weights, so at most 1. In the window they are 2 and more, and rise with the
    position: if the budget is smaller than the window, the latest tokens are kept.

    Args:
        query: `[Q, w, D]`, the queries of the last w tokens.
        keys: `[H, n, D]`.
        kernel_size: The number of tokens that the average pooling spans.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        softcap: Cap of the logits, or None.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: `[H, n]`, float32.
    """
    heads, tokens, _ = keys.shape
    window = query.shape[1]
    logits = scaled_logits(query.unflatten(0, (heads, -1)), keys.unsqueeze(1), scaling, softcap)  # [H, G, w, n]
    later = torch.ones(window, tokens, dtype=torch.bool, device=keys.device).triu(tokens - window + 1)
    own_sinks = None if sinks is None else sinks.view(heads, -1, 1, 1)
    weights = attention_weights(logits.masked_fill_(later, -math.inf), own_sinks)
    votes = weights.mean(2)[..., : tokens - window]  # [H, G, n - w]
    if votes.shape[-1]:
        votes = F.avg_pool1d(votes, kernel_size, stride=1, padding=kernel_size // 2)
    own = 2 + torch.arange(window, dtype=votes.dtype, device=votes.device)
    return torch.cat([votes.mean(1), own.expand(heads, -1)], dim=1)
