"""Expected attention (arXiv 2510.00636): the attention that future queries will give, if they follow a Gaussian.

| the paper | here |
|---|---|
| mean and covariance of the queries before RoPE | `Moments` of the prompt's queries, with the rotation undone |
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

from ..attention.logits import attention_weights
from ..attention.rotary import Rotary
from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache
from .moments import Moments
from .observing import ObservingRun

#: The number of tokens whose float32 copies are held at once.
TOKEN_BLOCK = 4096


class ExpectedAttentionScorer:
    """Scores a KV pair by the attention that future queries are expected to give it, times the norm of its value.

    Future queries are assumed to be Gaussian. Their mean and covariance in each head are those of the prompt's queries,
    taken while the target prefills. Nothing else of the queries is kept. The cap of the logits (Gemma 2) is left out,
    because with it the expectation has no closed form.

    Args:
        future_tokens: T, the number of positions after the prompt over which the rotation is averaged.
        sink_tokens: The number of first tokens of a row whose states are outliers. They are left out of the statistics
            and of the softmax, and are kept before all other tokens.
        epsilon: A constant added to the weights, so that the norm of a value also counts where almost no attention is
            expected. The default is the one that the authors evaluate with.

    Raises:
        InvalidInputError: An argument is too small.
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
        """Start to take the moments of the prompt's queries.

        For a target that it has not seen before, the scorer first runs the target on one token, see `Rotary.of`.

        Raises:
            UnsupportedModelError: The rotation of the target's queries cannot be undone.
        """
        if request.target not in self._rotaries:
            self._rotaries[request.target] = Rotary.of(request.target)
        return _ExpectedAttentionRun(self, self._rotaries[request.target], request)


class _ExpectedAttentionRun(ObservingRun[Moments]):
    """Folds queries into their moments, a mean `[Q, D]` and a scatter `[Q, D, D]`.

    Columns of the batch stand for positions. Padding shifts all positions of a row alike, and only distances matter.
    """

    def __init__(self, scorer: ExpectedAttentionScorer, rotary: Rotary, request: ScoringRequest) -> None:
        super().__init__(request)
        self.scorer, self.rotary = scorer, rotary
        self.logits: dict[int, tuple[float | None, Tensor | None]] = {}  # by layer, the dot product's factor and sinks

    def fold(
        self, observation: Observation, row: int, pad: int, start: int, stop: int, before: Moments | None
    ) -> Moments | None:
        layer, moments = observation.layer, before
        self.logits[layer] = (observation.scaling, observation.sinks)
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
                    continue  # the row has only sink tokens
                keys, values = (part[0, :, self.scorer.sink_tokens :] for part in states[layer])
                future = torch.arange(self.scorer.future_tokens, device=keys.device) + prompt.columns
                turn = self.rotary.mean_turn(layer, future, keys.shape[2])
                with torch.autocast(keys.device.type, enabled=False):
                    weights = expected_weights(
                        keys, moments.mean @ turn, turn.T @ moments.covariance @ turn, *self.logits[layer]
                    )
                scores[row, layer, :, own:] = (weights + self.scorer.epsilon) * values.float().norm(dim=-1)
        return scores


def expected_weights(
    keys: Tensor, mean: Tensor, covariance: Tensor, scaling: float | None, sinks: Tensor | None = None
) -> Tensor:
    """The expected attention weights of Gaussian queries, as the mean over the query heads of a group.

    Args:
        keys: `[H, n, D]`.
        mean: `[Q, D]`, the mean of the queries.
        covariance: `[Q, D, D]`, the covariance of the queries.
        scaling: Factor of the dot product; None for ``D ** -0.5``.
        sinks: `[Q]`, the logit of each query head's attention sink, or None.

    Returns: `[H, n]`, float32.
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
    return attention_weights(exponents, None if sinks is None else sinks.view(heads, -1, 1)).mean(1)
