"""ProxyKV (arXiv 2605.16360): a small model reads the context while the large one prefills."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import GeometryError
from ..geometry import ModelGeometry, check_geometry
from ..proxy.features import proxy_features
from ..proxy.mapper import HybridAxialMapper
from .base import ScorerRun, ScoringRequest
from .on_lane import LaneScorer, LaneUse


class ProxyScorer(LaneScorer):
    """Features of the proxy's pass, through the mapper, are the scores of the target's KV pairs.

    Args:
        proxy: M_s, a decoder without language-model head, cut to the layers that the mapper reads.
        mapper: Phi_theta, trained for this proxy and the target.
        tokenizer: The proxy's; the target's must give the same tokens, and stands in where None is given.
        threads: CPU threads of the lane; None for as many as torch uses elsewhere.

    Raises:
        GeometryError: The proxy is not the one that the mapper was trained for.
    """

    name = "proxykv"

    def __init__(
        self,
        proxy: PreTrainedModel,
        mapper: HybridAxialMapper,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        threads: int | None = None,
    ) -> None:
        recipe = mapper.config.feature_recipe
        layers = proxy.config.get_text_config(decoder=True).num_hidden_layers
        if layers != recipe.proxy_layers or recipe.channels(proxy.config) != mapper.config.channels:
            raise GeometryError(
                f"expected a proxy of {recipe.proxy_layers} layers whose features have {mapper.config.channels} "
                f"channels, got {layers} layers and {recipe.channels(proxy.config)} channels: the mapper "
                f"was trained for {mapper.config.proxy_id}"
            )
        super().__init__(proxy, tokenizer, threads)
        self.mapper = mapper
        self.repeats = "reconstruction" in recipe.sources

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Launch the proxy and return at once.

        Raises:
            GeometryError: The mapper was trained for another target.
            InvalidInputError: A prompt of embeddings, longer than the proxy's positions, or of another
                tokenizer; no tokenizer where the mapper reads ``reconstruction``.
        """
        check_target(self.mapper, request.geometry)
        return super().begin(request)

    def score_row(
        self,
        input_ids: Tensor,
        context: tuple[int, int],
        request: ScoringRequest,
        use: LaneUse,
        cancelled: Callable[[], bool],
    ) -> Tensor:
        """See `LaneScorer.score_row`."""
        with use.timed("proxy"):
            features = proxy_features(
                self.proxy,
                input_ids,
                self.mapper.config.feature_recipe,
                context=context,
                tokenizer=self.tokenizer_for(request),
                cancelled=cancelled,
                holds=use.holds,
            )
        with use.timed("mapper"):
            scores: Tensor = self.mapper(features[None])[0]
        use.holds(features.nbytes + scores.nbytes)
        return scores


def check_target(mapper: HybridAxialMapper, geometry: ModelGeometry) -> None:
    """Refuse a mapper that was trained for a target of another geometry.

    Raises:
        GeometryError: Naming what differs.
    """
    trained = f"the mapper was trained for {mapper.config.target_id}, another target than this"
    check_geometry(mapper.config.target, geometry, trained)


def check_proxy(mapper: HybridAxialMapper, geometry: ModelGeometry) -> None:
    """Refuse a mapper that was trained for a (whole) proxy of another geometry.

    Raises:
        GeometryError: Naming what differs.
    """
    trained = f"the mapper was trained for {mapper.config.proxy_id}, another proxy than this"
    check_geometry(mapper.config.proxy, geometry, trained)
