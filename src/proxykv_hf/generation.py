"""``model.generate(..., proxykv=ProxyKVConfig(...))``: the cache is made, used and closed by itself."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ._compat import CACHE_KEYWORDS, cache_keyword
from .cache.cache import ProxyPrunedCache
from .cache.prefill import Schedule
from .cache.prompt import Context
from .cache.retention import RetentionPolicy, policy_or_ratio
from .errors import InvalidInputError
from .scorers.base import Scorer
from .scorers.proxy import ProxyScorer

M = TypeVar("M", bound=PreTrainedModel)


@dataclass
class ProxyKVConfig:
    """How ``generate`` is to prune. One object may serve many calls: it loads its mapper once for a model.

    What it says may be changed between calls.

    Args:
        mapper: A Hub id or folder; or give ``scorer``.
        scorer: Any scorer, in place of a mapper.
        retention_ratio: Share kept, 0.3 by default; or give ``policy``.
        policy: How much is kept, in full.
        tokenizer: The target's, for scorers that need it and to be compared with the proxy's.
        context: What may be evicted, see `ProxyPrunedCache`.
        strict: Raise if scoring fails.
        timeout: Seconds to wait for scores.
        schedule: When the proxy runs, see `ProxyPrunedCache`.
        options: For `ProxyScorer.from_pretrained`: ``proxy``, ``revision``, ``device``, ``dtype``, ``threads``.

    Raises:
        InvalidInputError: Both or neither of ``mapper`` and ``scorer``.
        InvalidPolicyError: Both ``retention_ratio`` and ``policy``, or a wrong ratio.
    """

    mapper: str | Path | None = None
    scorer: Scorer | None = None
    retention_ratio: float | None = None
    policy: RetentionPolicy | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    context: Context | None = None
    strict: bool = False
    timeout: float | None = None
    schedule: Schedule | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._checked_policy()
        # Of each target: from what its scorer was loaded, and the scorer.
        self._loaded: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Scorer]] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_loaded"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def _checked_policy(self) -> RetentionPolicy:
        if (self.mapper is None) == (self.scorer is None):
            given = "neither" if self.mapper is None else "both"
            raise InvalidInputError(f"expected a mapper or a scorer, got {given}: give exactly one of them")
        return policy_or_ratio(self.policy, self.retention_ratio)

    def make_cache(self, target: PreTrainedModel) -> ProxyPrunedCache:
        """A new cache for ``target``; a mapper is loaded on the first call."""
        policy = self._checked_policy()
        return ProxyPrunedCache(
            target,
            self._scorer(target),
            policy,
            tokenizer=self.tokenizer,
            context=self.context,
            strict=self.strict,
            timeout=self.timeout,
            schedule=self.schedule,
        )

    def _scorer(self, target: PreTrainedModel) -> Scorer:
        if self.scorer is not None:
            return self.scorer
        assert self.mapper is not None
        source = (self.mapper, dict(self.options))
        loaded, scorer = self._loaded.get(target, (None, None))
        if scorer is None or loaded != source:
            scorer = ProxyScorer.from_pretrained(self.mapper, target=target, **self.options)
            self._loaded[target] = (source, scorer)
        return scorer


class ProxyKVGenerationMixin:
    """Gives a model's ``generate`` the argument ``proxykv``, and one name for its cache on every transformers release.

    Put it before the model class: ``class ProxyKVQwen2(ProxyKVGenerationMixin, Qwen2ForCausalLM)``, or use
    `with_proxykv` on a model that is loaded already.
    """

    def generate(
        self, inputs: Tensor | None = None, *args: Any, proxykv: ProxyKVConfig | None = None, **kwargs: Any
    ) -> Any:
        """As transformers' ``generate``, with these differences.

        Args:
            inputs: The prompt, as in transformers; or give ``input_ids=`` or ``inputs_embeds=``.
            proxykv: How the prompt's cache is pruned; None leaves it whole.
            args: Handed on.
            kwargs: Handed on. A cache may be called ``cache`` or ``past_key_values``, whatever the release calls it.

        The cache that ``proxykv`` makes is in the output if ``return_dict_in_generate`` asks for it, and is closed
        otherwise.

        Raises:
            InvalidInputError: Both ``proxykv`` and a cache are given, or ``proxykv`` is no `ProxyKVConfig`.
        """
        generate = super().generate  # type: ignore[misc]
        assert isinstance(self, PreTrainedModel)
        given_cache = next((kwargs.pop(name) for name in CACHE_KEYWORDS if kwargs.get(name) is not None), None)
        if proxykv is None:
            named = {} if given_cache is None else {cache_keyword(self): given_cache}
            return generate(inputs, *args, **kwargs, **named)
        if not isinstance(proxykv, ProxyKVConfig):
            raise InvalidInputError(
                f"proxykv: expected a ProxyKVConfig(mapper=..., retention_ratio=...), got {proxykv!r}"
            )
        if given_cache is not None:
            raise InvalidInputError("expected proxykv or a cache, got both: a ProxyPrunedCache is a cache already")
        prompts = (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids"))  # of both, embeddings are prefilled
        prompt = next((p for p in prompts if p is not None), None)
        cache = proxykv.make_cache(self)
        output: Any = None
        try:
            if prompt is not None:
                cache.expect(prompt.shape[1])
            output = generate(inputs, *args, **kwargs, **{cache_keyword(self): cache})
            return output
        finally:
            if not any(getattr(output, name, None) is cache for name in CACHE_KEYWORDS):
                cache.close()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers', under the plain architecture's name, so that everybody can load it."""
        own, plain = type(self), plain_class(type(self))
        self.__class__ = plain
        try:
            return self.save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = own


def plain_class(cls: type) -> type:
    """The first class of ``cls``'s ancestors that is a model without the mixin."""
    return next(
        base
        for base in cls.__mro__
        if issubclass(base, PreTrainedModel) and not issubclass(base, ProxyKVGenerationMixin)
    )


def with_proxykv(model: M) -> M:
    """The same model, with `ProxyKVGenerationMixin` from now on.

    Its class keeps its name, so that `transformers.pipeline` and `save_pretrained` know it, and it pickles and copies
    as before.
    """
    if not isinstance(model, ProxyKVGenerationMixin):
        plain: Any = type(model)
        model.__class__ = _with_mixin(plain)
    return model


@functools.cache
def _with_mixin(plain: type[PreTrainedModel]) -> type:
    """A subclass of the plain class, by the same name; it is made once."""
    same = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (ProxyKVGenerationMixin, plain), {**same, "__reduce_ex__": _reduce_plain})


def _reduce_plain(model: PreTrainedModel, protocol: SupportsIndex) -> Any:
    """Pickle the model as one of its plain class, and have `_rebuild` add the mixin again."""
    own = type(model)
    model.__class__ = plain_class(own)
    try:
        reduced: Any = model.__reduce_ex__(protocol)
    finally:
        model.__class__ = own
    make, arguments, *state = reduced
    return _rebuild, (make, arguments), *state


def _rebuild(make: Callable[..., M], arguments: tuple[Any, ...]) -> M:
    return with_proxykv(make(*arguments))
