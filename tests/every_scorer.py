"""The scorers that need no proxy, by name: functions that make one for a target."""

from __future__ import annotations

from heads import random_heads
from tiny import random_scores, tiny_tokenizer

from proxykv_hf import (
    ExpectedAttentionScorer,
    H2OScorer,
    HeadPriorScorer,
    HiddenStateScorer,
    KVzipScorer,
    RandomScorer,
    SnapKVScorer,
    StreamingLLMScorer,
)

#: The scorers that read the target's prefill.
OBSERVERS = {
    "snapkv": lambda model: SnapKVScorer(8),
    "h2o": lambda model: H2OScorer(),
    "expected_attention": lambda model: ExpectedAttentionScorer(32),
    "hidden_state": lambda model: HiddenStateScorer(random_heads(model)),
}
SCORERS = OBSERVERS | {
    "kvzip": lambda model: KVzipScorer(tiny_tokenizer()),
    "streaming_llm": lambda model: StreamingLLMScorer(),
    "head_prior": lambda model: HeadPriorScorer(random_scores(model, 1, 1)[0, :, :, 0]),
    "random": lambda model: RandomScorer(),
}
