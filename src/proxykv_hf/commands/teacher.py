"""``proxykv teacher``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ..errors import InvalidInputError
from ..training.corpus import Corpus
from ..training.teacher import import_folder, score_corpus
from .models import DTYPES, add_target, device_and_dtype, load, public_name

#: The options for documents that are made from ``--text``, and their defaults.
OF_TEXT: dict[str, Any] = {"documents": 256, "tokens": (256, 2048), "seed": 0}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "teacher",
        help="score documents with KVzip, to train mappers on",
        description="Score text and generated retrieval documents with KVzip on a target, and write a folder of "
        "shards. Run again, the command continues where it stopped. The processes of `accelerate launch` or `torchrun` "
        "share the work.",
    )
    add_target(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--text",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="text files (.txt, .md, .rst, .py, also .gz) to make documents from; may be given several times",
    )
    what.add_argument(
        "--import",
        type=Path,
        dest="scores",
        metavar="FOLDER",
        help="in place of --text: scores made elsewhere, one safetensors file per document, to convert into shards",
    )
    parser.add_argument("--documents", type=int, help="how many documents to score (default: 256)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        metavar=("LEAST", "GREATEST"),
        help="shortest and longest document, in tokens (default: 256 2048)",
    )
    parser.add_argument("--seed", type=int, help="seed of the documents (default: 0)")
    parser.add_argument(
        "--split",
        choices=("train", "held_out"),
        default="train",
        help="which documents to make; one text file in ten is used only for held_out (default: train)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    corpus = None
    given = {name: value for name in OF_TEXT if (value := getattr(arguments, name)) is not None}
    if arguments.text is not None:
        chosen = OF_TEXT | given
        documents: int = chosen.pop("documents")
        if documents < 1:
            raise InvalidInputError(f"--documents: expected at least 1, got {documents}")
        corpus = Corpus(arguments.text, split=arguments.split, **chosen)
    elif given:
        raise InvalidInputError(
            f"{', '.join(f'--{name}' for name in given)}: expected only with --text; --import takes every file as it is"
        )
    state = PartialState(
        cpu=not torch.cuda.is_available()
    )  # without a GPU, other processes are only found with cpu=True
    try:
        model, tokenizer = load(arguments.target, *device_and_dtype(str(state.device), arguments.dtype))
        common: dict[str, Any] = {
            "target_id": public_name(arguments.target),
            "revision": getattr(model.config, "_commit_hash", None),
            "process_index": state.process_index,
            "process_count": state.num_processes,
        }
        if corpus is None:
            import_folder(arguments.scores, model, tokenizer, arguments.out, split=arguments.split, **common)
        else:
            score_corpus(model, tokenizer, corpus, documents, arguments.out, **common)
    finally:
        state.destroy_process_group()
