"""``proxykv kept``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..bench.report import check_writable
from ..cache.retention import RetentionPolicy
from ..commands import sources
from ..errors import InvalidInputError
from ..evaluation.kept import find_kept
from ..evaluation.kept_plot import plot_kept
from ..evaluation.methods import METHODS
from .models import add_device_and_dtype, add_target, optional, read_text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "kept",
        help="draw which tokens of a text are kept, in which layers and heads",
        description="Prefill a text once, score it with several methods, and draw what each method keeps.",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the text; - (default) is stdin")
    add_target(parser)
    sources.add_sources(parser)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)}; each one's overlap with the first is shown (default: kvzip, also proxykv "
        "with --mapper, and hidden_state with --hidden-state)",
    )
    parser.add_argument("--retention-ratio", type=float, default=0.3, help="share of KV pairs kept (default: 0.3)")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--tokens", type=int, default=512, help="how many tokens of the text are read (default: 512)")
    parser.add_argument(
        "--mark",
        action="append",
        default=[],
        metavar="PASSAGE",
        help="show where this passage is in the text; may be given several times",
    )
    add_device_and_dtype(parser)
    parser.add_argument("--out", type=Path, required=True, help="the PNG to draw (needs the extra 'plot')")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    policy = RetentionPolicy(arguments.retention_ratio, allocation=arguments.allocation, sink_tokens=0, recent_tokens=0)
    if arguments.tokens < 1:
        raise InvalidInputError(f"--tokens: expected at least 1, got {arguments.tokens}")
    methods = arguments.methods or ["kvzip", *sources.methods_of(arguments)]
    sources.check(arguments, methods)
    check_writable(arguments.out)
    optional("matplotlib", "plot")
    text = read_text(arguments.file)
    target, tokenizer, scorers = sources.load_scorers(arguments, methods)
    kept = find_kept(target, tokenizer, text, scorers, policy, tokens=arguments.tokens, marks=arguments.mark)
    name = "the text" if arguments.file == "-" else Path(arguments.file).name
    plot_kept(kept, arguments.out, f"{arguments.target}, {name}: what is kept ({arguments.allocation})")
