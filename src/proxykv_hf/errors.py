"""The exception tree: every error is a `ProxyKVError` and also the built-in that it resembles."""

from __future__ import annotations


class ProxyKVError(Exception):
    """Base of all errors that proxykv-hf raises on purpose."""


class InvalidPolicyError(ProxyKVError, ValueError):
    """A retention policy that cannot be met: a ratio outside (0, 1], both budgets or neither, …"""


class InvalidInputError(ProxyKVError, ValueError):
    """A prompt, mask, context span or batch that the cache or a scorer cannot work with."""


class GeometryError(ProxyKVError, ValueError):
    """Scores, a saved cache or a mapper made for other layers, heads or sizes than the target's."""


class UnsupportedModelError(ProxyKVError, TypeError):
    """A model without a prunable KV cache, or one whose attention cannot be reached."""


class ScoringError(ProxyKVError, RuntimeError):
    """A scorer failed, or gave scores of a wrong shape or with NaN."""


class CacheStateError(ProxyKVError, RuntimeError):
    """A call that the cache's state does not allow: after ``close()``, into the pruned part, …"""


class ShardError(ProxyKVError, ValueError):
    """A teacher's scores on disk that are cut short, altered, or of another target, recipe or corpus."""


class ProxyKVWarning(UserWarning):
    """Something was not done as asked, and the output is still right: say, an uncompressed cache."""
