"""``proxykv bench``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from ..bench.measure import METHODS, Plan, environment, make_methods, runs, target_threads
from ..bench.prompt import prompt_ids
from ..bench.report import check_writable, markdown, plot, summarize, write_results
from ..cache.prefill import check_scorable
from ..cache.retention import RetentionPolicy
from ..commands import sources
from ..errors import InvalidInputError
from ..evaluation.methods import METHODS as SCORERS
from ..proxy.loading import SELF_PROXY, load_mapper
from .models import add_device_and_dtype, add_target, device_and_dtype, optional, read_text, resolve, target_named


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure seconds and bytes of prefill, prune and decoding",
        description="Measure methods side by side: seconds until the prompt's cache is pruned, tokens decoded per "
        "second, and bytes.",
    )
    add_target(parser)
    sources.add_sources(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 1024], metavar="N", help="prompt lengths in tokens"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)} (default: full kvzip snapkv, also proxykv with --mapper, and hidden_state "
        "with --hidden-state)",
    )
    parser.add_argument("--retention-ratio", type=float, default=0.3, help="share of KV pairs kept (default: 0.3)")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method at each length (default: 3)")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens decoded after each prompt (default: 32)")
    parser.add_argument("--threads", type=int, help="CPU threads for the target")
    parser.add_argument("--proxy-threads", type=int, help="CPU threads for the lane, where the proxy runs")
    add_device_and_dtype(parser)
    parser.add_argument(
        "--text", type=Path, help="a file whose first tokens are the prompt (default: generated records)"
    )
    parser.add_argument("--out", type=Path, required=True, help="a JSON file for all rows, written after every repeat")
    parser.add_argument("--plot", type=Path, help="also draw a PNG (needs the extra 'plot')")
    parser.set_defaults(run=run)


def _plan(arguments: argparse.Namespace) -> Plan:
    """Check everything that can be checked without a model, and return the plan."""
    policy = RetentionPolicy(arguments.retention_ratio, allocation=arguments.allocation, sink_tokens=0, recent_tokens=0)
    names = arguments.methods or ["full", "kvzip", "snapkv", *sources.methods_of(arguments)]
    plan = Plan(tuple(names), tuple(arguments.lengths), policy, arguments.repeats, arguments.new_tokens)
    for option, threads in (("--threads", arguments.threads), ("--proxy-threads", arguments.proxy_threads)):
        if threads is not None and threads < 1:
            raise InvalidInputError(f"{option}: expected at least 1, got {threads}")
    sources.check(arguments, plan.scored)
    check_writable(arguments.out)
    if arguments.plot is not None:
        check_writable(arguments.plot)
        optional("matplotlib", "plot")
    return plan


def _runs_a_proxy(plan: Plan) -> bool:
    return any(SCORERS[name].reads("proxy") for name in plan.scored)


def run(arguments: argparse.Namespace) -> None:
    plan = _plan(arguments)
    tqdm = optional("tqdm", "models").tqdm
    device, dtype = device_and_dtype(arguments.device, arguments.dtype)
    text = None if arguments.text is None else read_text(arguments.text)
    folder = resolve(arguments.target)

    with target_named(arguments.target):
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    ids = prompt_ids(tokenizer, max(plan.lengths) + 1, text)
    mapper = None if arguments.mapper is None else load_mapper(arguments.mapper)
    proxy_config = None
    if arguments.proxy is not None:
        proxy_config = AutoConfig.from_pretrained(resolve(arguments.proxy))
    elif mapper is not None and mapper.config.proxy_id != SELF_PROXY and _runs_a_proxy(plan):
        named = mapper.config
        proxy_config = AutoConfig.from_pretrained(str(named.proxy_id), revision=named.proxy_revision or "main")
    plan.check_positions(ids, tokenizer, config, proxy_config)

    target, tokenizer, scorers = sources.load_scorers(arguments, plan.scored, threads=arguments.proxy_threads)
    for length in plan.lengths:
        check_scorable(target, tokenizer, scorers.values(), ids[:, :length])
    methods = make_methods(plan, scorers)
    rows: list[dict[str, Any]] = []
    with target_threads(arguments.threads):
        header = environment(device) | {
            "command": arguments.command_line,
            "target": arguments.target,
            "mapper": arguments.mapper,
            "proxy": arguments.proxy or (None if mapper is None else mapper.config.proxy_id),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "proxy_threads": arguments.proxy_threads,
            "policy": plan.policy.to_dict(),
            "batch": 1,
            "new_tokens": plan.new_tokens,
        }
        total = plan.repeats * plan.runs_per_repeat
        for row in tqdm(runs(plan, methods, target, tokenizer, ids), total=total, desc="runs"):
            rows.append(row)
            if len(rows) % plan.runs_per_repeat == 0:
                write_results(arguments.out, header, rows)
    summary = summarize(rows)
    print(markdown(summary))
    if arguments.plot is not None:
        plot(summary, arguments.plot, f"{arguments.target}, {header['device']}, {header['dtype']}")
