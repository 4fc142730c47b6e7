"""How an example is put to the model: what is prefilled, which part may be evicted, what is asked afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..chat import chat_affixes, encode
from ..errors import InvalidInputError
from .answers import Turn
from .task import Example, Question

#: Metrics that look for every reference in the answer, not for any one of them.
WANT_ALL = ("string_match_all",)
#: Characters after which an answer follows without a space.
OPENING = "\"'`([{<"


@dataclass(frozen=True)
class Sitting:
    """One prefill, and the questions that are asked after it.

    Args:
        ids: The prompt's tokens.
        context: ``(start, stop)``, the span of the prompt that may be evicted.
        questions: The indices of these questions in the example.
        turns: These questions as tokens.
    """

    ids: tuple[int, ...]
    context: tuple[int, int]
    questions: tuple[int, ...]
    turns: tuple[Turn, ...]


def sittings(
    example: Example, metric: str, tokenizer: PreTrainedTokenizerBase, query_aware: bool = False
) -> Iterator[Sitting]:
    """The prefills that an example needs: one, or with ``query_aware`` one for each question.

    The user's turn is the context and the question; the answer begins with the question's prefix. Only the context may
    be evicted. Normally the prompt ends with the context, and no scorer sees a question. With ``query_aware`` the
    prompt ends with the question: every scorer reads the question as part of the prompt (the last of SnapKV's queries
    are the question's). The question is kept whole and not counted in the budget. The text after it (the end of the
    user's turn, the answer's prefix) is fed to the pruned cache.
    """
    before, after = chat_affixes(tokenizer)
    prefix, context = encode(tokenizer, before), encode(tokenizer, example.context)
    ids, span = (*prefix, *context), (len(prefix), len(prefix) + len(context))
    asked = [encode(tokenizer, question.text) for question in example.questions]
    begun = [encode(tokenizer, after + question.answer_prefix) for question in example.questions]
    references = [
        tuple(encode(tokenizer, reference_text(question, metric in WANT_ALL))) for question in example.questions
    ]
    if query_aware:
        for place, question in enumerate(example.questions):
            turn = Turn(tuple(begun[place]), references[place], question.max_new_tokens)
            yield Sitting((*ids, *asked[place]), span, (place,), (_checked(turn, example),))
        return
    turns = [
        Turn((*ask, *begin), reference, question.max_new_tokens)
        for question, ask, begin, reference in zip(example.questions, asked, begun, references, strict=True)
    ]
    yield Sitting(ids, span, tuple(range(len(turns))), tuple(_checked(turn, example) for turn in turns))


def wording_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that change with the chat template and with the tokens that the tokenizer makes of it."""
    tokens = [encode(tokenizer, text) for text in chat_affixes(tokenizer)]
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def _checked(turn: Turn, example: Example) -> Turn:
    """Refuse a turn without tokens, which would make the model continue the context instead of answering."""
    if not turn.ids:
        raise InvalidInputError(
            f"task {example.task}, example {example.name}: expected something between the context and the answer, got "
            "a question without text or answer prefix, and a chat template that puts nothing after the user's turn: "
            "give the question a text or an answer prefix"
        )
    return turn


def reference_text(question: Question, all_wanted: bool) -> str:
    """The text whose likelihood is measured: the first reference, or all of them if all are wanted."""
    wanted = question.references if all_wanted else question.references[:1]
    text = ", ".join(wanted)
    last = question.answer_prefix[-1:]
    return f" {text}" if text and last and not last.isspace() and last not in OPENING else text
