"""The prompt of a benchmark: a fixed number of tokens, of a given or a generated text."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..chat import encode
from ..errors import InvalidInputError


def prompt_ids(tokenizer: PreTrainedTokenizerBase, tokens: int, text: str | None = None) -> Tensor:
    """The first token ids of ``text``, by default of `varied_text`: `[1, tokens]`.

    Raises:
        InvalidInputError: The text is too short.
    """
    characters = 4 * tokens
    ids = encode(tokenizer, varied_text(characters) if text is None else text)
    while text is None and len(ids) < tokens:
        characters *= 2
        ids = encode(tokenizer, varied_text(characters))
    if len(ids) < tokens:
        raise InvalidInputError(
            f"text: expected at least {tokens} tokens, the longest length and one more, got {len(ids)}: give a longer "
            "text, or shorter lengths"
        )
    return torch.tensor([ids[:tokens]])


_SUBJECTS = ["The harbour master", "A surveyor", "Our neighbour", "The night clerk", "An old pilot", "The gardener"]
_VERBS = ["counted", "sold", "repaired", "measured", "lost", "painted", "weighed", "ordered", "returned", "described"]
_THINGS = "anchors baskets candles engines kettles ladders lanterns needles ribbons saddles timbers windows".split()
_PLACES = ["Amber Lane", "the north quay", "Mill Street", "the upper yard", "Orchard Row", "the old depot"]


def varied_text(characters: int, seed: int = 0) -> str:
    """Varied sentences and records, at least ``characters`` characters; the same text for the same seed."""
    rng = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < characters:
        subject, verb, place = rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_PLACES)
        count, thing = rng.randrange(2, 990), rng.choice(_THINGS)
        parts.append(
            f"{subject} {verb} {count} {thing} at {place} on day {rng.randrange(1, 366)}.\n"
            if rng.random() < 0.6
            else f"record {rng.randrange(10**7):07d}: {thing}={count}, place={place!r}, mass={rng.random():.4f}\n"
        )
        length += len(parts[-1])
    return "".join(parts)
