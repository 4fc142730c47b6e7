"""The methods that are compared, by name. Their scorers are made only here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..attention.reconstruction import RECIPE
from ..errors import InvalidInputError
from ..geometry import device_of, weights_fingerprint
from ..proxy.loading import SELF_PROXY, load_mapper
from ..proxy.mapper import HybridAxialMapper
from ..scorers.base import Scorer
from ..scorers.expected_attention import ExpectedAttentionScorer
from ..scorers.h2o import H2OScorer
from ..scorers.head_prior import HeadPriorScorer
from ..scorers.hidden_state import HiddenStateScorer
from ..scorers.kvzip import KVzipScorer
from ..scorers.proxy import ProxyScorer
from ..scorers.random import RandomScorer
from ..scorers.snapkv import SnapKVScorer
from ..scorers.static_alignment import StaticAlignmentScorer
from ..scorers.streaming_llm import StreamingLLMScorer

Allocation = Literal["global", "uniform"]

#: The full cache, with which every method is compared. It has no scorer and is always run.
FULL = "full"

#: Arguments of `Sources` that a method may need, and the error message if one is missing.
MISSING = {
    "mapper": "expected a trained mapper, got none: give --mapper FOLDER",
    "hidden_state": "expected trained heads, got none: give --hidden-state FOLDER",
}


@dataclass(frozen=True)
class Method:
    """A way to choose the KV pairs that are kept.

    Args:
        scorer: Rates the KV pairs.
        allocation: The allocation that the method's authors use.
        identity: What the scores depend on besides target and prompt. Results with another identity are not mixed.
    """

    scorer: Scorer
    allocation: Allocation
    identity: str


class Sources:
    """What scorers are made from; each part is loaded when it is first needed.

    Args:
        target: The model whose cache is pruned.
        tokenizer: Its tokenizer.
        mapper: A mapper, or a folder or Hub id to load it from; None if there is none.
        proxy: A folder or Hub id; replaces the proxy that the mapper's config names.
        hidden_state: A folder of trained heads; None if there is none.
        seed: The seed of random scores.
        threads: CPU threads of a proxy's lane; None for as many as torch uses elsewhere.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mapper: str | HybridAxialMapper | None = None,
        proxy: str | None = None,
        hidden_state: str | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        self.target, self.tokenizer, self.seed, self.threads = target, tokenizer, seed, threads
        self._mapper, self._proxy, self._hidden_state = mapper, proxy, hidden_state

    @functools.cached_property
    def mapper(self) -> HybridAxialMapper:
        if self._mapper is None:
            raise InvalidInputError(MISSING["mapper"])
        return self._mapper if isinstance(self._mapper, HybridAxialMapper) else load_mapper(self._mapper)

    @functools.cached_property
    def proxykv(self) -> ProxyScorer:
        return ProxyScorer.from_pretrained(self.mapper, target=self.target, proxy=self._proxy, threads=self.threads)

    def hidden_state(self) -> HiddenStateScorer:
        """The scorer that uses the trained heads."""
        if self._hidden_state is None:
            raise InvalidInputError(MISSING["hidden_state"])
        return HiddenStateScorer.from_pretrained(self._hidden_state, target=self.target)

    def whole_proxy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The proxy with all its layers, and its tokenizer."""
        revision = None
        source = self._proxy
        if source is None:
            source, revision = str(self.mapper.config.proxy_id), self.mapper.config.proxy_revision
        if source == SELF_PROXY:
            raise InvalidInputError(
                "expected a proxy that is a model of its own, but this mapper's proxy is the target's first layers: "
                "give --proxy, or leave the method out"
            )
        model = AutoModel.from_pretrained(source, revision=revision or "main", dtype=self.target.dtype)
        nn.Module.to(model, device_of(self.target)).eval()
        return model, AutoTokenizer.from_pretrained(source, revision=revision or "main")


def _proxykv(sources: Sources) -> tuple[Scorer, str]:
    scorer = sources.proxykv
    return scorer, f"mapper {weights_fingerprint(scorer.mapper)}, proxy {weights_fingerprint(scorer.proxy)}"


def _kvzip(sources: Sources) -> tuple[Scorer, str]:
    return KVzipScorer(sources.tokenizer), RECIPE


def _snapkv(sources: Sources) -> tuple[Scorer, str]:
    scorer = SnapKVScorer()
    return scorer, f"window {scorer.window_tokens}, kernel {scorer.kernel_size}"


def _h2o(sources: Sources) -> tuple[Scorer, str]:
    scorer = H2OScorer()
    return scorer, f"recent share {scorer.recent_share}"


def _streaming_llm(sources: Sources) -> tuple[Scorer, str]:
    scorer = StreamingLLMScorer()
    return scorer, f"sinks {scorer.sink_tokens}"


def _expected_attention(sources: Sources) -> tuple[Scorer, str]:
    scorer = ExpectedAttentionScorer()
    return scorer, f"future {scorer.future_tokens}, sinks {scorer.sink_tokens}, epsilon {scorer.epsilon}"


def _hidden_state(sources: Sources) -> tuple[Scorer, str]:
    scorer = sources.hidden_state()
    return scorer, f"heads {_digest(scorer.heads.weights, scorer.heads.bias)}"


def _head_prior(sources: Sources) -> tuple[Scorer, str]:
    prior = sources.mapper.head_prior()
    return HeadPriorScorer(prior), f"prior {_digest(prior)}"


def _digest(*tensors: Tensor) -> str:
    """16 hex digits that change with the numbers in the tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _static_alignment(sources: Sources) -> tuple[Scorer, str]:
    proxy, tokenizer = sources.whole_proxy()
    scorer = StaticAlignmentScorer(proxy, tokenizer, threads=sources.threads)
    return scorer, f"{RECIPE}, proxy {weights_fingerprint(proxy)}"


def _random(sources: Sources) -> tuple[Scorer, str]:
    return RandomScorer(sources.seed), f"seed {sources.seed}"


@dataclass(frozen=True)
class Making:
    """How a method is made.

    Args:
        allocation: The allocation that the method's authors use.
        make: Makes the scorer and the identity.
        wants: Names of arguments of `Sources`; at least one of them must be given.
        takes: Names of further arguments of `Sources` that are read if they are given.
    """

    allocation: Allocation
    make: Callable[[Sources], tuple[Scorer, str]]
    wants: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def reads(self, source: str) -> bool:
        return source in self.wants or source in self.takes


#: The methods by name. Expected attention's authors let the heads of one layer compete, which lies between the two
#: allocations.
METHODS: dict[str, Making] = {
    "proxykv": Making("global", _proxykv, wants=("mapper",), takes=("proxy",)),
    "kvzip": Making("global", _kvzip),
    "head_prior": Making("global", _head_prior, wants=("mapper",)),
    "static_alignment": Making("global", _static_alignment, wants=("mapper", "proxy")),
    "hidden_state": Making("global", _hidden_state, wants=("hidden_state",)),
    "snapkv": Making("uniform", _snapkv),
    "h2o": Making("uniform", _h2o),
    "expected_attention": Making("uniform", _expected_attention),
    "streaming_llm": Making("uniform", _streaming_llm),
    "random": Making("uniform", _random),
}


def check_sources(names: Sequence[str], given: set[str]) -> None:
    """Check that every method has the sources it needs and that every source is read; needs no model.

    Args:
        names: Names in ``METHODS``.
        given: Which of ``mapper``, ``proxy`` and ``hidden_state`` of `Sources` are given.

    Raises:
        InvalidInputError: A source is missing, or no method reads it.
    """
    for name in names:
        if (wants := METHODS[name].wants) and not given.intersection(wants):
            raise InvalidInputError(f"method {name}: {MISSING[wants[0]]}")
    for source in sorted(given):
        readers = [name for name, making in METHODS.items() if making.reads(source)]
        if not set(readers).intersection(names):
            raise InvalidInputError(
                f"--{source.replace('_', '-')}: expected only with a method that reads it ({', '.join(readers)}), got "
                f"{', '.join(names) or 'none'}"
            )


def check_methods(names: Sequence[str]) -> list[str]:
    """``names`` without the full cache, which is always run.

    Raises:
        InvalidInputError: A name is unknown or comes twice.
    """
    unknown = [name for name in names if name not in (FULL, *METHODS)]
    if unknown or len(set(names)) < len(names):
        raise InvalidInputError(
            f"methods: expected some of {', '.join((FULL, *METHODS))}, each once, got {', '.join(names)}"
        )
    return [name for name in names if name != FULL]


def make_methods(names: Sequence[str], sources: Sources) -> dict[str, Method]:
    """The methods by name, in the order of ``names``.

    Raises:
        InvalidInputError: A name is unknown, or a source of the method is missing.
    """
    methods = {}
    for name in check_methods(names):
        try:
            scorer, identity = METHODS[name].make(sources)
        except InvalidInputError as error:
            raise InvalidInputError(f"method {name}: {error}") from error
        methods[name] = Method(scorer, METHODS[name].allocation, identity)
    return methods
