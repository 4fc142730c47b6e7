"""Runs an evaluation: one prefill per document for all cells, and every question asked of every pruned copy."""

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
from .cells import WHOLE, Cell
from .methods import Allocation, Method
from .prompts import Sitting, sittings
from .rows import Key, Row, key_of
from .task import Example, Question

#: The values of ``allocation``: one allocation for all methods, each method's native one, or both.
ALLOCATIONS = ("native", "global", "uniform", "native+global")

Metric = Callable[[str, Question], float]


def make_cells(
    methods: Mapping[str, Allocation],
    ratios: Sequence[float],
    allocation: str,
    own_ratios: Mapping[str, Sequence[float]] | None = None,
) -> list[Cell]:
    """The full cache, and every method at each of its allocations and ratios.

    Args:
        methods: By name, the native allocation: the one that the method's authors use.
        ratios: The ratios of all methods that are not in ``own_ratios``.
        allocation: One of ``ALLOCATIONS``.
        own_ratios: By name, ratios of single methods.

    Raises:
        InvalidInputError: The allocation is unknown, there are no ratios, or a ratio comes twice.
        InvalidPolicyError: A ratio is outside (0, 1].
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
    """An example, prepared for the model.

    Args:
        example: The example.
        metric: The name of its task's metric.
        sittings: The prefills that it needs.
    """

    example: Example
    metric: str
    sittings: tuple[Sitting, ...]

    @classmethod
    def of(cls, example: Example, metric: str, tokenizer: PreTrainedTokenizerBase, query_aware: bool) -> Case:
        return cls(example, metric, tuple(sittings(example, metric, tokenizer, query_aware)))


class Runner:
    """Asks the questions of cases in every cell.

    Args:
        target: The model, in eval mode.
        tokenizer: The target's tokenizer.
        methods: By name, all methods in the cells except the full cache.
        cells: From `make_cells`.
        metrics: The metrics by name.
        batch_tokens: The limit on the tokens of one forward over questions, padding included.
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
        self._one_by_one = any(ModelGeometry.from_config(target.config).sliding_windows)  # see `answers`, on padding

    def check(self, case: Case) -> None:
        """Refuse a case that is too long for the target or a scorer; a case must not be cut.

        Raises:
            InvalidInputError: The case is too long; the message names the example.
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
        """The keys of all rows of a case, in the order of the rows: question after question."""
        return [
            self._key(case, question, cell) for question in range(len(case.example.questions)) for cell in self.cells
        ]

    def run(self, case: Case, known: Mapping[Key, Row], progress: Callable[[int], object]) -> list[Row]:
        """Make the rows of a case that are not known yet.

        Args:
            case: From `Case.of`; it passed `check`.
            known: The rows that are known, by key.
            progress: Called with the number of rows that were just made.
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
        """Run one prefill, and ask the missing questions of each cell after it."""
        turns = dict(zip(sitting.questions, sitting.turns, strict=True))
        for question in () if self._one_by_one else turns:
            if row := known.get(self._key(case, question, WHOLE)):
                turns[question] = replace(turns[question], draft=tuple(encode(self.tokenizer, row["answer"])))
        groups: dict[tuple[int, ...], list[Cell]] = {}  # cells that lack answers to the same questions
        for cell, questions in missing:
            if cell != WHOLE:
                groups.setdefault(questions, []).append(cell)
        names = {cell.method for cells in groups.values() for cell in cells}
        scorers = {name: method.scorer for name, method in self.methods.items() if name in names}
        rows: list[Row] = []
        # A cache needs a scorer to prefill, even if nothing is pruned.
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
                f"finite logits, got a negative log-likelihood of {answer.nll}: the target overflows in "
                f"{self.target.dtype}, give another --dtype"
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
    """Computes the bytes of the KV pairs in a whole cache, and in each row of a pruned copy of it."""

    def __init__(self, whole: ProxyPrunedCache) -> None:
        report = whole.report()
        layer = whole.layers[whole.geometry.full_layers[0]]
        self.full = report.bytes_full
        self._pair = (layer.keys.shape[3] + layer.values.shape[3]) * layer.keys.element_size()
        self._pairs = sum(map(sum, report.kept_tokens[0]))

    def of(self, cache: ProxyPrunedCache) -> list[int]:
        """The bytes of each row."""
        kept = [sum(map(sum, row)) for row in cache.report().kept_tokens]
        return [self.full - (self._pairs - pairs) * self._pair for pairs in kept]
