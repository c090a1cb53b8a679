"""The loop with tools: the model answers, its calls run, their answers come back, until it answers without a call.

Where a row has a simulated user (``interaction_kwargs``), an answer without a call goes to that user instead of ending
the trajectory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.client import within_response
from verl.agent_loop.extend import Extender, TemplateContinuationError, assistant_message, plain_message
from verl.agent_loop.failed import error_place
from verl.agent_loop.parsers import Malformed, Parsed, ToolParser
from verl.agent_loop.seen import NOTHING, ShownMedia
from verl.agent_loop.tool_calls import MOST_CHARACTERS, CallLimits, ToolCalls, ToolReply, openai_call, shortened
from verl.agent_loop.unfinished import PROCESS
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import MultiTurnConfig, RolloutConfig
from verl.errors import DataError, RolloutError, suggest
from verl.interactions.base import BaseInteraction, load_interactions
from verl.metrics import notice
from verl.observability.traces import traced
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.base import Completion
from verl.tools.base import BaseTool
from verl.tools.loading import load_tools
from verl.tools.runner import TimeLimit


@dataclass(frozen=True)
class TurnLimits:
    """Limits that end a conversation early: turns, seconds; and how its tokens are compared."""

    assistant: int | None
    user: int | None
    seconds: float | None
    comparison: str


@dataclass(frozen=True)
class ToolAgentParts:
    """What all trajectories share."""

    extender: Extender
    parser: ToolParser
    calls: ToolCalls
    users: Mapping[str, BaseInteraction]
    limits: TurnLimits

    @classmethod
    def build(
        cls, multi_turn: MultiTurnConfig, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None
    ) -> ToolAgentParts:
        """From the section ``multi_turn``."""
        extender = Extender(tokenizer, template_kwargs)
        limits = CallLimits(
            multi_turn.max_parallel_calls,
            multi_turn.max_tool_response_length,
            multi_turn.tool_response_truncate_side,
            multi_turn.tool_timeout,
        )
        tools = load_tools(multi_turn.tool_config_path, multi_turn.function_tool_path)
        parser = ToolParser.get_tool_parser(multi_turn.format, tokenizer)
        users = load_interactions(multi_turn.interaction_config_path)
        turns = TurnLimits(
            multi_turn.max_assistant_turns,
            multi_turn.max_user_turns,
            multi_turn.trajectory_timeout,
            multi_turn.tokenization_sanity_check_mode,
        )
        return cls(extender, parser, ToolCalls(tools, limits, extender.has_special), users, turns)


@dataclass
class SimulatedUser:
    """The simulated user of one trajectory."""

    user: BaseInteraction
    instance: str
    kwargs: dict[str, Any]


class ToolAgentLoop(AgentLoopBase):
    """A conversation with tools and a simulated user; see ``multi_turn`` for its limits.

    The row's columns that it reads: ``raw_prompt``; ``tools_kwargs``; ``interaction_kwargs``; ``tool_selection``, in
    the row or in ``extra_info``: names of the tools that this row has, all where it is missing.

    It resumes in a later batch with the turn in which it was left. What its tools and its user keep in memory is of the
    process: in another one, after a restart, a conversation that needs such memory starts again.
    """

    resumable = True
    shared: ToolAgentParts

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> ToolAgentParts:
        template_kwargs = None if data_config is None else dict(data_config.apply_chat_template_kwargs or {})
        return ToolAgentParts.build(config.multi_turn, tokenizer, template_kwargs)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        parts = self.shared
        names = tools_of_row(kwargs, list(parts.calls.tools))
        schemas = [parts.calls.tools[name].get_openai_tool_schema().for_template() for name in names]
        known = self._from_earlier()
        data = (
            self._begin(kwargs, schemas)
            if known is None
            else await AgentData.of_plain(kwargs, known["data"], self.server_manager.seen)
        )
        if known is None and self.unfinished is not None:
            data.metrics.add("rollout/partial/restarted", 1, "sum")
        simulated = None
        try:
            simulated = await self._simulated_user(data, None if known is None else known["user"])
            turns = self._turns(data, sampling_params, names, schemas, simulated)
            if not await ends_in_time(turns, parts.limits.seconds):
                # An answer that asks for something slow must not get its row out of the loss.
                _ended(data, "time_limit", "length" if data.assistant_turns else "abort")
        except UserFailed as error:
            notice(
                f"interaction {error.name}", f"failed: {error}. Such rows are masked; further ones are only counted."
            )
            _ended(data, "user_failed", "abort")
        finally:
            if not self._is_left:
                await parts.calls.finish(data)
                if simulated is not None:
                    await self._leave(data, simulated)
        if self._is_left:
            user = None if simulated is None else simulated.instance
            return replace(data.output(), unfinished={"process": PROCESS, "data": data.plain(), "user": user})
        self._compare(data, schemas)
        return data.output()

    @property
    def _is_left(self) -> bool:
        """Whether the conversation resumes in a later batch."""
        return self.server_manager.left is not None

    def _from_earlier(self) -> Mapping[str, Any] | None:
        """Where the conversation stood in an earlier batch; None for a new one, and for one that starts again."""
        state: Mapping[str, Any] | None = self.unfinished
        if state is None:
            return None
        tools = [self.shared.calls.tools[name] for name in state["data"]["instances"]]
        keeps_memory = state["user"] is not None or any(type(tool).create is not BaseTool.create for tool in tools)
        if state["process"] == PROCESS or not keeps_memory:
            return state
        notice(
            "actor_rollout_ref.rollout.keep_unfinished",
            "conversations whose tools or users keep something in memory start again: the process that had it is gone",
        )
        self.server_manager.restart()
        return None

    def _begin(self, row: dict[str, Any], schemas: Sequence[Any]) -> AgentData:
        if row.get("raw_prompt") is None:
            fix = "Set data.return_raw_chat=true."
            raise DataError("a row has no 'raw_prompt', which the loop with tools needs", got=sorted(row), fix=fix)
        data = AgentData(row, [dict(message) for message in row["raw_prompt"]], row.get("tools_kwargs") or {})
        data.seen = self.server_manager.seen
        data.prompt_ids = data.seen.prompt(self.shared.extender.prompt(data.messages, schemas))
        most = int(self.config.prompt_length)
        if len(data.prompt_ids) > most:
            reason = f"a prompt with its tools has {len(data.prompt_ids)} tokens, more than {most}; it is not cut"
            notice("data.max_prompt_length", reason)
        return data

    async def _turns(
        self,
        data: AgentData,
        sampling_params: Mapping[str, Any],
        names: Sequence[str],
        schemas: Sequence[Any],
        simulated: SimulatedUser | None,
    ) -> None:
        parts = self.shared
        while True:
            answer = await self._sample(data, sampling_params)
            if self._is_left:
                return
            data.add_sampled(answer)
            parsed = await self._parse(data, answer, schemas) if names else Parsed("")
            history, message = list(data.messages), self._message(answer, parsed)
            data.messages.append(message)
            data.record.append(
                transcript_entry("assistant", parts.extender.text(answer.token_ids), answer.token_ids, 1)
            )
            if self._is_over(data, answer):
                return
            shown = NOTHING
            if parsed.items:
                replies = await parts.calls.run(data, parsed.items, names, parts.parser.form)
                new, entry = [reply.message() for reply in replies], entry_of_calls(replies)
                shown = ShownMedia(tuple(one for reply in replies for one in reply.shown.media))
            elif simulated is not None:
                new, entry = await self._ask(data, simulated)
            else:
                _ended(data, "answer")
                return
            if not new:
                data.record.append(entry)
                return
            try:
                after = parts.extender.after(answer.token_ids, history, message, new, schemas)
            except TemplateContinuationError as error:
                data.record.append({**entry, "left_out": str(error)})
                notice("the chat template", f"a conversation ends because of it and is scored as it is: {error}")
                _ended(data, "template")
                return
            ids = data.seen.expanded(after, shown.images, shown.videos)
            if not self._fits(data, ids):
                data.record.append({**entry, "left_out": "it does not fit into the response"})
                _ended(data, "length", "length")
                return
            await data.seen.take(shown.media)  # a time limit here leaves nothing of the turn
            data.messages += new
            data.add_inserted(ids)
            data.record.append({**entry, "tokens": len(ids), "mask": 0})

    async def _sample(self, data: AgentData, sampling_params: Mapping[str, Any]) -> Completion:
        """The next answer; its budget is what is left of the response."""
        stops = [*(sampling_params.get("stop_token_ids") or ()), *self.shared.parser.stop_token_ids]
        parameters = {**within_response(sampling_params, len(data.response_ids)), "stop_token_ids": tuple(stops)}
        parameters["max_tokens"] = self._left(data)
        return await self.server_manager.generate(
            "tool_agent", prompt_ids=[*data.prompt_ids, *data.response_ids], sampling_params=parameters
        )

    async def _parse(self, data: AgentData, answer: Completion, schemas: Sequence[Any]) -> Parsed:
        """The answer's calls; one on which the parser fails is an answer with a malformed call."""
        parser = self.shared.parser
        try:
            return await parser.parse(answer.token_ids, schemas)
        except Exception as error:  # boundary: a user's parser
            name = type(parser).__name__
            notice(f"the tool-call parser {name}", f"failed: {type(error).__name__}: {error}{error_place(error)}")
            data.metrics.add("tool_calls/parser_failed", 1, "sum")
            return Parsed("", [Malformed("it is in no form that is known")])

    def _message(self, answer: Completion, parsed: Parsed) -> dict[str, Any]:
        calls = [openai_call(call, number) for number, call in enumerate(parsed.calls)]
        return assistant_message(self.shared.extender.text(answer.token_ids), parsed.content, calls)

    def _is_over(self, data: AgentData, answer: Completion) -> bool:
        """Whether no further turn may follow, whatever the answer says."""
        limits = self.shared.limits
        if answer.finish_reason != "stop":
            _ended(data, answer.finish_reason, answer.finish_reason)
        elif self._left(data) < 1:
            _ended(data, "length", "length")
        elif limits.assistant and data.assistant_turns >= limits.assistant:
            _ended(data, "max_assistant_turns")
        elif limits.user and data.user_turns >= limits.user:
            _ended(data, "max_user_turns")
        else:
            return False
        return True

    async def _simulated_user(self, data: AgentData, instance: str | None) -> SimulatedUser | None:
        """The row's simulated user, if it has one; it begins with the trajectory where it has no instance of it yet."""
        kwargs, users = dict(data.row.get("interaction_kwargs") or {}), self.shared.users
        if not users or not kwargs:
            return None
        name = str(kwargs.get("name") or (next(iter(users)) if len(users) == 1 else ""))
        if name not in users:
            fix = suggest(name, users)
            raise DataError("no such simulated user", key="interaction_kwargs.name", got=name, allowed=users, fix=fix)
        if instance is None:
            instance = await self._with_user(users[name], users[name].start_interaction, **kwargs)
        return SimulatedUser(users[name], instance, kwargs)

    async def _ask(self, data: AgentData, simulated: SimulatedUser) -> tuple[list[Any], dict[str, Any]]:
        """What the simulated user says; nothing where the conversation is over."""
        messages = [plain_message(message) for message in data.messages]
        user = simulated.user
        with traced(f"user {user.name}", "user", {"messages": messages}) as call:
            answer = await self._with_user(
                user, user.generate_response, simulated.instance, messages, **simulated.kwargs
            )
            if call is not None:
                call.returns(answer)
        try:
            is_over, text, score, metrics = answer
            data.turn_scores.append(float(score))
        except (TypeError, ValueError) as error:
            raise UserFailed(user.name, f"it returned {answer!r:.200}, not (is over, text, score, metrics)") from error
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                data.metrics.add(f"interaction/{user.name}/{name}", float(value), "mean")
        reply = shortened(str(text), MOST_CHARACTERS, "left")
        data.metrics.add(f"interaction/{user.name}/truncated_answers", int(len(reply) < len(str(text))), "sum")
        entry = {"role": "user", "text": reply, "score": float(score)}
        if is_over:
            _ended(data, "user")
            return [], entry
        return [{"role": "user", "content": reply}], entry

    async def _leave(self, data: AgentData, simulated: SimulatedUser) -> None:
        user = simulated.user
        try:
            score = await self._with_user(user, user.calculate_score, simulated.instance)
            data.reward_scores[user.name] = float(score)
            await self._with_user(user, user.finalize_interaction, simulated.instance)
        except (UserFailed, TypeError, ValueError) as error:
            notice(f"interaction {user.name}", f"failed at the end: {error}")

    async def _with_user(self, user: BaseInteraction, method: Any, *arguments: Any, **named: Any) -> Any:
        calls = self.shared.calls
        try:
            return await calls.runner.run(functools.partial(method, *arguments, **named), calls.limits.seconds)
        except TimeLimit as error:
            raise UserFailed(user.name, str(error)) from error
        except Exception as error:  # boundary: a user's simulated user
            raise UserFailed(user.name, f"{type(error).__name__}: {error}") from error

    def _left(self, data: AgentData) -> int:
        """How many tokens the response may still have."""
        left = int(self.config.response_length) - len(data.response_ids)
        if self.config.max_model_len:
            left = min(left, int(self.config.max_model_len) - len(data.prompt_ids) - len(data.response_ids))
        return left

    def _fits(self, data: AgentData, ids: Sequence[int]) -> bool:
        """Whether these tokens can be put in and at least one can be sampled after them."""
        return len(ids) < self._left(data)

    def _compare(self, data: AgentData, schemas: Sequence[Any]) -> None:
        """Report where the conversation rendered again would have other tokens than those that were sampled."""
        mode = self.shared.limits.comparison
        if mode == "disable" or not data.response_ids:
            return
        recorded = [*data.prompt_ids, *data.response_ids]
        difference = self.shared.extender.difference(recorded, data.messages, schemas, data.seen.prompt)
        counts = difference is not None and not (mode == "ignore_strippable" and difference.only_space)
        data.metrics.add("agent_loop/rendered_differently", float(counts), "mean")
        if counts:
            notice(
                "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode",
                f"{difference}. What was sampled is what is trained on; agent_loop/rendered_differently counts such "
                "conversations.",
            )


class UserFailed(RolloutError):
    """A simulated user raised, hung, or returned something else than its contract says."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


def tools_of_row(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The tools that a row has.

    Raises:
        DataError: it names one that there is not.
    """
    extra = row.get("extra_info")
    selection = row.get("tool_selection")
    if selection is None and isinstance(extra, Mapping):
        selection = extra.get("tool_selection")
    if selection is None:
        return list(names)
    selected_names = [selection] if isinstance(selection, str) else [str(name) for name in selection]
    unknown = [name for name in selected_names if name not in names]
    if unknown:
        raise DataError(
            "a row selects a tool that there is not",
            key="tool_selection",
            got=unknown[0],
            allowed=list(names),
            fix=suggest(unknown[0], names),
        )
    return [name for name in names if name in selected_names]


async def ends_in_time(work: Coroutine[Any, Any, None], seconds: float | None) -> bool:
    """Whether the work ended in time; what is not done then is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            task.result()
            return True
        return False
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def transcript_entry(role: str, text: str, ids: Sequence[int], mask: int) -> dict[str, Any]:
    """A piece of the conversation for people."""
    return {"role": role, "text": text, "tokens": len(ids), "mask": mask}


def entry_of_calls(replies: Sequence[ToolReply]) -> dict[str, Any]:
    """The answers of a turn's tools for people."""
    return {"role": "tool", "calls": [reply.entry() for reply in replies]}


def _ended(data: AgentData, why: str, finish_reason: str | None = None) -> None:
    data.metrics.add(f"agent_loop/ended/{why}", 1, "sum")
    data.extra_fields["ended"] = why
    if finish_reason is not None:
        data.finish_reason = finish_reason
