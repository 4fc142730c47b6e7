"""What a cache has used, and the report that `ProxyPrunedCache.report` makes of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .layers import PrunedLayer


@dataclass
class Usage:
    """What a cache has used so far; see `CacheReport` for the fields."""

    devices: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_peak: int = 0
    bytes_peak_proxy: int = 0
    fallback: str | None = None

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def note_peak(self, held: int) -> None:
        """Note that ``held`` bytes are held now, and raise the peak if they are more."""
        self.bytes_peak = max(self.bytes_peak, held)

    def fork(self) -> Usage:
        """What a copy of the cache starts with: the same figures, except for the memory peak, which starts at 0."""
        return dataclasses.replace(self, devices=dict(self.devices), seconds=dict(self.seconds), bytes_peak=0)


@dataclass(frozen=True)
class CacheReport:
    """The tokens, bytes and seconds of a cache.

    Args:
        seen_tokens: `[B]`, the tokens that the model has seen in each row: the prompt without padding, and all tokens
            after it.
        kept_tokens: `[B][L_full][H]`, the tokens that are held in each row, full-attention layer and head.
        bytes_full: Bytes that a `DynamicCache` of the same tokens holds.
        bytes_kept: Bytes that this cache holds. Slack is included, and memory that rows share counts once.
        bytes_peak: The most bytes that the cache has held at any time. During the prefill this includes the K and V
            that a layer has just computed.
        bytes_peak_proxy: The most bytes that the scorer's proxy has held: features, KV pairs and scores, without
            weights and temporary activations.
        seconds: Seconds by phase: ``prefill``, ``wait`` (for scores), ``prune``, ``decode`` (on CUDA only until the
            work is launched), and the phases that the scorer adds (``proxy``, ``mapper``).
        devices: The device of each model, by ``target`` and ``proxy``.
        fallback: Why the cache is uncompressed although it was to be pruned (scoring failed, for example), or None.
    """

    seen_tokens: list[int]
    kept_tokens: list[list[list[int]]]
    bytes_full: int
    bytes_kept: int
    bytes_peak: int
    bytes_peak_proxy: int
    seconds: dict[str, float]
    devices: dict[str, str]
    fallback: str | None

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        kept = [sum(map(sum, row)) for row in self.kept_tokens]
        full = [seen * sum(map(len, row)) for seen, row in zip(self.seen_tokens, self.kept_tokens, strict=True)]
        share = sum(kept) / sum(full) if sum(full) else 1.0
        lines = [
            f"tokens   {_join(self.seen_tokens) or 'none'} seen, {100 * share:.1f} % of their KV pairs kept",
            f"KV       {_size(self.bytes_kept)} of {_size(self.bytes_full)}, peak {_size(self.bytes_peak)}"
            + (f", the proxy's {_size(self.bytes_peak_proxy)}" if self.bytes_peak_proxy else ""),
            "seconds  " + ", ".join(f"{phase} {value:.2f}" for phase, value in self.seconds.items()),
            "devices  " + ", ".join(f"{part} on {device}" for part, device in self.devices.items()),
        ]
        if self.fallback is not None:
            lines.append(f"fallback uncompressed: {self.fallback}")
        return "\n".join(lines)


def bytes_if_whole(layer: Any) -> int:
    """Bytes that a layer would hold if it had kept everything it has seen."""
    if not layer.is_initialized:
        return 0
    if not isinstance(layer, PrunedLayer):
        return int(layer.keys.nbytes + layer.values.nbytes)
    assert layer.storage is not None
    keys, values = layer.storage.keys, layer.storage.values
    per_token = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
    return int(keys.shape[0] * layer.get_seq_length() * per_token)


def _join(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, … ({len(numbers)} rows)"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
