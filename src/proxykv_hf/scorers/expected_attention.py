"""Expected attention (arXiv 2510.00636): what queries that are still to come will look at, if they are Gaussian.

| the paper | here |
|---|---|
| mean and covariance of the queries before RoPE | `Moments` of the prompt's queries, un-rotated |
| R-bar, the mean of the next T rotations | `Rotary.mean_turn`, T = ``future_tokens`` |
| z-hat, ``exp(mu'k / sqrt(d) + k' Sigma k / 2d)`` | `expected_weights`, before its softmax |
| the contribution ``(a-hat + epsilon) |W_o v|`` | ``(weights + epsilon) * |v|``, as in the authors' own code |
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.rotary import Rotary
from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache
from .moments import Moments
from .observing import ObservingRun

#: Tokens whose float32 copies are held at once.
TOKEN_BLOCK = 4096


class ExpectedAttentionScorer:
    """Attention that a Gaussian of future queries is expected to give each KV pair, times its value's length.

    Mean and covariance are those of the prompt's queries, in each head, taken while the target prefills; nothing else
    of the queries is kept. A cap of the logits (Gemma 2) is left out: the expectation would have no closed form.

    Args:
        future_tokens: T, positions after the prompt over which the rotation is averaged.
        sink_tokens: First tokens of a row, whose states are outliers: left out of the statistics and of the
            softmax, and kept before all others.
        epsilon: Added to the weights, so that values count also where hardly any attention is expected; the default
            is what the authors evaluate with.
    """

    name = "expected_attention"
    observes = True

    def __init__(self, future_tokens: int = 512, sink_tokens: int = 4, epsilon: float = 1e-2) -> None:
        if future_tokens < 1 or sink_tokens < 0 or epsilon < 0:
            raise InvalidInputError(
                "expected future_tokens of at least 1, sink_tokens and epsilon of at least 0, got "
                f"{future_tokens}, {sink_tokens}, {epsilon}"
            )
        self.future_tokens = future_tokens
        self.sink_tokens = sink_tokens
        self.epsilon = epsilon
        self._rotaries: WeakKeyDictionary[PreTrainedModel, Rotary] = WeakKeyDictionary()

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to take the queries' moments.

        Raises:
            UnsupportedModelError: The target's queries cannot be un-rotated, see `Rotary.of`, which runs the target on
                one token the first time that it is met.
        """
        if request.target not in self._rotaries:
            self._rotaries[request.target] = Rotary.of(request.target)
        return _ExpectedAttentionRun(self, self._rotaries[request.target], request)


class _ExpectedAttentionRun(ObservingRun[Moments]):
    """What is folded are the queries' moments, `[Q, D]` and `[Q, D, D]`.

    Positions are counted in columns of the batch: all of a row's are shifted alike, and only distances matter.
    """

    def __init__(self, scorer: ExpectedAttentionScorer, rotary: Rotary, request: ScoringRequest) -> None:
        super().__init__(request)
        self.scorer, self.rotary = scorer, rotary
        self.logits: dict[int, float | None] = {}  # by layer, the factor of the dot product

    def fold(
        self, observation: Observation, row: int, pad: int, start: int, stop: int, before: Moments | None
    ) -> Moments | None:
        layer, moments = observation.layer, before
        self.logits[layer] = observation.scaling
        first = observation.columns - observation.query.shape[2]
        for begin in range(max(start, pad + self.scorer.sink_tokens), stop, TOKEN_BLOCK):
            end = min(begin + TOKEN_BLOCK, stop)
            query = observation.query[row, :, begin - first : end - first]
            positions = torch.arange(begin, end, device=query.device)
            new = Moments.of(self.rotary.undo(layer, query, positions))
            moments = new if moments is None else moments + new
        return moments

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, geometry = cache.request.prompt, cache.request.geometry
        scores = cache.request.blank_scores(math.inf)
        for row, pad in enumerate(prompt.pads):
            states, batch_row = cache.states(row), cache.batch_row(row)
            own = pad + self.scorer.sink_tokens
            for layer in geometry.full_layers:
                if (moments := self.folded(layer, batch_row)) is None or own >= prompt.columns:
                    continue  # nothing but sinks
                keys, values = (part[0, :, self.scorer.sink_tokens :] for part in states[layer])
                future = torch.arange(self.scorer.future_tokens, device=keys.device) + prompt.columns
                turn = self.rotary.mean_turn(layer, future, keys.shape[2])
                with torch.autocast(keys.device.type, enabled=False):
                    weights = expected_weights(
                        keys, moments.mean @ turn, turn.T @ moments.covariance @ turn, self.logits[layer]
                    )
                scores[row, layer, :, own:] = (weights + self.scorer.epsilon) * values.float().norm(dim=-1)
        return scores


def expected_weights(keys: Tensor, mean: Tensor, covariance: Tensor, scaling: float | None) -> Tensor:
    """Attention weights of an expected query, mean over the query heads of a group, `[H, n]`, float32.

    Args:
        keys: `[H, n, D]`.
        mean: `[Q, D]`, of the queries.
        covariance: `[Q, D, D]`.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
    """
    heads, tokens, size = keys.shape
    factor = size**-0.5 if scaling is None else scaling
    mean, covariance = mean.unflatten(0, (heads, -1)), covariance.unflatten(0, (heads, -1))
    exponents = mean.new_empty(heads, mean.shape[1], tokens)
    for head in range(heads):
        for start in range(0, tokens, TOKEN_BLOCK):
            block = keys[head, start : start + TOKEN_BLOCK].float() * factor  # [m, D]
            spread = torch.einsum("gmd,md->gm", block @ covariance[head], block)
            exponents[head, :, start : start + TOKEN_BLOCK] = mean[head] @ block.T + spread / 2
    return exponents.softmax(-1).mean(1)
