"""Python as a tool: what a model writes runs in the sandbox of this machine, or at a service; its output comes back.

The sandbox is started when the tool is loaded, so that a machine that cannot offer one stops the run before it begins.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from verl.errors import ConfigError
from verl.sandbox import Limits, Outcome, Pool, RemoteSandbox, Session, check
from verl.tools.base import BaseTool, Executed
from verl.tools.limits import share_of
from verl.tools.runner import in_thread
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.settings import read_settings

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs Python code and returns what it prints, and the value of its last line.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
    },
}
DEFAULTS: dict[str, Any] = {
    "stateful": False,
    "default_timeout": 10.0,
    "memory_limit_mb": 512,
    "max_output_kb": 64,
    "num_workers": 0,
    "packages": True,
    "preload": [],
    "allow_missing": [],
    "sandbox_fusion_url": None,
    "rate_limit": 10,
    "default_language": "python",
}
NOTHING = "(no output)"
CHECK_SECONDS = 10.0
_FENCE = re.compile(r"\A\s*```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:\n```\s*)?\Z", re.DOTALL)


class PythonInterpreterTool(BaseTool):
    """Runs the argument ``code``.

    ``config``, all optional:

    - ``stateful``: variables and files stay from call to call of one trajectory (default: each call starts afresh).
    - ``default_timeout``: seconds of one call; ``memory_limit_mb``, ``max_output_kb``: its other limits.
    - ``num_workers``: programs at once; default: one per core.
    - ``packages``: whether installed packages can be imported; ``preload``: modules that are imported beforehand.
    - ``allow_missing``: layers of the sandbox that this machine may lack (``namespaces``, ``landlock``, ``seccomp``).
    - ``sandbox_fusion_url``: run at a service instead, with ``default_language``, ``rate_limit`` programs at
      once in the run.

    Raises:
        SandboxRefused: this machine lacks a layer that may not be missing.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ):
        super().__init__(config, tool_schema)
        self._settings = settings = read_settings(self.name, self.config, DEFAULTS)
        self._limits = Limits(
            seconds=settings["default_timeout"],
            memory_mb=settings["memory_limit_mb"],
            output_kb=settings["max_output_kb"],
        )
        self._sessions: dict[str, Session] = {}
        self._pool: Pool | None = None
        self._remote: RemoteSandbox | None = None
        if settings["sandbox_fusion_url"]:
            self._remote = self._connect(settings)
        else:
            self._pool = pool = Pool(
                settings["num_workers"] or None,
                allow_missing=settings["allow_missing"],
                packages=settings["packages"],
                preload=settings["preload"],
            )
            limits = replace(self._limits, seconds=CHECK_SECONDS)
            check(lambda code, stdin: pool.run(code, stdin, limits))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        name = instance_id or str(uuid.uuid4())
        if self._settings["stateful"] and self._pool is not None:
            self._sessions[name] = Session(self._pool, self._limits)
        return name, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        """Run one call. Metrics: ``error`` is 1 where it did not end by itself with exit code 0; ``seconds``."""
        code = parameters.get("code")
        if not isinstance(code, str):
            return ToolResponse(text='Error: "code" has to be text'), None, {"error": 1.0}
        outcome = await in_thread(self._run, instance_id, _without_fence(code))
        metrics = {
            "error": float(not outcome.ok),
            "timeout": float(outcome.status == "timeout"),
            "seconds": outcome.seconds,
        }
        return ToolResponse(text=outcome.describe() or NOTHING), None, metrics

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        session = self._sessions.pop(instance_id, None)
        if session is not None:
            await in_thread(session.close)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _run(self, instance_id: str, code: str) -> Outcome:
        if self._pool is None:
            assert self._remote is not None
            return self._remote.run(code, limits=self._limits)
        session = self._sessions.get(instance_id)
        if session is not None:
            return session.run(code)
        with Session(self._pool, self._limits) as session:
            return session.run(code)

    def _connect(self, settings: Mapping[str, Any]) -> RemoteSandbox:
        key = f"{self.name}.config.sandbox_fusion_url"
        if settings["stateful"]:
            raise ConfigError("a sandbox service keeps no variables", key=key, fix="Leave out stateful.")
        most, language = share_of(settings["rate_limit"]), settings["default_language"]
        return RemoteSandbox(settings["sandbox_fusion_url"], most, language, key)


def _without_fence(code: str) -> str:
    """Models often wrap their code in a Markdown fence."""
    match = _FENCE.match(code)
    return match.group(1) if match else code
