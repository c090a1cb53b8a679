"""Runs the loop of every row at once over one sampler and brings the trajectories together as a batch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.batch import array_of_objects, later_images, loop_metrics, to_batch
from verl.agent_loop.early_stop import Stop, gather_most, gather_prompts
from verl.agent_loop.failed import check_some_worked
from verl.agent_loop.overlapped_scoring import OverlappedScoring, ScoreRow
from verl.agent_loop.row_traces import mark_traced
from verl.agent_loop.runner import RowRunner, RunnerLostError, RunsRows, Score
from verl.agent_loop.unfinished import (
    EARLIER,
    ENOUGH,
    LEFT,
    Members,
    are_complete,
    output_of,
    partial_metrics,
    states_of,
    trajectories_before,
)
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data.settings import read, read_number
from verl.errors import RolloutError
from verl.metrics import notice
from verl.outcomes import run_now
from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.base import Completion, Request, Sampler

if TYPE_CHECKING:
    from verl.data.vision.processor import VisionProcessor

LOOPS = "actor_rollout_ref.rollout.agent.num_workers"


class AgentLoopManager:
    """From rows of prompts to a batch of trajectories.

    Rows arrive repeated: the n samples of a prompt are n rows with one ``uid``, distinguished by their order.

    Args:
        config: the ``rollout`` section.
        sampler: serves every request.
        tokenizer, processor: of the policy.
        score: ``await score(row, output)`` scores a trajectory as soon as it ends, while the others sample;
            the batch then has ``rm_scores`` (B, T), the score on the last sampled token.
        data_config: for loops that render messages as the dataset does.
        score_row: scores a batch of one row as soon as its trajectory ends; unlike ``score`` it leaves the place of
            the scores to the reward manager, which finds the results in the batch.

    The loops run here, unless `run_in` says in which other processes. Where they run changes no result: over-sampling,
    scoring and the limits of both are of the whole batch, and stay here.
    """

    def __init__(
        self,
        config: RolloutConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        processor: VisionProcessor | None = None,
        score: Score | None = None,
        data_config: DataConfig | None = None,
        score_row: ScoreRow | None = None,
    ):
        self.config, self.sampler, self.score_row = config, sampler, score_row
        self.here = RowRunner(config, sampler, tokenizer, processor, score, data_config)
        self._runners: Sequence[RunsRows] = [self.here]
        self._lost: set[int] = set()
        self._served: dict[str, asyncio.Future[Completion]] = {}
        self._stop = Stop()
        self._shortest = read_number(data_config, "min_response_length", 0)

    def run_in(self, runners: Sequence[RunsRows]) -> None:
        """Run the loops in other processes, each of which gets adjacent rows; none: here.

        Raises:
            RolloutError: ``score`` is set, which the other processes do not have.
        """
        if runners and self.here.score is not None:
            raise RolloutError("score runs with the loops, and only in this process", fix="Pass score_row instead.")
        self._runners, self._lost = list(runners) or [self.here], set()

    async def serve(self, request: Request) -> Completion:
        """The answer to a loop in another process; it is empty once enough trajectories of the batch are done.

        Unless what is not done resumes later: then the loop knows which of its requests still want an answer.
        """
        if self._stop.is_set and not self._stop.keeps:
            return self._stop.answer(request)
        before = self._served.get(request.id)
        if before is not None:  # of a process that is lost, whose row runs again: its answer has no reader
            await self.sampler.abort([request.id])
            await asyncio.wait([before])
        answer = self._served[request.id] = asyncio.ensure_future(self.sampler.generate(request))
        try:
            return await answer
        finally:
            answer.cancel()  # has no effect once it has ended
            if self._served.get(request.id) is answer:
                del self._served[request.id]

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """A batch of trajectories in the order of the rows.

        Args:
            prompts: ``raw_prompt_ids`` or ``raw_prompt``, and ``uid``; ``agent_name`` picks a row's loop. A column
                ``sample_index`` tells the samples of a uid apart where they are spread over several batches.
                ``meta_info["validate"]`` samples with ``val_kwargs``; ``meta_info["do_sample"]`` overrides both. With
                ``meta_info["enough_prompts"]`` the batch ends once that number of prompts is complete; its column
                ``unfinished`` says where the others stand, and is the column ``earlier`` of the next rows.

        Raises:
            RolloutError: all rows failed, the sampler is gone, or a loop says that its failure stops the run; the
                message names the row. A row that fails alone is masked and counted as ``rollout/agent/failed``.
        """
        return run_now(self.generate(prompts))

    async def generate(self, prompts: DataProto) -> DataProto:
        """The same inside a running event loop."""
        rows = [{name: values[i] for name, values in prompts.non_tensor_batch.items()} for i in range(len(prompts))]
        parameters = self.sampling_params(prompts.meta_info)
        enough = prompts.meta_info.get(ENOUGH)
        stop = self._stop = Stop(keeps=enough is not None)
        pad = self.here.pad
        scorer = None if self.score_row is None else OverlappedScoring(self.score_row, rows, pad)
        streams, uids = sample_streams(rows, prompts.meta_info), list(prompts.non_tensor_batch.get("uid", ()))
        tasks = []
        places = self._places(rows)
        marked_rows = mark_traced(self.config, rows, streams, places, prompts.meta_info)
        for number, (row, stream) in enumerate(zip(marked_rows, streams)):
            ended = (row.get(EARLIER) or {}).get("ended")
            work = self._run(places[number], number, row, stream, parameters, stop) if ended is None else _again(ended)
            tasks.append(asyncio.ensure_future(_scored(number, work, None if stop.keeps else scorer)))
        try:
            if enough is None:
                outputs = await gather_most(tasks, self._may_give_up(prompts.meta_info), self._end_batch)
            else:
                outputs = await self._enough_of(tasks, uids, int(enough), scorer)
        except BaseException:
            for task in tasks:  # the batch ends; what is left must not go on sampling
                task.cancel()
            if scorer is not None:
                scorer.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        check_some_worked(outputs)
        batch = to_batch(outputs, pad, with_log_probs=self.config.calculate_log_probs)
        batch.non_tensor_batch.update(later_images(outputs, rows) | trajectories_before(outputs))
        scoring = {} if scorer is None else await scorer.finish(outputs, batch)
        if enough is None:
            batch.meta_info["metrics"] = {**loop_metrics(outputs), **scoring}
            return batch
        states = states_of(outputs, uids, places)
        batch.non_tensor_batch[LEFT] = array_of_objects(states)
        measured = loop_metrics([output for output, state in zip(outputs, states) if state is None])
        batch.meta_info["metrics"] = {**measured, **scoring, **partial_metrics(rows, outputs, states)}
        return batch

    async def _enough_of(
        self,
        tasks: Sequence[asyncio.Task[AgentLoopOutput]],
        uids: Sequence[str],
        enough: int,
        scorer: OverlappedScoring | None,
    ) -> list[AgentLoopOutput]:
        """The results of all tasks once enough prompts have all samples; only those of such prompts are scored."""
        begun: set[int] = set()

        def score(rows: Sequence[int]) -> None:
            begun.update(rows)
            for row in rows if scorer is not None else ():
                scorer.start(row, tasks[row].result())  # type: ignore[union-attr]  # no rows without it

        outputs = await gather_prompts(tasks, Members(uids), enough, self._end_batch, score)
        score([row for row, is_over in enumerate(are_complete(outputs, uids)) if is_over and row not in begun])
        return outputs

    def _places(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """The runner of each row: adjacent rows share one, and a trajectory resumes where its tools are."""
        count = len(self._runners)
        places = [number * count // len(rows) for number in range(len(rows))]
        before = [(row.get(EARLIER) or {}).get("runner", count) for row in rows]
        return [known if known < count else place for known, place in zip(before, places)]

    async def _run(
        self, place: int, number: int, row: dict[str, Any], stream: tuple[str, int], parameters: dict[str, Any],
        stop: Stop,
    ) -> AgentLoopOutput:  # fmt: skip
        """The trajectory of a row. If its process is lost, another one restarts the loop: tools went with the first.

        Raises:
            RunnerLostError: so is the second; it may be the loop that ends them.
        """
        runner = self._living(place)
        try:
            return await self._runner_at(runner).run(number, row, stream, parameters, stop)
        except RunnerLostError as error:
            if runner is None:
                raise
            self._lost.add(runner)
            notice(LOOPS, f"{error}. Its rows are run again, from their prompts, by the others of the "
                   f"{len(self._runners)} processes, or beside the sampler if none is left")  # fmt: skip
        row = {name: value for name, value in row.items() if name != EARLIER}
        return await self._runner_at(self._living(runner)).run(number, row, stream, parameters, stop)

    def _living(self, place: int) -> int | None:
        """The place, or the next one that is not lost; None: all are."""
        order = [(place + step) % len(self._runners) for step in range(len(self._runners))]
        return next((each for each in order if each not in self._lost), None)

    def _runner_at(self, place: int | None) -> RunsRows:
        return self.here if place is None else self._runners[place]

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


async def _again(plain: Mapping[str, Any]) -> AgentLoopOutput:
    """A trajectory that ended in an earlier batch."""
    return output_of(plain)


async def _scored(number: int, work: Awaitable[AgentLoopOutput], scorer: OverlappedScoring | None) -> AgentLoopOutput:
    """A trajectory whose scoring has begun."""
    output = await work
    if scorer is not None:
        scorer.start(number, output)
    return output


def sample_streams(rows: Sequence[Mapping[str, Any]], meta_info: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(uid, sample index) of each row, the key of its random numbers.

    Rows without a uid are distinguished by their place and by ``meta_info["global_steps"]``.

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
