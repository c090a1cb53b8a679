"""Programs of models in the sandbox of this machine (`verl.sandbox`)."""

from __future__ import annotations

from verl.errors import NotBuiltError
from verl.rewards.execution import Outcome, Program


class LocalSandbox:
    """Runs programs in the warm pool of this machine's sandbox.

    Args:
        memory_mb: memory of one program.
    """

    def __init__(self, memory_mb: int | None = None):
        self.memory_mb = memory_mb

    def run(self, program: Program) -> Outcome:
        raise NotBuiltError(
            "running programs on this machine is not built yet",
            key="reward.sandbox_fusion.url",
            fix="Name a service that runs them.",
        )
