"""Linear heads on the target's hidden states (`scorers.hidden_state`), trained on a teacher's scores in closed form.

The target runs over the documents once. For each attention module, only the count, mean and scatter of its input and of
the log scores of its KV heads are kept: a ridge regression needs no more, nor does its error on other documents. So the
strength of the regularisation is chosen for each layer on documents that were kept apart, and the heads are then fitted
to all documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.functions import attention_modules
from ..attention.reconstruction import RECIPE
from ..cache.cache import ProxyPrunedCache
from ..cache.retention import RetentionPolicy
from ..errors import InvalidInputError
from ..geometry import ModelGeometry, device_of, weights_fingerprint
from ..scorers.hidden_state import HiddenStateHeads, HiddenStateScorer
from ..scorers.moments import Moments
from .dataset import SCORE_FLOOR
from .metrics import mean_metrics, measure
from .shards import ScoredDocument

#: Strengths of the regularisation that are tried for each layer, on standardised channels, whose variance is 1.
STRENGTHS = (1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
#: One document in this many is used to choose the strength.
CHOOSING_EVERY = 10


def train(
    model: PreTrainedModel,
    documents: Iterable[ScoredDocument],
    *,
    target_id: str,
    strengths: Sequence[float] = STRENGTHS,
) -> HiddenStateHeads:
    """Fit heads to the log scores of some documents.

    Args:
        model: The target that the documents were scored on.
        documents: At least two documents, which are read once, one at a time.
        target_id: How the heads name the target.
        strengths: Strengths of the regularisation to try, each above 0.

    Raises:
        InvalidInputError: There are fewer than two documents.
    """
    geometry = ModelGeometry.from_config(model.config)
    fitting: dict[int, Moments] = {}
    choosing: dict[int, Moments] = {}
    count = tokens = 0
    for document in documents:
        sums = choosing if count % CHOOSING_EVERY == 1 else fitting
        for layer, moments in document_moments(model, document).items():
            sums[layer] = sums[layer] + moments if layer in sums else moments
        count += 1
        tokens += document.scores.shape[-1]
    if not choosing:
        raise InvalidInputError(f"expected at least 2 scored documents to train on, got {count}")
    channels = len(fitting[geometry.full_layers[0]].mean) - geometry.num_key_value_heads
    heads = (geometry.num_layers, geometry.num_key_value_heads)
    weights, bias = (torch.zeros(shape, dtype=torch.float32) for shape in ((*heads, channels), heads))
    chosen: list[float] = []
    for layer in geometry.full_layers:
        apart = {strength: solve(fitting[layer], channels, strength) for strength in strengths}
        chosen.append(min(strengths, key=lambda strength: squared_error(choosing[layer], *apart[strength])))
        weights[layer], bias[layer] = solve(fitting[layer] + choosing[layer], channels, chosen[-1])
    recipe: dict[str, Any] = {
        "summary": f"ridge regression of log scores, {count} documents, {tokens:,} tokens",
        "documents": count,
        "tokens": tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "score_floor": SCORE_FLOOR,
        "strengths": chosen,
    }
    return HiddenStateHeads(weights, bias, geometry, target_id, weights_fingerprint(model), RECIPE, recipe)


@torch.no_grad()
def document_moments(model: PreTrainedModel, document: ScoredDocument) -> dict[int, Moments]:
    """The moments of hidden states with log scores appended, `[hidden + H]`, float64, for each full-attention layer."""
    geometry = ModelGeometry.from_config(model.config)
    targets = document.scores.float().clamp(min=SCORE_FLOOR).log().mT  # [L, N, H]
    found: dict[int, Moments] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer: Any = module.layer_idx
        if layer in geometry.full_layers:
            hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            states = hidden[0, document.prefix_tokens :].float()  # [N, hidden]
            found[layer] = Moments.of(torch.cat([states, targets[layer].to(states.device)], dim=1)).double()

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]
    try:
        model.base_model(input_ids=document.input_ids.long().to(device_of(model))[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def solve(moments: Moments, channels: int, strength: float) -> tuple[Tensor, Tensor]:
    """Solve ``(S + strength) W = C`` for W.

    S is the covariance of the standardised channels, and C their covariance with the scores.

    Args:
        moments: The moments of channels with scores appended.
        channels: How many of the values are channels.
        strength: Above 0.

    Returns: weights `[H, channels]` and bias `[H]`, for channels that are not standardised.
    """
    covariance = moments.covariance
    deviation = covariance.diagonal()[:channels].clamp(min=1e-8).sqrt()
    gram = covariance[:channels, :channels] / deviation / deviation[:, None]
    gram.diagonal().add_(strength)
    weights = torch.cholesky_solve(covariance[:channels, channels:] / deviation[:, None], torch.linalg.cholesky(gram))
    weights = (weights / deviation[:, None]).T
    return weights, moments.mean[channels:] - weights @ moments.mean[:channels]


def squared_error(moments: Moments, weights: Tensor, bias: Tensor) -> float:
    """The mean squared error of linear heads on data with these moments."""
    residual = torch.cat([-weights, torch.eye(len(weights)).to(weights)], dim=1)  # [H, channels + H]
    offset = residual @ moments.mean - bias
    return float(((residual @ moments.covariance * residual).sum(1) + offset.square()).mean())


def agreement(model: PreTrainedModel, heads: HiddenStateHeads, documents: Iterable[ScoredDocument]) -> dict[str, float]:
    """The mean metrics (`metrics.measure`) of the scorer on some documents, over the full-attention layers."""
    full = list(heads.geometry.full_layers)
    found = []
    for document in documents:
        ids, start = document.input_ids.long().to(device_of(model))[None], document.prefix_tokens
        with ProxyPrunedCache(model, HiddenStateScorer(heads), RetentionPolicy(1.0), strict=True) as cache:
            scores = cache.prefill(ids, context=(start, ids.shape[1]), prune=False)[HiddenStateScorer.name]
        teacher = document.scores[full].float().clamp(min=SCORE_FLOOR).log()
        found.append(measure(scores[0, full, :, start:].cpu(), teacher))
    return mean_metrics(found)
