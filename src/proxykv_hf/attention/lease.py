"""Replaces a model's attention functions and hooks its forward, and later gives the model its own back."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from torch import nn
from transformers import PreTrainedModel

from .._compat import (
    attention_name,
    check_attention_interface,
    register_attention,
    set_attention_name,
    unregister_attention,
)
from ..errors import UnsupportedModelError
from .functions import PREFIX, attention_function, attention_modules, forget


class Lease:
    """A share in the use of a model's attention. It ends with `release`, or when it is garbage-collected.

    The first share replaces the model's attention implementation and hooks its forward. When the last share ends, the
    model is put back as it was. A deep copy is a share of its own.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._finalizer = weakref.finalize(self, _Attachment.take(model).give_up)

    def release(self) -> None:
        """End the share. A second call does nothing."""
        self._finalizer()

    def __deepcopy__(self, memo: dict[int, Any]) -> Lease:
        model = self._model()
        return self if model is None else Lease(model)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Attachment:
    """What was changed on a model, and how many shares use it."""

    _lock = threading.RLock()
    _of_model: ClassVar[weakref.WeakKeyDictionary[nn.Module, _Attachment]] = weakref.WeakKeyDictionary()
    _names: ClassVar[Counter[str]] = Counter()
    _configs: ClassVar[Counter[int]] = Counter()  # several models may be built from one config object

    def __init__(self, model: PreTrainedModel) -> None:
        if any(_is_compiled(module) and attention_modules(module) for module in model.modules()):
            raise UnsupportedModelError(
                f"expected a model whose attention is not compiled, got {type(model).__name__} under torch.compile, "
                "where the cache cannot take part in the attention: pass the uncompiled model and generate with it "
                "(after compiled = torch.compile(model) that is still `model`; after model.compile() load the model "
                "again). Parts without attention may be compiled: for layer in model.model.layers: "
                "layer.mlp.compile()"
            )
        check_attention_interface(model.config)
        configs = {id(config): config for config in _attention_configs(model)}
        self._saved = [(config, own_attention_name(config)) for config in configs.values()]
        for _, name in self._saved:
            _check_supported(name)
        self._backends: set[str] = set()
        for config, name in self._saved:
            self._configs[id(config)] += 1
            self._set(config, name)
        self._handles = [
            model.register_forward_pre_hook(_before_forward, with_kwargs=True),
            model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True),
        ]
        self._shares = 0
        self._is_attached = True

    @classmethod
    def of(cls, model: nn.Module) -> _Attachment | None:
        """A model's attachment, or None while no share uses the model's attention."""
        return cls._of_model.get(model)

    @classmethod
    def take(cls, model: PreTrainedModel) -> _Attachment:
        """Add a share to ``model``'s attachment."""
        with cls._lock:
            while True:
                attachment = cls._of_model.get(model)
                if attachment is None:
                    attachment = cls._of_model[model] = cls(model)
                attachment._shares += 1
                if attachment._is_attached:  # else the last share has just ended, when its cache was garbage-collected
                    return attachment

    def _set(self, config: Any, name: str) -> None:
        """Make a config name our function for the back end ``name``, which is registered if it is new."""
        if name not in self._backends:
            if not self._names[name]:
                register_attention(PREFIX + name, attention_function(name), like=name)
            self._names[name] += 1
            self._backends.add(name)
        set_attention_name(config, PREFIX + name)

    def follow(self) -> None:
        """Replace an attention implementation that somebody has set since the last forward.

        Raises:
            UnsupportedModelError: A cache cannot take part in this implementation.
        """
        for place, (config, saved) in enumerate(self._saved):
            if attention_name(config) != PREFIX + saved:
                with self._lock:
                    name = own_attention_name(config)
                    _check_supported(name)
                    self._saved[place] = (config, name)
                    self._set(config, name)

    def give_up(self) -> None:
        """Remove a share. With the last one, put the model back as it was."""
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
                if attention_name(config) == PREFIX + name:  # unless somebody has set another name since
                    set_attention_name(config, name)
            for name in self._backends:
                self._names[name] -= 1
                if not self._names[name]:
                    del self._names[name]
                    unregister_attention(PREFIX + name)


def _check_supported(name: str) -> None:
    if not name.startswith(("sdpa", "eager", "flash_attention")):
        raise UnsupportedModelError(
            f"expected attn_implementation 'sdpa', 'eager' or 'flash_attention_*', got {name}: load the model with one "
            "of these, or set one of them"
        )


def own_attention_name(config: Any) -> str:
    """The attention implementation that a config names while no cache is open."""
    return attention_name(config).removeprefix(PREFIX)


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module, or its forward, is under torch.compile."""
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
    """A cache that is told when a forward that uses it begins and ends."""

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
    attachment = _Attachment.of(model)
    if attachment is not None:
        attachment.follow()
    cache = _aware_cache(args, kwargs)
    changed = None if cache is None else cache.before_forward(model, args, kwargs)
    return None if changed is None else (args, changed)


def _after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _aware_cache(args, kwargs)) is not None:
        cache.after_forward(model, output is not None)
