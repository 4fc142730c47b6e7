"""The only file that knows that transformers' versions differ (supported: 5.17 and later, below 6)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

#: 5.23 renamed the forward's ``past_key_values`` to ``cache``; the old name still works there.
CACHE_KEYWORDS = ("cache", "past_key_values")


@functools.lru_cache(maxsize=64)
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def cache_keyword(model: nn.Module) -> str:
    """The name under which ``model``'s forward, and ``generate``, take a cache."""
    parameters = _parameters(type(model).forward)
    return next((name for name in CACHE_KEYWORDS if name in parameters), CACHE_KEYWORDS[-1])


def call_forward(model: nn.Module, *, cache: Any, **kwargs: Any) -> Any:
    """Call ``model`` with its cache under the right keyword; ``logits_to_keep`` only if it is known."""
    if "logits_to_keep" not in _parameters(type(model).forward):
        kwargs.pop("logits_to_keep", None)
    return model(**{cache_keyword(model): cache}, **kwargs)


def bind_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A forward's arguments by name, positional ones too; the cache is always under ``"cache"``."""
    bound = dict(kwargs)
    if args:
        names = [name for name in _parameters(type(model).forward) if name != "self"]
        bound.update(zip(names, args, strict=False))
    found = next((bound.pop(name) for name in CACHE_KEYWORDS if bound.get(name) is not None), None)
    bound["cache"] = found
    return bound
