"""``proxykv``: the command line."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from ._compat import cache_keyword
from .errors import InvalidInputError, ProxyKVError
from .scorers.base import Scorer

#: Scorers by name; made only when asked for.
SCORERS = ("kvzip", "snapkv", "random")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 after an error that was the input's fault."""
    parser = argparse.ArgumentParser(prog="proxykv", description="Truly smaller KV caches for transformers.")
    parser.add_argument("--version", action="version", version=f"proxykv-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_generate(commands)
    _add_teacher(commands)
    parsed = parser.parse_args(arguments)
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
    _add_target(parser)
    parser.add_argument("--question", required=True, action="append", help="may be given several times")
    parser.add_argument("--scorer", choices=SCORERS, default="kvzip", help="what rates the KV pairs (default: kvzip)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--retention-ratio", type=float, help="share of KV pairs kept, in (0, 1] (default: 0.3)")
    budget.add_argument("--max-tokens", type=int, help="instead: context tokens kept per head, on average")
    parser.add_argument("--allocation", choices=("global", "uniform"), default="global")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of an answer (default: 64)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_generate)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        required=True,
        help=f"a folder, a Hub id, or in a checkout a short name ({', '.join(_example_names()) or 'none here'})",
    )


def _generate(arguments: argparse.Namespace) -> None:
    from .retention import RetentionPolicy

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

    # Heavy imports come after the arguments are known to be right.
    import torch

    from .cache import ProxyPrunedCache
    from .chat import chat_affixes, encode

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = _load(arguments.target, device)
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


def _add_teacher(commands: Any) -> None:
    parser = commands.add_parser(
        "teacher",
        help="score documents with KVzip: what mappers are trained on",
        description="Score text and generated retrieval material with KVzip on a target, into a folder of shards. "
        "Run again, it goes on where it stopped; the processes of `accelerate launch` or `torchrun` share the work.",
    )
    _add_target(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="text files (.txt, .md, .rst, .py, also .gz) to make documents of; may be given several times",
    )
    what.add_argument(
        "--import",
        type=Path,
        dest="scores",
        metavar="FOLDER",
        help="instead: scores made elsewhere, one safetensors file a document, to be turned into shards",
    )
    parser.add_argument("--documents", type=int, default=256, help="how many (default: 256)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=(256, 2048),
        metavar=("LEAST", "GREATEST"),
        help="length of a document (default: 256 2048)",
    )
    parser.add_argument("--seed", type=int, default=0, help="other documents for every seed")
    parser.add_argument(
        "--split",
        choices=("train", "held_out"),
        default="train",
        help="one text file in ten and its documents are held out (default: train)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=_teacher)


def _teacher(arguments: argparse.Namespace) -> None:
    import torch
    from accelerate import PartialState

    from .training.corpus import Corpus
    from .training.teacher import import_folder, score_corpus

    corpus = None
    if arguments.text is not None:
        if arguments.documents < 1:
            raise InvalidInputError(f"--documents: expected at least 1, got {arguments.documents}")
        corpus = Corpus(arguments.text, split=arguments.split, seed=arguments.seed, tokens=tuple(arguments.tokens))
    state = PartialState(cpu=not torch.cuda.is_available())  # on CPUs it looks for other processes only so
    try:
        model, tokenizer = _load(arguments.target, str(state.device) if state.device.type == "cuda" else "cpu")
        common: dict[str, Any] = {
            "target_id": _public_name(arguments.target),
            "revision": getattr(model.config, "_commit_hash", None),
            "process_index": state.process_index,
            "process_count": state.num_processes,
        }
        if corpus is None:
            import_folder(arguments.scores, model, tokenizer, arguments.out, split=arguments.split, **common)
        else:
            score_corpus(model, tokenizer, corpus, arguments.documents, arguments.out, **common)
    finally:
        state.destroy_process_group()


def _load(target: str, device: str) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer; float32 on a CPU, bfloat16 on a GPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _resolve(target)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=device).eval()
    except (OSError, ValueError) as error:
        names = _example_names()
        known = f"; short names here: {', '.join(names)}" if names else ""
        raise InvalidInputError(
            f"--target: expected a folder with a model or an id that the Hub has, got {target!r}{known} "
            f"({str(error).splitlines()[0]})"
        ) from error
    return model, tokenizer


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


def _public_name(target: str) -> str:
    """The Hub id where ``target`` is a short name, else as it is."""
    if Path(target).exists() or target not in _example_names():
        return target
    return str(_example_models().MODELS[target].hub_id)


if __name__ == "__main__":
    sys.exit(main())
