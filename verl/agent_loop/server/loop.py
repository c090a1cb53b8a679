"""``openai_agent``: a row is what a user's own agent does with the model, through an endpoint in the forms of
OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.batch import SEVERAL_WITH_PICTURES
from verl.agent_loop.failed import COLUMN, OnError, failed
from verl.agent_loop.parsers import ToolParser
from verl.agent_loop.server.agent import AgentFailure, AgentOutcome, AgentTimeoutError, run_agent
from verl.agent_loop.server.conversation import Conversation
from verl.agent_loop.server.endpoint import shared_endpoint
from verl.agent_loop.server.prompts import Prompts
from verl.agent_loop.server.record import Answer, trajectory
from verl.agent_loop.server.settings import AgentSettings
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import NotBuiltError, RolloutError
from verl.protocol.tokenizer import Tokenizer

STOP_POLL = 0.25


@dataclass(frozen=True)
class SharedEndpoint:
    """What all rows of an entry share."""

    settings: AgentSettings
    function: Callable[..., Any]
    parser: ToolParser
    template_kwargs: dict[str, Any]


class OpenAIAgentLoop(AgentLoopBase):
    """Calls ``agent(base_url, api_key, row)`` and makes a trajectory of the model calls that it makes.

    The agent returns a reward, None (the run's reward function scores the text), or a dict with ``score`` and further
    values of the row. What one conversation samples is one trajectory: mask 1 on sampled tokens only. `AgentSettings`
    says what the entry in the YAML file of ``rollout.agent.agent_loop_config_path`` may hold. Images of the row are the
    agent's to send; the trajectory has those that its calls had.
    """

    shared: SharedEndpoint

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> SharedEndpoint:
        settings = AgentSettings.read(kwargs)
        parser = ToolParser.get_tool_parser(settings.tool_format or config.multi_turn.format, tokenizer)
        of_data = None if data_config is None else data_config.get("apply_chat_template_kwargs")
        return SharedEndpoint(
            settings, settings.function(), parser, {**dict(of_data or {}), **settings.template_kwargs}
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        if self.server_manager.seen.videos:
            fix = "Give some of the frames as images, or use another agent loop for these rows."
            raise NotBuiltError("an agent cannot send videos yet, and the row has some", key="agent_name", fix=fix)
        if self.shared.settings.branches == "rows" and self.processor is not None:
            raise NotBuiltError(SEVERAL_WITH_PICTURES, key="branches", got="rows", allowed="error, last")
        conversation = self._conversation(sampling_params)
        start = time.perf_counter()
        async with shared_endpoint().open(conversation) as base_url:
            access = {"base_url": base_url, "api_key": conversation.key, "row": kwargs, "model": conversation.models[0]}
            outcome = await self._outcome(access)
        if conversation.lost is not None:
            raise conversation.lost  # not the agent's fault: the batch ends as it does with any other loop
        before = list(self._before(conversation, kwargs))
        output = await self._output(conversation, outcome, kwargs)
        output.metrics.tool_calls = max(0.0, time.perf_counter() - start - conversation.client.seconds)
        return [*before, output] if before else output

    async def _outcome(self, access: dict[str, Any]) -> AgentOutcome | AgentFailure:
        """What the agent returned or did wrong; it is ended early once no more is to be sampled for the batch."""
        work = asyncio.ensure_future(run_agent(self.shared.function, access, self.shared.settings.timeout))
        try:
            while not work.done() and not self.server_manager.stop.is_set:
                await asyncio.wait({work}, timeout=STOP_POLL)
            if not work.done():
                return AgentFailure("the batch ended without it")
            return work.result()
        except AgentFailure as error:
            return error
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def _conversation(self, sampling_params: dict[str, Any]) -> Conversation:
        client, shared, context = self.server_manager, self.shared, self.config.max_model_len
        if shared.settings.branches == "rows":
            longest = int(self.config.prompt_length) + client.response_length
            context = min(context or longest, longest)
        return Conversation(
            client=client,
            sampling={**sampling_params, "seed": client.seed},
            budget=client.response_length,
            prompts=Prompts(self.tokenizer, shared.template_kwargs),
            context=context,
            trains_on_all=shared.settings.branches == "rows",
            models=shared.settings.models,
            follows_request=shared.settings.sampling == "request",
            parser=shared.parser,
        )

    def _before(self, conversation: Conversation, row: dict[str, Any]) -> Iterator[AgentLoopOutput]:
        """Earlier trajectories, where they are rows; each sampled token is in one alone."""
        for leaf in conversation.record.leaves[:-1] if conversation.trains_on_all else ():
            output = trajectory(leaf, self._text, row, conversation.record.trained).output()
            output.num_turns = leaf.num_messages
            yield output

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids))

    async def _output(
        self, conversation: Conversation, outcome: AgentOutcome | AgentFailure, row: dict[str, Any]
    ) -> AgentLoopOutput:
        settings, record = self.shared.settings, conversation.record
        error = outcome if isinstance(outcome, AgentFailure) else None
        last: Answer | None
        try:
            last, dropped = record.chosen(keep_last=settings.branches != "error" or error is not None)
        except RolloutError as problem:
            last, dropped = (record.leaves[-1] if record.leaves else None), 0
            error = error or AgentFailure(str(problem))
        if last is None:
            data = AgentData(row, prompt_ids=await self.prompt_ids(row))
        else:
            data = trajectory(last, self._text, row, record.trained)
        data.metrics.add("rollout/agent/calls", len(record.answers), "mean")
        data.metrics.add("rollout/agent/dropped_tokens", 0 if conversation.trains_on_all else dropped, "sum")
        data.metrics.add("rollout/agent/overridden_requests", conversation.overridden, "sum")
        data.metrics.add("rollout/agent/failed", 0, "sum")
        output = data.output()
        if last is not None and self.server_manager.seen.processor is not None:
            output.multi_modal_data, output.multi_modal_inputs = self.server_manager.seen.of_trajectory(last.seen)
        output.num_turns = 1 if last is None else last.num_messages
        output.extra_fields[COLUMN] = None
        if conversation.client.stop.is_set:
            output.finish_reason = "abort"
            return output
        if error is not None:
            # A policy that fills its context or dawdles would escape a low score if that were masked.
            may_be_its_doing = conversation.is_full or isinstance(error, AgentTimeoutError)
            no_mask = last is not None and may_be_its_doing and settings.on_error == "mask"
            on_error: OnError = "zero" if no_mask else settings.on_error
            return failed(output, f"the agent {settings.agent}", error, on_error)
        assert isinstance(outcome, AgentOutcome)
        output.extra_fields.update(outcome.extra)
        output.reward_score = outcome.reward
        return output
