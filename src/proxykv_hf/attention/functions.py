"""The attention functions registered with transformers, and how a model is given them and gets back its own.

For each back end (``sdpa``, ``eager``, …) there is one function, ``proxykv_<back end>``, with that
back end's own mask function. A cache layer that wants a say in the attention over the keys that its
``update`` returns announces them with `hand_over`; the attention function, finding those very keys
among its arguments, lets the layer attend. All other calls go straight to the back end, so caches
and threads on one model do not see each other.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError

PREFIX = "proxykv_"

#: What an attention function returns: output `[B, q, Q, Dv]`, and the weights or None.
AttentionOutput = tuple[Tensor, Tensor | None]
Backend = Callable[..., AttentionOutput]

#: Keywords of attention functions that change the weights and that only the back end can honour.
UNSUPPORTED_KEYWORDS = ("s_aux", "position_bias")


class AttendingLayer(Protocol):
    """A cache layer that takes part in the attention over its keys."""

    def attend(
        self,
        backend: Backend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> AttentionOutput:
        """Like an attention function: query `[B, Q, q, D]`, key and value as ``update`` returned them."""
        ...


class _ThreadState(threading.local):
    handed: tuple[Tensor, Tensor, AttendingLayer] | None = None
    attended: weakref.ref[Tensor] | None = None  # the keys that a layer attended over last
    hidden: Tensor | None = None


_thread = _ThreadState()


def hand_over(key: Tensor, value: Tensor, layer: AttendingLayer) -> None:
    """Announce that ``key`` and ``value``, about to be returned by ``layer.update``, want ``layer`` to attend.

    Raises:
        UnsupportedModelError: The keys announced before never came to an attention function.
    """
    check_consumed()
    _thread.handed = (key, value, layer)


def check_consumed() -> None:
    """Raise if announced keys never came: their layer's share in the attention would be lost in silence."""
    unconsumed, _thread.handed = _thread.handed, None
    if unconsumed is not None:
        raise UnsupportedModelError(
            "expected the model's attention to hand the cache's keys to transformers' "
            "AttentionInterface unchanged, but they never arrived there: the model computes attention "
            "in its own way, or its attention implementation was set while a cache was open (set it before the cache "
            "is made), or it was put under torch.compile (which the cache cannot take part in)"
        )


def forget() -> None:
    """Drop what a forward that died has left behind in this thread."""
    _thread.handed = _thread.hidden = None


def take_hidden() -> Tensor | None:
    """The hidden states `[B, q, hidden]` that entered the attention module now running, see `tap_hidden`."""
    hidden, _thread.hidden = _thread.hidden, None
    return hidden


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The decoder's self-attention modules, in the order of the model."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__
    ]


def tap_hidden(model: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
    """Have the attention modules note their input for `take_hidden`, until the handles are removed."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _thread.hidden = kwargs.get("hidden_states", args[0] if args else None)

    return [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]


def _backend_function(name: str, module: nn.Module) -> Backend:
    """The function that ``module`` would have called with the attention implementation ``name``."""
    for cls in type(module).__mro__:
        namespace = vars(sys.modules.get(cls.__module__, object()))
        default = namespace.get("eager_attention_forward")
        interface = namespace.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        if default is not None or name in interface:
            function: Backend = interface.get_interface(name, default)
            return _under_own_name(function) if name.startswith("flash_attention") else function
    raise UnsupportedModelError(
        f"expected {type(module).__name__}'s file to define eager_attention_forward as transformers' "
        "models do; load the model with attn_implementation='sdpa'"
    )


def _under_own_name(function: Backend) -> Backend:
    """A flash back end, which looks for its kernel by the name that the module's config has, shown its own there."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionOutput:
        return function(_Renamed(module), *args, **kwargs)

    return forward


class _Renamed:
    """All that an attention module or its config has, but for ``_attn_implementation``, which is without `PREFIX`."""

    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name == "_attn_implementation":
            return str(value).removeprefix(PREFIX)
        return _Renamed(value) if name == "config" else value


def _attention_function(name: str) -> Callable[..., Any]:
    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> AttentionOutput:
        backend = _backend_function(name, module)
        handed, attended = _thread.handed, _thread.attended
        try:
            if handed is None or handed[0] is not key:
                if attended is not None and attended() is key:
                    raise UnsupportedModelError(f"{type(module).__name__} attends twice over the same keys")
                return backend(module, query, key, value, attention_mask, **kwargs)
            if handed[1] is not value:
                raise UnsupportedModelError(f"{type(module).__name__} attends to other values than it cached")
            _thread.handed, _thread.attended = None, weakref.ref(key)
            return handed[2].attend(backend, module, query, key, value, attention_mask, **kwargs)
        finally:
            _thread.hidden = None

    forward.__name__ = forward.__qualname__ = PREFIX + name
    return forward


class Lease:
    """A share in a model's attention being ours; given up by `release`, or when collected.

    The first share swaps the model's attention implementation and hooks its forward, the last one
    given up puts everything back. A deep copy is a share of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._finalizer = weakref.finalize(self, _Attachment.take(model).give_up)

    def release(self) -> None:
        """Give up the share; once is enough, more does nothing."""
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        model = self._model()
        return self if model is None else Lease(model)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Attachment:
    """What was changed on a model, and how many shares are out."""

    _lock = threading.RLock()
    _of_model: ClassVar[weakref.WeakKeyDictionary[nn.Module, _Attachment]] = weakref.WeakKeyDictionary()
    _names: ClassVar[Counter[str]] = Counter()
    _configs: ClassVar[Counter[int]] = Counter()  # models may be built from one config object

    def __init__(self, model: PreTrainedModel) -> None:
        if any(_is_compiled(module) and attention_modules(module) for module in model.modules()):
            raise UnsupportedModelError(
                f"expected a model whose attention runs as it is written, got {type(model).__name__} under "
                "torch.compile, in which the cache cannot take its part: pass the model itself and generate with it, "
                "uncompiled (after compiled = torch.compile(model) that is still `model`; after model.compile() load "
                "it anew). Parts without attention may be compiled: for layer in model.model.layers: "
                "layer.mlp.compile()"
            )
        configs = {id(config): config for config in _attention_configs(model)}
        self._saved = [(config, str(config._attn_implementation).removeprefix(PREFIX)) for config in configs.values()]
        self._backends = {name for _, name in self._saved}
        refused = [name for name in self._backends if not name.startswith(("sdpa", "eager", "flash_attention"))]
        if refused:
            raise UnsupportedModelError(
                f"expected attn_implementation 'sdpa', 'eager' or 'flash_attention_*', got "
                f"{', '.join(sorted(refused))}: load the model with one of these"
            )
        for name in self._backends:
            self._names[name] += 1
            if self._names[name] == 1:
                masks = AttentionMaskInterface._global_mapping
                AttentionInterface._global_mapping[PREFIX + name] = _attention_function(name)
                masks[PREFIX + name] = masks[name]
        for config, name in self._saved:
            self._configs[id(config)] += 1
            config._attn_implementation_internal = PREFIX + name
        self._handles = [
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        ]
        self._shares = 0
        self._is_attached = True

    @classmethod
    def take(cls, model: PreTrainedModel) -> _Attachment:
        """One more share of ``model``'s attachment."""
        with cls._lock:
            while True:
                attachment = cls._of_model.get(model)
                if attachment is None:
                    attachment = cls._of_model[model] = cls(model)
                attachment._shares += 1
                if attachment._is_attached:  # no collected cache has given up the last share in between
                    return attachment

    def give_up(self) -> None:
        """One share less; the last one puts the model back as it was."""
        with self._lock:
            self._shares -= 1
            if self._shares or not self._is_attached:
                return
            self._is_attached = False
            for model in [m for m, attachment in self._of_model.items() if attachment is self]:
                del self._of_model[model]
            for handle in self._handles:
                handle.remove()
            for config, name in self._saved:
                self._configs[id(config)] -= 1
                if self._configs[id(config)]:
                    continue
                del self._configs[id(config)]
                if config._attn_implementation == PREFIX + name:  # unless somebody set another since
                    config._attn_implementation_internal = name
            for name in self._backends:
                self._names[name] -= 1
                if not self._names[name]:
                    del self._names[name]
                    AttentionInterface._global_mapping.pop(PREFIX + name, None)
                    AttentionMaskInterface._global_mapping.pop(PREFIX + name, None)


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it, ``module.compile()`` was called or its forward is compiled."""
    return (
        "_orig_mod" in module._modules
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _attention_configs(model: PreTrainedModel) -> Iterator[Any]:
    yield model.config.get_text_config(decoder=True)
    for module in attention_modules(model):
        if (config := getattr(module, "config", None)) is not None:
            yield config


class ForwardAware(Protocol):
    """A cache that is told of the forwards it is used in."""

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any] | None: ...

    def after_forward(self, model: nn.Module, succeeded: bool) -> None: ...


def _aware_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardAware | None:
    for argument in (*kwargs.values(), *args):
        if hasattr(argument, "before_forward") and hasattr(argument, "after_forward"):
            return argument
    return None


def _before_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    forget()
    cache = _aware_cache(args, kwargs)
    changed = None if cache is None else cache.before_forward(model, args, kwargs)
    return None if changed is None else (args, changed)


def _after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _aware_cache(args, kwargs)) is not None:
        cache.after_forward(model, output is not None)


def check_arguments(attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse attention arguments that a pruned cache could not honour later."""
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] != 1:
        raise UnsupportedModelError("the model's attention has a mask for each head, which evicted tokens would shift")
    for name in UNSUPPORTED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"the model's attention uses {name!r}, which a pruned cache cannot honour over ragged heads"
            )
