"""One answer per row, rewarded by conversations that a simulated user and the policy continue from it.

Wu et al. 2025 (arXiv 2502.00640). With t the conversation up to the answer m, and t_i a continuation of it with a
simulated user::

    R(m | t) = mean over i = 1 .. K of [ sum over metrics of weight * metric(t_i) ]

Only the tokens of m are trained on; the continuations are not in the batch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.client import within_response
from verl.agent_loop.extend import plain_message
from verl.agent_loop.failed import OnError, check_on_error, failed
from verl.agent_loop.settings import known_arguments, positive
from verl.agent_loop.tool_agent import ToolAgentLoop, ToolAgentParts
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError, DataError
from verl.protocol.tokenizer import Tokenizer
from verl.registry import load_object
from verl.rollout.base import Completion

CUT_OFF = -1.0
"""The score of an answer that is empty, or cut off by the response length: nobody continues from it."""


@dataclass(frozen=True)
class Conversation:
    """What a metric reads.

    Args:
        messages: with role and content, from the row's first message to the last answer.
        row: the columns of the data.
        tokens: how many the policy sampled in it.
    """

    messages: list[dict[str, Any]]
    row: Mapping[str, Any]
    tokens: int

    def answers(self) -> list[str]:
        """The texts of the assistant's messages."""
        return [str(message["content"]) for message in self.messages if message["role"] == "assistant"]


@dataclass(frozen=True)
class Metric:
    """A function of a `Conversation` and of keywords, plain or async, which returns a number."""

    name: str
    measure: Callable[..., Any]
    weight: float
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> Metric:
        """From an entry with ``function``, ``weight`` (1), and arguments of the function.

        Raises:
            ConfigError: no function, or a weight that is no number.
        """
        options = dict(entry)
        function, weight = options.pop("function", None), options.pop("weight", 1.0)
        if not isinstance(function, str):
            raise ConfigError(
                "a metric without a function", key=f"metrics.{name}.function", got=function, allowed="my_pkg.mod:name"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise ConfigError("a weight is a number", key=f"metrics.{name}.weight", got=weight)
        return cls(name, load_object(function), float(weight), options)

    async def of_conversation(self, conversation: Conversation) -> float:
        """Its value.

        Raises:
            ValueError: the function returned no finite number.
        """
        result = self.measure(conversation, **self.options)
        value = float(await result if inspect.isawaitable(result) else result)
        if not math.isfinite(value):
            raise ValueError(f"the metric {self.name} is {value}")
        return value


@dataclass(frozen=True)
class CollabSettings:
    """The arguments of an entry in ``actor_rollout_ref.rollout.agent.agent_loop_config_path``.

    Args:
        metrics: name -> an entry of `Metric.of`.
        futures: K.
        max_tokens_per_turn: most tokens of one answer; None: what is left of the response.
        on_error: of a simulated user or a metric that fails: ``mask``, ``zero`` or ``raise``.
    """

    metrics: Mapping[str, Any]
    futures: int = 3
    max_tokens_per_turn: int | None = None
    on_error: OnError = "mask"


@dataclass(frozen=True)
class CollabParts(ToolAgentParts):
    """What all rows share."""

    settings: CollabSettings = field(default_factory=lambda: CollabSettings({}))
    metrics: tuple[Metric, ...] = ()


class CollaborativeLoop(ToolAgentLoop):
    """Samples an answer, then K continuations one after the other, each with its own instance of the row's user.

    A continuation ends when the user ends it, after ``multi_turn.max_user_turns`` or ``multi_turn.max_assistant_turns``
    (which counts the answer), or where the next turn does not fit into prompt and response length.
    """

    resumable = False
    shared: CollabParts

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> CollabParts:
        known_arguments(
            kwargs, CollabSettings, "metrics", "CollaborativeLoop needs to know what to reward", "a mapping"
        )
        futures, most = kwargs.get("futures", CollabSettings.futures), kwargs.get("max_tokens_per_turn")
        settings = CollabSettings(
            kwargs["metrics"],
            int(positive(futures, "futures")),
            None if most is None else int(positive(most, "max_tokens_per_turn")),
            check_on_error(kwargs.get("on_error", CollabSettings.on_error)),
        )
        multi_turn, key = config.multi_turn, "actor_rollout_ref.rollout.multi_turn"
        if multi_turn.max_user_turns is None and multi_turn.max_assistant_turns is None:
            fix = f"Set {key}.max_assistant_turns too, or alone."
            raise ConfigError("conversations need a limit of turns", key=f"{key}.max_user_turns", got=None, fix=fix)
        if multi_turn.trajectory_timeout is not None:
            fix = f"Leave it out; {key}.tool_timeout limits each call of a user."
            raise ConfigError("this loop has no time limit", key=f"{key}.trajectory_timeout", fix=fix)
        parts = super().prepare(config, tokenizer, data_config)
        metrics = tuple(Metric.of(name, entry) for name, entry in settings.metrics.items())
        return CollabParts(**vars(parts), settings=settings, metrics=metrics)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data, settings = self._begin(kwargs, []), self.shared.settings
        answer = await self._answer(data.prompt_ids, sampling_params, int(self.config.response_length))
        data.add_sampled(answer)
        message = {"role": "assistant", "content": self.shared.extender.text(answer.token_ids)}
        is_cut = answer.finish_reason != "stop" and len(answer.token_ids) != settings.max_tokens_per_turn
        score, error, values = CUT_OFF, None, dict[str, float]()
        if message["content"].strip() and not is_cut:
            try:
                futures = [await self._future(data, message, sampling_params) for _ in range(settings.futures)]
                values = {
                    metric.name: fmean([await metric.of_conversation(f) for f in futures])
                    for metric in self.shared.metrics
                }
                score = sum(metric.weight * values[metric.name] for metric in self.shared.metrics)
            except (ConfigError, DataError):
                raise
            except Exception as failure:  # boundary: a simulated user, or a metric of the user's
                error = failure
        for name, value in values.items():
            data.metrics.add(f"collabllm/{name}", value)
        data.metrics.add("collabllm/without_future", float(not values))
        output = replace(data.output(), reward_score=score)
        return output if error is None else failed(output, "a conversation", error, settings.on_error)

    async def _future(self, data: AgentData, message: Mapping[str, Any], parameters: Mapping[str, Any]) -> Conversation:
        """One continuation of the conversation behind the answer."""
        future = AgentData(data.row, [*data.messages, dict(message)], seen=data.seen)
        tokens, answers, limits = len(data.response_ids), 1, self.shared.limits
        user = await self._simulated_user(future, None)
        if user is None:
            fix = "Add extra_info.interaction_kwargs, and set multi_turn.interaction_config_path."
            raise DataError("a row has no simulated user", key="interaction_kwargs", got=None, fix=fix)
        room = int(self.config.prompt_length) + int(self.config.response_length)
        try:
            while answers != limits.assistant and (limits.user is None or answers <= limits.user):
                new, _ = await self._ask(future, user)
                prompt = data.seen.prompt(self.shared.extender.prompt([*future.messages, *new]))
                if not new or len(prompt) >= room:
                    break
                answer = await self._answer(prompt, within_response(parameters, tokens), room - len(prompt))
                text = self.shared.extender.text(answer.token_ids)
                future.messages += [*new, {"role": "assistant", "content": text}]
                tokens, answers = tokens + len(answer.token_ids), answers + 1
        finally:
            await self._leave(future, user)
        return Conversation([plain_message(message) for message in future.messages], data.row, tokens)

    async def _answer(self, prompt: list[int], parameters: Mapping[str, Any], most: int) -> Completion:
        limit = self.shared.settings.max_tokens_per_turn
        parameters = {**parameters, "max_tokens": most if limit is None else min(most, limit)}
        return await self.server_manager.generate("collabllm", prompt_ids=prompt, sampling_params=parameters)
