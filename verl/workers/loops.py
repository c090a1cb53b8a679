"""The worker that runs agent loops in a separate process, and its link to the process with the service."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from verl.agent_loop import AgentLoopManager
from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.early_stop import Stop
from verl.agent_loop.runner import RowRunner, RunnerLostError, place_of_row
from verl.config import ActorRolloutRefConfig, DataConfig
from verl.data import processor_of, tokenizer_of
from verl.errors import WorkerError, portable
from verl.models.config import import_external
from verl.rollout.hosted import RemoteSampler
from verl.single_controller.base.handle import Handle
from verl.tools.limits import shared_by
from verl.workers.part import local_model


class RolloutWorker:
    """Runs agent loops, with their tools and users; it holds no model, and requests go to the sampling service.

    Args:
        config: the section ``actor_rollout_ref`` of the configuration.
        data: the section ``data``, for agent loops that render messages.
        service: handle on the `SamplingWorker` that has the service.
        processes: how many such workers there are; tools with a limit for the run keep to their share.
    """

    def __init__(self, config: ActorRolloutRefConfig, data: DataConfig | None, service: Handle, processes: int = 1):
        if processes > 1:
            shared_by(processes)
        import_external(config.model.external_lib)  # no model is loaded here, and it may register loops and parsers
        model = local_model(config.model, "actor_rollout_ref.model.path")
        sampler = RemoteSampler(service, generate=AgentLoopManager.serve)
        tokenizer = tokenizer_of(model)
        processor = processor_of(model, tokenizer, data and data.mm_processor_kwargs)
        self._runner = RowRunner(config.rollout, sampler, tokenizer, processor, data_config=data)
        self._stop = Stop()

    async def run_row(
        self,
        batch: int,
        number: int,
        row: dict[str, Any],
        stream: tuple[str, int],
        parameters: dict[str, Any],
        keeps: bool = False,
    ) -> AgentLoopOutput:
        """As `RowRunner.run`, for a row of a batch that `end_batch` may end; ``keeps`` is of its `Stop`."""
        output = await self._runner.run(number, row, stream, parameters, self._stop_of(batch, keeps))
        return output if output.failure is None else replace(output, failure=portable(output.failure))

    async def end_batch(self, batch: int, keeps: bool = False) -> None:
        """Enough trajectories of a batch are done."""
        self._stop_of(batch, keeps).is_set = True

    def _stop_of(self, batch: int, keeps: bool) -> Stop:
        if self._stop.batch != batch:
            self._stop = Stop(batch=batch, keeps=keeps)
        return self._stop


class RemoteRunner:
    """Runs the loops of rows in a `RolloutWorker` elsewhere.

    Args:
        worker: its handle.
    """

    def __init__(self, worker: Handle):
        self._worker = worker

    async def run(
        self, number: int, row: dict[str, Any], stream: tuple[str, int], parameters: dict[str, Any], stop: Stop
    ) -> AgentLoopOutput:
        try:
            return await self._worker.call(
                RolloutWorker.run_row, stop.batch, number, row, stream, parameters, stop.keeps
            )
        except WorkerError as error:
            where = place_of_row(number, row, stream)
            raise RunnerLostError(f"the process that ran the agent loop of {where} is lost: {error}") from error

    async def end(self, stop: Stop) -> None:
        with suppress(WorkerError):  # of a process that is lost each of its rows says so
            await self._worker.call(RolloutWorker.end_batch, stop.batch, stop.keeps)
