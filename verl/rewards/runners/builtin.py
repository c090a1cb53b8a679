"""The built-in scorers: most answer at once, in place; those that wait for another process wait in threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future

from verl.rewards.dispatch import waits
from verl.rewards.function import RewardFunction
from verl.rewards.gate import OPEN, CallGate
from verl.rewards.runners.base import InlineRunner, Results, Runner
from verl.rewards.runners.thread import ThreadRunner
from verl.rewards.samples import RewardSample


class BuiltinRunner(Runner):
    """Each call has one sample. Those that wait are at once as many as there are cores, or places of a service.

    None has a time limit here: the processes that compare formulas and run programs keep it, from when they begin with
    a sample. So an answer that waits for its turn behind slow ones loses nothing.
    """

    def __init__(self, function: RewardFunction, gate: CallGate = OPEN):
        settings = function.reward_kwargs
        places = settings.get("max_concurrent", 64) if settings.get("sandbox_fusion_url") else 0
        self._inline = InlineRunner(function, gate)
        self.call = self._inline.call
        self._threads = ThreadRunner(function, None, places or len(os.sched_getaffinity(0)), gate)

    def submit(self, samples: Sequence[RewardSample]) -> Future[Results]:
        runner = self._threads if self.waits(samples[0]) else self._inline
        return runner.submit(samples)

    @staticmethod
    def waits(sample: RewardSample) -> bool:
        """Whether scoring it takes more than a moment of this process."""
        return waits(sample.data_source)

    def close(self) -> None:
        self._threads.close()
