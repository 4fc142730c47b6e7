"""From scores to a kept mask: pure functions of scores and a `RetentionPolicy`, one row at a time."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InvalidPolicyError

#: Arguments of a policy that are integers of at least 0.
COUNTS = ("sink_tokens", "recent_tokens", "min_context")


@dataclass(frozen=True)
class RetentionPolicy:
    """How much of the context is kept, and which tokens are kept in any case.

    Exactly one of ``retention_ratio`` and ``max_tokens`` is given.

    Args:
        retention_ratio: rho, the share of the context's KV pairs that is kept, in (0, 1].
        max_tokens: The number of context tokens that a head keeps, on average over the heads.
        allocation: How the budget is divided among heads. ``"global"``: one threshold over all layers and heads, so
            that important heads keep more; this is KVzip's own rule (arXiv 2505.23416). ``"uniform"``: every head of a
            row keeps the same number of tokens.
        sink_tokens: The number of first tokens of a row that are always kept (attention sinks, arXiv 2309.17453).
        recent_tokens: The number of last tokens of a row that are always kept.
        protected: Spans ``(start, stop)`` of tokens that are always kept, in the row's own positions (padding is not
            counted).
        min_context: A context of fewer tokens than this is not pruned.

    Sinks, recent and protected tokens that lie in the context count towards the budget.

    Raises:
        InvalidPolicyError: An argument is not valid; the error names it. Raised on construction.
    """

    retention_ratio: float | None = None
    max_tokens: int | None = None
    allocation: Literal["global", "uniform"] = "global"
    sink_tokens: int = 4
    recent_tokens: int = 8
    protected: tuple[tuple[int, int], ...] = ()
    min_context: int = 0

    def __post_init__(self) -> None:
        if (self.retention_ratio is None) == (self.max_tokens is None):
            given = "neither" if self.max_tokens is None else "both"
            raise InvalidPolicyError(f"expected retention_ratio or max_tokens, got {given}: give exactly one of them")
        ratio = self.retention_ratio
        if ratio is not None and not (_is_number(ratio) and 0 < ratio <= 1):
            raise InvalidPolicyError(
                f"retention_ratio: expected a number in (0, 1], got {ratio!r}; it is the share that is "
                "kept (kvpress's compression_ratio is 1 - retention_ratio)"
            )
        if self.max_tokens is not None and not (_is_count(self.max_tokens) and self.max_tokens >= 1):
            raise InvalidPolicyError(f"max_tokens: expected an integer of at least 1, got {self.max_tokens!r}")
        if self.allocation not in ("global", "uniform"):
            raise InvalidPolicyError(f"allocation: expected 'global' or 'uniform', got {self.allocation!r}")
        for name in COUNTS:
            value = getattr(self, name)
            if not (_is_count(value) and value >= 0):
                raise InvalidPolicyError(f"{name}: expected an integer of at least 0, got {value!r}")
        for span in self.protected:
            pair = isinstance(span, (tuple, list)) and len(span) == 2 and all(map(_is_count, span))
            if not (pair and 0 <= span[0] < span[1]):
                raise InvalidPolicyError(
                    f"protected: expected a tuple of spans (start, stop), 0 <= start < stop, got {span!r} in it"
                )
        plain: dict[str, Any] = {
            "retention_ratio": None if ratio is None else float(ratio),
            "max_tokens": None if self.max_tokens is None else int(self.max_tokens),
            "protected": tuple((int(start), int(stop)) for start, stop in self.protected),
        } | {name: int(getattr(self, name)) for name in COUNTS}
        for name, value in plain.items():  # JSON takes Python's numbers, but not numpy's
            object.__setattr__(self, name, value)

    def tokens_per_head(self, context_tokens: int) -> float:
        """The number of context tokens to keep per head, before rounding."""
        if self.max_tokens is not None:
            return min(self.max_tokens, context_tokens)
        assert self.retention_ratio is not None
        return self.retention_ratio * context_tokens

    def to_dict(self) -> dict[str, Any]:
        """The policy as a dict for JSON; ``RetentionPolicy(**d)`` reads it back."""
        return dataclasses.asdict(self)


def check_policy(policy: object) -> None:
    """Refuse everything but a policy, for example a bare ratio.

    Raises:
        InvalidPolicyError: ``policy`` is not a `RetentionPolicy`.
    """
    if not isinstance(policy, RetentionPolicy):
        raise InvalidPolicyError(
            f"expected a RetentionPolicy, got {policy!r}: pass RetentionPolicy(retention_ratio=0.3), for example"
        )


def policy_or_ratio(policy: RetentionPolicy | None, retention_ratio: float | None) -> RetentionPolicy:
    """``policy``, or the default policy for ``retention_ratio``. The ratio is 0.3 if neither is given.

    Raises:
        InvalidPolicyError: Both are given, or the ratio is not valid.
    """
    if policy is not None and retention_ratio is not None:
        raise InvalidPolicyError("expected a policy or a retention_ratio, got both: put the ratio into the policy")
    return policy or RetentionPolicy(0.3 if retention_ratio is None else retention_ratio)


@dataclass(frozen=True)
class Selection:
    """What `select` decided for one row.

    Args:
        keep: `[L, H, N]`, bool; true outside the context.
        over_budget: The number of KV pairs, over all heads, that are kept beyond the budget.
    """

    keep: Tensor
    over_budget: int


def select(scores: Tensor, policy: RetentionPolicy, context: tuple[int, int]) -> Selection:
    """Select the KV pairs of one row that are kept.

    ``"global"`` keeps exactly ``round(rho * L * H * (stop - start))`` KV pairs of the context. ``"uniform"`` keeps
    ``round(rho * (stop - start))`` in every head. More are kept only if protected tokens, or the one KV pair that every
    head keeps, do not fit. Of equal scores, the earlier in the flattened `[L, H, N]` wins.

    Args:
        scores: `[L, H, N]` for the row's own N tokens; higher scores are kept. No NaN inside the context.
        policy: The budget, and the protected tokens.
        context: The span ``(start, stop)`` that may be evicted, ``0 <= start <= stop <= N``.
    """
    layers, heads, tokens = scores.shape
    start, stop = context
    length = stop - start
    keep = torch.ones(layers, heads, tokens, dtype=torch.bool, device=scores.device)
    if length < max(policy.min_context, 1):
        return Selection(keep, 0)

    protected = torch.zeros(tokens, dtype=torch.bool, device=scores.device)
    protected[: policy.sink_tokens] = True
    protected[max(0, tokens - policy.recent_tokens) :] = True
    for first, last in policy.protected:
        protected[first:last] = True
    protected = protected[start:stop]
    protected_count = int(protected.sum())

    # Each group of heads has its own budget: one group of all heads, or one group per head.
    inside = scores[:, :, start:stop].reshape(layers * heads, length)
    inside = inside.to(torch.promote_types(inside.dtype, torch.float32), copy=True)
    inside.clamp_(max=torch.finfo(inside.dtype).max)  # infinity marks what is kept in any case
    groups = 1 if policy.allocation == "global" else layers * heads
    heads_per_group = layers * heads // groups
    budget = max(round(policy.tokens_per_head(length) * heads_per_group), heads_per_group)
    inside[:, protected] = math.inf
    if protected_count == 0 and groups == 1:  # the best KV pair of each head is kept in any case
        inside.scatter_(1, first_argmax(inside), math.inf)
    count = max(budget, protected_count * heads_per_group)
    kept = top_k_mask(inside.view(groups, heads_per_group * length), count)
    keep[:, :, start:stop] = kept.view(layers, heads, length)
    return Selection(keep, (count - budget) * groups)


def top_k_mask(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` largest scores of each row. Of equal scores, the earlier are marked.

    The threshold is selected and the row is scanned twice, which is linear in N, while a sort is not.

    Args:
        scores: `[R, N]`, without NaN.
        count: How many to mark, 1 to N.

    Returns: `[R, N]`, bool, with exactly ``count`` true values in each row.
    """
    threshold = scores.kthvalue(scores.shape[1] - count + 1, dim=1, keepdim=True).values  # [R, 1]
    above = scores > threshold
    ties = scores == threshold
    room = count - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1) <= room))


def first_argmax(scores: Tensor) -> Tensor:
    """`[R, N]` to `[R, 1]`: the first position of each row's maximum (``argmax`` may return any of them)."""
    is_max = scores == scores.amax(1, keepdim=True)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return places.masked_fill(~is_max, scores.shape[1]).amin(1, keepdim=True)


def pack_mask(mask: Tensor) -> Tensor:
    """`[..., N]` bool to `[..., ceil(N / 8)]` uint8, with the first position in the lowest bit."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8))
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=mask.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(packed: Tensor, tokens: int) -> Tensor:
    """The inverse of `pack_mask` for N = ``tokens``."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> bits) & 1).flatten(-2)[..., :tokens].bool()


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
