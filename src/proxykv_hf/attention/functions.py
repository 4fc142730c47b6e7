"""The attention functions that are registered with transformers, and how a cache layer takes part in them.

For each back end (``sdpa``, ``eager``, …) there is one function, ``proxykv_<back end>``. A cache layer that wants to
compute or to read the attention over the keys that its ``update`` returns announces these keys with `hand_over`. The
attention function that receives them calls the layer's ``attend``. It passes every other call on to the back end, so
caches and threads on one model do not see each other.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._compat import function_of_file
from ..errors import UnsupportedModelError

PREFIX = "proxykv_"

#: What an attention function returns: output `[B, q, Q, Dv]`, and the weights or None.
AttentionOutput = tuple[Tensor, Tensor | None]
Backend = Callable[..., AttentionOutput]

#: Keywords of attention functions that change the weights and that only the back end can honour.
UNSUPPORTED_KEYWORDS = ("position_bias",)


@dataclass(slots=True)
class AttentionCall:
    """One call of an attention function, as a model made it.

    Args:
        backend: The function that the model would have called without this package.
        module: The attention module.
        query: `[B, Q, q, D]`, after RoPE.
        key: `[B, H, N, D]`, as the layer's ``update`` returned it.
        value: `[B, H, N, Dv]`, as the layer's ``update`` returned it.
        attention_mask: The mask that the back end's mask function made.
        kwargs: All other arguments.
    """

    backend: Backend
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    kwargs: dict[str, Any]

    @property
    def scaling(self) -> float | None:
        """Factor of the dot product; None for ``D ** -0.5``."""
        return self.kwargs.get("scaling")

    @property
    def softcap(self) -> float | None:
        """Cap of the logits (Gemma 2), or None."""
        return self.kwargs.get("softcap")

    @property
    def sinks(self) -> Tensor | None:
        """`[Q]`, the logit of each query head's attention sink (gpt-oss), or None."""
        return self.kwargs.get("s_aux")

    def by_backend(self) -> AttentionOutput:
        """Let the back end compute the attention."""
        return self.backend(self.module, self.query, self.key, self.value, self.attention_mask, **self.kwargs)

    def check(self) -> None:
        """Refuse arguments that a pruned cache could not honour later.

        Raises:
            UnsupportedModelError: There is such an argument, which the error names.
        """
        mask = self.attention_mask
        if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
            raise UnsupportedModelError(
                "expected one attention mask for all heads, got a mask for each head, which no longer fits the keys "
                "once tokens are evicted: use another model"
            )
        for name in UNSUPPORTED_KEYWORDS:
            if self.kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"the model's attention uses {name!r}, which a pruned cache cannot honour over ragged heads"
                )


class AttendingLayer(Protocol):
    """A cache layer that takes part in the attention over its keys."""

    def attend(self, call: AttentionCall) -> AttentionOutput:
        """Compute the attention, or let the back end do it."""
        ...


class _ThreadState(threading.local):
    handed: tuple[Tensor, Tensor, AttendingLayer] | None = None
    attended: weakref.ref[Tensor] | None = None  # the keys of the last attention that a layer computed
    hidden: Tensor | None = None


_thread = _ThreadState()


def hand_over(key: Tensor, value: Tensor, layer: AttendingLayer) -> None:
    """Announce that ``layer`` is to attend over ``key`` and ``value``, which its ``update`` is about to return.

    Raises:
        UnsupportedModelError: No attention function received the keys announced before.
    """
    check_consumed()
    _thread.handed = (key, value, layer)


def check_consumed() -> None:
    """Raise if no attention function received the announced keys: their layer did not take part in the attention."""
    unconsumed, _thread.handed = _thread.handed, None
    if unconsumed is not None:
        raise UnsupportedModelError(
            "expected the model's attention to hand the cache's keys to transformers' "
            "AttentionInterface unchanged, but they never arrived there: the model computes attention "
            "in its own way, or it was put under torch.compile, which the cache cannot take part in"
        )


def forget() -> None:
    """Drop what an interrupted forward left behind in this thread."""
    _thread.handed = _thread.hidden = None


def take_hidden() -> Tensor | None:
    """The hidden states `[B, q, hidden]` that entered the attention module that now runs, see `tap_hidden`."""
    hidden, _thread.hidden = _thread.hidden, None
    return hidden


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The decoder's self-attention modules, in the model's order."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    ]


def tap_hidden(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Make the attention modules note their input for `take_hidden`, until the returned handles are removed."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _thread.hidden = kwargs.get("hidden_states", args[0] if args else None)

    return [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]


def _backend_function(name: str, module: nn.Module) -> Backend:
    """The function that ``module`` would have called with the attention implementation ``name``."""
    for cls in type(module).__mro__:
        function = function_of_file(vars(sys.modules.get(cls.__module__, object())), name)
        if function is not None:
            return _under_own_name(function) if name.startswith("flash_attention") else function
    raise UnsupportedModelError(
        f"expected {type(module).__name__}'s file to define eager_attention_forward as transformers' "
        "models do; load the model with attn_implementation='sdpa'"
    )


def _under_own_name(function: Backend) -> Backend:
    """Show a flash back end the name without `PREFIX`: it finds its kernel by the name in the module's config."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionOutput:
        return function(_Renamed(module), *args, **kwargs)

    return forward


class _Renamed:
    """An attention module, or its config, whose ``_attn_implementation`` reads without `PREFIX`."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name == "_attn_implementation":
            return str(value).removeprefix(PREFIX)
        return _Renamed(value) if name == "config" else value


def attention_function(name: str) -> Callable[..., Any]:
    """The function to register as ``proxykv_<name>``."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> AttentionOutput:
        call = AttentionCall(_backend_function(name, module), module, query, key, value, attention_mask, kwargs)
        handed, attended = _thread.handed, _thread.attended
        try:
            if handed is None or handed[0] is not key:
                if attended is not None and attended() is key:
                    raise UnsupportedModelError(f"{type(module).__name__} attends twice over the same keys")
                return call.by_backend()
            if handed[1] is not value:
                raise UnsupportedModelError(f"{type(module).__name__} attends to other values than it cached")
            _thread.handed, _thread.attended = None, weakref.ref(key)
            return handed[2].attend(call)
        finally:
            _thread.hidden = None

    forward.__name__ = forward.__qualname__ = PREFIX + name
    return forward
