"""``proxykv kept``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..benchmark.report import check_writable
from ..errors import InvalidInputError
from ..evaluation.kept import find_kept
from ..evaluation.kept_plot import plot_kept
from ..pretrained import load_proxy_scorer
from ..retention import RetentionPolicy
from ..scorers.base import Scorer
from .generate import SCORERS
from .models import DTYPES, add_target, device_and_dtype, load, optional, read_text, resolve

METHODS = ("proxykv", *sorted(SCORERS))


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "kept",
        help="draw which tokens of a text are kept, in which layers and heads",
        description="Prefill a text once, score it in several ways, and draw what each of them keeps.",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the text; - (default) is stdin")
    add_target(parser)
    parser.add_argument("--mapper", help="a folder or Hub id, for the method proxykv")
    parser.add_argument("--proxy", help="like --target; by default the one that the mapper's config names")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=["kvzip", "proxykv"],
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)}; the others' overlap with the first is told (default: kvzip proxykv)",
    )
    parser.add_argument("--retention-ratio", type=float, default=0.3, help="share of KV pairs kept (default: 0.3)")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--tokens", type=int, default=512, help="the text's first so many (default: 512)")
    parser.add_argument("--mark", action="append", default=[], metavar="PASSAGE", help="show where the text has this")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--out", type=Path, required=True, help="a PNG (wants the extra 'plot')")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    policy = RetentionPolicy(arguments.retention_ratio, allocation=arguments.allocation, sink_tokens=0, recent_tokens=0)
    if arguments.tokens < 1:
        raise InvalidInputError(f"--tokens: expected at least 1, got {arguments.tokens}")
    if "proxykv" in arguments.methods and arguments.mapper is None:
        raise InvalidInputError("the method proxykv wants a trained mapper: give --mapper FOLDER")
    check_writable(arguments.out)
    optional("matplotlib", "plot")
    text = read_text(arguments.file)
    device, dtype = device_and_dtype(arguments.device, arguments.dtype)
    target, tokenizer = load(arguments.target, device, dtype)
    scorers: dict[str, Scorer] = {}
    for method in arguments.methods:
        if method == "proxykv":
            proxy = None if arguments.proxy is None else resolve(arguments.proxy)
            scorers[method] = load_proxy_scorer(arguments.mapper, target=target, proxy=proxy)
        else:
            scorers[method] = SCORERS[method]()
    kept = find_kept(target, tokenizer, text, scorers, policy, tokens=arguments.tokens, marks=arguments.mark)
    name = "the text" if arguments.file == "-" else Path(arguments.file).name
    plot_kept(kept, arguments.out, f"{arguments.target}, {name}: what is kept ({arguments.allocation})")
