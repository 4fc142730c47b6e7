"""A scorer that records what the cache shows it and which of its methods the cache calls."""

from __future__ import annotations

from torch import Tensor

from proxykv_hf import ScorerRun
from proxykv_hf.scorers.base import Observation, ScoringRequest


class Watcher:
    """Records observations in ``shown`` and calls in ``events``, and returns the given scores `[R, L, H, N]`."""

    name = "watcher"
    observes = True

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.shown, self.events = scores, [], []

    def begin(self, request: ScoringRequest) -> ScorerRun:
        watcher = self
        watcher.events.append("begin")

        class Run(ScorerRun):
            def observe(self, observation: Observation) -> None:
                watcher.shown.append(observation)

            def finish(self, cache):
                watcher.events.append("finish")
                self.seconds["proxy"] = 1.5
                self.devices["proxy"] = "abacus"
                return watcher.scores

            def cancel(self) -> None:
                watcher.events.append("cancel")

        return Run()
