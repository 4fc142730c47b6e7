"""What the library overrides of transformers takes every argument that the installed release has."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

import proxykv_hf
from proxykv_hf.cache.prunable import PrunableCache

#: Mixins have no parent of transformers' own until they are mixed in.
PARENTS = {"ProxyKVGenerationMixin": (GenerationMixin, PreTrainedModel)}
#: Methods that hand nothing on, and why.
REFUSALS = {"HybridAxialMapper.push_to_hub": "refuses every call"}

NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def names(function: Callable[..., Any]) -> list[str]:
    """The parameters that have names of their own, ``self`` aside."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in NAMED][1:]


def takes_anything(function: Callable[..., Any]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds


def hands_on(function: Callable[..., Any]) -> bool:
    """Whether a call in the function's body gets its ``*args`` and ``**kwargs``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if starred and any(keyword.arg is None for keyword in call.keywords):
            return True
    return False


def faults(name: str, ours: Callable[..., Any], parent: Callable[..., Any]) -> list[str]:
    """What an override does not take of its parent's arguments."""
    if name in REFUSALS:
        return []
    known, wanted = names(ours), names(parent)
    missing = [parameter for parameter in wanted if parameter not in known]
    found = []
    if not (takes_anything(ours) or name.rpartition(".")[2].startswith("__")):
        found.append(f"{name} does not take arguments that a later release may add: give it *args and **kwargs")
    if missing and not hands_on(ours):
        found.append(f"{name} neither takes nor hands on {', '.join(missing)}")
    in_order = [parameter for parameter in known if parameter in wanted]
    if in_order != wanted[: len(in_order)]:
        found.append(f"{name} takes {', '.join(in_order)} in another order than {', '.join(wanted)}")
    return found


def library_classes() -> Iterator[type]:
    for module_info in pkgutil.walk_packages(proxykv_hf.__path__, "proxykv_hf."):
        module = importlib.import_module(module_info.name)
        yield from (
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
        )


def overrides() -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Every method of the library that overrides one of transformers, with its name and the parent's method."""
    for cls in library_classes():
        parents = [base for base in cls.__mro__[1:] if base.__module__.startswith("transformers.")]
        parents += PARENTS.get(cls.__name__, ())
        for name, method in vars(cls).items():
            parent = next((vars(base)[name] for base in parents if name in vars(base)), None)
            if inspect.isfunction(method) and inspect.isfunction(parent) and name != "__init__":
                yield f"{cls.__name__}.{name}", method, parent


OVERRIDES = {name: (ours, parent) for name, ours, parent in overrides()}


@pytest.mark.parametrize("name", sorted(OVERRIDES))
def test_an_override_takes_or_hands_on_every_argument(name):
    assert faults(name, *OVERRIDES[name]) == []


def test_every_kind_of_class_is_looked_at():
    assert {
        "PrunableCache.update",
        "PrunableCache.crop",
        "PrunableCache.activate_past_recording",
        "PrunedLayer.update",
        "PassingLayer.get_mask_sizes",
        "ProxyKVGenerationMixin.generate",
        "ProxyKVGenerationMixin.save_pretrained",
        "HybridAxialMapper.save_pretrained",
    } <= set(OVERRIDES)


class LaterCache(DynamicCache):
    """transformers' cache as a later release may have it."""

    def crop(self, tokens_to_remove: int, keep_states: bool = False) -> None: ...

    def reset(self, hard: bool = False) -> None: ...

    def activate_past_recording(self, states_to_keep: int | None = None, **kwargs: Any) -> None: ...


def test_a_new_argument_of_a_parent_is_named_unless_it_is_handed_on():
    def crop(self, tokens_to_remove): ...

    def reset(self, *args, **kwargs):
        """Takes anything, and drops it."""

    def activate_past_recording(self, *args, **kwargs):
        return self.parent(*args, **kwargs)

    assert faults("crop", crop, LaterCache.crop) == [
        "crop does not take arguments that a later release may add: give it *args and **kwargs",
        "crop neither takes nor hands on keep_states",
    ]
    assert faults("reset", reset, LaterCache.reset) == ["reset neither takes nor hands on hard"]
    assert faults("activate", activate_past_recording, LaterCache.activate_past_recording) == []
    assert faults("PrunableCache.crop", PrunableCache.crop, LaterCache.crop) == []
    assert faults("PrunableCache.reset", PrunableCache.reset, LaterCache.reset) == [
        "PrunableCache.reset neither takes nor hands on hard"
    ]
