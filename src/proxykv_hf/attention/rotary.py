"""The rotation of a model's queries by their position (RoPE, arXiv 2104.09864), and its inverse."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._compat import Cache, call_forward
from ..errors import UnsupportedModelError
from ..geometry import ModelGeometry, device_of
from .functions import AttentionCall, AttentionOutput, attention_modules
from .lease import Lease
from .passing import PassingLayer

#: The types of RoPE whose frequencies change with the length of the text.
CHANGING = ("dynamic", "longrope")
#: The position at which a model's rotation is tested.
TRIED_POSITION = 5
#: The largest error that rounding may cause, in bfloat16 for example, as a share of a query.
TOLERANCE = 0.05


class Rotary:
    """The rotation that a model applies to its queries, taken from the model's own parts and tested on the model.

    Use `Rotary.of`. The sines and cosines come from the decoder's ``rotary_emb``. The ``apply_rotary_pos_emb`` of the
    file that defines the attention rotates by them.

    Args:
        embedding: The decoder's ``rotary_emb``.
        apply: The function ``apply_rotary_pos_emb``.
        layer_types: The type of each layer, if the embedding depends on it; else None.
    """

    def __init__(
        self, embedding: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]], layer_types: list[str] | None
    ) -> None:
        self._embedding, self._apply, self._layer_types = embedding, apply, layer_types
        self._still_layers: set[int] = set()  # those that do not rotate queries

    @classmethod
    def of(cls, model: PreTrainedModel) -> Rotary:
        """The rotation of a model's full-attention layers.

        It is tested by one forward of a token that sees only itself, at two positions: without the rotation, its
        queries at both positions are the same.

        Raises:
            UnsupportedModelError: The model has no RoPE, has one whose frequencies change with the length of the text,
                or rotates its queries in another way.
        """
        name = type(model).__name__
        decoder = model.get_decoder()
        embedding: Any = getattr(decoder, "rotary_emb", None)
        modules = attention_modules(decoder)
        apply = _apply_function(modules[0]) if modules else None
        if embedding is None or apply is None:
            raise UnsupportedModelError(
                f"expected a model with rotary positions, a decoder with `rotary_emb` and attention with "
                f"`apply_rotary_pos_emb`, got {name}: use a scorer that needs no positions (SnapKVScorer)"
            )
        kinds: Any = getattr(embedding, "rope_type", None)
        changing = set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(CHANGING)
        if changing:
            raise UnsupportedModelError(
                f"expected rotary positions whose frequencies are fixed, got {', '.join(sorted(changing))} in {name}: "
                "use a scorer that needs no positions (SnapKVScorer)"
            )
        typed = "layer_type" in inspect.signature(embedding.forward).parameters
        layer_types = list(model.config.get_text_config(decoder=True).layer_types) if typed else None
        rotary = cls(embedding, apply, layer_types)
        rotary._try_out(model, decoder)
        return rotary

    def undo(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        """States `[..., n, D]` as they were before their rotation by positions `[n]`, float32."""
        states = states.float()
        if layer in self._still_layers:
            return states
        cos, sin = self._angles(layer, positions)
        return self._turn(states, cos, -sin) / (cos.square() + sin.square()).mean()  # 1 unless RoPE also scales

    def mean_turn(self, layer: int, positions: Tensor, size: int) -> Tensor:
        """The mean of the rotations by some positions, as a matrix `[D, D]`: ``row @ matrix`` rotates a row.

        Args:
            layer: The layer's index in the model.
            positions: `[n]`, at least one position.
            size: D.
        """
        unit = torch.eye(size, dtype=torch.float32, device=positions.device)
        if layer in self._still_layers:
            return unit
        cos, sin = (part.mean(0, keepdim=True).expand(size, -1) for part in self._angles(layer, positions))
        return self._turn(unit, cos, sin)  # the rotation is linear in sine and cosine

    def _angles(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines `[n, R]`, float32, where R of the D numbers of a head are rotated."""
        typed = {} if self._layer_types is None else {"layer_type": self._layer_types[layer]}
        like = torch.zeros(1, dtype=torch.float32, device=positions.device)  # sines and cosines take its dtype
        cos, sin = self._embedding(like, positions[None], **typed)
        return cos[0].to(positions.device), sin[0].to(positions.device)  # a layer may be on another device

    def _turn(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        flat = states.reshape(1, -1, *states.shape[-2:])  # [1, heads, n, D]
        turned, still = flat[..., : cos.shape[-1]], flat[..., cos.shape[-1] :]
        return torch.cat([self._apply(turned, turned, cos[None], sin[None])[0], still], dim=-1).view_as(states)

    @torch.no_grad()
    def _try_out(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        """Test on the model that `undo` inverts what each full-attention layer does with a query."""
        geometry = ModelGeometry.from_config(model.config)
        layers = [_QueryLayer(window is not None) for window in geometry.sliding_windows]
        size = model.config.get_text_config(decoder=True).hidden_size
        # A made-up embedding, since that of a token in the vocabulary may be all zeros.
        device = device_of(model)
        token = torch.arange(size, device=device).cos().to(model.dtype)
        positions = torch.tensor([[0], [TRIED_POSITION]], device=device)
        with Lease(model):
            call_forward(
                decoder,
                inputs_embeds=token.expand(2, 1, -1),
                position_ids=positions,
                cache=Cache(layers=list(layers)),
                use_cache=True,
            )
        for index in geometry.full_layers:
            query = layers[index].query
            assert query is not None
            here, there = query.float()  # [Q, 1, D] twice
            try:
                undone = [self.undo(index, part, at) for part, at in zip((here, there), positions, strict=True)]
            except (RuntimeError, TypeError, ValueError, IndexError):  # for example positions with several axes
                undone = [here, torch.full_like(here, torch.inf)]
            if not _close(*undone):
                if not _close(here, there):
                    raise UnsupportedModelError(
                        f"expected {type(model).__name__} to rotate queries by `rotary_emb` and "
                        f"`apply_rotary_pos_emb`, but layer {index} does not: use a scorer that needs no positions "
                        "(SnapKVScorer)"
                    )
                self._still_layers.add(index)


class _QueryLayer(PassingLayer):
    """Notes the queries of one forward."""

    query: Tensor | None = None  # [B, Q, q, D]

    def attend(self, call: AttentionCall) -> AttentionOutput:
        self.query = call.query
        return call.by_backend()


def _apply_function(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The ``apply_rotary_pos_emb`` of the file that defines an attention module, or that of its base classes."""
    namespaces = (vars(sys.modules.get(cls.__module__, object())) for cls in type(module).__mro__)
    return next((space["apply_rotary_pos_emb"] for space in namespaces if "apply_rotary_pos_emb" in space), None)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())
