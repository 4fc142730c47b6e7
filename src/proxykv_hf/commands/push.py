"""``proxykv push``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, utils

from ..errors import InvalidInputError
from ..proxy.card import card_on_hub
from ..proxy.loading import load_mapper

CARD = "README.md"
#: What is uploaded besides the card from a folder that ``proxykv train`` wrote: everything but the checkpoints.
FILES = ("config.json", "model.safetensors", "results.json", "history.json", "curves.png")
#: The HTTP library of huggingface_hub, which ``utils`` names from 1.30 on: httpx in version 1, httpx2 in version 2.
httpx: Any = getattr(utils, "httpx", None) or importlib.import_module("httpx")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "push",
        help="upload a mapper to the Hub",
        description="Upload a mapper that `proxykv train` wrote to the Hub, in one commit: weights, config, card, "
        "results and curves. The example in the card then loads the mapper from the repository. Log in with `hf auth "
        "login` first, or set HF_TOKEN.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the folder that holds the mapper and its README.md"
    )
    parser.add_argument(
        "--repo", required=True, metavar="ID", help="the id of the repository, which is created if missing"
    )
    parser.add_argument(
        "--private", action="store_true", help="if the repository is created, create it as a private one"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    folder, card = arguments.folder, arguments.folder / CARD
    if not folder.is_dir():
        raise InvalidInputError(f"expected a folder that holds a mapper, but {folder} is not a folder")
    load_mapper(folder)
    if not card.is_file():
        raise InvalidInputError(f"expected the mapper's card, but there is no {card}: `proxykv train` writes it")
    api = HfApi()
    try:
        repo = api.create_repo(arguments.repo, private=arguments.private or None, exist_ok=True).repo_id
        text = card_on_hub(card.read_text(encoding="utf-8"), repo)
        files = [folder / name for name in FILES if (folder / name).is_file()]
        operations = [CommitOperationAdd(CARD, text.encode()), *(CommitOperationAdd(path.name, path) for path in files)]
        done = api.create_commit(repo, operations, commit_message="Upload a proxykv-hf mapper")
    except httpx.HTTPError as error:
        raise OSError(f"could not upload {folder} to {api.endpoint} as {arguments.repo}: {error}") from error
    print(done.commit_url)
