"""The only file that knows that transformers' releases differ, and the only one that touches its private names.

Everything that is not part of transformers' documented interface is imported, read and written here. A release that
lost one of these names is refused with the releases that are known to work: at import, or when a cache is made.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from torch import nn

from .errors import UnsupportedModelError

#: The oldest and the newest release on which the tests have passed, see docs/versions.md.
OLDEST, NEWEST = "5.17", "5.25"

#: 5.23 renamed the forward's ``past_key_values`` to ``cache``; the old name still works there, with a FutureWarning.
CACHE_KEYWORDS = ("cache", "past_key_values")


def unsupported_release(what: str) -> str:
    """An error message: what this release lacks, and which releases work."""
    return (
        f"expected transformers {OLDEST} to {NEWEST}, on which proxykv-hf is tested, got {transformers.__version__}: "
        f"{what}; pip install 'transformers>={OLDEST},<6'"
    )


if Version(transformers.__version__).release < Version(OLDEST).release:
    raise ImportError(unsupported_release("it is too old"))
try:
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as missing:
    raise ImportError(unsupported_release(str(missing))) from missing

__all__ = ["Cache", "DynamicLayer", "DynamicSlidingWindowLayer"]


# ---------------------------------------------------------------- forwards


@functools.lru_cache(maxsize=64)
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def cache_keyword(model: nn.Module) -> str:
    """The name under which ``model``'s forward, and ``generate``, take a cache."""
    parameters = _parameters(type(model).forward)
    return next((name for name in CACHE_KEYWORDS if name in parameters), CACHE_KEYWORDS[-1])


def call_forward(model: nn.Module, *, cache: Any, **kwargs: Any) -> Any:
    """Call ``model`` with its cache under the right keyword; ``logits_to_keep`` is left out where it is unknown."""
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


# ---------------------------------------------------------------- attention functions


def check_attention_interface(config: Any) -> None:
    """Refuse a release that lost a name which the functions below touch.

    Raises:
        UnsupportedModelError: Naming what is gone, and the releases that work.
    """
    interfaces = (AttentionInterface, AttentionMaskInterface)
    needed = [
        (type(config), config, "_attn_implementation"),
        (type(config), config, "_attn_implementation_internal"),
        (type(ALL_ATTENTION_FUNCTIONS), ALL_ATTENTION_FUNCTIONS, "get_interface"),
        *((interface, interface, name) for interface in interfaces for name in ("register", "_global_mapping")),
    ]
    for kind, owner, name in needed:
        # `hasattr` would find the `register` that every abstract class has from its metaclass.
        if not (name in vars(owner) or any(name in vars(base) for base in kind.__mro__)):
            raise UnsupportedModelError(unsupported_release(f"its {kind.__name__} has no {name}"))


def attention_name(config: Any) -> str:
    """The attention implementation that a config names."""
    return str(config._attn_implementation)


def set_attention_name(config: Any, name: str) -> None:
    """Have ``config``'s model call the attention function ``name``.

    `set_attn_implementation` is no way to do so: it also changes models inside the model, a vision tower say, and
    refuses models that it takes for unsuited.
    """
    config._attn_implementation_internal = name


def register_attention(name: str, function: Callable[..., Any], like: str) -> None:
    """Add an attention function, with the mask function of the implementation ``like``."""
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[like])


def unregister_attention(name: str) -> None:
    """Undo `register_attention`, for which transformers has no public way."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def function_of_file(namespace: Mapping[str, Any], name: str) -> Callable[..., Any] | None:
    """What a model's file calls under the implementation ``name``.

    Args:
        namespace: The file's global names: its eager function, and its own `AttentionInterface` if it has one.

    Returns: None where the file defines neither.
    """
    default = namespace.get("eager_attention_forward")
    interface = namespace.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    if default is None and name not in interface:
        return None
    function: Callable[..., Any] = interface.get_interface(name, default)
    return function


# ---------------------------------------------------------------- offloading (accelerate)


def execution_device(module: nn.Module) -> Any:
    """Where accelerate's hook on ``module`` has it compute, or None without such a hook."""
    return getattr(getattr(module, "_hf_hook", None), "execution_device", None)
