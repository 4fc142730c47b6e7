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
    """Scores the target's KV pairs by a small model: the mapper turns the features of the proxy's pass into scores.

    Args:
        proxy: M_s, a decoder without language-model head, cut to the layers that the mapper reads.
        mapper: Phi_theta, trained for this proxy and the target.
        tokenizer: The proxy's tokenizer. The target's tokenizer must give the same tokens. If None, the target's is
            used.
        threads: CPU threads that the proxy uses; None for as many as torch uses elsewhere.

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
        """Load a mapper and its proxy, check that both fit the target, and make a scorer of them.

        Args:
            mapper: A Hub id, a folder, or a loaded mapper. A loaded mapper is copied if its device, dtype or mode has
                to change.
            target: The model whose cache is to be pruned.
            proxy: A folder, a Hub id or a loaded model, in place of the proxy that the mapper's config names. A loaded
                model may be whole, or cut to the layers that the mapper reads. It must have the target's tokenizer.
            revision: The mapper's revision on the Hub.
            device: The device of a proxy that is loaded here. By default the target's device. A loaded proxy, and one
                that is the target's own layers, stay where they are. The mapper moves to the proxy's device.
            dtype: The dtype of a proxy that is loaded here. By default the target's dtype. The mapper always computes
                in float32.
            threads: CPU threads that the proxy uses; None for as many as torch uses elsewhere.

        Raises:
            InvalidInputError: ``mapper`` holds no mapper, or none in safetensors. Or torch cannot compute on
                ``device``.
            GeometryError: The mapper was trained for another target or proxy.
            UnsupportedModelError: The proxy has to share the first layers of a model whose weights are not plain
                tensors.
            TypeError: ``target`` is not a loaded model.

        A `ProxyKVWarning` reports a target or proxy with other weights than those that the mapper was trained with, for
        example in another quantization or dtype.
        """
        small, loaded, tokenizer = load_proxy(
            mapper, target=target, proxy=proxy, revision=revision, device=device, dtype=dtype
        )
        return cls(small, loaded, tokenizer=tokenizer, threads=threads)

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Check the prompt, launch the proxy, and return at once.

        Raises:
            GeometryError: The mapper was trained for another target.
            InvalidInputError: The prompt came as embeddings, takes more positions than the proxy has, or has tokens of
                another tokenizer. Or the mapper reads ``reconstruction``, and there is no tokenizer.
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
        """Score one row, see `LaneScorer.score_row`."""
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
