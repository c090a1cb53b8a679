"""Runs the calls of an answer: every fault of a model or of a tool becomes text for the model, and is counted."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.parsers import FunctionCall, Malformed
from verl.agent_loop.seen import NOTHING, SeenImages, ShownMedia
from verl.data.vision.videos import VideoClip
from verl.errors import suggest
from verl.json_text import read_json
from verl.metrics import notice
from verl.observability.traces import traced
from verl.tools.base import BaseTool
from verl.tools.runner import TimeLimit, ToolRunner, in_thread, runner
from verl.tools.schemas import ToolResponse

CUT = "...(truncated)..."
MOST_CHARACTERS = 1 << 16
"""Of what an environment or a simulated user says at a time; answers of tools have a setting."""


@dataclass(frozen=True)
class CallLimits:
    """What a turn's calls may take.

    Args:
        parallel: calls that run per turn; the rest is answered with that.
        length: characters that are kept of an answer; ``side`` says which: its beginning (left), its end (right), both
            (middle).
        seconds: until a call is given up; None: never.
    """

    parallel: int = 1
    length: int = 256
    side: str = "middle"
    seconds: float | None = None


@dataclass(frozen=True)
class ToolReply:
    """The answer to one call."""

    name: str
    text: str
    arguments: Any = None
    call_id: str | None = None
    reward: float | None = None
    seconds: float = 0.0
    fault: str = ""
    shown: ShownMedia = NOTHING

    def message(self) -> dict[str, Any]:
        """The answer as a message; its images and videos stand before its text."""
        message = {"role": "tool", "content": self.shown.content(self.text), "name": self.name}
        return {**message, "tool_call_id": self.call_id} if self.call_id else message

    def entry(self) -> dict[str, Any]:
        """The answer for people."""
        entry = {"name": self.name, "arguments": self.arguments, "answer": self.text, "reward": self.reward}
        fault = {"fault": self.fault} if self.fault else {}
        return {**entry, "seconds": round(self.seconds, 4), **fault, **self.shown.entry()}


class ToolCallError(Exception):
    """A call that has no proper answer; the text is for the model, ``kind`` for the metrics."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


class ToolCalls:
    """Runs calls of all trajectories.

    Args:
        tools: by name.
        limits: per turn and call.
        has_special: whether a text holds special tokens of the policy.
    """

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        limits: CallLimits,
        has_special: Callable[[str], bool] = lambda text: False,
        where: ToolRunner | None = None,
    ):
        self.tools, self.limits, self.has_special, self.runner = dict(tools), limits, has_special, where or runner()

    async def run(
        self, data: AgentData, items: Sequence[FunctionCall | Malformed], names: Sequence[str], form: str = ""
    ) -> list[ToolReply]:
        """The answers to the calls of one turn, in their order.

        Args:
            names: tools that this row may call.
            form: how a call is written, for what a malformed one is answered with.
        """
        start = time.perf_counter()
        taken, rest = list(items[: self.limits.parallel]), len(items) - self.limits.parallel
        data.tool_call_count += sum(isinstance(item, FunctionCall) for item in taken)
        await self._create(data, taken, names)
        replies = list(await asyncio.gather(*(self._answer(data, item, names, form) for item in taken)))
        if rest > 0:
            data.metrics.add("tool_calls/beyond_parallel_limit", rest, "sum")
            most = "1 call runs" if self.limits.parallel == 1 else f"{self.limits.parallel} calls run"
            replies.append(ToolReply("", f"Error: at most {most} per turn; {rest} more did not run.", fault="limit"))
        data.tool_seconds += time.perf_counter() - start
        return replies

    async def finish(self, data: AgentData) -> None:
        """Ask for the rewards of the instances, and release them, whatever happened before."""
        for name, instance in data.instances.items():
            tool, kwargs = self.tools[name], _row_kwargs(data, name)
            with self._boundary(data, name, "calc_reward"):
                reward = await self._run(tool.calc_reward, instance, **(kwargs.get("calc_reward_kwargs") or {}))
                if reward is not None:
                    data.reward_scores[name] = _finite(reward)
            with self._boundary(data, name, "release"):
                await self._run(tool.release, instance, **(kwargs.get("release_kwargs") or {}))
        data.instances = {}

    async def _create(self, data: AgentData, items: Sequence[Any], names: Sequence[str]) -> None:
        """Make the instances that a turn's calls need and the trajectory does not have."""
        called = {item.name for item in items if isinstance(item, FunctionCall)}
        for name in sorted(called & set(names) - set(data.instances)):
            tool = self.tools[name]
            kwargs = dict(_row_kwargs(data, name).get("create_kwargs") or {})
            argument = {"create_kwargs": kwargs} if takes(tool.create, "create_kwargs") else {}
            with self._boundary(data, name, "create"):
                created = await self._run(tool.create, **{**kwargs, **argument})
                data.instances[name] = created[0] if isinstance(created, tuple) else created

    async def _answer(self, data: AgentData, item: Any, names: Sequence[str], form: str) -> ToolReply:
        with traced(f"tool {getattr(item, 'name', '')}".strip(), "tool", {"call": item}) as call:
            reply = await self._reply(data, item, names, form)
            if call is not None:
                call.returns(reply.entry())
        return reply

    async def _reply(self, data: AgentData, item: Any, names: Sequence[str], form: str) -> ToolReply:
        start = time.perf_counter()
        name = item.name if isinstance(item, FunctionCall) else ""
        call_id = item.tool_call_id if isinstance(item, FunctionCall) else None
        arguments: Any = item.arguments if isinstance(item, FunctionCall) else None
        try:
            if isinstance(item, Malformed):
                hint = f" Write a call as {form}" if form else ""
                raise ToolCallError("malformed", f"the tool call could not be read: {item.reason}.{hint}")
            arguments = self._arguments(item, names)
            text, shown, reward = await self._execute(data, name, arguments)
            kind = ""
        except ToolCallError as fault:
            text, shown, reward, kind = f"Error: {fault}", NOTHING, None, fault.kind
        seconds = time.perf_counter() - start
        data.metrics.add(f"tool_calls/{kind or 'answered'}", 1, "sum")
        if name in self.tools:
            data.metrics.add(f"tool_calls/{name}/count", 1, "sum")
            data.metrics.add(f"tool_calls/{name}/failed", float(bool(kind)), "mean")
            data.metrics.add(f"tool_calls/{name}/seconds", seconds, "mean")
        return ToolReply(name, self._shortened(data, text), arguments, call_id, reward, seconds, kind, shown)

    def _arguments(self, call: FunctionCall, names: Sequence[str]) -> dict[str, Any]:
        if call.name not in names:
            raise ToolCallError(
                "unknown_tool",
                f"there is no tool {call.name[:80]!r}. {suggest(call.name[:80], names)} Tools: {', '.join(names)}.",
            )
        try:
            arguments = read_json(call.arguments, strict=True)
        except ValueError as error:
            raise ToolCallError("bad_arguments", f"the arguments are not valid JSON ({error})") from error
        if not isinstance(arguments, dict):
            raise ToolCallError("bad_arguments", "the arguments are not a JSON object")
        return arguments

    async def _execute(
        self, data: AgentData, name: str, arguments: dict[str, Any]
    ) -> tuple[str, ShownMedia, float | None]:
        """(text, images and videos, step reward) of a tool's answer."""
        tool = self.tools[name]
        if name not in data.instances:
            raise ToolCallError("failed", f"the tool {name} could not be started")
        kwargs = dict(_row_kwargs(data, name).get("execute_kwargs") or {})
        if takes(tool.execute, "agent_data"):
            kwargs["agent_data"] = data
        try:
            returned = await self._run(tool.execute, data.instances[name], arguments, **kwargs)
            response, reward, metrics = unpacked(returned)
            shown: tuple[Image | VideoClip, ...] = ()
            if response.image or response.video:  # decoding takes long: not on the loop that all trajectories share
                shown = await self._run(in_thread, _decoded, data.seen, response, f"tool {name}")
        except TimeLimit as error:
            raise ToolCallError("timeout", f"the tool {name} gave {error}") from error
        except Exception as error:  # boundary: a user's tool; the model receives it, the person too
            self._tell(data, name, "execute", error)
            raise ToolCallError("failed", f"{type(error).__name__}: {error}") from error
        for key, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                data.metrics.add(f"tool_calls/{name}/{key}", float(value), "mean")
        if reward is not None:
            data.tool_rewards.append(reward)
            data.metrics.add("tool_calls/step_reward", reward, "mean")
        return response.text or "", ShownMedia(shown), reward

    async def _run(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await self.runner.run(functools.partial(method, *arguments, **named), self.limits.seconds)

    def _shortened(self, data: AgentData, text: str) -> str:
        shown = shortened(text, self.limits.length, self.limits.side)
        if shown is not text:
            data.metrics.add("tool_calls/truncated_answers", 1, "sum")
        shown = shown.encode("utf-8", "replace").decode("utf-8")  # half a letter has no tokens
        if self.has_special(shown):
            data.metrics.add("tool_calls/special_tokens_as_text", 1, "sum")
        return shown

    @contextmanager
    def _boundary(self, data: AgentData, name: str, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: a user's tool; the person hears of it, the trajectory continues
            self._tell(data, name, method, error)

    def _tell(self, data: AgentData, name: str, method: str, error: Exception) -> None:
        """Count a failure of a tool, and show the first of each kind."""
        data.metrics.add(f"tool_calls/{name}/errors", 1, "sum")
        text = f"{type(error).__name__}: {str(error)[:300]}"
        notice(
            f"tool {name}.{method}",
            f"failed: {text}. The model receives it; further failures are only counted (tool_calls/{name}/errors).",
        )


def unpacked(returned: object) -> tuple[ToolResponse, float | None, Mapping[str, Any]]:
    """(answer, step reward, metrics) of what `BaseTool.execute` returned.

    Raises:
        TypeError: it returned something else than its contract says; the message names it.
        ValueError: the reward is not a finite number.
    """
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError(f"the tool returned {type(returned).__name__}, not (ToolResponse, reward, metrics)")
    response, reward, metrics = returned
    if isinstance(response, str):
        response = ToolResponse(text=response)
    if not isinstance(response, ToolResponse):
        raise TypeError(f"the tool answered with {type(response).__name__}, not with a ToolResponse")
    for kind, media in (("images", response.image), ("videos", response.video)):
        if media is not None and not isinstance(media, (list, tuple)):
            raise TypeError(f"the {kind} of a tool's answer are a list")
    if response.text is not None and not isinstance(response.text, str):
        raise TypeError(f"the tool answered with {type(response.text).__name__}, not with text")
    known = metrics if isinstance(metrics, Mapping) else {}
    return response, None if reward is None else _finite(reward), known


def _decoded(seen: SeenImages, response: ToolResponse, where: str) -> tuple[Image | VideoClip, ...]:
    images = seen.load(response.image, where) if response.image else []
    return (*images, *(seen.load_videos(response.video, where) if response.video else ()))


def shortened(text: str, length: int, side: str) -> str:
    """At most ``length`` characters of a text, with a mark where the rest was; the text itself if it is short."""
    if len(text) <= length:
        return text
    if side == "left":
        return text[:length] + CUT.rstrip(".")
    if side == "right":
        return CUT.lstrip(".") + text[len(text) - length :]
    half = length // 2
    return text[: length - half] + CUT + text[len(text) - half :]


def takes(method: Callable[..., Any], name: str) -> bool:
    """Whether a method can be given an argument of this name."""
    return _takes(method.__func__ if inspect.ismethod(method) else method, name)


@functools.lru_cache(maxsize=1024)
def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def openai_call(call: FunctionCall, number: int) -> dict[str, Any]:
    """A call as it stands in an assistant message, its arguments as the model wrote them."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.tool_call_id or f"call{number:05d}", "type": "function", "function": function}


def _row_kwargs(data: AgentData, name: str) -> Mapping[str, Any]:
    return data.tools_kwargs.get(name) or {}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}")
    return number
