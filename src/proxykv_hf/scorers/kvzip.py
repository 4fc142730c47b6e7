"""KVzip (arXiv 2505.23416): the oracle, and the teacher of mappers. About as dear as a second prefill."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.reconstruction import CHUNK_TOKENS, PROMPTS, SINK_TOKENS, reconstruction_scores, repeat_length
from ..errors import InvalidInputError
from .base import ScorerRun, ScoringRequest, WholeCache


class KVzipScorer:
    """The target repeats its own context; see `reconstruction` for the recipe.

    Args:
        tokenizer: The target's; by default the cache's.
        chunk_tokens: Context tokens repeated in one forward.
        sink_tokens: First tokens of the prompt that the scored attention sees besides the chunk.
        prompts: The request to repeat, for the first chunk and for later ones, as in `reconstruction.PROMPTS`.
    """

    name = "kvzip"
    observes = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        sink_tokens: int = SINK_TOKENS,
        prompts: tuple[str, str] = PROMPTS,
    ) -> None:
        if tokenizer is not None and not callable(tokenizer):
            raise InvalidInputError(f"expected the target's tokenizer, got {tokenizer!r}: AutoTokenizer loads it")
        if chunk_tokens < 1 or sink_tokens < 0:
            raise InvalidInputError(
                f"expected chunk_tokens of at least 1 and sink_tokens of at least 0, got {chunk_tokens}, {sink_tokens}"
            )
        self.tokenizer = tokenizer
        self.chunk_tokens = chunk_tokens
        self.sink_tokens = sink_tokens
        self.prompts = prompts

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Nothing but checks: the work needs the whole cache.

        Raises:
            InvalidInputError: No tokenizer, a prompt of embeddings, or more positions needed than the
                target has.
        """
        tokenizer = self.tokenizer or request.tokenizer
        if tokenizer is None:
            raise InvalidInputError("KVzip asks the target to repeat: give KVzipScorer(tokenizer) or the cache one")
        prompt = request.prompt
        for row, (start, stop) in enumerate(prompt.contexts):
            context_ids = prompt.row_ids(row)[start:stop]
            longest = repeat_length(tokenizer, context_ids, self.chunk_tokens, self.prompts)
            needed = prompt.next_positions[row] + longest
            if request.max_positions is not None and needed > request.max_positions:
                raise InvalidInputError(
                    f"KVzip repeats the context in {longest} tokens after the prompt and so needs {needed} positions, "
                    f"but the target has {request.max_positions}: give a shorter prompt, or fewer chunk_tokens"
                )
        return _KVzipRun(self, tokenizer)


class _KVzipRun(ScorerRun):
    def __init__(self, scorer: KVzipScorer, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.scorer, self.tokenizer = scorer, tokenizer

    def finish(self, cache: WholeCache) -> Tensor:
        prompt, scores = cache.request.prompt, cache.request.blank_scores()
        for row, pad in enumerate(prompt.pads):
            scores[row, :, :, pad:] = reconstruction_scores(
                cache.target,
                cache.states(row),
                prompt.row_ids(row),
                prompt.contexts[row],
                self.tokenizer,
                next_position=prompt.next_positions[row],
                chunk_tokens=self.scorer.chunk_tokens,
                sink_tokens=self.scorer.sink_tokens,
                prompts=self.scorer.prompts,
            )
        return scores
