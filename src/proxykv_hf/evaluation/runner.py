"""One prefill per document, shared by all methods, allocations and ratios; every question of every pruned copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import get_args

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache.cache import ProxyPrunedCache
from ..cache.prefill import check_scorable
from ..cache.retention import RetentionPolicy
from ..chat import encode
from ..errors import InvalidInputError
from ..geometry import ModelGeometry, device_of, max_positions
from ..scorers.random import RandomScorer
from .answers import Answer, ask, batches
from .cells import WHOLE as WHOLE
from .cells import Cell as Cell
from .methods import Allocation, Method
from .prompts import Sitting, sittings
from .rows import Key, Row, key_of
from .task import Example, Question

#: What ``allocation`` may be: one for all, each method's own, or both.
ALLOCATIONS = ("native", "global", "uniform", "native+global")

Metric = Callable[[str, Question], float]


def make_cells(
    methods: Mapping[str, Allocation],
    ratios: Sequence[float],
    allocation: str,
    own_ratios: Mapping[str, Sequence[float]] | None = None,
) -> list[Cell]:
    """The full cache, and every method at its allocations and every ratio.

    Args:
        methods: By name, the allocation that each one's authors use.
        ratios: Of every method that has none of its own.
        allocation: One of ``ALLOCATIONS``.
        own_ratios: Those of single methods.

    Raises:
        InvalidInputError: An unknown allocation, no ratio, or one twice.
        InvalidPolicyError: A ratio outside (0, 1].
    """
    if allocation not in ALLOCATIONS:
        raise InvalidInputError(f"allocation: expected one of {', '.join(ALLOCATIONS)}, got {allocation!r}")
    by_method = {name: (own_ratios or {}).get(name, ratios) for name in methods}
    for asked in [ratios, *by_method.values()]:
        if not asked or len(set(asked)) < len(asked):
            raise InvalidInputError(
                f"ratios: expected at least one, each once, got {', '.join(map(str, asked)) or 'none'}"
            )
        for ratio in asked:
            RetentionPolicy(ratio)
    cells = [WHOLE]
    for name, native in methods.items():
        allocations = [native if part == "native" else part for part in allocation.split("+")]
        for one in get_args(Allocation):
            cells += [Cell(name, one, ratio) for ratio in by_method[name] if one in allocations]
    return cells


@dataclass(frozen=True)
class Case:
    """An example as it is put to the model.

    Args:
        example: The example.
        metric: Name of its task's metric.
        sittings: The prefills that it takes.
    """

    example: Example
    metric: str
    sittings: tuple[Sitting, ...]

    @classmethod
    def of(cls, example: Example, metric: str, tokenizer: PreTrainedTokenizerBase, query_aware: bool) -> Case:
        return cls(example, metric, tuple(sittings(example, metric, tokenizer, query_aware)))


class Runner:
    """Asks the questions of cases of every cell.

    Args:
        target: In eval mode.
        tokenizer: The target's.
        methods: By name; all that the cells name but the full cache.
        cells: From `make_cells`.
        metrics: By name.
        batch_tokens: Tokens of a forward over questions, padding included.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        methods: Mapping[str, Method],
        cells: Sequence[Cell],
        metrics: Mapping[str, Metric],
        batch_tokens: int = 4096,
    ) -> None:
        if batch_tokens < 1:
            raise InvalidInputError(f"batch_tokens: expected at least 1, got {batch_tokens}")
        self.target, self.tokenizer = target, tokenizer
        self.methods, self.cells, self.metrics = methods, cells, metrics
        self.batch_tokens = batch_tokens
        self._one_by_one = any(ModelGeometry.from_config(target.config).sliding_windows)  # see `answers`

    def check(self, case: Case) -> None:
        """Refuse a case that the target or a scorer has no positions for; if it were cut, it would be another case.

        Raises:
            InvalidInputError: Naming the example.
        """
        limit = max_positions(self.target.config)
        try:
            for sitting in case.sittings:
                after = max(len(turn.ids) + max(turn.max_new_tokens, len(turn.reference)) for turn in sitting.turns)
                needed = len(sitting.ids) + after
                if limit is not None and needed > limit:
                    raise InvalidInputError(
                        f"expected at most {limit} tokens, the target's positions, got {needed} of context, question "
                        "and answer: give fewer --tokens, or another target"
                    )
                scorers = [method.scorer for method in self.methods.values()]
                check_scorable(self.target, self.tokenizer, scorers, torch.tensor([sitting.ids]), sitting.context)
        except InvalidInputError as error:
            raise InvalidInputError(f"task {case.example.task}, example {case.example.name}: {error}") from error

    def keys(self, case: Case) -> list[Key]:
        """Those of all rows that a case has, in their order: question after question."""
        return [
            self._key(case, question, cell) for question in range(len(case.example.questions)) for cell in self.cells
        ]

    def run(self, case: Case, known: Mapping[Key, Row], progress: Callable[[int], object]) -> list[Row]:
        """The rows of a case that are not known yet.

        Args:
            case: From `Case.of`, checked.
            known: Rows that are there, by key.
            progress: Told how many rows more are done.
        """
        order = {key: place for place, key in enumerate(self.keys(case)) if key not in known}
        found: list[Row] = []
        for sitting in case.sittings:
            missing = [
                (cell, questions)
                for cell in self.cells
                if (questions := tuple(place for place in sitting.questions if self._key(case, place, cell) in order))
            ]
            if missing:
                found += self._sit(case, sitting, missing, known, progress)
        return sorted(found, key=lambda row: order[key_of(row)])

    def _key(self, case: Case, question: int, cell: Cell) -> Key:
        return case.example.task, case.example.name, question, *astuple(cell)

    def _sit(
        self,
        case: Case,
        sitting: Sitting,
        missing: Sequence[tuple[Cell, tuple[int, ...]]],
        known: Mapping[Key, Row],
        progress: Callable[[int], object],
    ) -> list[Row]:
        """One prefill, and the cells' missing questions after it."""
        turns = dict(zip(sitting.questions, sitting.turns, strict=True))
        for question in () if self._one_by_one else turns:
            if row := known.get(self._key(case, question, WHOLE)):
                turns[question] = replace(turns[question], draft=tuple(encode(self.tokenizer, row["answer"])))
        groups: dict[tuple[int, ...], list[Cell]] = {}  # ways to keep the cache that lack the same questions
        for cell, questions in missing:
            if cell != WHOLE:
                groups.setdefault(questions, []).append(cell)
        names = {cell.method for cells in groups.values() for cell in cells}
        scorers = {name: method.scorer for name, method in self.methods.items() if name in names}
        rows: list[Row] = []
        # A cache wants a scorer to prefill, even if nothing will be pruned.
        with ProxyPrunedCache(self.target, RandomScorer(), WHOLE.policy, tokenizer=self.tokenizer) as whole:
            ids = torch.tensor([sitting.ids], device=device_of(self.target))
            scores = whole.prefill(ids, context=sitting.context, prune=False, scorers=scorers or None)
            sizes = _Sizes(whole)

            def ask_all(cache: ProxyPrunedCache, cells: Sequence[Cell], questions: Sequence[int]) -> None:
                answers = ask(self.target, cache, [turns[question] for question in questions])
                for cell, kept, answered in zip(cells, sizes.of(cache), answers, strict=True):
                    for question, answer in zip(questions, answered, strict=True):
                        rows.append(self._row(case, question, cell, kept, sizes.full, answer))
                        if cell == WHOLE and not self._one_by_one:
                            turns[question] = replace(turns[question], draft=answer.tokens)
                progress(len(cells) * len(questions))

            for questions in (questions for cell, questions in missing if cell == WHOLE):
                asked = [turns[question] for question in questions]
                for places, _ in batches(asked, 1, self.batch_tokens, self._one_by_one):
                    ask_all(whole, [WHOLE], [questions[place] for place in places])
            for questions, cells in groups.items():
                asked = [turns[question] for question in questions]
                for places, ways in batches(asked, len(cells), self.batch_tokens, self._one_by_one):
                    some = [cells[way] for way in ways]
                    chosen = torch.cat([scores[cell.method] for cell in some])
                    with whole.compress(chosen, [cell.policy for cell in some]) as pruned:
                        ask_all(pruned, some, [questions[place] for place in places])
        return rows

    def _row(self, case: Case, question: int, cell: Cell, kept: int, full: int, answer: Answer) -> Row:
        asked = case.example.questions[question]
        text = str(self.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))
        if answer.nll is not None and not math.isfinite(answer.nll):
            raise InvalidInputError(
                f"task {case.example.task}, example {case.example.name}, {cell}: expected "
                f"logits that are numbers, got a likelihood of {answer.nll}: in {self.target.dtype} the target "
                "overflows; try another --dtype"
            )
        return {
            "task": case.example.task,
            "example": case.example.name,
            "question": question,
            **asdict(cell),
            "bytes": kept,
            "bytes_full": full,
            "answer": text,
            "score": self.metrics[case.metric](text, asked),
            "nll": None if answer.nll is None else round(answer.nll, 6),
            "tokens_nll": answer.tokens_nll,
            "seconds": round(answer.seconds, 4),
        }


class _Sizes:
    """Bytes of the KV pairs that the rows of pruned copies of a whole cache hold."""

    def __init__(self, whole: ProxyPrunedCache) -> None:
        report = whole.report()
        layer = whole.layers[whole.geometry.full_layers[0]]
        self.full = report.bytes_full
        self._pair = (layer.keys.shape[3] + layer.values.shape[3]) * layer.keys.element_size()
        self._pairs = sum(map(sum, report.kept_tokens[0]))

    def of(self, cache: ProxyPrunedCache) -> list[int]:
        """One number for each row."""
        kept = [sum(map(sum, row)) for row in cache.report().kept_tokens]
        return [self.full - (self._pairs - pairs) * self._pair for pairs in kept]
