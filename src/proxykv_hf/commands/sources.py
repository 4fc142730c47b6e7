"""The options that scorers are made from: a mapper, its proxy, and trained hidden-state heads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from ..evaluation.methods import METHODS, Sources, check_sources, make_methods
from ..geometry import ModelGeometry
from ..proxy.loading import check_target, load_mapper
from ..scorers.base import Scorer
from ..scorers.hidden_state import HiddenStateHeads, check_heads
from .models import device_and_dtype, load, resolve, target_named

#: The options, named like the fields of `Sources`, and the method that each of them adds to the defaults.
OPTIONS = {"mapper": "proxykv", "hidden_state": "hidden_state", "proxy": None}


def add_sources(parser: argparse.ArgumentParser) -> None:
    """The options ``--mapper``, ``--proxy`` and ``--hidden-state``."""
    readers = [name for name, making in METHODS.items() if "mapper" in making.wants]
    parser.add_argument("--mapper", help=f"a mapper's folder or Hub id, for {', '.join(readers)}")
    parser.add_argument(
        "--proxy", help="the proxy, given like --target (default: the one that the mapper's config names)"
    )
    parser.add_argument("--hidden-state", metavar="FOLDER", help="the folder of trained heads, for hidden_state")


def methods_of(arguments: argparse.Namespace) -> list[str]:
    """The methods to run for the given mapper and heads if no method is named."""
    return [name for option, name in OPTIONS.items() if name is not None and getattr(arguments, option) is not None]


def check(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Check that the options give what the methods need, and nothing that none of the methods reads.

    Raises:
        InvalidInputError: A method lacks an option, or no method reads an option.
    """
    check_sources(names, {option for option in OPTIONS if getattr(arguments, option) is not None})


def load_sources(arguments: argparse.Namespace, *, seed: int = 0, threads: int | None = None) -> Sources:
    """Load the target, its tokenizer, and everything else that the options name; see `Sources`.

    Raises:
        InvalidInputError: A folder holds no model, mapper or heads, or torch cannot compute on the device.
        GeometryError: The mapper or the heads are made for another target.
    """
    device, dtype = device_and_dtype(arguments.device, arguments.dtype)
    mapper = None if arguments.mapper is None else load_mapper(arguments.mapper)
    heads = None if arguments.hidden_state is None else HiddenStateHeads.from_pretrained(arguments.hidden_state)
    folder = resolve(arguments.target)
    with target_named(arguments.target):
        config = AutoConfig.from_pretrained(folder)
    if mapper is not None:  # check this before loading the weights, which takes a while
        check_target(mapper, ModelGeometry.from_config(config))
    if heads is not None:
        check_heads(heads, config)
    proxy = None if arguments.proxy is None else resolve(arguments.proxy)
    target, tokenizer = load(arguments.target, device, dtype)
    return Sources(
        target,
        tokenizer,
        mapper=mapper,
        proxy=proxy,
        hidden_state=arguments.hidden_state,
        seed=seed,
        threads=threads,
    )


def load_scorers(
    arguments: argparse.Namespace, names: Sequence[str], *, threads: int | None = None
) -> tuple[Any, Any, dict[str, Scorer]]:
    """Load the target and its tokenizer, and make the scorers of the methods, by name; see `load_sources`."""
    sources = load_sources(arguments, threads=threads)
    scorers = {name: method.scorer for name, method in make_methods(names, sources).items()}
    return sources.target, sources.tokenizer, scorers
