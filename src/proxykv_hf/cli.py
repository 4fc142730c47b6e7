"""``proxykv``: the command line."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .errors import ProxyKVError

COMMANDS = ("generate", "teacher", "train", "evaluate", "report", "kept", "bench", "push")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, or 2 after an error that the input caused."""
    parser = argparse.ArgumentParser(prog="proxykv", description="Truly smaller KV caches for transformers.")
    parser.add_argument("--version", action="version", version=f"proxykv-hf {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        importlib.import_module(f".commands.{name}", __package__).add_parser(commands)
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


if __name__ == "__main__":
    sys.exit(main())
