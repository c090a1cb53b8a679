"""Upstream's tool that runs code at a Sandbox Fusion service: the Python tool with a service's address."""

from typing import Any

from verl.errors import ConfigError
from verl.tools.python_interpreter import PythonInterpreterTool


class SandboxFusionTool(PythonInterpreterTool):
    """`PythonInterpreterTool` whose ``config.sandbox_fusion_url`` must be there."""

    def __init__(self, config: Any, tool_schema: Any = None):
        if not dict(config or {}).get("sandbox_fusion_url"):
            raise ConfigError(
                "is missing",
                key="config.sandbox_fusion_url",
                allowed="http://host:port/run_code",
                fix="For the sandbox of this machine use verl.tools.python_interpreter.PythonInterpreterTool.",
            )
        super().__init__(config, tool_schema)
