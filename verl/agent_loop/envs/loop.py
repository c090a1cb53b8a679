"""``environment_agent``: what the model writes is an action, what the environment shows is the next user turn."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from PIL.Image import Image

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.client import within_response
from verl.agent_loop.envs.adapter import Environment, EnvironmentFailure, Observation, Step
from verl.agent_loop.envs.host import load_environment
from verl.agent_loop.envs.hosted import EnvironmentHost, HostedEnvironment, host_of
from verl.agent_loop.extend import Extender, TemplateContinuationError, assistant_message
from verl.agent_loop.failed import COLUMN, OnError, check_on_error, failed
from verl.agent_loop.seen import NOTHING, SeenImages, ShownMedia
from verl.agent_loop.settings import PLACES, known_arguments, positive
from verl.agent_loop.tool_calls import MOST_CHARACTERS, shortened
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data.messages import Message, prune
from verl.data.vision.images import describe_image
from verl.data.vision.videos import VideoClip
from verl.errors import ConfigError, DataError
from verl.metrics import notice
from verl.protocol.fields import TURN_STATES
from verl.protocol.tokenizer import Tokenizer
from verl.tools.runner import TimeLimit, in_thread, runner

T = TypeVar("T")


@dataclass(frozen=True)
class EnvironmentSettings:
    """How an environment is played; the arguments of an entry in ``agent_loop_config_path``.

    Args:
        environment: ``file.py:name`` or ``my_pkg.mod:name``, a class or function that makes an environment.
        environment_kwargs: arguments of every environment; a row's ``extra_info.environment_kwargs`` win.
        max_turns: most actions; None leaves it to the environment.
        max_tokens_per_turn: most tokens of one action; None: what is left of the response.
        step_timeout: seconds of one call of the environment.
        timeout: seconds of an episode, after which the rewards that it had count; None: no limit.
        on_error: ``mask`` leaves a failed row out of training and counts it, ``zero`` gives it the score 0, ``raise``
            stops the run.
        template_kwargs: arguments of the chat template.
        max_observation_length: most characters of an observation; the beginning of a longer one is kept.
        process: each episode is a process of its own, which is killed with what it started when the episode ends; else
            a thread, which shares this process's memory. None: a process on Linux, but a thread for environments of
            this library, and where loading the environment's code starts threads, which no forked process would have.
    """

    environment: str
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    max_tokens_per_turn: int | None = None
    step_timeout: float = 60.0
    timeout: float | None = None
    on_error: OnError = "mask"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_observation_length: int = MOST_CHARACTERS
    process: bool | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> EnvironmentSettings:
        """From the entry's arguments.

        Raises:
            ConfigError: an unknown one, or a value that cannot work.
        """
        known_arguments(entry, cls, "environment", "environment_agent needs to know what to play", PLACES)
        values = dict(entry)
        for name in ("max_turns", "max_tokens_per_turn", "max_observation_length"):
            if values.get(name) is not None:
                values[name] = int(positive(values[name], name))
        values["step_timeout"] = positive(values.get("step_timeout", cls.step_timeout), "step_timeout")
        if values.get("timeout") is not None:
            values["timeout"] = positive(values["timeout"], "timeout")
        values["on_error"] = check_on_error(values.get("on_error", cls.on_error))
        if not isinstance(values.get("process"), bool | None):
            raise ConfigError("wrong type", key="process", got=values["process"], allowed=[True, False, None])
        if values.get("process") and sys.platform != "linux":
            raise ConfigError(
                "needs Linux", key="process", got=True, allowed=[False], fix="leave it out, or run on Linux"
            )
        for name in ("environment_kwargs", "template_kwargs"):
            values[name] = dict(values.get(name) or {})
        return cls(**values)

    def maker(self) -> Callable[..., object] | EnvironmentHost:
        """What makes environments in this process, or the process whose episodes do.

        Raises:
            ConfigError: the environment's code cannot be loaded.
        """
        by_default = sys.platform == "linux" and not self.environment.startswith("verl.")
        if not (by_default if self.process is None else self.process):
            return load_environment(self.environment)
        host = host_of(self.environment)
        if not (threads := host.start()):
            return host
        name = f"the environment {self.environment}"
        started = f"loading it starts {threads} thread(s), which processes forked from it do not have"
        if self.process:
            notice(name, f"{started}; start them in its __init__, or set process: false")
            return host
        host.close()
        notice(name, f"{started}: its episodes are threads (process: false)")
        return load_environment(self.environment)


@dataclass(frozen=True)
class Shared:
    """What all rows of an entry share."""

    settings: EnvironmentSettings
    make: Callable[..., object] | EnvironmentHost
    extender: Extender

    def environment(self, arguments: Mapping[str, object], seed: int) -> Environment:
        """One for an episode."""
        if isinstance(self.make, EnvironmentHost):
            return HostedEnvironment(self.make, arguments, self.settings.step_timeout, seed)
        return Environment(self.make, arguments, self.settings.step_timeout)


class EnvironmentAgentLoop(AgentLoopBase):
    """Plays one episode per row.

    The row's prompt comes first; the first observation is joined to its last user message, or is a user message of its
    own where there is none. All samples of a prompt reset with the same seed, so that they meet the same episode; a
    row's ``extra_info.environment_options`` are the ``options`` of ``reset``. Each step's reward is on the last token
    of its action, their sum is the row's score.
    """

    shared: Shared

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> Shared:
        settings = EnvironmentSettings.read(kwargs)
        of_data = None if data_config is None else data_config.get("apply_chat_template_kwargs")
        extender = Extender(tokenizer, {**dict(of_data or {}), **settings.template_kwargs})
        return Shared(settings, settings.maker(), extender)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        settings, extra = self.shared.settings, kwargs.get("extra_info")
        extra = extra if isinstance(extra, Mapping) else {}
        # A parquet column gives every row all names, null where a row has none.
        made_with = {**settings.environment_kwargs, **prune(extra.get("environment_kwargs") or {})}
        environment = self.shared.environment(made_with, _seed(str(kwargs["uid"])))
        episode = _Episode(AgentData(kwargs, seen=self.server_manager.seen))
        error: EnvironmentFailure | None = None
        limit = asyncio.timeout(settings.timeout)
        try:
            await environment.make()
            async with limit:
                await self._play(episode, environment, sampling_params, prune(extra.get("environment_options")))
        except EnvironmentFailure as failure:
            error = failure
        except DataError as failure:  # an image or video that is refused, or a template without a place for one
            error = EnvironmentFailure(str(failure))
        except TimeoutError:
            if not limit.expired():
                await environment.close()
                raise
            if episode.data.prompt_ids:  # a policy that dawdles would escape a low score if this were masked
                episode.end("timeout")
            else:
                error = EnvironmentFailure(f"its first observation took longer than the timeout, {settings.timeout} s")
        try:
            await environment.close()
        except EnvironmentFailure as failure:
            error = error or failure
        output = await self._output(episode, kwargs)
        return output if error is None else failed(output, self._name, error, settings.on_error)

    @property
    def _name(self) -> str:
        return f"the environment {self.shared.settings.environment}"

    async def _play(
        self, episode: _Episode, environment: Environment, sampling_params: Mapping[str, Any], options: Any
    ) -> None:
        settings, extender, data = self.shared.settings, self.shared.extender, episode.data
        first = await episode.timed(environment.reset(_seed(str(data.row["uid"])), options))
        text, shown = await self._shown(episode, first)
        content = shown.content(extender.template.outside_text(text))
        data.messages = _opening(data.row.get("raw_prompt"), content)
        await data.seen.take(shown.media)
        data.prompt_ids = data.seen.prompt(extender.prompt(data.messages))
        data.record.append(_entry("user", text, len(data.prompt_ids), 0, shown))
        if self._left(data) < 1:
            raise EnvironmentFailure(f"its first observation and the prompt have {len(data.prompt_ids)} tokens already")
        while True:
            answer = await self._sample(episode, sampling_params)
            history, text = list(data.messages), extender.text(answer.token_ids)
            message = assistant_message(text, text)
            data.messages.append(message)
            data.record.append(_entry("assistant", text, len(answer.token_ids), 1))
            if answer.finish_reason == "abort" or self._left(data) < 1:
                episode.end("length" if answer.finish_reason != "abort" else "abort")
                return
            action = self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
            step = await episode.timed(environment.step(action))
            episode.take(step)
            if step.is_over or (settings.max_turns and data.assistant_turns >= settings.max_turns):
                episode.end("terminated" if step.terminated else "truncated" if step.truncated else "max_turns")
                return
            text, shown = await self._shown(episode, step.observation)
            new: list[Message] = [{"role": "user", "content": shown.content(text)}]
            try:
                after = extender.after(answer.token_ids, history, message, new)
            except TemplateContinuationError as error:
                notice("the chat template", f"an episode ends because of it: {error}; its rewards count")
                episode.end("template")
                return
            ids = data.seen.expanded(after, shown.images, shown.videos)
            if len(ids) >= self._left(data):
                episode.end("length")
                return
            await data.seen.take(shown.media)  # a time limit here leaves nothing of the turn
            data.messages += new
            data.add_inserted(ids)
            data.record.append(_entry("user", text, len(ids), 0, shown))

    async def _shown(self, episode: _Episode, observation: Observation) -> tuple[str, ShownMedia]:
        """What the model is shown: a text that is not too long, pictures and clips.

        The text is cut before it is rendered and tokenised, which takes many times its memory and cannot be
        interrupted.
        """
        data = episode.data
        images, videos = observation.images, observation.videos
        if (images or videos) and data.seen.processor is None:
            raise EnvironmentFailure(f"it shows {'an image' if images else 'a video'}, and the model reads only text")
        media_shown = ShownMedia()
        if images or videos:  # decoding takes long: not on the loop that all episodes share
            limit = self.shared.settings.step_timeout
            try:
                work = partial(in_thread, self._decoded, data.seen, observation)
                media_shown = ShownMedia(await episode.timed(runner().run(work, limit)))
            except TimeLimit as error:
                raise EnvironmentFailure(f"its images or videos took longer than {limit:g} s to decode") from error
        episode.state = observation.state or _digest(observation.text, media_shown)
        shown = shortened(observation.text, self.shared.settings.max_observation_length, "left")
        if shown is not observation.text:
            data.metrics.add("rollout/environment/truncated_observations", 1, "sum")
            lengths = f"an observation of {len(observation.text)} characters is cut to {len(shown)}"
            notice(self._name, f"{lengths} (max_observation_length); further ones are only counted")
        return shown, media_shown

    def _decoded(self, seen: SeenImages, observation: Observation) -> tuple[Image | VideoClip, ...]:
        images = seen.load(observation.images, self._name) if observation.images else []
        return (*images, *(seen.load_videos(observation.videos, self._name) if observation.videos else ()))

    async def _sample(self, episode: _Episode, sampling_params: Mapping[str, Any]) -> Any:
        data = episode.data
        most = min(self._left(data), self.shared.settings.max_tokens_per_turn or self._left(data))
        answer = await self.server_manager.generate(
            "environment_agent",
            prompt_ids=[*data.prompt_ids, *data.response_ids],
            sampling_params={**within_response(sampling_params, len(data.response_ids)), "max_tokens": most},
        )
        if answer.token_ids:
            episode.states.append((len(data.response_ids), episode.state))
        data.add_sampled(answer)
        return answer

    def _left(self, data: AgentData) -> int:
        left = int(self.server_manager.response_length) - len(data.response_ids)
        context = self.config.max_model_len
        return left if context is None else min(left, context - len(data.prompt_ids) - len(data.response_ids))

    async def _output(self, episode: _Episode, row: dict[str, Any]) -> AgentLoopOutput:
        data = episode.data
        if not data.prompt_ids:
            data.prompt_ids = await self.prompt_ids(row)
        data.tool_seconds = episode.seconds
        data.metrics.add("rollout/environment/steps", len(episode.rewards), "mean")
        for why in ("terminated", "truncated", "max_turns", "length", "template", "timeout"):
            data.metrics.add(f"rollout/environment/{why}", float(episode.ended == why), "mean")
        data.metrics.add("rollout/agent/failed", 0, "sum")
        data.finish_reason = {"length": "length", "abort": "abort"}.get(episode.ended, "stop")
        data.extra_fields |= {"ended": episode.ended, "step_rewards": [r for _, r in episode.rewards], COLUMN: None}
        data.extra_fields[TURN_STATES] = episode.states
        output = data.output()
        output.step_rewards = episode.rewards
        output.reward_score = sum(reward for _, reward in episode.rewards)
        return output


@dataclass
class _Episode:
    """An episode as it is played.

    Args:
        rewards: (place in the response, reward) of each step, on the last token of its action.
        states: (place in the response, state) of each action, at its first token.
        state: the state that was observed last.
    """

    data: AgentData
    rewards: list[tuple[int, float]] = field(default_factory=list)
    states: list[tuple[int, str]] = field(default_factory=list)
    state: str = ""
    ended: str = ""
    seconds: float = 0.0

    def take(self, step: Step) -> None:
        """Note the reward on the last token of the action."""
        self.rewards.append((len(self.data.response_ids) - 1, step.reward))
        self.data.record[-1]["reward"] = step.reward

    def end(self, why: str) -> None:
        self.ended = why

    async def timed(self, work: Awaitable[T]) -> T:
        """The result, its seconds counted as the environment's."""
        start = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds += time.perf_counter() - start


def _opening(prompt: Any, shown: str | list[dict[str, Any]]) -> list[Message]:
    """The row's messages with the first observation in their last user turn."""
    messages = [dict(message) for message in (prompt if prompt is not None else ())]
    if not shown and messages:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": shown}]
    before = messages[-1]["content"]
    if isinstance(before, str) and isinstance(shown, str):
        messages[-1]["content"] = f"{before}\n\n{shown}"
    else:
        messages[-1]["content"] = [*_parts(before), *_parts("\n\n" if before else ""), *_parts(shown)]
    return messages


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _digest(text: str, shown: ShownMedia) -> str:
    """The state that an observation without a name stands for: its text and the pixels that it shows."""
    pictures = [*shown.images, *(frame for clip in shown.videos for frame in clip["frames"])]
    described = [describe_image(picture) for picture in pictures]
    return hashlib.blake2b(f"{text}\n{described}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _seed(uid: str) -> int:
    """The same for all samples of a prompt, and in every run."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=4).digest(), "big") >> 1


def _entry(role: str, text: str, count: int, mask: int, shown: ShownMedia = NOTHING) -> dict[str, Any]:
    return {"role": role, "text": text, "tokens": count, "mask": mask, **shown.entry()}
