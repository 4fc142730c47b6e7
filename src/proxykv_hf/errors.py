"""The exceptions. Each error is a `ProxyKVError` and also the built-in exception that it is closest to."""

from __future__ import annotations


class ProxyKVError(Exception):
    """Base of all errors that proxykv-hf raises on purpose."""


class InvalidPolicyError(ProxyKVError, ValueError):
    """An invalid retention policy: a ratio outside (0, 1], both budgets or neither, …"""


class InvalidInputError(ProxyKVError, ValueError):
    """A prompt, mask, context span or batch that the cache or a scorer cannot work with."""


class GeometryError(ProxyKVError, ValueError):
    """Scores, a saved cache, a mapper or heads that were made for other layers, heads or sizes than the target's."""


class UnsupportedModelError(ProxyKVError, TypeError):
    """A model without a KV cache that can be pruned, or one whose attention this package cannot reach."""


class ScoringError(ProxyKVError, RuntimeError):
    """A scorer failed or returned scores of a wrong shape or with NaN, or a training loss is not finite."""


class CacheStateError(ProxyKVError, RuntimeError):
    """A call that the state of the cache does not allow: after ``close()``, a crop into the pruned part, …"""


class ShardError(ProxyKVError, ValueError):
    """A teacher's scores on disk that are cut short, altered, or made from another target, recipe or corpus."""


class ProxyKVWarning(UserWarning):
    """Something was not done as requested, but the output is still correct: the cache is not pruned, for example."""
