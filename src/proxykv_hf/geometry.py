"""The geometry of a model's KV cache, read from its config, and a fingerprint of the model's weights."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ._compat import DynamicLayer, DynamicSlidingWindowLayer, execution_device
from .errors import GeometryError, UnsupportedModelError

#: The dtypes of quantised weights (bitsandbytes, GPTQ, AWQ). Not int64 and bool, the dtypes of indices and masks.
PACKED = (torch.int8, torch.uint8, torch.int16, torch.int32)


@dataclass(frozen=True)
class ModelGeometry:
    """The layers, heads and sizes of a decoder.

    Args:
        num_layers: L, the number of decoder layers.
        num_key_value_heads: H, the number of KV heads of a full-attention layer.
        num_attention_heads: Q, the number of query heads of a layer.
        head_dim: D, the head dimension of a full-attention layer.
        sliding_windows: For each layer, the window in tokens if it has a sliding window, or None if it has full
            attention. Only full-attention layers are pruned.
    """

    num_layers: int
    num_key_value_heads: int
    num_attention_heads: int
    head_dim: int
    sliding_windows: tuple[int | None, ...]

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, may_be_bounded: bool = False) -> ModelGeometry:
        """Read the geometry from a model's config.

        A sliding window of at least as many tokens as the model has positions counts as full attention (Phi-3.5-mini,
        Phi-4-mini).

        Args:
            config: The model's config.
            may_be_bounded: Whether to accept a model whose layers all have sliding windows. Its cache is bounded
                already, so nothing of it is pruned.

        Raises:
            UnsupportedModelError: The model is an encoder-decoder, its cache is not plain K and V (recurrent,
                convolutional, compressed), or it has no full-attention layer and ``may_be_bounded`` is false.
        """
        try:
            geometry = cls._read(config)
        except UnsupportedModelError:
            raise
        except (AttributeError, RuntimeError) as error:  # transformers raises these if heads differ by layer
            raise UnsupportedModelError(
                f"expected one number of heads and one head size for all layers of {type(config).__name__}: {error}"
            ) from error
        if not geometry.full_layers and not may_be_bounded:
            raise UnsupportedModelError(
                f"expected at least one full-attention layer, got {type(config).__name__} with sliding windows only: "
                "its cache is bounded already and there is nothing to prune"
            )
        return geometry

    @classmethod
    def _read(cls, config: PreTrainedConfig) -> ModelGeometry:
        name = type(config).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                f"expected a decoder-only model, got the encoder-decoder {name}: its cross-attention "
                "cache is not a prompt that can be pruned"
            )
        decoder = config.get_text_config(decoder=True)
        heads = getattr(decoder, "num_attention_heads", None)
        if not isinstance(heads, int):
            raise UnsupportedModelError(
                f"expected a model with attention heads, got {name}: it has no KV pairs to prune"
            )
        windows: list[int | None] = []
        limit = max_positions(config)
        for index, layer in enumerate(DynamicCache(config=decoder).layers):
            if type(layer) is DynamicLayer:
                windows.append(None)
            elif type(layer) is DynamicSlidingWindowLayer:
                windows.append(None if limit is not None and layer.sliding_window >= limit else layer.sliding_window)
            else:
                raise UnsupportedModelError(
                    f"expected full or sliding-window attention in every layer, got "
                    f"{type(layer).__name__} in layer {index} of {name}"
                )
        if not windows:  # transformers cannot tell the layers from this config
            windows = [None] * decoder.num_hidden_layers
        return cls(
            num_layers=len(windows),
            num_key_value_heads=getattr(decoder, "num_key_value_heads", None) or heads,
            num_attention_heads=heads,
            head_dim=getattr(decoder, "head_dim", None) or decoder.hidden_size // heads,
            sliding_windows=tuple(windows),
        )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The indices of the full-attention layers. Only these layers are pruned."""
        return tuple(index for index, window in enumerate(self.sliding_windows) if window is None)

    def to_dict(self) -> dict[str, Any]:
        """The geometry as a dict for JSON; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelGeometry:
        """Read what `to_dict` returned."""
        return cls(**{**data, "sliding_windows": tuple(data["sliding_windows"])})


def check_geometry(
    expected: ModelGeometry, got: ModelGeometry, what: str, widths: tuple[int, int] | None = None
) -> None:
    """Refuse a model of another geometry.

    Args:
        expected: The geometry that something was made for.
        got: The model's geometry.
        what: The beginning of the error message.
        widths: The hidden size expected and got, if it has to be the same too.

    Raises:
        GeometryError: The geometries differ. The error names the differences.
    """
    ours, theirs = expected.to_dict(), got.to_dict()
    if widths is not None:
        ours["hidden_size"], theirs["hidden_size"] = widths
    differ = [name for name in ours if ours[name] != theirs[name]]
    if "num_layers" in differ and not any((*expected.sliding_windows, *got.sliding_windows)):
        differ.remove("sliding_windows")  # with no window in either model, it only repeats num_layers
    if differ:
        raise GeometryError(
            f"{what}: expected {', '.join(f'{name}={ours[name]!r}' for name in differ)}, got "
            f"{', '.join(f'{name}={theirs[name]!r}' for name in differ)}"
        )


def check_loaded(target: object) -> None:
    """Refuse everything but a loaded model, for example a model's name.

    Raises:
        TypeError: ``target`` is not a loaded model.
    """
    if not isinstance(target, nn.Module):
        raise TypeError(
            f"target: expected a loaded model, as AutoModelForCausalLM.from_pretrained returns it, got {target!r}"
        )


def max_positions(config: PreTrainedConfig) -> int | None:
    """The number of positions that a model's decoder has, or None if its config does not say."""
    limit: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


def device_of(module: nn.Module) -> torch.device:
    """The device that ``module`` computes on: that of its first parameter, or accelerate's if that is offloaded."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            if not parameter.is_meta:
                return parameter.device
            device = execution_device(part)
            return torch.device("cpu" if device is None else device)
    return torch.device("cpu")


def weights_fingerprint(model: PreTrainedModel) -> str | None:
    """16 hex digits that differ for other weights of the same geometry, for example another quantization.

    None if weights are offloaded, and so cannot be read.

    The fingerprint is a hash over the names and at most 16 evenly spaced values of each parameter, with floating-point
    values as float32. It is quick to compute, the same on every device, and independent of the parameters' layout. The
    buffers of quantised modules count as well.
    """
    digest = hashlib.sha256()
    for name, weights in sorted(_weights(model).items()):
        if weights.is_meta:
            return None
        if weights.numel():
            step = max(1, weights.numel() // 16)
            places = torch.arange(0, weights.numel(), step, device=weights.device)[:16]
            sample = weights.detach().flatten()[places].cpu()
            sample = sample.float() if sample.is_floating_point() else sample.long()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, and all buffers (scales, for example) of modules that hold quantised weights.

    Other buffers follow from the config, and are not weights.
    """
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        buffers = dict(module.named_buffers(prefix, recurse=False))
        if any(tensor.dtype in PACKED for tensor in (*buffers.values(), *module.parameters(recurse=False))):
            weights |= buffers
    return weights


def are_other_weights(model: PreTrainedModel, fingerprint: str | None) -> bool:
    """Whether ``model``'s weights are known to differ from those of ``fingerprint``, which is None if unknown."""
    return fingerprint is not None and weights_fingerprint(model) not in (None, fingerprint)
