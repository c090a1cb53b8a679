"""The Python tool at a Sandbox Fusion service, with the names that subclasses of upstream's tool use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from verl.errors import ConfigError
from verl.tools.python_interpreter import NOTHING, PythonInterpreterTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class SandboxFusionTool(PythonInterpreterTool):
    """`PythonInterpreterTool` whose ``config.sandbox_fusion_url`` must be there.

    Subclasses that run code themselves call `execute_code` in a thread; how many do so at once is bounded by the
    client of the service, so ``_async_semaphore`` never blocks and there is no pool of processes.
    """

    use_ray_execution_pool = False
    _async_semaphore: Any = nullcontext()

    def __init__(
        self, config: Mapping[str, Any] | None, tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ):
        if not dict(config or {}).get("sandbox_fusion_url"):
            raise ConfigError(
                "is missing",
                key="config.sandbox_fusion_url",
                allowed="http://host:port/run_code",
                fix="For the sandbox of this machine use verl.tools.python_interpreter.PythonInterpreterTool.",
            )
        super().__init__(config, tool_schema)
        self.default_timeout: float = self._settings["default_timeout"]
        self.default_language: str = self._settings["default_language"]

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """What the code prints; blocks. ``timeout`` in seconds."""
        assert self._remote is not None
        outcome = self._remote.speaking(language).run(code, limits=replace(self._limits, seconds=timeout))
        return outcome.describe() or NOTHING
