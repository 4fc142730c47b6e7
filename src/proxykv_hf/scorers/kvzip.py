"""KVzip (arXiv 2505.23416): the oracle, and the teacher of mappers. It costs about as much as a second prefill."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..attention.reconstruction import CHUNK_TOKENS, PROMPTS, SINK_TOKENS, reconstruction_scores, repeat_length
from ..errors import InvalidInputError
from .base import ScorerRun, ScoringRequest, WholeCache


class KVzipScorer:
    """Scores a KV pair by the attention that it gets while the target repeats its own context.

    See `attention.reconstruction` for the recipe.

    Args:
        tokenizer: The target's tokenizer. By default the cache's tokenizer.
        chunk_tokens: The number of context tokens that are repeated in one forward.
        sink_tokens: The number of first tokens of the prompt that the scored attention sees besides the chunk.
        prompts: The texts that ask the target to repeat the first chunk, and a later chunk.

    Raises:
        InvalidInputError: ``tokenizer`` is not a tokenizer, or a number is too small.
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
        """Check the prompt. All other work needs the whole cache.

        Raises:
            InvalidInputError: There is no tokenizer, the prompt came as embeddings, or the repetition needs more
                positions than the target has.
        """
        tokenizer = self.tokenizer or request.tokenizer
        if tokenizer is None:
            raise InvalidInputError(
                "expected a tokenizer, since KVzip asks the target to repeat its context, got none: give KVzipScorer "
                "or the cache one"
            )
        prompt = request.prompt
        for row, (start, stop) in enumerate(prompt.contexts):
            context_ids = prompt.row_ids(row)[start:stop]
            longest = repeat_length(tokenizer, context_ids, self.chunk_tokens, self.prompts)
            needed = prompt.next_positions[row] + longest
            if request.max_positions is not None and needed > request.max_positions:
                raise InvalidInputError(
                    f"KVzip repeats the context in up to {longest} tokens after the prompt and so needs {needed} "
                    f"positions, but the target has {request.max_positions}: give a shorter prompt, or fewer "
                    "chunk_tokens"
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
