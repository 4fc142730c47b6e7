"""The hybrid axial mapper, Phi_theta (arXiv 2605.16360, section 3): from the proxy's features X to scores Y-hat.

Three stages keep time and heads apart:

1. a stem over time turns the proxy's C channels into M synthetic head tokens of width d;
2. a Transformer encoder runs along time; a text longer than ``window`` tokens is encoded in overlapping windows whose
   seams are blended;
3. learnable target queries, one per target KV head, cross-attend over the M head tokens of each time step.

Beside them, the *linear path* leads from the stem's bottleneck straight to the heads. It alone can hold a reduced-rank
ridge regression; the three stages learn what is not linear.

Additional shape letters: M head tokens, T target heads (full-attention layers times H), d width, R rank of the
bottleneck, W windows.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from ..errors import GeometryError, InvalidInputError, ProxyKVWarning
from ..geometry import ModelGeometry
from .features import FeatureRecipe

VERSION = 1
SIZES = ("bottleneck", "head_tokens", "encoder_heads", "window")
#: Standardised features beyond this many standard deviations are outliers (attention sinks) and are clipped.
CLAMP = 8.0
#: How many time steps are standardised at once. C is large, so this bounds the memory.
TIME_BLOCK = 4096
#: Shortest wavelength of the sinusoidal positions, in tokens.
SHORTEST_WAVE = 4.0


class HybridAxialMapperConfig(PreTrainedConfig):
    """Everything that a mapper needs besides its weights.

    Args:
        target_geometry: The target's geometry, as `ModelGeometry.to_dict` returns it.
        proxy_geometry: The geometry of the whole proxy, as `ModelGeometry.to_dict` returns it.
        target_id: The target's name on the Hub.
        proxy_id: The proxy's name on the Hub, or ``"target"`` if the proxy is the target's own first layers.
        proxy_revision: The proxy's revision on the Hub.
        target_weights: The `weights_fingerprint` of the target that made the teacher's scores.
        proxy_weights: The `weights_fingerprint` of the proxy that made the features.
        features: The feature recipe, as `FeatureRecipe.to_dict` returns it.
        channels: C, the number of channels of the feature recipe.
        score_recipe: The name of the recipe for the teacher's scores.
        bottleneck: R, the number of channels after the pointwise part of the stem.
        head_tokens: M, the number of synthetic head tokens.
        width: d, the width of a head token. A multiple of twice ``encoder_heads``.
        kernel_size: The number of time steps that the stem's convolution sees. Odd.
        encoder_layers: The number of blocks of the encoder along time.
        encoder_heads: The number of attention heads of an encoder block.
        window: The number of tokens that attend to each other in the encoder.
        overlap: The number of tokens over which the seam of two windows is blended, at most half of ``window``.
        dropout: The share of input channels, bottleneck channels and block activations that training drops.
        training: How the mapper was trained, for people to read.
        mapper_version: The version of the format. A `ProxyKVWarning` reports a newer one.

    Raises:
        InvalidInputError: An argument is not valid; the error names it. Raised on construction.
    """

    model_type = "hybrid_axial_mapper"

    target_geometry: dict[str, Any] | None = None
    proxy_geometry: dict[str, Any] | None = None
    target_id: str | None = None
    proxy_id: str | None = None
    proxy_revision: str | None = None
    target_weights: str | None = None
    proxy_weights: str | None = None
    features: dict[str, Any] | None = None
    channels: int = 0
    score_recipe: str = "kvzip-1"
    bottleneck: int = 192
    head_tokens: int = 8
    width: int = 64
    kernel_size: int = 5
    encoder_layers: int = 2
    encoder_heads: int = 4
    window: int = 512
    overlap: int = 64
    dropout: float = 0.1
    training: dict[str, Any] | None = None
    mapper_version: int = VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("target_geometry", "proxy_geometry", "features", "training"):
            setattr(self, name, json.loads(json.dumps(getattr(self, name))))  # tuples become lists, as in a file
        unit, half = 2 * max(self.encoder_heads, 1), self.window // 2
        rules = {name: (getattr(self, name) >= 1, "at least 1") for name in SIZES}
        rules |= {
            "encoder_layers": (self.encoder_layers >= 0, "at least 0"),
            "kernel_size": (self.kernel_size % 2 == 1 and self.kernel_size > 0, "an odd number"),
            "width": (self.width % unit == 0 and self.width > 0, f"a multiple of {unit} (twice encoder_heads)"),
            "overlap": (0 <= self.overlap <= half, f"0 to {half} (half of window)"),
            "dropout": (0 <= self.dropout < 1, "a number in [0, 1)"),
        }
        for name, (met, expected) in rules.items():
            if not met:
                raise InvalidInputError(f"{name}: expected {expected}, got {getattr(self, name)}")
        if self.mapper_version > VERSION:
            message = f"this mapper has format {self.mapper_version}, newer than {VERSION}: update proxykv-hf"
            warnings.warn(message, ProxyKVWarning, stacklevel=3)
        super().__post_init__(**kwargs)

    @property
    def target(self) -> ModelGeometry:
        """The target's geometry."""
        return ModelGeometry.from_dict(self._given("target_geometry"))

    @property
    def proxy(self) -> ModelGeometry:
        """The geometry of the whole proxy."""
        return ModelGeometry.from_dict(self._given("proxy_geometry"))

    @property
    def feature_recipe(self) -> FeatureRecipe:
        """The features that the mapper reads."""
        return FeatureRecipe(**self._given("features"))

    def _given(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] | None = getattr(self, name)
        if value is None:
            raise InvalidInputError(
                f"{name}: expected a dict, got None: give it, since a mapper is made for one target and one proxy"
            )
        return value


class HybridAxialMapper(PreTrainedModel):
    """The trained network that turns the proxy's features `[B, C, N]` into log-scale scores `[B, L, H, N]`.

    Its time and memory are linear in N. Before training, its scores are close to the head prior, whatever the text.

    Args:
        config: The mapper's config, with the geometries, the feature recipe and the sizes.

    Raises:
        InvalidInputError: The config lacks the target's geometry or the number of channels.
    """

    config_class = HybridAxialMapperConfig
    main_input_name = "features"
    config: HybridAxialMapperConfig
    channel_mean: Tensor
    channel_std: Tensor
    prior: Tensor

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__(config)
        if config.channels < 1:
            raise InvalidInputError(f"channels: expected C of the feature recipe, got {config.channels}")
        target = config.target
        self.register_buffer("channel_mean", torch.zeros(config.channels))
        self.register_buffer("channel_std", torch.ones(config.channels))
        self.register_buffer("prior", torch.zeros(target.num_layers, target.num_key_value_heads))
        self.compress = nn.Linear(config.channels, config.bottleneck)
        self.dropout = nn.Dropout(config.dropout)
        self.stem = nn.Conv1d(config.bottleneck, config.head_tokens * config.width, config.kernel_size)
        self.encoder = nn.ModuleList(_Block(config) for _ in range(config.encoder_layers))
        self.encoder_norm = nn.LayerNorm(config.width)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.heads = _TargetHeads(_head_count(target), config.width, config.bottleneck)
        self.post_init()

    def _init_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, _TargetHeads):
            init.normal_(module.query, std=1.0)
            init.normal_(module.output, std=0.01 / math.sqrt(module.output.shape[1]))  # scores start close to the prior
            init.zeros_(module.bias)
            init.zeros_(module.linear)
        elif isinstance(module, HybridAxialMapper):
            init.zeros_(module.channel_mean)
            init.ones_(module.channel_std)
            init.zeros_(module.prior)

    def forward(self, features: Tensor) -> Tensor:
        """Compute the score of every KV pair.

        Args:
            features: `[B, C, N]`, the features of the config's feature recipe, in any float dtype.

        Returns: the scores `[B, L, H, N]`, float32, as natural logarithms. They are zero in sliding-window layers.

        Raises:
            InvalidInputError: ``features`` does not have three axes, or has another C.
        """
        if features.dim() != 3 or features.shape[1] != self.config.channels:
            raise InvalidInputError(
                f"features: expected [B, C = {self.config.channels}, N], got {list(features.shape)}: "
                "extract them with the mapper's own feature recipe (config.feature_recipe)"
            )
        return self.score(self.project(features))

    def project(self, features: Tensor) -> Tensor:
        """The pointwise part of stage 1: from features `[B, C, N]` to the bottleneck `[B, N, R]`."""
        mean, std = self.channel_mean[:, None], self.channel_std[:, None]
        parts = []
        for block in features.split(TIME_BLOCK, dim=2):
            standard = ((block.to(mean) - mean) / std).clamp(-CLAMP, CLAMP).to(self.dtype)
            parts.append(self.compress(self.dropout(standard).transpose(1, 2)))
        return torch.cat(parts, dim=1)

    def score(self, projected: Tensor) -> Tensor:
        """Everything after `project`: from the bottleneck `[B, N, R]` to scores `[B, L, H, N]`."""
        batch, tokens, _ = projected.shape
        config, margin = self.config, self.config.kernel_size // 2
        scores = self.heads.direct(projected)  # [B, N, T]
        stem_input = functional.pad(self.dropout(functional.gelu(projected)), (0, 0, margin, margin))
        blended, weights = torch.zeros_like(scores), scores.new_zeros(tokens, 1)
        for start, stop in _windows(tokens, config.window, config.overlap):
            weight = _seam_weight(start, stop, tokens, config.overlap).to(scores.device)[:, None]  # [n, 1]
            head_tokens = self._encode(stem_input[:, start : stop + 2 * margin], start)
            blended[:, start:stop] += weight * self.heads(self.key(head_tokens), self.value(head_tokens))
            weights[start:stop] += weight
        full = (scores + blended / weights).transpose(1, 2)  # [B, T, N]
        whole = full.new_zeros(batch, *self.prior.shape, tokens)
        whole[:, list(config.target.full_layers)] = full.unflatten(1, (-1, whole.shape[2]))
        return whole

    def _encode(self, stem_input: Tensor, start: int) -> Tensor:
        """The convolution of stage 1, and stage 2, for one window.

        Args:
            stem_input: `[B, n + kernel_size - 1, R]`, the window and the margins of the convolution.
            start: The window's first token.

        Returns: the head tokens `[B, n, M, d]`.
        """
        batch, width = len(stem_input), self.config.width
        states = self.stem(stem_input.transpose(1, 2)).transpose(1, 2)  # [B, n, M * d]
        states = states.unflatten(2, (-1, width)).transpose(1, 2).flatten(0, 1)  # [B * M, n, d]
        places = torch.arange(start, start + states.shape[1], dtype=torch.float64)
        states = states + _positions(places, width, self.config.window).to(states)
        for block in self.encoder:
            states = block(states)
        return self.encoder_norm(states).unflatten(0, (batch, -1)).transpose(1, 2)

    def head_prior(self) -> Tensor:
        """The mean training score of every head, `[L, H]`. Training changes the heads' bias, but not this prior."""
        return self.prior.clone()

    @torch.no_grad()
    def set_head_prior(self, values: Tensor) -> None:
        """Set the head prior, and start every head's bias from it.

        Args:
            values: `[L_full, H]`, the mean training score of each head on a log scale, with a row for each
                full-attention layer.

        Raises:
            GeometryError: ``values`` has another shape.
        """
        target = self.config.target
        expected = (len(target.full_layers), target.num_key_value_heads)
        if tuple(values.shape) != expected:
            raise GeometryError(
                f"values: expected {list(expected)}, a row per full-attention layer, got {list(values.shape)}"
            )
        self.prior[list(target.full_layers)] = values.to(self.prior)
        self.heads.bias.copy_(values.flatten())

    @torch.no_grad()
    def set_channel_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the training data's mean and standard deviation, `[C]` each, by which features are standardised."""
        self.channel_mean.copy_(mean)
        self.channel_std.copy_(std.clamp(min=1e-4))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``. If it fails, older files stay as they were.

        Args:
            save_directory: The folder. It is made if it is missing.
            args: Further positional arguments of transformers' ``save_pretrained``.
            kwargs: Further keyword arguments of transformers' ``save_pretrained``, except ``push_to_hub``.

        Raises:
            OSError: The files cannot be written, for example because the disk is full.
            InvalidInputError: ``push_to_hub`` is given.
        """
        if kwargs.get("push_to_hub"):
            self.push_to_hub()
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mapper-", dir=folder) as fresh:
            try:
                super().save_pretrained(fresh, *args, **kwargs)
            except SafetensorError as error:  # safetensors wraps the system's errors in its own
                raise OSError(f"the mapper cannot be written into {folder}: {error}") from error
            for path in Path(fresh).iterdir():
                os.replace(path, folder / path.name)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refuse to upload: the mapper does not hold its card, and transformers would upload a template in its place.

        Raises:
            InvalidInputError: Always. The error names ``proxykv push``, which uploads a mapper with its card.
        """
        raise InvalidInputError(
            "a mapper is uploaded with its card, which it does not hold itself: save it into a folder with its "
            "README.md, as `proxykv train` does, and run `proxykv push FOLDER --repo ID`"
        )

    def resize_target_heads(self, geometry: ModelGeometry) -> None:
        """Change to another target with new heads. Everything else is kept, and is frozen.

        The new heads start with a prior of zero (see `set_head_prior`) and need training. The target's id and
        fingerprint are cleared.

        Args:
            geometry: The geometry of the new target.
        """
        self.requires_grad_(False)
        config = self.config
        config.target_geometry = json.loads(json.dumps(geometry.to_dict()))
        config.target_id = config.target_weights = None
        heads = _TargetHeads(_head_count(geometry), config.width, config.bottleneck)
        self._init_weights(heads)
        self.heads = heads.to(self.prior.device, self.dtype)
        self.prior = self.prior.new_zeros(geometry.num_layers, geometry.num_key_value_heads)


class _TargetHeads(nn.Module):
    """Stage 3: the parameters of each target head."""

    def __init__(self, heads: int, width: int, bottleneck: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, width))
        self.output = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads))
        self.linear = nn.Parameter(torch.empty(heads, bottleneck))

    def direct(self, compressed: Tensor) -> Tensor:
        """The linear path and the bias: from `[B, N, R]` to `[B, N, T]`, in float32 even under autocast.

        In bfloat16, scores near a bias of -6, for example, would take only a few hundred different values. That is too
        coarse to choose what is kept.
        """
        with torch.autocast(compressed.device.type, enabled=False):
            return functional.linear(compressed.float(), self.linear.float(), self.bias.float())

    def forward(self, key: Tensor, value: Tensor) -> Tensor:
        """``sum_m softmax_m(q_h . k_m / sqrt(d)) * (w_h . v_m)``: from two `[B, n, M, d]` to `[B, n, T]`.

        The product with w_h comes before the sum over M, so there is no tensor `[n, T, d]`.
        """
        weights = functional.linear(key, self.query / math.sqrt(key.shape[-1])).softmax(2)  # [B, n, M, T]
        return (weights * functional.linear(value, self.output)).sum(2)


class _Block(nn.Module):
    """A pre-norm block of the encoder along time."""

    def __init__(self, config: HybridAxialMapperConfig) -> None:
        super().__init__()
        width = config.width
        self.attention_heads = config.encoder_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, states: Tensor) -> Tensor:  # [b, n, d]
        qkv = self.qkv(self.attention_norm(states)).unflatten(2, (3, self.attention_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # [b, heads, n, d / heads]
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        states = states + self.dropout(self.out(mixed))
        return states + self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(states)))))


def _head_count(geometry: ModelGeometry) -> int:
    return len(geometry.full_layers) * geometry.num_key_value_heads


def _positions(places: Tensor, width: int, longest: int) -> Tensor:
    """Sinusoids `[n, d]` with wavelengths up to ``longest``, so that long texts have no phases unseen in training."""
    ends = math.log10(SHORTEST_WAVE), math.log10(max(longest, SHORTEST_WAVE))
    phase = 2 * math.pi * places[:, None] / torch.logspace(*ends, width // 2, dtype=places.dtype)
    return torch.cat([phase.sin(), phase.cos()], dim=1)


def _windows(tokens: int, window: int, overlap: int) -> list[tuple[int, int]]:
    """Spans of windows that cover the tokens. The last window is moved back, so that it is full."""
    if tokens <= window:
        return [(0, tokens)]
    starts = [*range(0, tokens - window, window - overlap), tokens - window]
    return [(start, start + window) for start in starts]


def _seam_weight(start: int, stop: int, tokens: int, overlap: int) -> Tensor:
    """A window's weight at each of its tokens, `[n]`, float32: linear ramps at the seams, 1 at the text's ends."""
    steps = torch.arange(1, stop - start + 1, dtype=torch.float32) / (overlap + 1)
    rise = steps if start > 0 else torch.ones_like(steps)
    fall = steps.flip(0) if stop < tokens else torch.ones_like(steps)
    return torch.minimum(rise, fall).clamp(max=1.0)
