"""A custom agent loop as upstream's documentation shows one: it asks a second time, and trains on both answers."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op


@register("ask_twice")
class AskTwiceLoop(AgentLoopBase):
    def __init__(self, *args, again="Again.", **kwargs):
        super().__init__(*args, **kwargs)
        self.again = again

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        metrics, request_id = {}, uuid4().hex
        prompt_ids = await self.apply_chat_template(messages)
        with simple_timer("generate_sequences", metrics):
            first = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        asked = self.tokenizer.encode(self.again, add_special_tokens=False)
        inputs = prompt_ids + list(first.token_ids) + asked
        with simple_timer("generate_sequences", metrics):
            second = await self.server_manager.generate(
                request_id=request_id, prompt_ids=inputs, sampling_params=sampling_params
            )
        parts = [(first.token_ids, 1), (asked, 0), (second.token_ids, 1)]
        response_ids = [token for tokens, _ in parts for token in tokens]
        response_mask = [mask for tokens, mask in parts for _ in tokens]
        length = self.config.data.max_response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[:length],
            response_mask=response_mask[:length],
            num_turns=4,
            metrics=metrics,
            extra_fields={"asked_again": True},
        )
