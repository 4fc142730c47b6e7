"""The teacher: KVzip's scores (arXiv 2505.23416) of a corpus, computed on the target itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..attention.reconstruction import RECIPE, repeat_length
from ..cache.cache import ProxyPrunedCache
from ..cache.retention import RetentionPolicy
from ..chat import chat_affixes, encode
from ..errors import InvalidInputError, ShardError
from ..geometry import ModelGeometry, max_positions, weights_fingerprint
from ..scorers.kvzip import KVzipScorer
from .corpus import Corpus, Split
from .shards import DOCUMENTS_PER_SHARD, ScoredDocument, ShardFolder


def score_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    documents: int,
    out: str | Path,
    *,
    target_id: str,
    revision: str | None = None,
    process_index: int = 0,
    process_count: int = 1,
    progress: bool = True,
) -> None:
    """Score the first documents of a corpus, and write them to a folder of shards; see `shards`.

    Documents that the folder already holds, in finished or partial shards, are not scored again. More documents of the
    same corpus may be added later.

    Args:
        model: The target.
        tokenizer: The target's tokenizer.
        corpus: The corpus that the documents come from.
        documents: How many documents to score.
        out: The folder of shards.
        target_id: How the manifest names the target: its Hub id, or a folder.
        revision: The target's revision on the Hub.
        process_index: The number of this process among those that share the work, from 0.
        process_count: How many processes share the work. Each makes the shards with
            ``shard % process_count == process_index``.
        progress: Show a progress bar.

    Raises:
        InvalidInputError: ``documents`` is less than 1, or the target has too few positions for the longest document.
            This is raised before any work.
        ShardError: The folder holds shards of another target, recipe or corpus, or a damaged shard.
    """
    if documents < 1:
        raise InvalidInputError(f"documents: expected at least 1, got {documents}")
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    _check_positions(model, tokenizer, len(prefix), corpus.tokens[1])

    def score(number: int) -> ScoredDocument:
        document = corpus.document(number)
        ids = prefix + encode(tokenizer, document.text)[: document.tokens]
        return ScoredDocument(
            name=_name(number),
            input_ids=torch.tensor(ids, dtype=torch.int32),
            scores=teacher_scores(model, tokenizer, ids, len(prefix)),
            kind=document.kind,
            sources=document.sources,
            split=document.split,
        )

    folder = ShardFolder(
        out, _identity(model, target_id, revision, str(model.dtype).removeprefix("torch."), corpus.recipe())
    )
    _fill(folder, documents, score, process_index, process_count, progress)


def teacher_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, input_ids: list[int], prefix_tokens: int
) -> Tensor:
    """KVzip's scores of a document that follows a chat prefix, `[L, H, N]`, float16, on the CPU."""
    ids = torch.tensor([input_ids])
    with ProxyPrunedCache(model, KVzipScorer(tokenizer), RetentionPolicy(1.0), strict=True) as cache:
        scores = cache.prefill(ids, context=(prefix_tokens, len(input_ids)), prune=False)["kvzip"]
    return scores[0, :, :, prefix_tokens:].half().cpu().contiguous()


def import_folder(
    source: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    *,
    target_id: str,
    revision: str | None = None,
    split: Split = "train",
    process_index: int = 0,
    process_count: int = 1,
    progress: bool = True,
) -> None:
    """Convert scores that were made elsewhere, one safetensors file per document, into shards.

    Each file holds ``input_ids`` `[P + N]`, ``scores`` `[L, H, N]`, and as metadata ``kind``, ``recipe`` and
    ``prefix_tokens``. Shapes, recipe and chat prefix must be the target's; that the scores are, cannot be checked.
    Scores are attention weights from 0 to 1, not their logarithms.

    Args:
        source: The folder of these files, which are read in the order of their names.
        model: The target.
        tokenizer: The target's tokenizer.
        out: The folder of shards.
        target_id: See `score_corpus`.
        revision: See `score_corpus`.
        split: What the documents are used for.
        process_index: See `score_corpus`.
        process_count: See `score_corpus`.
        progress: See `score_corpus`.

    Raises:
        InvalidInputError: The folder holds no such file.
        ShardError: A file is damaged, holds values that are not scores, or is not of this target or recipe; see also
            `score_corpus`.
    """
    paths = sorted(Path(source).glob("*.safetensors"))
    if not paths:
        raise InvalidInputError(f"expected a folder of safetensors files to import, found none in {source}")
    prefix = encode(tokenizer, chat_affixes(tokenizer)[0])
    geometry = ModelGeometry.from_config(model.config)
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths))
    corpus = {"imported_sha256": digest.hexdigest(), "documents": len(paths), "split": split}

    def read(number: int) -> ScoredDocument:
        ids, scores, kind = _read_foreign(paths[number])
        heads = (geometry.num_layers, geometry.num_key_value_heads)
        if tuple(scores.shape[:2]) != heads or ids[: len(ids) - scores.shape[2]].tolist() != prefix:
            raise ShardError(
                f"{paths[number]}: expected scores [{heads[0]}, {heads[1]}, N] after the target's chat prefix of "
                f"{len(prefix)} tokens, got {list(scores.shape)} for {len(ids)} tokens: another target's?"
            )
        return ScoredDocument(_name(number), ids.int(), scores, kind, (paths[number].name,), split)

    folder = ShardFolder(out, _identity(model, target_id, revision, None, corpus))
    _fill(folder, len(paths), read, process_index, process_count, progress)


def _read_foreign(path: Path) -> tuple[Tensor, Tensor, str]:
    """Read a file of scores made elsewhere: ids `[P + N]`, scores `[L, H, N]` in float16, and the kind."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            ids, scores = file.get_tensor("input_ids"), file.get_tensor("scores")
    except SafetensorError as error:
        raise ShardError(f"{path} is not a complete file of scores ({error}): leave it out") from error
    if metadata.get("recipe") != RECIPE:
        raise ShardError(f"{path}: expected scores of recipe {RECIPE}, got {metadata.get('recipe')!r}")
    if scores.dim() != 3 or metadata.get("prefix_tokens") != str(len(ids) - scores.shape[2]):
        raise ShardError(
            f"{path}: expected scores [L, H, N] and prefix_tokens that make up {len(ids)} tokens, got "
            f"{list(scores.shape)} and {metadata.get('prefix_tokens')!r}"
        )
    scores = scores.half()
    if not ((scores >= 0) & (scores <= 1)).all():  # NaN fails this test too
        raise ShardError(
            f"{path}: expected scores from 0 to 1, as attention weights are, got {scores.min():g} to {scores.max():g}: "
            "score it again, or leave it out"
        )
    return ids, scores, metadata.get("kind", "unknown")


def _name(number: int) -> str:
    return f"doc-{number:06d}"


def _identity(
    model: PreTrainedModel, target_id: str, revision: str | None, dtype: str | None, corpus: dict[str, Any]
) -> dict[str, Any]:
    """What shards are made from. ``dtype`` is the dtype that the target computed in, or None if unknown."""
    target = {
        "id": target_id,
        "revision": revision,
        "geometry": ModelGeometry.from_config(model.config).to_dict(),
        "weights": weights_fingerprint(model),
        "dtype": dtype,
    }
    return {"target": target, "score_recipe": RECIPE, "corpus": corpus}


def _check_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prefix: int, longest: int) -> None:
    """Refuse documents that are too long: KVzip repeats a document at the positions after it."""
    limit = max_positions(model.config)
    needed = prefix + longest + repeat_length(tokenizer, torch.zeros(longest, dtype=torch.long))
    if limit is not None and needed > limit:
        raise InvalidInputError(
            f"tokens: the longest documents, of {longest} tokens, take {needed} positions to read and repeat, and the "
            f"target has {limit}: ask for shorter ones"
        )


def _fill(
    folder: ShardFolder,
    documents: int,
    make: Callable[[int], ScoredDocument],
    process_index: int,
    process_count: int,
    progress: bool,
) -> None:
    """Make the missing documents of this process's shards, and write each document at once."""
    from tqdm import tqdm

    begun: dict[int, list[ScoredDocument]] = {}
    wanted: dict[int, range] = {}
    there = 0
    for shard in range(process_index, -(-documents // DOCUMENTS_PER_SHARD), process_count):
        numbers = range(shard * DOCUMENTS_PER_SHARD, min(documents, (shard + 1) * DOCUMENTS_PER_SHARD))
        ready = folder.begun(shard, len(numbers))
        if not folder.is_finished(shard):
            begun[shard], wanted[shard] = ready, numbers[len(ready) :]
        there += min(len(ready), len(numbers))
    with tqdm(
        total=there + sum(map(len, wanted.values())),
        initial=there,
        desc="documents" if process_count == 1 else f"documents, process {process_index + 1} of {process_count}",
        position=process_index,
        disable=not progress,
    ) as bar:
        for shard, numbers in wanted.items():
            ready = begun.pop(shard)
            for number in numbers:
                ready.append(make(number))
                folder.keep(shard, ready)
                bar.update()
            folder.finish(shard)
