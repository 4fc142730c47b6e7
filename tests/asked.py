"""A tiny task, and models that give some answer to it, for tests of the runner."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from proxykv_hf.evaluation.task import Example, Question, Task

METRICS = {"held": lambda answer, question: float(question.references[0][0] in answer)}


def make(tokens: int, length: Callable[[str], int], seed: int, index: int) -> Example:
    """A context of letters, and questions of different lengths; example ``index`` has ``2 + index`` questions."""
    rng = random.Random(1000 * seed + index)
    context = "".join(rng.choices("abcdefgh", k=tokens))
    assert length(context) <= tokens
    questions = tuple(
        Question(f"\nAnd what of {context[: 2 + place]}?", (context[-3 - place :], "no"), "It is:", 3 + place)
        for place in range(2 + index)
    )
    return Example("letters", f"{index:05d}", context, questions)


TASK = Task("letters", "held", make, "made up")


def talkative_model() -> Any:
    """A model with many end tokens, so that its answers differ in length."""
    model = tiny_model("llama", 2)
    model.generation_config.eos_token_id = list(range(150, 200))
    return model


def save_model(folder: Path) -> Path:
    """Save the talkative model and its tokenizer."""
    torch.manual_seed(0)
    talkative_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
