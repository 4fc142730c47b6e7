"""The hybrid axial mapper, Phi_theta (arXiv 2605.16360, section 3): the proxy's features X to scores Y-hat.

Three stages keep time and heads apart:

1. a stem over time takes the proxy's C channels to M synthetic head tokens of width d;
2. a Transformer encoder along time, beyond ``window`` tokens in overlapping windows with blended seams;
3. learnable target queries, one per target KV head, cross-attend over the M head tokens of each time step.

Beside them runs the *linear path*: the stem's bottleneck straight to the heads. A reduced-rank ridge
regression is then a mapper already, and the three stages learn what a line cannot say.

Axis letters besides those of the design: M head tokens, T target heads (full-attention layers times H),
d width, R rank of the bottleneck, W windows.
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
#: Standardised features beyond this many deviations are outliers (attention sinks) and are cut.
CLAMP = 8.0
#: Time steps whose standardised channels are held at once: C is large.
TIME_BLOCK = 4096
#: Shortest wavelength of the sinusoidal positions, in tokens.
SHORTEST_WAVE = 4.0


class HybridAxialMapperConfig(PreTrainedConfig):
    """Everything that a mapper needs besides its weights.

    Args:
        target_geometry, proxy_geometry: `ModelGeometry.to_dict` of the target and of the whole proxy.
        target_id, proxy_id, proxy_revision: What they are called on the Hub.
        target_weights, proxy_weights: Their `weights_fingerprint` when the teacher and the features were made.
        features, channels: `FeatureRecipe.to_dict`, and its C.
        score_recipe: How the teacher's scores were made.
        bottleneck: R, channels after the pointwise part of the stem.
        head_tokens, width: M and d; d a multiple of twice ``encoder_heads``.
        kernel_size: Time steps that the stem's convolution sees, odd.
        encoder_layers, encoder_heads: Blocks of the encoder along time, and their attention heads.
        window, overlap: Tokens that attend to each other in the encoder, and over which the seam of two such
            windows is blended, at most half a window.
        dropout: Share of channels, bottleneck and blocks' activations that training drops.
        training: How it was trained, for people.
        mapper_version: Format; a newer one warns.

    Raises:
        InvalidInputError: On construction, naming the argument.
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
            setattr(self, name, json.loads(json.dumps(getattr(self, name))))  # tuples become lists, as on disk
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
        return ModelGeometry.from_dict(self._given("target_geometry"))

    @property
    def proxy(self) -> ModelGeometry:
        return ModelGeometry.from_dict(self._given("proxy_geometry"))

    @property
    def feature_recipe(self) -> FeatureRecipe:
        return FeatureRecipe(**self._given("features"))

    def _given(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] | None = getattr(self, name)
        if value is None:
            raise InvalidInputError(f"{name}: expected a dict, got None: a mapper is made for one pair of models")
        return value


class HybridAxialMapper(PreTrainedModel):
    """Features `[B, C, N]` to log-scale scores `[B, L, H, N]`.

    Time and memory are linear in N. A fresh mapper answers about the head prior, whatever the text says.
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
            init.normal_(module.output, std=0.01 / math.sqrt(module.output.shape[1]))  # about the prior, at first
            init.zeros_(module.bias)
            init.zeros_(module.linear)
        elif isinstance(module, HybridAxialMapper):
            init.zeros_(module.channel_mean)
            init.ones_(module.channel_std)
            init.zeros_(module.prior)

    def forward(self, features: Tensor) -> Tensor:
        """Scores of every KV pair.

        Args:
            features: `[B, C, N]`, as `proxy_features` gives them, any float dtype.

        Returns: `[B, L, H, N]`, float32, natural logarithms; zero in sliding-window layers.

        Raises:
            InvalidInputError: Not three axes, or another C.
        """
        if features.dim() != 3 or features.shape[1] != self.config.channels:
            raise InvalidInputError(
                f"features: expected [B, C = {self.config.channels}, N], got {list(features.shape)}: "
                "extract them with the mapper's own feature recipe (config.feature_recipe)"
            )
        return self.score(self.project(features))

    def project(self, features: Tensor) -> Tensor:
        """Stage 1, pointwise: standardised features `[B, C, N]` to the bottleneck, `[B, N, R]`."""
        mean, std = self.channel_mean[:, None], self.channel_std[:, None]
        parts = []
        for block in features.split(TIME_BLOCK, dim=2):
            standard = ((block.to(mean) - mean) / std).clamp(-CLAMP, CLAMP).to(self.dtype)
            parts.append(self.compress(self.dropout(standard).transpose(1, 2)))
        return torch.cat(parts, dim=1)

    def score(self, projected: Tensor) -> Tensor:
        """All that follows: the bottleneck `[B, N, R]` to scores `[B, L, H, N]`."""
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
        """Stage 1, convolution, and stage 2, of one window that starts at token ``start``.

        ``stem_input`` is `[B, n + kernel_size - 1, R]`; returns `[B, n, M, d]`.
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
        """The mean training score of every head, `[L, H]`, apart from what training made of the bias."""
        return self.prior.clone()

    @torch.no_grad()
    def set_head_prior(self, values: Tensor) -> None:
        """Start every head from its mean training score.

        Args:
            values: `[L_full, H]`, log scale; a row for each full-attention layer.
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
        """Standardise by the training data's mean and deviation, `[C]` each."""
        self.channel_mean.copy_(mean)
        self.channel_std.copy_(std.clamp(min=1e-4))

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write ``config.json`` and ``model.safetensors``; each file appears whole or stays what it was.

        Args:
            save_directory: The folder, made where missing.
            args, kwargs: As transformers has them, without ``push_to_hub``.

        Raises:
            OSError: They cannot be written, on a full disk say.
            InvalidInputError: ``push_to_hub``.
        """
        if kwargs.get("push_to_hub"):
            self.push_to_hub()
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mapper-", dir=folder) as fresh:
            try:
                super().save_pretrained(fresh, *args, **kwargs)
            except SafetensorError as error:  # what safetensors makes of the system's errors
                raise OSError(f"the mapper cannot be written into {folder}: {error}") from error
            for path in Path(fresh).iterdir():
                os.replace(path, folder / path.name)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refused: a mapper alone does not know its card, and would get a template for one.

        Raises:
            InvalidInputError: Always, naming ``proxykv push``.
        """
        raise InvalidInputError(
            "a mapper goes to the Hub with its card, which lies beside it and not in it: save it into a folder with "
            "its README.md, as `proxykv train` does, and run `proxykv push FOLDER --repo ID`"
        )

    def resize_target_heads(self, geometry: ModelGeometry) -> None:
        """Change to another target by new queries alone; everything else is kept and frozen.

        The new heads start from a prior of zero (`set_head_prior`), and want training. The target's id and
        fingerprint are cleared.
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
    """Stage 3: what belongs to single target heads."""

    def __init__(self, heads: int, width: int, bottleneck: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(heads, width))
        self.output = nn.Parameter(torch.empty(heads, width))
        self.bias = nn.Parameter(torch.empty(heads))
        self.linear = nn.Parameter(torch.empty(heads, bottleneck))

    def direct(self, compressed: Tensor) -> Tensor:
        """The linear path and the bias: `[B, N, R]` to `[B, N, T]`, float32.

        Under autocast too: scores about the bias, a prior of -6 say, are a few hundred numbers only in bfloat16, and
        what is kept is decided among them.
        """
        with torch.autocast(compressed.device.type, enabled=False):
            return functional.linear(compressed.float(), self.linear.float(), self.bias.float())

    def forward(self, key: Tensor, value: Tensor) -> Tensor:
        """``sum_m softmax_m(q_h . k_m / sqrt(d)) * (w_h . v_m)``: `[B, n, M, d]` twice to `[B, n, T]`.

        The product with w_h comes before the sum over M, so nothing of `[n, T, d]` is made.
        """
        weights = functional.linear(key, self.query / math.sqrt(key.shape[-1])).softmax(2)  # [B, n, M, T]
        return (weights * functional.linear(value, self.output)).sum(2)


class _Block(nn.Module):
    """One pre-norm block of the encoder along time."""

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
    """Sinusoids `[n, d]`, wavelengths up to ``longest``: no place of a long text has an unseen phase."""
    ends = math.log10(SHORTEST_WAVE), math.log10(max(longest, SHORTEST_WAVE))
    phase = 2 * math.pi * places[:, None] / torch.logspace(*ends, width // 2, dtype=places.dtype)
    return torch.cat([phase.sin(), phase.cos()], dim=1)


def _windows(tokens: int, window: int, overlap: int) -> list[tuple[int, int]]:
    """Spans that cover the tokens; the last one is moved back to be whole."""
    if tokens <= window:
        return [(0, tokens)]
    starts = [*range(0, tokens - window, window - overlap), tokens - window]
    return [(start, start + window) for start in starts]


def _seam_weight(start: int, stop: int, tokens: int, overlap: int) -> Tensor:
    """A window's say at each of its places, `[n]`, float32: rises and falls linearly at seams, not at a text's ends."""
    steps = torch.arange(1, stop - start + 1, dtype=torch.float32) / (overlap + 1)
    rise = steps if start > 0 else torch.ones_like(steps)
    fall = steps.flip(0) if stop < tokens else torch.ones_like(steps)
    return torch.minimum(rise, fall).clamp(max=1.0)
