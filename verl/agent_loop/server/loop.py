"""``openai_agent``: a row is what a user's own agent does with the model, through an OpenAI-compatible endpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.failed import COLUMN, check_on_error, failed
from verl.agent_loop.parsers import ToolParser
from verl.agent_loop.server.agent import AgentFailure, Outcome, load_agent, run_agent
from verl.agent_loop.server.conversation import Conversation
from verl.agent_loop.server.endpoint import shared_endpoint
from verl.agent_loop.server.prompts import Prompts
from verl.agent_loop.server.record import Answer, trajectory
from verl.errors import ConfigError, RolloutError, suggest

SAMPLING = ("run", "request")
BRANCHES = ("error", "last")


class OpenAIAgentLoop(AgentLoopBase):
    """Calls ``agent(base_url, api_key, row)`` and makes a trajectory of the model calls that it makes.

    The agent returns a reward, None (the run's reward function scores the text), or a dict with ``score`` and further
    values of the row. What one conversation samples is one trajectory: mask 1 on sampled tokens only.

    Args:
        agent: ``file.py:name``, ``file.py`` or ``my_pkg.mod:name``; a plain or an async function.
        timeout: seconds for one agent; then the row has failed.
        on_error: ``mask`` leaves a failed row out of training and counts it, ``raise`` stops the run.
        branches: what becomes of calls that do not go on from one another: ``error`` fails the row, ``last`` trains on
            the last conversation and counts the sampled tokens that are left out.
        sampling: ``run`` samples with the run's settings whatever a request asks for, ``request`` follows requests.
        models: names under which the policy is served; ``*`` takes any.
        tool_format: parser of tool calls; None is ``rollout.multi_turn.format``.
        template_kwargs: arguments of the chat template.
    """

    def __init__(
        self,
        *args: Any,
        agent: str | None = None,
        timeout: float = 600.0,
        on_error: str = "mask",
        branches: str = "error",
        sampling: str = "run",
        models: Sequence[str] = ("policy",),
        tool_format: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        if not agent:
            raise ConfigError(
                "openai_agent needs to know which function to run",
                key="agent",
                allowed="file.py:name or my_pkg.mod:name",
                fix="Set it in the YAML file of rollout.agent.agent_loop_config_path.",
            )
        for key, value, allowed in (("sampling", sampling, SAMPLING), ("branches", branches, BRANCHES)):
            if value not in allowed:
                raise ConfigError("unknown value", key=key, got=value, allowed=allowed, fix=suggest(value, allowed))
        if not timeout > 0:
            raise ConfigError("must be positive", key="timeout", got=timeout, allowed="seconds")
        self.function, self.timeout, self.on_error = load_agent(agent), float(timeout), check_on_error(on_error)
        self.name = f"the agent {agent}"
        self.keep_last, self.follows_request = branches == "last", sampling == "request"
        self.models = (models,) if isinstance(models, str) else tuple(models)
        self.tool_format, self.template_kwargs = tool_format, dict(template_kwargs or {})

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        conversation = self._conversation(sampling_params)
        start = time.perf_counter()
        outcome: Outcome | AgentFailure
        async with shared_endpoint().open(conversation) as base_url:
            arguments = {
                "base_url": base_url,
                "api_key": conversation.key,
                "row": dict(kwargs),
                "model": self.models[0],
            }
            try:
                outcome = await run_agent(self.function, arguments, self.timeout)
            except AgentFailure as error:
                outcome = error
        if conversation.lost is not None:
            raise conversation.lost  # not the agent's fault: the batch ends as it does with any other loop
        output = await self._output(conversation, outcome, kwargs)
        client = conversation.client
        output.metrics.tool_calls = max(0.0, time.perf_counter() - start - client.seconds)
        return output

    def _conversation(self, sampling_params: dict[str, Any]) -> Conversation:
        client = self.server_manager
        name = self.tool_format or self.config.multi_turn.format
        kwargs = {**self._data_kwargs(), **self.template_kwargs}
        parameters = {**sampling_params, "seed": client.seed}
        return Conversation(
            client=client,
            sampling=parameters,
            budget=client.response_length,
            prompts=Prompts(self.tokenizer, kwargs),
            models=self.models,
            follows_request=self.follows_request,
            parser=ToolParser.get_tool_parser(name, self.tokenizer),
        )

    def _data_kwargs(self) -> dict[str, Any]:
        given = None if self.data_config is None else self.data_config.get("apply_chat_template_kwargs")
        return dict(given or {})

    async def _output(
        self, conversation: Conversation, outcome: Outcome | AgentFailure, row: dict[str, Any]
    ) -> AgentLoopOutput:
        record, error = conversation.record, outcome if isinstance(outcome, AgentFailure) else None
        last: Answer | None
        try:
            last, dropped = record.chosen(keep_last=self.keep_last or error is not None)
        except RolloutError as problem:
            last, dropped = (record.leaves[-1] if record.leaves else None), 0
            error = error or AgentFailure(str(problem))
        if last is None:
            output = AgentLoopOutput(await self.prompt_ids(row), [], [], [], token_versions=[], num_turns=1)
        else:
            output = trajectory(last)
        output.extra_fields = {
            "agent_calls": len(record.answers),
            "agent_dropped_tokens": dropped,
            "agent_overridden_requests": conversation.overridden,
            COLUMN: None,
        }
        if conversation.client.stop.is_set:
            output.finish_reason = "abort"
            return output
        if error is not None:
            return failed(output, self.name, error, self.on_error)
        assert isinstance(outcome, Outcome)
        output.extra_fields.update(outcome.extra)
        output.reward_score = outcome.reward
        return output
