"""Scores that linear heads compute from the target's own hidden states, like KVzap's linear model (arXiv 2601.07891).

In each layer, a linear head is trained for every KV head. From the hidden state that enters the attention module, it
predicts the natural logarithm of the KV pair's KVzip score. There is no proxy and no second pass. But such a head
cannot know what a token's own state does not hold, for example that a distant token refers to it.
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
    """Trained linear heads, and the target that they were trained for.

    Args:
        weights: `[L, H, hidden]`, float32. Zero in sliding-window layers.
        bias: `[L, H]`, float32. Zero in sliding-window layers.
        geometry: The target's geometry.
        target_id: The target's name on the Hub.
        target_weights: The `weights_fingerprint` of the target.
        score_recipe: The name of the recipe for the teacher's scores.
        training: How the heads were trained, for people to read.

    Raises:
        GeometryError: The shapes of ``weights`` and ``bias`` do not fit the geometry. Raised on construction.
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
        """Compute the log scores of one layer.

        Args:
            layer: The layer's index in the model.
            hidden: `[..., n, hidden]`, the hidden states that enter the layer's attention module.

        Returns: `[..., H, n]`, float32, natural logarithms.
        """
        weights, bias = self.weights[layer].to(hidden.device), self.bias[layer].to(hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), weights, bias).mT

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``model.safetensors`` and ``config.json``.

        Args:
            folder: The folder. It is made if it is missing.
        """
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
        """Load the heads that `save_pretrained` wrote.

        Args:
            folder: The folder that was given to `save_pretrained`.

        Raises:
            InvalidInputError: The folder holds no heads, or they are damaged.
            GeometryError: The shapes of the weights do not fit the geometry in the config.

        A `ProxyKVWarning` reports heads of a newer format.
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
    """Scores KV pairs by linear heads on the hidden states that the target computes anyway.

    The scores are predicted logarithms of KVzip's scores.

    Args:
        heads: Heads that were trained for the target, see `training.hidden_state`.
    """

    name = "hidden_state"
    observes = True

    def __init__(self, heads: HiddenStateHeads) -> None:
        self.heads = heads

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, target: PreTrainedModel | None = None) -> HiddenStateScorer:
        """Load the heads that `save_pretrained` wrote, and make a scorer of them.

        Args:
            folder: The folder that was given to `save_pretrained`.
            target: The model whose cache is to be pruned. If it is given, the heads are checked against it at once, and
                a `ProxyKVWarning` tells if it has other weights of the same geometry than the heads were trained with.
                If it is None, the geometry is checked before a prefill.

        Raises:
            InvalidInputError: The folder holds no heads, or they are damaged.
            GeometryError: The heads were trained for a target of another geometry.
        """
        scorer = cls(HiddenStateHeads.from_pretrained(folder))
        if target is not None:
            check_heads(scorer.heads, target.config)
            if are_other_weights(target, scorer.heads.target_weights):
                warnings.warn(
                    "the heads were trained with other weights of the target (another fine-tune or quantization of "
                    f"the same geometry, or the same weights in another dtype than {target.dtype}): they may score a "
                    "little worse",
                    ProxyKVWarning,
                    stacklevel=2,
                )
        return scorer

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the heads' ``model.safetensors`` and ``config.json``.

        Args:
            folder: The folder. It is made if it is missing.
        """
        self.heads.save_pretrained(folder)

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Start to read the target's hidden states.

        Raises:
            GeometryError: The heads were trained for a target of another geometry.
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
                f"expected hidden states of {self.heads.weights.shape[-1]} channels, which the heads read, but those "
                f"that enter the attention of layer {observation.layer} have {got}: use heads trained for this target"
            )
        self.parts.setdefault(observation.layer, []).append(self.heads.predict(observation.layer, hidden.detach()))

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        rows = [cache.batch_row(row) for row in range(len(prompt.lengths))]
        for layer, parts in self.parts.items():  # drafts of assisted decoding come after the prompt
            scores[:, layer] = torch.cat(parts, dim=2)[rows, :, : prompt.columns].to(scores.device)
        return scores

    def cancel(self) -> None:
        self.parts.clear()


def check_heads(heads: HiddenStateHeads, config: PreTrainedConfig) -> None:
    """Refuse heads that were trained for a target of another geometry or hidden size.

    Raises:
        GeometryError: The geometries or hidden sizes differ. The error names the differences.
    """
    widths = (heads.weights.shape[-1], config.get_text_config(decoder=True).hidden_size)
    trained = f"the heads were trained for {heads.target_id}, another target than this"
    check_geometry(heads.geometry, ModelGeometry.from_config(config), trained, widths)
