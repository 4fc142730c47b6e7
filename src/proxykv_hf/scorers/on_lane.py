"""Scorers whose proxy runs on a lane, row after row, while the target prefills."""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.reconstruction import repeat_length
from ..errors import InvalidInputError, ProxyKVWarning
from ..geometry import device_of, max_positions
from ..proxy.lane import Job, Lane, cancellable
from .base import ScorerRun, ScoringRequest, WholeCache


class LaneScorer:
    """The common part of scorers with a proxy: the checks before the prefill, the launch, and the wait.

    Args:
        proxy: M_s, a decoder without language-model head.
        tokenizer: The proxy's tokenizer. The target's tokenizer must give the same tokens. If None, the target's is
            used.
        threads: CPU threads that the proxy uses; None for as many as torch uses elsewhere.
    """

    name = "lane"
    observes = False
    #: Whether the proxy repeats the context, which takes positions after the prompt.
    repeats = False

    def __init__(self, proxy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, threads: int | None) -> None:
        self.proxy = proxy
        self.tokenizer = tokenizer
        self.lane = Lane(proxy.device, threads)

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Check the prompt, launch the proxy, and return at once.

        Raises:
            InvalidInputError: The prompt came as embeddings, takes more positions than the proxy has, or has tokens of
                another tokenizer. Or the proxy repeats the context, and there is no tokenizer.
        """
        prompt = request.prompt
        if self.repeats and self.tokenizer_for(request) is None:
            raise InvalidInputError(
                "expected a tokenizer, since the proxy is asked to repeat the context, got none: give the cache (or "
                "the scorer) one"
            )
        rows = [prompt.row_ids(row) for row in range(len(prompt.lengths))]
        config = self.proxy.config.get_text_config(decoder=True)
        limit = max_positions(config)
        needed = max(self._positions(*row, request) for row in zip(rows, prompt.contexts, strict=True))
        if limit is not None and needed > limit:
            raise InvalidInputError(
                f"expected at most {limit} tokens, the proxy's positions, got {needed}"
                f"{', including those that repeat the context' if self.repeats else ''}: give a shorter prompt, or use "
                "a scorer without a proxy"
            )
        if self.tokenizer is not None and request.tokenizer is not None:
            check_same_tokens(torch.cat(rows), self.tokenizer, request.tokenizer)
        largest = max(int(row.max()) for row in rows)
        if largest >= config.vocab_size:
            raise InvalidInputError(
                f"token {largest} is not in the proxy's vocabulary of {config.vocab_size}: use a proxy with the "
                "target's tokenizer"
            )
        return _LaneRun(self, request, rows)

    @property
    def shares_cpu(self) -> bool:
        """See `scorers.base.OnLane`."""
        return self.lane.threads is None and self.lane.device.type == "cpu"

    def tokenizer_for(self, request: ScoringRequest) -> PreTrainedTokenizerBase | None:
        """The proxy's tokenizer, or the target's if the scorer has none (a proxy of the target's own first layers)."""
        return self.tokenizer if self.tokenizer is not None else request.tokenizer

    def _positions(self, input_ids: Tensor, context: tuple[int, int], request: ScoringRequest) -> int:
        """The number of positions that one row takes."""
        tokenizer = self.tokenizer_for(request)
        if not self.repeats or tokenizer is None:
            return len(input_ids)
        return len(input_ids) + repeat_length(tokenizer, input_ids[slice(*context)])

    def score_row(
        self,
        input_ids: Tensor,
        context: tuple[int, int],
        request: ScoringRequest,
        use: LaneUse,
    ) -> Tensor:
        """Score one row. This runs on the lane.

        Args:
            input_ids: `[n]`, the row's tokens.
            context: The span ``(start, stop)`` of the row that may be evicted.
            request: The request that the row belongs to.
            use: Where to note time and memory.

        Returns: the scores `[L, H, n]`.
        """
        raise NotImplementedError


class LaneUse:
    """The time and memory that scoring takes on a lane."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes_peak = 0
        self.bytes_scores = 0
        """Bytes of all rows' scores, which are held while each row is scored."""
        self._device = device

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``phase``, including the work on the device."""
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":  # blocks only the lane's thread
            torch.cuda.current_stream(self._device).synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def holds(self, count: int) -> None:
        """Note that ``count`` bytes of one row's features, KV pairs and scores are held now."""
        self.bytes_peak = max(self.bytes_peak, self.bytes_scores + count)


class _LaneRun(ScorerRun):
    needs_cache = False

    def __init__(self, scorer: LaneScorer, request: ScoringRequest, rows: list[Tensor]) -> None:
        super().__init__()
        self.devices["proxy"] = str(scorer.proxy.device)
        self._scorer, self._request, self._rows = scorer, request, rows
        self._use = LaneUse(scorer.proxy.device)
        self._patience = request.timeout  # seconds that are left to wait
        self._job: Job[Tensor] | None = self._launch() if request.at_once else None

    def _launch(self) -> Job[Tensor]:
        scorer, request, rows, use = self._scorer, self._request, self._rows, self._use
        prompt = request.prompt

        def work() -> Tensor:
            scores = request.blank_scores(device=scorer.proxy.device)
            use.bytes_scores = scores.nbytes
            with cancellable(scorer.proxy):
                for row, ids in enumerate(rows):
                    scores[row, :, :, prompt.pads[row] :] = scorer.score_row(ids, prompt.contexts[row], request, use)
            return scores

        return scorer.lane.submit(work)

    def ready(self) -> bool:
        return self._job is not None and self._job.ready()

    def wait(self) -> None:
        if self._job is not None:
            started = time.perf_counter()
            self._job.wait(self._patience)
            if self._patience is not None:
                self._patience = max(0.0, self._patience - (time.perf_counter() - started))

    def finish(self, cache: WholeCache) -> Tensor:
        self._job = self._job or self._launch()
        crowded: str | None = None
        try:
            scores = self._result()
        except torch.OutOfMemoryError as error:
            crowded = str(error).splitlines()[0]
            traceback.clear_frames(error.__traceback__)  # they keep the failed run's tensors
        if crowded is not None:
            self._job = self._launch()  # the target's prefill is over, and its activations are gone
            scores = self._result()
            warnings.warn(
                f"the proxy found no memory beside the target ({crowded}) and was run again after the prefill: "
                "schedule='sequential' or 'proxy_first' avoids the first run",
                ProxyKVWarning,
                stacklevel=2,
            )
        self._job = None
        self.seconds |= self._use.seconds
        self.bytes_peak = self._use.bytes_peak
        return scores.to(device_of(cache.target))

    def _result(self) -> Tensor:
        assert self._job is not None
        try:
            return self._job.result(self._patience)
        except TimeoutError as error:
            raise TimeoutError(f"the scores were not there after {self._request.timeout:g} s") from error

    def cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()


def check_same_tokens(ids: Tensor, ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    """Refuse a prompt with tokens that differ between the proxy's tokenizer (``ours``) and the target's (``theirs``).

    Raises:
        InvalidInputError: There is such a token, which the error names.
    """
    if ours is theirs:
        return
    numbers = ids.unique().tolist()
    for number, a, b in zip(
        numbers, ours.convert_ids_to_tokens(numbers), theirs.convert_ids_to_tokens(numbers), strict=True
    ):
        if a != b:
            raise InvalidInputError(
                f"target and proxy need the same tokenizer, but token {number} of the prompt is {b!r} for the target "
                f"and {a!r} for the proxy"
            )
