"""``proxykv evaluate``."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..bench.measure import environment
from ..bench.report import check_writable
from ..chat import encode
from ..errors import InvalidInputError
from ..evaluation.cells import WHOLE, Cell
from ..evaluation.methods import FULL, METHODS, Method, check_methods, make_methods
from ..evaluation.metrics import METRICS, check_metric
from ..evaluation.prompts import wording_fingerprint
from ..evaluation.readers import FORMATS, Reading, read
from ..evaluation.rows import FORMAT, RowFile
from ..evaluation.runner import ALLOCATIONS, Case, Runner, make_cells
from ..evaluation.sole import sole_use
from ..evaluation.task import Example
from ..evaluation.tasks import TASKS
from ..geometry import device_of, weights_fingerprint
from .models import add_device_and_dtype, add_target, optional, public_name
from .sources import add_sources, check, load_sources, methods_of

#: The default length of a context of ``--tasks``, in tokens.
TOKENS = 1024


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="measure how well each method still answers at each budget",
        description="Prefill each document once, prune the cache with every method at every ratio, and ask all "
        "questions about the document. Each answer is a JSON line in --out. A run that was stopped continues where it "
        "stopped. A later run with other methods, ratios, tasks or examples adds its answers to the same file.",
    )
    add_target(parser)
    add_sources(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tasks", nargs="+", metavar="TASK", help=f'"all", or some of {", ".join(TASKS)}')
    source.add_argument("--data", type=Path, metavar="FILE", help="a file of examples, in place of --tasks")
    parser.add_argument(
        "--format", choices=FORMATS, help="format of --data (default: proxykv, the format of this package)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)}; a method may have its own ratios, as in snapkv=0.1,0.2; the full cache is "
        "always run too (default: kvzip snapkv random, and before them proxykv with --mapper and hidden_state with "
        "--hidden-state)",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        metavar="RATIO",
        help="shares of KV pairs kept, for the methods without ratios of their own (default: 0.1 0.2 0.3)",
    )
    parser.add_argument("--tokens", type=int, help="length of a context of --tasks, in tokens (default: 1024)")
    parser.add_argument("--examples", type=int, help="examples of each task (default: 10; with --data, all)")
    parser.add_argument("--questions", type=int, help="most questions asked about each example (default: all)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the examples of --tasks and of random scores (default: 0)"
    )
    parser.add_argument(
        "--allocation",
        choices=ALLOCATIONS,
        default="native",
        help="how the budget is allocated to heads (default: native, each method's own way)",
    )
    parser.add_argument(
        "--query-aware",
        action="store_true",
        help="prefill, score and prune the context together with the question; the question itself is kept",
    )
    add_device_and_dtype(parser)
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="most tokens in one forward over questions (default: 4096)"
    )
    parser.add_argument(
        "--redo",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="some of --methods: delete all their rows in --out first, and run them again",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="a file of JSON lines; `proxykv report` reads it"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    cells = _checked(arguments)
    reading = _reading(arguments)
    metrics = {name: TASKS[name].metric for name in _tasks(arguments)} if reading is None else reading.metrics
    for metric in metrics.values():
        check_metric(metric)
    optional("tqdm", "models")
    with sole_use(arguments.out):
        _evaluate(arguments, cells, reading, metrics)
    if reading is not None and reading.errors:
        raise InvalidInputError(_left_out(arguments.data, reading))


def _evaluate(
    arguments: argparse.Namespace, cells: list[Cell], reading: Reading | None, metrics: dict[str, str]
) -> None:
    """Ask every question whose answer ``--out`` does not hold yet."""
    tqdm = optional("tqdm", "models").tqdm
    sources = load_sources(arguments, seed=arguments.seed)
    target, tokenizer = sources.target, sources.tokenizer
    examples = _made(arguments, tokenizer) if reading is None else _first(reading.examples, arguments.examples)
    asked = [dataclasses.replace(example, questions=example.questions[: arguments.questions]) for example in examples]
    cases = [Case.of(example, metrics[example.task], tokenizer, arguments.query_aware) for example in asked]
    methods = make_methods(list(dict.fromkeys(cell.method for cell in cells)), sources)
    runner = Runner(target, tokenizer, methods, cells, METRICS, arguments.batch_tokens)
    for case in cases:
        runner.check(case)
    ratios = sorted({cell.ratio for cell in cells if cell != WHOLE})
    header = _header(arguments, target, tokenizer, metrics, examples, methods, ratios)
    file = RowFile(arguments.out, header, arguments.redo)
    keys = [key for case in cases for key in runner.keys(case)]
    with tqdm(total=len(keys), initial=sum(key in file.rows for key in keys), desc="answers") as bar:
        for case in cases:
            bar.set_postfix_str(f"{case.example.task} {case.example.name}")
            if rows := runner.run(case, file.rows, bar.update):
                file.append(rows)


def _checked(arguments: argparse.Namespace) -> list[Cell]:
    """Check everything in the options that can be checked without a model, and return the cells to evaluate."""
    default = [*methods_of(arguments), "kvzip", "snapkv", "random"]
    asked = [_method(text) for text in arguments.methods or default]
    names = check_methods([name for name, _ in asked])
    own = {name: ratios for name, ratios in asked if ratios is not None}
    if FULL in own:
        raise InvalidInputError(f"--methods: expected {FULL} without ratios, since it keeps everything")
    if arguments.ratios is not None and own.keys() >= set(names):
        raise InvalidInputError("--ratios: expected only with a method that has no ratios of its own, got none")
    check(arguments, names)
    for option in ("tokens", "examples", "questions", "batch_tokens"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise InvalidInputError(f"--{option.replace('_', '-')}: expected at least 1, got {value}")
    if arguments.tasks is None and arguments.tokens is not None:
        raise InvalidInputError("--tokens: expected only with --tasks; the contexts of --data have a given length")
    if arguments.data is None and arguments.format is not None:
        raise InvalidInputError("--format: expected only with --data; the examples of --tasks are generated")
    if arguments.tasks is not None:
        unknown = [name for name in arguments.tasks if name not in TASKS]
        if unknown and arguments.tasks != ["all"]:
            raise InvalidInputError(f"--tasks: expected all, or some of {', '.join(TASKS)}, got {', '.join(unknown)}")
    if idle := [name for name in check_methods(arguments.redo) if name not in names]:
        raise InvalidInputError(f"--redo: expected some of --methods, which are run again, got {', '.join(idle)}")
    check_writable(arguments.out)
    return make_cells(
        {name: METHODS[name].allocation for name in names},
        [0.1, 0.2, 0.3] if arguments.ratios is None else arguments.ratios,
        arguments.allocation,
        own,
    )


def _method(text: str) -> tuple[str, tuple[float, ...] | None]:
    """The name and the own ratios, if any, of one of ``--methods``: ``snapkv`` or ``snapkv=0.1,0.2``."""
    name, given, ratios = text.partition("=")
    if not given:
        return name, None
    try:
        return name, tuple(map(float, ratios.split(",")))
    except ValueError as error:
        raise InvalidInputError(f"--methods: expected ratios as in {name}=0.1,0.2, got {text!r}") from error


def _reading(arguments: argparse.Namespace) -> Reading | None:
    """Read ``--data``, if it is given. Lines with errors are reported at once, since the run may take hours.

    Raises:
        InvalidInputError: There is no such file, or the file holds no example.
    """
    if arguments.data is None:
        return None
    reading = read(arguments.data, arguments.format or "proxykv")
    if not reading.examples:
        raise InvalidInputError(
            "\n".join([f"expected examples in {arguments.data}, got none", *map(str, reading.errors)])
        )
    if reading.errors:
        print(_left_out(arguments.data, reading), file=sys.stderr, flush=True)
    return reading


def _left_out(data: Path, reading: Reading) -> str:
    return "\n".join([f"{len(reading.errors)} lines of {data} were left out:", *map(str, reading.errors)])


def _tasks(arguments: argparse.Namespace) -> list[str]:
    return list(TASKS if arguments.tasks == ["all"] else dict.fromkeys(arguments.tasks))


def _made(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """The examples of ``--tasks``."""
    return [
        TASKS[name].make(arguments.tokens or TOKENS, lambda text: len(encode(tokenizer, text)), arguments.seed, index)
        for index in range(
            arguments.examples or 10
        )  # task by task, so that a run that is cut short has examples of all tasks
        for name in _tasks(arguments)
    ]


def _first(examples: Sequence[Example], count: int | None) -> list[Example]:
    """The first ``count`` examples of each task, in order; all examples if ``count`` is None."""
    places = collections.Counter[str]()
    kept = []
    for example in examples:
        if count is None or places[example.task] < count:
            kept.append(example)
        places[example.task] += 1
    return kept


def _header(
    arguments: argparse.Namespace,
    target: Any,
    tokenizer: PreTrainedTokenizerBase,
    metrics: dict[str, str],
    examples: list[Example],
    methods: dict[str, Method],
    ratios: list[float],
) -> dict[str, Any]:
    """The header of ``--out``: what this run evaluates, and on what."""
    facts = environment(device_of(target))
    data = arguments.data
    return {
        "format": FORMAT,
        "target": public_name(arguments.target),
        "target_weights": weights_fingerprint(target),
        "mapper": arguments.mapper,
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokens": arguments.tokens or TOKENS if data is None else None,
        "seed": arguments.seed,
        "allocation": arguments.allocation,
        "query_aware": arguments.query_aware,
        "wording": wording_fingerprint(tokenizer),
        "data": None if data is None else hashlib.sha256(data.read_bytes()).hexdigest(),
        "tasks": metrics,
        "examples": {f"{example.task} {example.name}": example.fingerprint for example in examples},
        "methods": [FULL, *methods],
        "ratios": ratios,
        "identities": {name: method.identity for name, method in methods.items()},
        "versions": facts["versions"],
        "hardware": f"{facts['device']}, {torch.get_num_threads()} CPU threads",
        "commit": _commit(),
        "command": shlex.split(arguments.command_line),
    }


def _commit() -> str | None:
    """The git commit of the checkout that the package is in, with ``-dirty`` if files were changed; else None."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip() or None
