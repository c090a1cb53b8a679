"""The trivial loop: one prompt, one answer."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class SingleTurnAgentLoop(AgentLoopBase):
    """Samples one answer to the row's prompt."""

    resumable = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.prompt_ids(kwargs)
        answer = await self.server_manager.generate(kwargs["uid"], prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=list(answer.token_ids),
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=list(answer.log_probs),
            token_versions=list(answer.token_versions),
            routed_experts=answer.routed_experts,
            num_turns=2,
            metrics=AgentLoopMetrics(num_preempted=answer.num_preempted),
            finish_reason=answer.finish_reason,
        )
