"""``proxykv``: the command line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import __version__
from ._compat import cache_keyword
from .benchmark import METHODS, Plan, environment, make_methods, runs, target_threads
from .benchmark_prompt import prompt_ids
from .benchmark_report import check_writable, markdown, plot, summarize, write_results
from .errors import InvalidInputError, ProxyKVError
from .retention import RetentionPolicy
from .scorers.base import Scorer

#: Scorers by name; made only when asked for.
SCORERS = ("kvzip", "snapkv", "random")
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 after an error that was the input's fault."""
    parser = argparse.ArgumentParser(prog="proxykv", description="Truly smaller KV caches for transformers.")
    parser.add_argument("--version", action="version", version=f"proxykv-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    _add_bench(commands)
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = parser.parse_args(given)
    parsed.command_line = shlex.join(["proxykv", *given])
    run: Callable[[argparse.Namespace], None] = parsed.run
    try:
        run(parsed)
    except (ProxyKVError, OSError, ValueError) as error:
        print(f"proxykv: {error}", file=sys.stderr)
        return 2
    return 0


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="answer questions about a document from a pruned cache",
        description="Prefill a document once, prune its cache without having seen the questions, answer them.",
    )
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="the document; - (default) is stdin")
    parser.add_argument(
        "--target",
        required=True,
        help=f"a folder, a Hub id, or in a checkout a short name ({', '.join(_example_names()) or 'none here'})",
    )
    parser.add_argument("--question", required=True, action="append", help="may be given several times")
    parser.add_argument("--scorer", choices=SCORERS, default="kvzip", help="what rates the KV pairs (default: kvzip)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--retention-ratio", type=float, help="share of KV pairs kept, in (0, 1] (default: 0.3)")
    budget.add_argument("--max-tokens", type=int, help="instead: context tokens kept per head, on average")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of an answer (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> None:
    ratio = arguments.retention_ratio
    policy = RetentionPolicy(
        retention_ratio=0.3 if ratio is None and arguments.max_tokens is None else ratio,
        max_tokens=arguments.max_tokens,
        allocation=arguments.allocation,
    )
    if arguments.max_new_tokens < 1:
        raise InvalidInputError(f"--max-new-tokens: expected at least 1, got {arguments.max_new_tokens}")
    try:
        document = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"expected text in UTF-8, but {arguments.file} is none: {error}") from error
    if not document.strip():
        raise InvalidInputError(f"expected a document, but {arguments.file} is empty")
    folder = _resolve(arguments.target)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .cache import ProxyPrunedCache
    from .chat import chat_affixes, encode

    device, dtype = _device_and_dtype(None, None)
    with _target_named(arguments.target):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()

    before, after = chat_affixes(tokenizer)
    prefix, context = encode(tokenizer, before), encode(tokenizer, document)
    turns = [encode(tokenizer, f"\n\n{question}{after}") for question in arguments.question]
    longest = len(prefix) + len(context) + max(map(len, turns)) + arguments.max_new_tokens
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise InvalidInputError(
            f"document, question and answer take {longest} tokens and {arguments.target} has {limit} positions: "
            "give a shorter document, or a model for longer ones"
        )
    prompt = torch.tensor([prefix + context], device=device)
    print(f"Reading {prompt.shape[1]} tokens …", file=sys.stderr)
    answers = []
    with ProxyPrunedCache(model, _scorer(arguments.scorer), policy, tokenizer=tokenizer) as cache:
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
        settings = {"target": arguments.target, "scorer": arguments.scorer, "policy": policy.to_dict()}
        print(json.dumps(settings | {"answers": answers, "report": report.to_dict()}))
    else:
        print(f"\n{report}")


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure seconds and bytes of prefill, prune and decoding",
        description="Measure methods side by side: seconds until the prompt is pruned, decoded tokens a second, bytes.",
    )
    parser.add_argument("--target", required=True, help="a folder, a Hub id, or in a checkout a short name")
    parser.add_argument("--mapper", help="a folder or Hub id, for the methods proxykv")
    parser.add_argument("--proxy", help="like --target; by default the one that the mapper's config names")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024], metavar="N", help="prompts' tokens")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["full", "kvzip", "snapkv"],
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)}",
    )
    parser.add_argument("--retention-ratio", type=float, default=0.3, help="share of KV pairs kept (default: 0.3)")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens decoded after each prompt (default: 32)")
    parser.add_argument("--threads", type=int, help="CPU threads of the target")
    parser.add_argument("--proxy-threads", type=int, help="CPU threads of the proxy's lane")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--text", type=Path, help="a file whose start is the prompt (default: made-up records)")
    parser.add_argument("--out", type=Path, required=True, help="JSON with all rows; written after every repeat")
    parser.add_argument("--plot", type=Path, help="a PNG (wants the extra 'plot')")
    parser.set_defaults(run=_bench)


def _bench_plan(arguments: argparse.Namespace) -> Plan:
    """The plan, once all is checked that needs no model."""
    policy = RetentionPolicy(arguments.retention_ratio, allocation=arguments.allocation, sink_tokens=0, recent_tokens=0)
    plan = Plan(tuple(arguments.methods), tuple(arguments.lengths), policy, arguments.repeats, arguments.new_tokens)
    for option, threads in (("--threads", arguments.threads), ("--proxy-threads", arguments.proxy_threads)):
        if threads is not None and threads < 1:
            raise InvalidInputError(f"{option}: expected at least 1, got {threads}")
    if plan.needs_proxy and arguments.mapper is None:
        raise InvalidInputError("the methods proxykv want a trained mapper: give --mapper FOLDER")
    check_writable(arguments.out)
    if arguments.plot is not None:
        check_writable(arguments.plot)
        _optional("matplotlib", "plot")
    return plan


def _bench(arguments: argparse.Namespace) -> None:
    plan = _bench_plan(arguments)
    tqdm = _optional("tqdm", "models").tqdm
    device, dtype = _device_and_dtype(arguments.device, arguments.dtype)
    text = None if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    folder = _resolve(arguments.target)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from .pretrained import SELF_PROXY, load_mapper, load_proxy_scorer

    with _target_named(arguments.target):
        tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    ids = prompt_ids(tokenizer, max(plan.lengths) + 1, text)
    mapper = load_mapper(arguments.mapper) if plan.needs_proxy else None
    proxy = None if arguments.proxy is None else _resolve(arguments.proxy)
    proxy_config = None
    if proxy is not None:
        proxy_config = AutoConfig.from_pretrained(proxy)
    elif mapper is not None and mapper.config.proxy_id != SELF_PROXY:
        named = mapper.config
        proxy_config = AutoConfig.from_pretrained(str(named.proxy_id), revision=named.proxy_revision or "main")
    plan.check_positions(ids, tokenizer, config, proxy_config)

    with _target_named(arguments.target):
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    scorer = None
    if mapper is not None:
        scorer = load_proxy_scorer(mapper, target=target, proxy=proxy, threads=arguments.proxy_threads)
    methods = make_methods(plan, tokenizer, scorer)
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


@contextlib.contextmanager
def _target_named(target: str) -> Iterator[None]:
    """Say what ``--target`` may be if what is done inside finds no model there."""
    try:
        yield
    except (OSError, ValueError) as error:
        names = _example_names()
        known = f"; short names here: {', '.join(names)}" if names else ""
        raise InvalidInputError(
            f"--target: expected a folder with a model or an id that the Hub has, got {target!r}{known} "
            f"({str(error).splitlines()[0]})"
        ) from error


def _device_and_dtype(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """What was asked for, or a GPU and bfloat16 where there is one, and float32 on a CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch's own words for an unknown device and a missing one
        raise InvalidInputError(
            f"--device: expected one that torch finds here, got {device!r} ({str(error).splitlines()[0]})"
        ) from error
    return place, getattr(torch, dtype or ("bfloat16" if place.type == "cuda" else "float32"))


def _optional(module: str, extra: str) -> Any:
    """A module that only an extra of the package installs.

    Raises:
        InvalidInputError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInputError(f"expected {module} to be installed: pip install 'proxykv-hf[{extra}]'") from error


def _scorer(name: str) -> Scorer:
    from .scorers.kvzip import KVzipScorer
    from .scorers.random import RandomScorer
    from .scorers.snapkv import SnapKVScorer

    scorers: dict[str, Callable[[], Scorer]] = {"kvzip": KVzipScorer, "snapkv": SnapKVScorer, "random": RandomScorer}
    return scorers[name]()


def _example_models() -> Any:
    """The module ``examples/models.py``, which a checkout has, or None."""
    path = Path(__file__).resolve().parents[2] / "examples" / "models.py"
    spec = importlib.util.spec_from_file_location("proxykv_example_models", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _example_names() -> list[str]:
    models = _example_models()
    return [] if models is None else sorted(models.MODELS)


def _resolve(target: str) -> str:
    """A folder or Hub id as it is; in a checkout also a short name of ``examples/models.py``."""
    if Path(target).exists() or target not in _example_names():
        return target
    return str(_example_models().resolve(target))


if __name__ == "__main__":
    sys.exit(main())
