"""Score documents with KVzip on a target: what a mapper is trained on.

    python examples/teacher.py --target smollm2-135m --documents 80 --out teacher/smollm2-135m

Documents are pieces of the Python standard library on this machine, and generated records, tables and
facts, since code and prose alone have few tokens that must be kept. Each becomes one safetensors file:
``input_ids`` `[P + N]` (the chat template's part before the text, then the document) and ``scores``
`[L, H, N]`, float16, of the document. Files that are there already are not made again.
"""

from __future__ import annotations

import argparse
import os
import random
import sysconfig
from pathlib import Path

import torch
from models import load
from safetensors.torch import save_file
from tqdm import tqdm

from proxykv_hf import KVzipScorer, ProxyPrunedCache, RetentionPolicy
from proxykv_hf.chat import chat_affixes, encode
from proxykv_hf.reconstruction import RECIPE

SYLLABLES = "ba co du fe gi ha jo ku la me ni po qua ri so tu va wo xe yi zu bro cle dri flo gra".split()
KINDS = ("py", "py", "records", "facts", "table")


def word(rng: random.Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))


def code(rng: random.Random, characters: int) -> str:
    """Consecutive lines of a random file of the standard library, its tests left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-s]*/*.py")) if "test" not in str(path)
    ]
    while True:
        text = rng.choice(files).read_text(encoding="utf-8", errors="ignore")
        if len(text) > characters:
            start = text.find("\n", rng.randrange(len(text) - characters)) + 1
            return text[start : start + characters]


def document(rng: random.Random, kind: str, characters: int) -> str:
    """About ``characters`` characters of a kind."""
    if kind == "py":
        return code(rng, characters)
    lines: list[str] = []
    columns = [word(rng) for _ in range(4)]
    filler = code(rng, characters)
    while sum(map(len, lines)) < characters * (0.35 if kind == "facts" else 1.0):
        if kind == "records":
            lines.append(f"{word(rng)}_{rng.randrange(1000)}: {word(rng)} {rng.randrange(10**6)}")
        elif kind == "table":
            lines.append(" | ".join([word(rng), *(str(rng.randrange(10**4)) for _ in columns[1:])]))
        else:
            lines.append(f"Remember that the {word(rng)} of {word(rng).title()} was set to {rng.randrange(10**5)}.")
    if kind == "table":
        lines.insert(0, " | ".join(columns))
    if kind == "facts":  # strewn into code
        pieces = filler.split("\n")
        for line in lines:
            pieces.insert(rng.randrange(len(pieces) + 1), line)
        lines = pieces
    return "\n".join(lines)[: int(characters * 1.2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a name of examples/models.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=80)
    parser.add_argument("--tokens", type=int, nargs=2, default=(200, 700), metavar=("FROM", "TO"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.target)
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number in tqdm(range(arguments.documents), desc="documents"):
        path = arguments.out / f"doc-{number:04d}.safetensors"
        if path.is_file():
            continue
        rng = random.Random(f"{arguments.seed} {number}")
        kind, tokens = KINDS[number % len(KINDS)], rng.randint(*arguments.tokens)
        ids = torch.tensor([prefix + encode(tokenizer, document(rng, kind, 6 * tokens))[:tokens]])
        with ProxyPrunedCache(model, KVzipScorer(tokenizer), RetentionPolicy(1.0)) as cache:
            scores = cache.prefill(ids, context=(len(prefix), ids.shape[1]), prune=False)["kvzip"]
        tensors = {
            "input_ids": ids[0].int(),
            "scores": scores[0, :, :, len(prefix) :].half().cpu().contiguous(),
        }
        metadata = {"kind": kind, "recipe": RECIPE, "seed": str(arguments.seed), "prefix_tokens": str(len(prefix))}
        temporary = path.with_suffix(".part")
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
