"""What a small model read, and what the target's own hidden states say: the mean of both log scores.

A proxy sees what a token means to those after it, and heads on hidden states what the target itself makes of it
(arXiv 2605.16360 and 2601.07891): each errs where the other need not. The price is that scores are there only when
the target's prefill is over, so that no layer can be pruned before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .base import Observation, ScorerRun, ScoringRequest, WholeCache
from .hidden_state import HiddenStateScorer
from .on_lane import LaneScorer

#: Weight of the hidden states' say; agreement with KVzip on held-out documents is flat from 0.25 to 0.4.
SHARE = 1 / 3


class JointScorer:
    """``(1 - share)`` times the proxy's log scores, and ``share`` times those of the hidden states.

    Args:
        proxy: The scorer of a small model, `ProxyScorer`.
        hidden_state: The scorer of trained heads.
        share: Of the hidden states, from 0 to 1.

    Raises:
        InvalidInputError: A share outside of 0 to 1.
    """

    name = "joint"
    observes = True

    def __init__(self, proxy: LaneScorer, hidden_state: HiddenStateScorer, share: float = SHARE) -> None:
        if not 0 <= share <= 1:
            raise InvalidInputError(f"share: expected a number from 0 to 1, got {share!r}")
        self.proxy, self.hidden_state, self.share = proxy, hidden_state, share
        self.lane = proxy.lane

    def begin(self, request: ScoringRequest) -> ScorerRun:
        """Launch the proxy, start to read hidden states, and return at once.

        Raises:
            GeometryError: Mapper or heads were trained for another target.
            InvalidInputError: A prompt that the proxy cannot read, see `LaneScorer.begin`.
        """
        return _JointRun(self, request)


class _JointRun(ScorerRun):
    def __init__(self, scorer: JointScorer, request: ScoringRequest) -> None:
        super().__init__()
        self._scorer, self._columns = scorer, request.prompt.columns
        self._own = scorer.hidden_state.begin(request)
        self._ahead = scorer.proxy.begin(request)

    def observe(self, observation: Observation) -> None:
        self._own.observe(observation)

    def ready(self) -> bool:
        return self._ahead.ready()

    def wait(self) -> None:
        self._ahead.wait()

    def finish(self, cache: WholeCache) -> Tensor:
        if cache.request.prompt.columns != self._columns:  # more chunks came, which the proxy has not read
            self._ahead.cancel()
            self._ahead = self._scorer.proxy.begin(cache.request)
        ahead, own = self._ahead.finish(cache), self._own.finish(cache)
        self.seconds, self.devices, self.bytes_peak = self._ahead.seconds, self._ahead.devices, self._ahead.bytes_peak
        return torch.lerp(ahead, own.to(ahead.device), self._scorer.share)

    def cancel(self) -> None:
        self._ahead.cancel()
        self._own.cancel()
