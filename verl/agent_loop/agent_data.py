"""What a conversation with tools has come to: its messages, its tokens, its rewards, and a record for people."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.batch import NO_VERSION
from verl.agent_loop.seen import SeenImages
from verl.agent_loop.unfinished import metrics_of, plain_metrics
from verl.data.special_tokens import SampledMessage
from verl.metrics import MetricSet
from verl.rollout.base import Completion
from verl.rollout.resume import append_experts


@dataclass
class AgentData:
    """The state of one trajectory; tools get it as ``agent_data``.

    Args:
        row: the columns of the data.
        messages: the conversation; answers carry their calls as the model wrote them.
        tools_kwargs: arguments of tools by name.
        prompt_ids, response_ids, response_mask, response_logprobs, token_versions, routed_experts: as in
            `AgentLoopOutput`.
        turn_scores: rewards of the simulated user, one per turn.
        tool_rewards: step rewards of tools, in the order of the calls.
        instances: ids of the tools' instances by name.
        seen: the images and videos up to now.
        record: one entry per piece of the conversation: role, text, tokens, mask, calls, rewards.
    """

    row: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] | None = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    routed_experts: Any = None
    assistant_turns: int = 0
    user_turns: int = 0
    tool_call_count: int = 0
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    reward_scores: dict[str, float] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    finish_reason: str = "stop"
    tool_seconds: float = 0.0
    num_preempted: int = -1
    metrics: MetricSet = field(default_factory=MetricSet)
    record: list[dict[str, Any]] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    seen: SeenImages = field(default_factory=SeenImages)

    def add_sampled(self, answer: Completion) -> None:
        """Take the tokens of an answer: the ones that are trained on."""
        self.response_ids += answer.token_ids
        self.response_mask += [1] * len(answer.token_ids)
        self.token_versions += answer.token_versions
        if self.response_logprobs is not None and len(answer.log_probs) == len(answer.token_ids):
            self.response_logprobs += answer.log_probs
        else:
            self.response_logprobs = None
        if answer.routed_experts is not None:
            length = len(self.prompt_ids) + len(self.response_ids)  # the answer may have been cut behind a stop text
            self.routed_experts = append_experts(self.routed_experts, answer.routed_experts[:length])
        self.assistant_turns += 1
        self.finish_reason = answer.finish_reason
        if answer.num_preempted >= 0:
            self.num_preempted = max(self.num_preempted, 0) + answer.num_preempted

    def add_inserted(self, ids: Sequence[int]) -> None:
        """Take tokens that the policy did not sample: masked out."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.token_versions += [NO_VERSION] * len(ids)
        if self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(ids)
        self.user_turns += 1

    def plain(self) -> dict[str, Any]:
        """All of it but the row, as data that a file can hold; of the media what came after the row's."""
        state = {name: value for name, value in vars(self).items() if name not in ("row", "tools_kwargs", "seen")}
        messages = [[isinstance(message, SampledMessage), dict(message)] for message in self.messages]
        return copy.deepcopy({**state, "messages": messages, "metrics": plain_metrics(self.metrics)}) | {
            "media": list(self.seen.added)
        }

    @classmethod
    async def of_plain(cls, row: dict[str, Any], state: Mapping[str, Any], seen: SeenImages | None = None) -> AgentData:
        """The reverse of `plain`.

        Args:
            seen: the images and videos of the row, which gets those of later turns.
        """
        media = state.get("media", state.get("images"))  # earlier checkpoints have images alone
        fields = copy.deepcopy({name: value for name, value in state.items() if name not in ("media", "images")})
        seen = seen or SeenImages()
        await seen.take(media or ())
        messages = [SampledMessage(message) if own else dict(message) for own, message in fields.pop("messages")]
        metrics = metrics_of(fields.pop("metrics"))
        return cls(row, messages, row.get("tools_kwargs") or {}, metrics=metrics, seen=seen, **fields)

    def output(self) -> AgentLoopOutput:
        """The trajectory as the trainer takes it."""
        fields = {
            "tool_call_counts": self.tool_call_count,
            "turn_scores": list(self.turn_scores),
            "tool_rewards": list(self.tool_rewards),
            "reward_scores": dict(self.reward_scores),
            "trajectory": self.record,
        }
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            response_logprobs=self.response_logprobs,
            token_versions=self.token_versions,
            routed_experts=self.routed_experts,
            num_turns=self.user_turns + self.assistant_turns + 1,
            metrics=AgentLoopMetrics(tool_calls=self.tool_seconds, num_preempted=self.num_preempted),
            extra_fields={**fields, **self.extra_fields},
            finish_reason=self.finish_reason,
            measures=self.metrics,
        )
