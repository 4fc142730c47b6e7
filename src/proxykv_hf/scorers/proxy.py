"""ProxyKV (arXiv 2605.16360): a small model reads the context while the large one prefills."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import GeometryError
from ..proxy.features import proxy_features
from ..proxy.loading import check_target, load_proxy
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

    @classmethod
    def from_pretrained(
        cls,
        mapper: str | Path | HybridAxialMapper,
        *,
        target: PreTrainedModel,
        proxy: str | Path | PreTrainedModel | None = None,
        revision: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
    ) -> ProxyScorer:
        """The scorer that a mapper describes: loads its proxy and checks that both fit the target.

        Args:
            mapper: A Hub id, a folder, or a mapper, which is copied if it would have to change.
            target: The model whose cache is to be pruned.
            proxy: A folder, an id or a model in place of the one that the mapper's config names. A model may be
                whole or cut to the layers that the mapper reads, and is taken to have the target's tokenizer.
            revision: The mapper's revision on the Hub.
            device: Where a proxy that is loaded here computes; the target's device by default. A proxy that is a
                model, or the target's own layers, stays where it is. The mapper goes where the proxy is.
            dtype: The dtype of a proxy that is loaded here; the target's by default. The mapper computes in float32.
            threads: CPU threads of the proxy's lane.

        Raises:
            InvalidInputError: ``mapper`` holds no mapper, or one in another form than safetensors; torch cannot
                compute on ``device``.
            GeometryError: The mapper was made for another target or proxy.
            UnsupportedModelError: The proxy is to be the first layers of a model whose weights are not plain.

        A `ProxyKVWarning` tells of other weights of the same geometry than those that the mapper was trained with
        (another quantization or dtype, say).
        """
        small, loaded, tokenizer = load_proxy(
            mapper, target=target, proxy=proxy, revision=revision, device=device, dtype=dtype
        )
        return cls(small, loaded, tokenizer=tokenizer, threads=threads)

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
    ) -> Tensor:
        """See `LaneScorer.score_row`."""
        with use.timed("proxy"):
            features = proxy_features(
                self.proxy,
                input_ids,
                self.mapper.config.feature_recipe,
                context=context,
                tokenizer=self.tokenizer_for(request),
                holds=use.holds,
            )
        with use.timed("mapper"):
            scores: Tensor = self.mapper(features[None])[0]
        use.holds(features.nbytes + scores.nbytes)
        return scores
