"""The text that a chat template puts around a user's message."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_MARK = "\x02user text\x02"


def chat_affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text that the chat template puts before and after a user's message, up to where the answer begins.

    Without a chat template: the BOS token, if the tokenizer adds one, and a line break.
    """
    if tokenizer.chat_template is None:
        adds_bos = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("").input_ids
        return (str(tokenizer.bos_token) if adds_bos else ""), "\n"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    prefix, _, suffix = str(text).partition(_MARK)
    return prefix, suffix


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of ``text``, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)
