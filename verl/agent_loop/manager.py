"""Runs the loop of every row at once over one sampler and brings the trajectories together as a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import loop_metrics, to_batch
from verl.agent_loop.early_stop import Stop, gather_most
from verl.agent_loop.failed import check_some_worked
from verl.agent_loop.overlapped_scoring import OverlappedScoring, ScoreRow
from verl.agent_loop.runner import RowRunner, RunsRows, Score
from verl.data.settings import read, read_number
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.from_sync import run_now


class AgentLoopManager:
    """From rows of prompts to a batch of trajectories.

    Rows arrive repeated: the n samples of a prompt are n rows with one ``uid``, told apart by their order.

    Args:
        config: the ``rollout`` section.
        sampler: serves every request.
        tokenizer, processor: of the policy.
        score: ``await score(row, output)`` scores a trajectory as soon as it ends, beside the sampling of the others;
            the batch then has ``rm_scores`` (B, T), the score on the last sampled token.
        data_config: for loops that render messages as the dataset does.
        score_row: scores a batch of one row as soon as its trajectory ends; unlike ``score`` it leaves the place of
            the scores to the reward manager, which finds the results in the batch.

    The loops run here, unless `run_in` says in which other processes. Where they run changes no result: over-sampling,
    scoring and the limits of both are of the whole batch, and stay here.
    """

    def __init__(
        self,
        config: Any,
        sampler: Sampler,
        tokenizer: Any,
        processor: Any = None,
        score: Score | None = None,
        data_config: Any = None,
        score_row: ScoreRow | None = None,
    ):
        self.config, self.sampler, self.score_row = config, sampler, score_row
        self.here = RowRunner(config, sampler, tokenizer, processor, score, data_config)
        self._runners: Sequence[RunsRows] = [self.here]
        self._stop = Stop()
        self._shortest = read_number(data_config, "min_response_length", 0)

    def run_in(self, runners: Sequence[RunsRows]) -> None:
        """Run the loops in other processes, each of which gets adjacent rows; none: here.

        Raises:
            RolloutError: ``score`` is set, which the other processes do not have.
        """
        if runners and self.here.score is not None:
            raise RolloutError("score runs with the loops, and only in this process", fix="Pass score_row instead.")
        self._runners = list(runners) or [self.here]

    async def serve(self, request: Request) -> Completion:
        """The answer to a loop in another process; it is empty once enough trajectories of the batch are done."""
        if self._stop.is_set:
            return self._stop.answer(request)
        return await self.sampler.generate(request)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A batch of trajectories in the order of the rows.

        Args:
            prompts: ``raw_prompt_ids`` or ``raw_prompt``, and ``uid``; ``agent_name`` picks a row's loop. A column
                ``sample_index`` tells the samples of a uid apart where they are spread over several batches.
                ``meta_info["validate"]`` samples with ``val_kwargs``; ``meta_info["do_sample"]`` overrides both.

        Raises:
            RolloutError: all rows failed, the sampler is gone, or a loop says that its failure stops the run; the
                message names the row. A row that fails alone is masked and counted as ``rollout/agent/failed``.
        """
        return run_now(self.generate(prompts))

    async def generate(self, prompts: DataProto) -> DataProto:
        """The same inside a running event loop."""
        rows = [{name: values[i] for name, values in prompts.non_tensor_batch.items()} for i in range(len(prompts))]
        parameters = self.sampling_params(prompts.meta_info)
        stop = self._stop = Stop()
        pad = self.here.pad
        beside = None if self.score_row is None else OverlappedScoring(self.score_row, rows, pad)
        streams = sample_streams(rows, prompts.meta_info)
        tasks = []
        for number, (row, stream) in enumerate(zip(rows, streams)):
            runner = self._runners[number * len(self._runners) // len(rows)]
            work = runner.run(number, row, stream, parameters, stop)
            tasks.append(asyncio.ensure_future(_scored(number, work, beside)))
        try:
            outputs = await gather_most(tasks, self._may_give_up(prompts.meta_info), self._end_batch)
        except BaseException:
            for task in tasks:  # the batch ends; what is left must not go on sampling
                task.cancel()
            if beside is not None:
                beside.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        check_some_worked(outputs)
        batch = to_batch(outputs, pad, with_log_probs=self.config.calculate_log_probs)
        scoring = {} if beside is None else await beside.finish(outputs, batch)
        batch.meta_info["metrics"] = {**loop_metrics(outputs), **scoring}
        return batch

    async def _end_batch(self) -> None:
        """Enough trajectories are done. Loops in other processes hear of it before their requests come back empty."""
        stop = self._stop
        for runner in self._runners:
            await runner.end(stop)
        stop.is_set = True
        await self.sampler.abort()

    def sampling_params(self, meta_info: dict[str, Any]) -> dict[str, Any]:
        """How this batch is sampled, from the configuration and the batch's own wishes."""
        source = self.config.val_kwargs if meta_info.get("validate") else self.config
        do_sample = bool(meta_info.get("do_sample", source.do_sample))
        return {
            "temperature": float(source.temperature) if do_sample else 0.0,
            "top_p": float(source.top_p),
            "top_k": int(source.top_k),
            "do_sample": do_sample,
            "max_tokens": int(self.config.response_length),
            "min_tokens": self._shortest,
            "repetition_penalty": float(read(self.config, "repetition_penalty", 1.0)),
            "ignore_eos": bool(self.config.ignore_eos),
        }

    def _may_give_up(self, meta_info: Mapping[str, Any]) -> float:
        """``over_sample_rate`` for samples to train on; a validation or a greedy baseline needs every answer."""
        needs_all = meta_info.get("validate") or "do_sample" in meta_info
        return 0.0 if needs_all else float(self.config.over_sample_rate)


async def _scored(number: int, work: Awaitable[AgentLoopOutput], beside: OverlappedScoring | None) -> AgentLoopOutput:
    """A trajectory whose scoring has begun."""
    output = await work
    if beside is not None:
        beside.start(number, output)
    return output


def sample_streams(rows: Sequence[Mapping[str, Any]], meta_info: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(uid, sample index) of each row, the key of its random numbers.

    Rows without a uid are told apart by their place and by ``meta_info["global_steps"]``.

    Raises:
        RolloutError: two rows would draw the same numbers.
    """
    seen: Counter[str] = Counter()
    streams = []
    for number, row in enumerate(rows):
        uid, index = row.get("uid"), row.get("sample_index")
        name = f"step {meta_info.get('global_steps', 0)} row {number}" if uid is None else str(uid)
        streams.append((name, seen[name] if index is None else int(index)))
        seen[name] += 1
    uid, index = max(streams, key=Counter(streams).__getitem__, default=("", 0))
    if streams.count((uid, index)) > 1:
        raise RolloutError(f"two rows of uid {uid} would draw the same random numbers", key="sample_index", got=index)
    return streams
