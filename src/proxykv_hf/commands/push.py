"""``proxykv push``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from ..errors import InvalidInputError
from ..proxy.card import card_on_hub
from ..proxy.loading import load_mapper

CARD = "README.md"
#: What goes to the Hub of a folder that ``proxykv train`` wrote: all but the checkpoints.
FILES = ("config.json", "model.safetensors", "results.json", "history.json", "curves.png")
#: Of the HTTP library, which is another one in versions 1 and 2 of huggingface_hub.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "push",
        help="put a mapper on the Hub",
        description="Put a mapper that `proxykv train` wrote on the Hub, in one commit: weights, config, card, figures "
        "and curves. The card's example then names the repository. `hf auth login`, or HF_TOKEN, says who you are.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="that holds the mapper and its README.md")
    parser.add_argument("--repo", required=True, metavar="ID", help="of the repository, made where missing")
    parser.add_argument("--private", action="store_true", help="make it a private one, if it is made")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    folder, card = arguments.folder, arguments.folder / CARD
    if not folder.is_dir():
        raise InvalidInputError(f"expected a folder that holds a mapper, but {folder} is none")
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
    except HTTPError as error:
        raise OSError(f"{api.endpoint} did not take {folder} as {arguments.repo}: {error}") from error
    print(done.commit_url)
