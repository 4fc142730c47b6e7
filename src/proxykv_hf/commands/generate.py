"""``proxykv generate``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from .._compat import cache_keyword
from ..attention.reconstruction import repeat_length
from ..cache.cache import ProxyPrunedCache
from ..cache.retention import RetentionPolicy
from ..chat import chat_affixes, encode
from ..commands import sources
from ..errors import InvalidInputError
from ..evaluation.methods import METHODS
from ..geometry import device_of, max_positions
from .models import add_device_and_dtype, add_target, read_text


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer questions about a document from a pruned cache",
        description="Prefill a document once, prune its cache without seeing the questions, then answer the questions.",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the document; - (default) is stdin")
    add_target(parser)
    parser.add_argument("--question", required=True, action="append", help="a question; may be given several times")
    sources.add_sources(parser)
    parser.add_argument(
        "--scorer",
        choices=METHODS,
        help="what scores the KV pairs (default: proxykv with --mapper, hidden_state with --hidden-state, else kvzip)",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--retention-ratio", type=float, help="share of KV pairs kept, in (0, 1] (default: 0.3)")
    budget.add_argument(
        "--max-tokens", type=int, help="context tokens kept per head on average, in place of --retention-ratio"
    )
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens in an answer (default: 64)")
    add_device_and_dtype(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    ratio = arguments.retention_ratio
    policy = RetentionPolicy(
        retention_ratio=0.3 if ratio is None and arguments.max_tokens is None else ratio,
        max_tokens=arguments.max_tokens,
        allocation=arguments.allocation,
    )
    if arguments.max_new_tokens < 1:
        raise InvalidInputError(f"--max-new-tokens: expected at least 1, got {arguments.max_new_tokens}")
    name: str = arguments.scorer or [*sources.methods_of(arguments), "kvzip"][0]
    sources.check(arguments, [name])
    document = read_text(arguments.file)
    if not document.strip():
        raise InvalidInputError(f"expected a document, but {arguments.file} is empty")

    model, tokenizer, scorers = sources.load_scorers(arguments, [name])
    device = device_of(model)
    opening, closing = chat_affixes(tokenizer)
    prefix, context = encode(tokenizer, opening), encode(tokenizer, document)
    turns = [encode(tokenizer, f"\n\n{question}{closing}") for question in arguments.question]
    read, asked = len(prefix) + len(context), max(map(len, turns)) + arguments.max_new_tokens
    repeated = repeat_length(tokenizer, torch.tensor(context)) if name == "kvzip" else 0
    limit = max_positions(model.config)
    for after, what, advice in (
        (asked, "a question and its answer", ""),
        (repeated, "KVzip's repetition of it", ", or another --scorer"),
    ):
        if limit is not None and read + after > limit:
            raise InvalidInputError(
                f"the document with {what} takes {read + after} tokens and {arguments.target} has {limit} positions: "
                f"give a shorter document, or a model for longer ones{advice}"
            )
    prompt = torch.tensor([prefix + context], device=device)
    print(f"Reading {prompt.shape[1]} tokens …", file=sys.stderr)
    answers = []
    with ProxyPrunedCache(model, scorers[name], policy, tokenizer=tokenizer) as cache:
        cache.prefill(prompt, context=(len(prefix), prompt.shape[1]))
        for question, turn in zip(arguments.question, turns, strict=True):
            ids = torch.cat([prompt, torch.tensor([turn], device=device)], dim=1)
            with cache.fork() as fork:
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=arguments.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
                    **{cache_keyword(model): fork},
                )
            answer = str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()
            answers.append({"question": question, "answer": answer})
            if not arguments.json:
                print(answer)
        report = cache.report()
    if arguments.json:
        settings = {"target": arguments.target, "scorer": name, "mapper": arguments.mapper, "policy": policy.to_dict()}
        print(json.dumps(settings | {"answers": answers, "report": report.to_dict()}))
    else:
        print(f"\n{report}")
