"""One answer per row, rewarded by conversations that a simulated user and the policy continue from it.

Wu et al. 2025 (arXiv 2502.00640). With t the conversation up to the answer m, and t_i a continuation of it with a
simulated user::

    R(m | t) = mean over i = 1 .. K of reward(t_i)

Only the tokens of m are trained on; the continuations are not in the batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from recipe.collabllm.settings import CollabSettings
from verl.agent_loop.agent_data import AgentData
from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.client import within_response
from verl.agent_loop.extend import plain_message
from verl.agent_loop.failed import failed
from verl.agent_loop.server.agent import AgentFailure, AgentOutcome, AgentTimeoutError, run_agent
from verl.agent_loop.settings import known_arguments
from verl.agent_loop.tool_agent import ToolAgentLoop, ToolAgentParts, UserFailed, transcript_entry
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError, DataError
from verl.metrics import notice
from verl.protocol.tokenizer import Tokenizer
from verl.rewards.judges import JudgeVerdictError
from verl.rollout.base import Completion

CUT_OFF = -1.0
"""The score of an answer that is empty, cut off by the response length, or refused by the model that plays the user."""


@dataclass(frozen=True)
class Conversation:
    """What a reward function reads.

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
class CollabParts(ToolAgentParts):
    """What all rows share."""

    settings: CollabSettings
    reward: Callable[[Conversation], Any]


class CollaborativeLoop(ToolAgentLoop):
    """Samples an answer, then K continuations one after the other, each with its own instance of the row's user.

    A continuation ends when the user ends it, after ``multi_turn.max_user_turns`` or ``multi_turn.max_assistant_turns``
    (which counts the answer), or where the next turn does not fit into prompt and response length, or into
    ``rollout.max_model_len``.
    """

    resumable = False
    shared: CollabParts

    @classmethod
    def prepare(
        cls, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None, **kwargs: Any
    ) -> CollabParts:
        known_arguments(
            kwargs, CollabSettings, "reward", "CollaborativeLoop needs to know what to reward", "my_pkg.mod:name"
        )
        settings = CollabSettings(**kwargs)
        multi_turn, key = config.multi_turn, "actor_rollout_ref.rollout.multi_turn"
        if multi_turn.max_user_turns is None and multi_turn.max_assistant_turns is None:
            fix = f"Set {key}.max_assistant_turns too, or alone."
            raise ConfigError("conversations need a limit of turns", key=f"{key}.max_user_turns", got=None, fix=fix)
        if multi_turn.trajectory_timeout is not None:
            fix = f"Leave it out; {key}.tool_timeout limits each call of a user."
            raise ConfigError("this loop has no time limit", key=f"{key}.trajectory_timeout", fix=fix)
        parts = super().prepare(config, tokenizer, data_config)
        return CollabParts(**vars(parts), settings=settings, reward=settings.function())

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data, settings = self._begin(kwargs, []), self.shared.settings
        answer = await self._answer(data.prompt_ids, sampling_params, self._left(data))
        data.add_sampled(answer)
        text = self.shared.extender.text(answer.token_ids)
        data.record.append(transcript_entry("assistant", text, answer.token_ids, 1))
        is_cut = answer.finish_reason != "stop" and len(answer.token_ids) != settings.max_tokens_per_turn
        outcomes: list[AgentOutcome] = []
        error: UserFailed | AgentFailure | None = None
        if text.strip() and not is_cut:
            try:
                for number in range(settings.futures):
                    outcomes.append(await self._outcome(await self._future(data, text, sampling_params, number)))
            except (UserFailed, AgentFailure) as failure:
                outcomes, error = [], failure
        cause = None if error is None else error.__cause__
        if isinstance(cause, ConfigError | DataError):
            raise cause from None
        if self.server_manager.stop.is_set:
            return replace(data.output(), finish_reason="abort")
        data.metrics.add("collabllm/without_future", float(not outcomes))
        for name in outcomes[0].extra if outcomes else ():
            data.metrics.add(f"collabllm/{name}", fmean(outcome.extra[name] for outcome in outcomes))
        score = fmean(float(outcome.reward or 0.0) for outcome in outcomes) if outcomes else CUT_OFF
        output = replace(data.output(), reward_score=score)
        if error is None:
            return output
        if isinstance(error, AgentTimeoutError) or isinstance(cause, JudgeVerdictError):
            what = "an answer that a model could not read, or at which the reward took too long"
            notice("collabllm", f"{what}, has the score {CUT_OFF:g}; the first: {error}")
            return output
        return failed(output, "a conversation", error, settings.on_error)

    async def _outcome(self, conversation: Conversation) -> AgentOutcome:
        """What the reward function says of a conversation; ``extra`` holds numbers.

        Raises:
            AgentFailure: it raised, took too long, or returned something that is no reward.
        """
        reward = self.shared.reward
        first = next(iter(inspect.signature(reward).parameters))
        outcome = await run_agent(reward, {first: conversation}, self.shared.settings.reward_timeout)
        if outcome.reward is None:
            raise AgentFailure("the reward function returned no number, and no dict with 'score'")
        try:
            return AgentOutcome(outcome.reward, {name: float(value) for name, value in outcome.extra.items()})
        except (TypeError, ValueError) as error:
            raise AgentFailure(f"the reward function returned what is no number: {error}") from error

    async def _future(self, data: AgentData, text: str, parameters: Mapping[str, Any], number: int) -> Conversation:
        """One continuation of the conversation behind the answer; its metrics and its record are added to the row's."""
        future = AgentData(data.row, [*data.messages, {"role": "assistant", "content": text}], seen=data.seen)
        tokens, answers, limits = len(data.response_ids), 1, self.shared.limits
        user = await self._simulated_user(future, None)
        if user is None:
            fix = "Add extra_info.interaction_kwargs, and set multi_turn.interaction_config_path."
            raise DataError("a row has no simulated user", key="interaction_kwargs", got=None, fix=fix)
        budget = int(self.config.response_length)
        room = int(self.config.prompt_length) + budget
        if self.config.max_model_len:
            room = min(room, int(self.config.max_model_len))
        try:
            while answers != limits.assistant and (limits.user is None or answers <= limits.user):
                turn, entry = await self._ask(future, user)
                future.record.append(entry)
                prompt = data.seen.prompt(self.shared.extender.prompt([*future.messages, *turn]))
                if not turn or len(prompt) >= room:
                    break
                limit = min(room - len(prompt), budget)
                answer = await self._answer(prompt, within_response(parameters, tokens), limit)
                content = self.shared.extender.text(answer.token_ids)
                future.messages += [*turn, {"role": "assistant", "content": content}]
                future.record.append(transcript_entry("assistant", content, answer.token_ids, 0))
                tokens, answers = tokens + len(answer.token_ids), answers + 1
        finally:
            await self._leave(future, user)
            data.metrics.merge(future.metrics)
            data.record += [{**entry, "future": number} for entry in future.record]
        return Conversation([plain_message(message) for message in future.messages], data.row, tokens)

    async def _answer(self, prompt: list[int], parameters: Mapping[str, Any], limit: int) -> Completion:
        parameters = {**parameters, "max_tokens": min(limit, self.shared.settings.max_tokens_per_turn or limit)}
        return await self.server_manager.generate("collabllm", prompt_ids=prompt, sampling_params=parameters)
