"""A scorer that a small model serves on a lane, row after row, while the target prefills."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidInputError
from ..lane import Job, Lane
from .base import ScorerRun, ScoringRequest, WholeCache


class LaneScorer:
    """What scorers with a proxy share: the checks before the prefill, the launch, the wait.

    Args:
        proxy: M_s, a decoder without language-model head.
        tokenizer: The proxy's; the target's must give the same tokens.
        threads: CPU threads of the lane; None for as many as torch uses elsewhere.
    """

    name = "lane"
    observes = False

    def __init__(self, proxy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, threads: int | None) -> None:
        self.proxy = proxy
        self.tokenizer = tokenizer
        self.lane = Lane(proxy.device, threads)

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Launch the proxy and return at once.

        Raises:
            InvalidInputError: A prompt of embeddings, longer than the proxy's positions, or of another
                tokenizer.
        """
        prompt = request.prompt
        rows = [prompt.row_ids(row) for row in range(len(prompt.lengths))]
        config = self.proxy.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and max(prompt.lengths) > limit:
            raise InvalidInputError(
                f"expected at most {limit} tokens, the proxy's positions, got {max(prompt.lengths)}: use a scorer "
                "without a proxy"
            )
        if self.tokenizer is not None and request.tokenizer is not None:
            check_same_tokens(torch.cat(rows), self.tokenizer, request.tokenizer)
        largest = max(int(row.max()) for row in rows)
        if largest >= config.vocab_size:
            raise InvalidInputError(
                f"token {largest} is not in the proxy's vocabulary of {config.vocab_size}: target and proxy need the "
                "same tokenizer"
            )
        return _LaneRun(self, request, rows)

    def score_row(
        self,
        input_ids: Tensor,
        context: tuple[int, int],
        request: ScoringRequest,
        seconds: dict[str, float],
        cancelled: Callable[[], bool],
    ) -> Tensor:
        """Scores of one row, `[L, H, n]`, on the lane.

        Args:
            input_ids: `[n]`.
            context: What may be evicted.
            request: The whole request.
            seconds: Time by phase, to be added to.
            cancelled: Whether to stop, by raising.
        """
        raise NotImplementedError


class _LaneRun(ScorerRun):
    def __init__(self, scorer: LaneScorer, request: ScoringRequest, rows: list[Tensor]) -> None:
        super().__init__()
        device, prompt, geometry = scorer.proxy.device, request.prompt, request.geometry
        self.devices["proxy"] = str(device)
        self.timeout = request.timeout
        self._lane_seconds: dict[str, float] = {}

        def work(cancelled: Callable[[], bool], seconds: dict[str, float] = self._lane_seconds) -> Tensor:
            shape = (len(rows), geometry.num_layers, geometry.num_key_value_heads, prompt.columns)
            scores = torch.zeros(shape, device=device)
            for row, ids in enumerate(rows):
                scores[row, :, :, prompt.pads[row] :] = scorer.score_row(
                    ids, prompt.contexts[row], request, seconds, cancelled
                )
            return scores

        self.job: Job[Tensor] = scorer.lane.submit(work)

    def ready(self) -> bool:
        return self.job.ready()

    def finish(self, cache: WholeCache) -> Tensor:
        scores = self.job.result(self.timeout)
        self.seconds |= self._lane_seconds
        return scores.to(cache.target.device)

    def cancel(self) -> None:
        self.job.cancel()


def check_same_tokens(ids: Tensor, ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> None:
    """Refuse a prompt whose tokens are others to the proxy (``ours``) than to the target (``theirs``).

    Raises:
        InvalidInputError: Naming a token.
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
