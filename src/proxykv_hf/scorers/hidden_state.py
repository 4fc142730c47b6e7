"""Scores read off the target's own hidden states by a line, as KVzap's linear model does (arXiv 2601.07891).

In each layer a trained linear head for every KV head takes what enters the attention module, and says the natural
logarithm of the pair's KVzip score. There is no proxy and no second pass; what a token's own state does not tell,
that something far away refers to it say, no such head can know.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import GeometryError, InvalidInputError, ProxyKVWarning
from ..files import write_whole
from ..geometry import ModelGeometry, are_other_weights, check_geometry
from .base import Observation, ScorerRun, ScoringRequest, WholeCache

MODEL_TYPE = "hidden_state_heads"
VERSION = 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HiddenStateHeads:
    """Trained linear heads, and what they were trained for.

    Args:
        weights: `[L, H, hidden]`, float32; zero in sliding-window layers.
        bias: `[L, H]`, the same.
        geometry: The target's.
        target_id: What the target is called on the Hub.
        target_weights: Its `weights_fingerprint`.
        score_recipe: How the teacher's scores were made.
        training: How they were trained, for people.

    Raises:
        GeometryError: On construction: weights of other shapes than the geometry's.
    """

    weights: Tensor
    bias: Tensor
    geometry: ModelGeometry
    target_id: str | None = None
    target_weights: str | None = None
    score_recipe: str | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        heads = (self.geometry.num_layers, self.geometry.num_key_value_heads)
        if self.weights.dim() != 3 or tuple(self.weights.shape[:2]) != heads or tuple(self.bias.shape) != heads:
            raise GeometryError(
                f"expected weights [L, H, hidden] and bias [L, H] of L, H = {[*heads]}, got "
                f"{[*self.weights.shape]} and {[*self.bias.shape]}"
            )

    def predict(self, layer: int, hidden: Tensor) -> Tensor:
        """Log scores `[..., H, n]`, float32, of hidden states `[..., n, hidden]` that enter a layer's attention."""
        weights, bias = self.weights[layer].to(hidden.device), self.bias[layer].to(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), weights, bias).mT

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json`` into a folder, made where missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": MODEL_TYPE,
            "version": VERSION,
            "target_id": self.target_id,
            "target_weights": self.target_weights,
            "score_recipe": self.score_recipe,
            "target_geometry": self.geometry.to_dict(),
            "training": self.training,
        }
        tensors = {"weights": self.weights.contiguous(), "bias": self.bias.contiguous()}
        write_whole(folder / WEIGHTS, save(tensors))
        write_whole(folder / CONFIG, (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> HiddenStateHeads:
        """What `save_pretrained` wrote.

        Raises:
            InvalidInputError: The folder holds no such heads.
            GeometryError: Its weights are not of the geometry that its config names.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if config["model_type"] != MODEL_TYPE:
                raise ValueError(f"config.json is of a {config['model_type']}")
            tensors = load_file(folder / WEIGHTS)
            weights, bias = tensors["weights"].float(), tensors["bias"].float()
            geometry = ModelGeometry.from_dict(config["target_geometry"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise InvalidInputError(
                f"expected a folder of hidden-state heads ({CONFIG} and {WEIGHTS}, as save_pretrained writes them), "
                f"got {folder}: {type(error).__name__}: {error}"
            ) from error
        if config.get("version", VERSION) > VERSION:
            warnings.warn(
                f"these heads have format {config['version']}, newer than {VERSION}: update proxykv-hf",
                ProxyKVWarning,
                stacklevel=2,
            )
        known = {name: config.get(name) for name in ("target_id", "target_weights", "score_recipe")}
        return cls(weights, bias, geometry, **known, training=config.get("training") or {})


class HiddenStateScorer:
    """Log KVzip scores, as linear heads see them in the states that the target computes anyway.

    Args:
        heads: Trained for the target, see `training.hidden_state`.
    """

    name = "hidden_state"
    observes = True

    def __init__(self, heads: HiddenStateHeads) -> None:
        self.heads = heads

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, target: PreTrainedModel | None = None) -> HiddenStateScorer:
        """The scorer of the heads in a folder.

        Args:
            folder: What `save_pretrained` wrote.
            target: The model whose cache is to be pruned, where it is to be checked at once. Other weights of the
                same geometry than those the heads were trained with are then a `ProxyKVWarning`.

        Raises:
            InvalidInputError: The folder holds no heads.
            GeometryError: They were trained for a target of another geometry.
        """
        scorer = cls(HiddenStateHeads.from_pretrained(folder))
        if target is not None:
            check_heads(scorer.heads, target.config)
            if are_other_weights(target, scorer.heads.target_weights):
                warnings.warn(
                    "the heads were trained with other weights of the target (another fine-tune or quantization of "
                    f"the same geometry, or the same weights in another dtype than {target.dtype}): they keep a little "
                    "less well",
                    ProxyKVWarning,
                    stacklevel=2,
                )
        return scorer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the heads into a folder."""
        self.heads.save_pretrained(folder)

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to read hidden states.

        Raises:
            GeometryError: The heads were trained for another target.
        """
        check_heads(self.heads, request.target.config)
        return _HiddenStateRun(self.heads)


class _HiddenStateRun(ScorerRun):
    def __init__(self, heads: HiddenStateHeads) -> None:
        super().__init__()
        self.heads = heads
        self.parts: dict[int, list[Tensor]] = {}  # by layer, `[B, H, q]` of each forward

    def observe(self, observation: Observation) -> None:
        hidden = observation.hidden
        if hidden is None or hidden.shape[-1] != self.heads.weights.shape[-1]:
            got = "none" if hidden is None else hidden.shape[-1]
            raise GeometryError(
                f"the heads read hidden states of {self.heads.weights.shape[-1]} channels, but what enters the "
                f"attention of layer {observation.layer} has {got}"
            )
        self.parts.setdefault(observation.layer, []).append(self.heads.predict(observation.layer, hidden.detach()))

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        rows = [cache.batch_row(row) for row in range(len(prompt.lengths))]
        for layer, parts in self.parts.items():  # drafts, in assisted decoding, come after the prompt's columns
            scores[:, layer] = torch.cat(parts, dim=2)[rows, :, : prompt.columns].to(scores.device)
        return scores

    def cancel(self) -> None:
        self.parts.clear()


def check_heads(heads: HiddenStateHeads, config: PreTrainedConfig) -> None:
    """Refuse heads that were trained for a target of another geometry, or another width.

    Raises:
        GeometryError: Naming what differs.
    """
    widths = (heads.weights.shape[-1], config.get_text_config(decoder=True).hidden_size)
    trained = f"the heads were trained for {heads.target_id}, another target than this"
    check_geometry(heads.geometry, ModelGeometry.from_config(config), trained, widths)
