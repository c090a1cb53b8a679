"""What a YAML entry may say about ``openai_agent``, checked once before the first row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.agent_loop.failed import OnError, check_on_error
from verl.agent_loop.server.agent import load_agent
from verl.agent_loop.settings import PLACES, known_arguments, positive
from verl.errors import ConfigError, suggest

SAMPLING = ("run", "request")
BRANCHES = ("error", "last", "rows")


@dataclass(frozen=True)
class AgentSettings:
    """How a user's agent is run.

    Args:
        agent: ``file.py:name``, ``file.py`` or ``my_pkg.mod:name``; a plain or an async function.
        timeout: seconds for one agent; then the row has failed.
        on_error: ``mask`` leaves a failed row out of training and counts it, ``zero`` gives it the score 0, ``raise``
            stops the run. What the policy may bring about, a full response or a time-out, is 0 instead of masked.
        branches: what becomes of calls that do not continue one another: ``error`` fails the row, ``last`` trains on
            the last conversation and counts the sampled tokens that are left out, ``rows`` makes each a row
            of the batch (each sampled token once), with the score of the last.
        sampling: ``run`` samples with the run's settings whatever a request asks for, ``request`` follows requests.
        models: names under which the policy is served; ``*`` takes any.
        tool_format: parser of tool calls; None is ``rollout.multi_turn.format``.
        template_kwargs: arguments of the chat template.
    """

    agent: str
    timeout: float = 600.0
    on_error: OnError = "mask"
    branches: str = "error"
    sampling: str = "run"
    models: tuple[str, ...] = ("policy",)
    tool_format: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> AgentSettings:
        """From the entry's arguments.

        Raises:
            ConfigError: an unknown one, or a value that cannot work.
        """
        known_arguments(entry, cls, "agent", "openai_agent needs to know which function to run", PLACES)
        values = dict(entry)
        for key, allowed in (("sampling", SAMPLING), ("branches", BRANCHES)):
            value = values.get(key, allowed[0])
            if value not in allowed:
                raise ConfigError("unknown value", key=key, got=value, allowed=allowed, fix=suggest(value, allowed))
        models = values.get("models") or cls.models
        values["models"] = (models,) if isinstance(models, str) else tuple(str(model) for model in models)
        values["timeout"] = positive(values.get("timeout", cls.timeout), "timeout")
        values["on_error"] = check_on_error(values.get("on_error", cls.on_error))
        values["template_kwargs"] = dict(values.get("template_kwargs") or {})
        return cls(**values)

    def function(self) -> Callable[..., Any]:
        """The agent itself."""
        return load_agent(self.agent)
