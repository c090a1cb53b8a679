"""Environments of ``verifiers`` (Prime Intellect), unmodified: their own rollout and rubric, at the run's endpoint.

https://docs.primeintellect.ai/verifiers (environments with a ``load_environment``, which version 0.4 no longer loads).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from verl.agent_loop.envs.adapter import EnvironmentFailure
from verl.agent_loop.parsers import ToolParser
from verl.agent_loop.server.agent import AgentTimeoutError
from verl.agent_loop.server.loop import OpenAIAgentLoop, SharedEndpoint
from verl.agent_loop.server.settings import AgentSettings
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data.messages import prune
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice
from verl.protocol.tokenizer import Tokenizer
from verl.tools.runner import TimeLimit, runner

INSTALL = "pip install 'verifiers>=0.3,<0.4'"
POLICY_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError", "ToolParseError", "ToolCallError")
"""Errors that a policy's answer brings about: the rubric's score counts. A conversation that is full is none for
``verifiers``, which reads "context length" in the endpoint's refusal."""
GRACE_SECONDS = 5.0
"""What the endpoint waits beyond the time limit, for the answer that the limit was exceeded."""
REWARD_ERRORS = "verifiers/reward_errors"
"""Column: how many times a reward function raised, which ``verifiers`` logs and scores 0."""
_ERRORS: ContextVar[list[str] | None] = ContextVar("errors", default=None)
"""What reward functions of the current rollout raised."""


class VerifiersAgentLoop(OpenAIAgentLoop):
    """Plays ``vf.load_environment(environment, **environment_kwargs)`` with the rows of its ``get_dataset()``.

    The entry in the YAML file has these two names and those of `AgentSettings` without ``agent``. The rubric's reward
    is the row's; its metrics are the columns ``verifiers/<name>``.
    """

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: object
    ) -> SharedEndpoint:
        name, arguments = kwargs.pop("environment", None), kwargs.pop("environment_kwargs", None) or {}
        if not isinstance(name, str) or not name or not isinstance(arguments, Mapping) or "agent" in kwargs:
            allowed = "the id of an installed environment, its environment_kwargs by name, and no agent"
            raise ConfigError("a verifiers loop needs to know its environment", key="environment", allowed=allowed)
        settings = AgentSettings.read({**kwargs, "agent": name})
        of_data = {} if data_config is None else dict(data_config.get("apply_chat_template_kwargs") or {})
        parser = ToolParser.get_tool_parser(settings.tool_format or config.multi_turn.format, tokenizer)
        rollouts = VerifiersRollouts(_load(name, arguments), settings.timeout)
        settings = replace(settings, timeout=settings.timeout + GRACE_SECONDS)
        return SharedEndpoint(settings, rollouts, parser, {**of_data, **settings.template_kwargs})


@dataclass
class VerifiersRollouts:
    """The agent that the endpoint runs: one rollout of the environment.

    All run on the tools' event loop, because environments keep connections of theirs open.

    Args:
        environment: a ``vf.Environment``.
        timeout: seconds of a rollout with its scoring.
    """

    environment: Any
    timeout: float

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, object], model: str) -> dict[str, object]:
        """The reward as ``score``, and the metrics.

        Args:
            row: all columns; those of the environment's dataset are what its rollout begins with.

        Raises:
            EnvironmentFailure: the environment failed, or its rubric gave no reward.
            AgentTimeoutError: the rollout took longer than ``timeout``.
            ConfigError: the row is not one of the environment's.
        """
        if row.get("example_id") is None:
            fix = "Write the file with load_environment(...).get_dataset().to_parquet(path)."
            raise ConfigError("a row of a verifiers environment has no example_id", key="data.train_files", fix=fix)
        try:
            return await runner().run(partial(self._rollout, base_url, api_key, row, model), self.timeout)
        except TimeLimit as limit:
            raise AgentTimeoutError(f"a rollout took longer than {limit.seconds:g} s and was given up") from limit

    async def _rollout(self, base_url: str, api_key: str, row: Mapping[str, object], model: str) -> dict[str, object]:
        errors: list[str] = []
        _ERRORS.set(errors)
        columns = {name: value for name, value in row.items() if not name.startswith("raw_prompt")}
        start, environment = prune({**columns, "prompt": row["raw_prompt"]}), self.environment
        async with import_module("openai").AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            endpoint = import_module("verifiers").OpenAIChatCompletionsClient(client)
            output = await environment.run_rollout(start, endpoint, model, environment.sampling_args)
        error = output.get("error")
        if error is not None and error["error"] not in POLICY_ERRORS:
            raise EnvironmentFailure(f"the rollout ended with {error['error_chain_repr']}")
        if output.get("reward") is None:
            raise EnvironmentFailure("its rubric gave no reward")
        if errors:
            notice("a reward function", f"raised and scores 0: {errors[0]}; {REWARD_ERRORS} counts it")
        metrics = {f"verifiers/{name}": value for name, value in (output.get("metrics") or {}).items()}
        return {"score": output["reward"], **metrics, REWARD_ERRORS: len(errors)}


class _RewardErrors(logging.Handler):
    """Collects what ``verifiers`` only logs: that a reward function raised."""

    def emit(self, record: logging.LogRecord) -> None:
        errors = _ERRORS.get()
        if errors is not None and ".rubrics." in record.name and record.levelno >= logging.ERROR:
            errors.append(record.getMessage())


def _load(name: str, arguments: Mapping[str, object]) -> object:
    try:
        load = import_module("verifiers").load_environment
    except (ModuleNotFoundError, AttributeError) as error:
        if error.name not in ("verifiers", "load_environment"):
            raise
        what = "no verifiers with a load_environment is installed"
        raise ConfigError(what, key="environment", got=name, fix=INSTALL) from error
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        environment = load(name, **arguments)
    finally:  # an environment takes both signals, which are the run's
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
    if environment.requires_group_rollouts:
        what = "its rubric compares the rollouts of a prompt, and rows are scored one by one"
        raise NotBuiltError(what, key="environment", got=name, fix="Use an environment with a reward per rollout.")
    logger = logging.getLogger("verifiers")
    if not any(isinstance(handler, _RewardErrors) for handler in logger.handlers):
        logger.addHandler(_RewardErrors())
    return environment
