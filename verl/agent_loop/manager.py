"""Runs the loop of every row at once over one sampler and brings the trajectories together as a batch."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.agent_loop.batch import loop_metrics, to_batch
from verl.agent_loop.client import SamplerClient
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.registry import AGENT_LOOPS
from verl.rollout.base import Sampler

Score = Callable[[dict[str, Any], AgentLoopOutput], Awaitable[float]]


class AgentLoopManager:
    """From rows of prompts to a batch of trajectories.

    Rows arrive repeated: the n samples of a prompt are n rows with one ``uid``, told apart by their order.

    Args:
        config: the ``rollout`` section.
        sampler: serves every request.
        tokenizer, processor: of the policy.
        score: scores a trajectory as soon as it ends, beside the sampling of the others.
        data_config: for loops that render messages as the dataset does.
    """

    def __init__(
        self,
        config: Any,
        sampler: Sampler,
        tokenizer: Any,
        processor: Any = None,
        score: Score | None = None,
        data_config: Any = None,
    ):
        self.config, self.sampler, self.score = config, sampler, score
        self.tokenizer, self.processor, self.data_config = tokenizer, processor, data_config

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A batch of trajectories in the order of the rows.

        Args:
            prompts: ``raw_prompt_ids`` or ``raw_prompt``, and ``uid``; ``agent_name`` picks a row's loop.
                ``meta_info["validate"]`` samples with ``val_kwargs``; ``meta_info["do_sample"]`` overrides both.

        Raises:
            RolloutError: a loop failed; the message names the row and the loop, the cause is the loop's own exception.
        """
        return _run(self.generate(prompts))

    async def generate(self, prompts: DataProto) -> DataProto:
        """The same inside a running event loop."""
        rows = [{name: values[i] for name, values in prompts.non_tensor_batch.items()} for i in range(len(prompts))]
        parameters = self.sampling_params(prompts.meta_info)
        seen: Counter[str] = Counter()
        tasks = []
        for number, row in enumerate(rows):
            uid = str(row.setdefault("uid", str(number)))
            tasks.append(asyncio.ensure_future(self._trajectory(number, row, uid, seen[uid], parameters)))
            seen[uid] += 1
        try:
            outputs = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:  # one failure ends the batch; what is left must not go on sampling
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        pad = self.tokenizer.pad_token_id
        batch = to_batch(outputs, self.tokenizer.eos_token_id if pad is None else pad)
        batch.meta_info["metrics"] = loop_metrics(outputs)
        return batch

    def sampling_params(self, meta_info: dict[str, Any]) -> dict[str, Any]:
        """How this batch is sampled, from the configuration and the batch's own wishes."""
        source = self.config.val_kwargs if meta_info.get("validate") else self.config
        return {
            "temperature": float(source.temperature),
            "top_p": float(source.top_p),
            "top_k": int(source.top_k),
            "do_sample": bool(meta_info.get("do_sample", source.do_sample)),
            "max_tokens": int(self.config.response_length),
            "ignore_eos": bool(self.config.ignore_eos),
        }

    async def _trajectory(
        self, number: int, row: dict[str, Any], uid: str, sample_index: int, parameters: dict[str, Any]
    ) -> AgentLoopOutput:
        name = row.get("agent_name") or self.config.agent.default_agent_loop
        loop_class: type[AgentLoopBase] = AGENT_LOOPS.get(name)
        client = SamplerClient(self.sampler, uid, sample_index, self.config.seed, int(self.config.response_length))
        loop = loop_class(self.config, client, self.tokenizer, self.processor, data_config=self.data_config)
        try:
            output = await loop.run(dict(parameters), **row)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # boundary: a user's loop, reported with the row it failed on
            raise RolloutError(
                f"the agent loop {name!r} ({loop_class.__module__}.{loop_class.__qualname__}) failed on row {number} "
                f"of the batch, uid {uid}: {type(error).__name__}: {error}"
            ) from error
        output.metrics.generate_sequences = client.seconds
        if self.score is not None and output.reward_score is None:
            output.reward_score = await self.score(row, output)
        return output


def _run(work: Coroutine[Any, Any, DataProto]) -> DataProto:
    """Run to the end from synchronous code, also where this thread already runs an event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[DataProto] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:  # carried over to the calling thread
            failure.append(error)

    thread = threading.Thread(target=target, name="agent-loops")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
