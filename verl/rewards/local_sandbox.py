"""Programs of models in the sandbox of this machine (`verl.sandbox`), one fresh process for each."""

from __future__ import annotations

from verl.rewards.execution import Outcome, Program, Status
from verl.sandbox import Limits, default_pool

MEMORY_MB = 1024
OUTPUT_KB = 1024
STATUS: dict[str, Status] = {"ok": "finished", "timeout": "timeout"}
NOT_COMPILED = ("SyntaxError:", "IndentationError:", "TabError:")


class LocalSandbox:
    """Runs programs in the pool of this process.

    Args:
        memory_mb: memory of one program.
    """

    def __init__(self, memory_mb: int | None = None):
        self.memory_mb = memory_mb or MEMORY_MB

    def run(self, program: Program) -> Outcome:
        """Run a program; raises the sandbox's own error where this machine offers none."""
        limits = Limits(program.seconds, program.memory_mb or self.memory_mb, output_kb=OUTPUT_KB)
        found = default_pool().run(program.code, program.stdin, limits)
        status = STATUS.get(found.status, "failed")
        last = found.stderr.strip().rpartition("\n")[2]
        if found.status == "error" and last.startswith(NOT_COMPILED) and "Traceback" not in found.stderr:
            status = "not compiled"
        return Outcome(status, found.stdout, found.stderr or found.detail)

    def check(self) -> None:
        """Start the pool, so that a missing layer is told before a run and not in the middle of it."""
        default_pool().prepare()
