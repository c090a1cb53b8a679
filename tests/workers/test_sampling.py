"""How the first sampling worker comes to know the replicas of other processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.rollout.test_service import Fake
from verl.config import ActorRolloutRefConfig, HFModelConfig
from verl.errors import WorkerError
from verl.rollout import Request, SamplingParams
from verl.rollout.service import SamplerService
from verl.single_controller.base.handle import called_method
from verl.single_controller.local.handle import LocalHandle
from verl.workers.sampling import SamplingWorker, balance_metrics


def answers(service) -> set[int]:
    """Numbers of the replicas that answer twelve requests."""

    async def run():
        asked = [Request(str(i), (1,), SamplingParams(max_tokens=1)) for i in range(12)]
        return await asyncio.gather(*map(service.generate, asked))

    return {done.token_ids[0] for done in asyncio.run(run())}


def test_replicas_of_other_processes_join_the_service():
    worker = SamplingWorker(ActorRolloutRefConfig(model=HFModelConfig(path="nowhere")))
    service = worker.service = SamplerService({worker.replica_name(0): Fake(0)})
    worker.agent_loops = SimpleNamespace(run_in=lambda runners: None)
    handles = {worker.replica_name(rank): LocalHandle(Fake(rank)) for rank in (2, 4)}
    asyncio.run(worker.connect(handles))
    assert [replica.name for replica in service.replicas] == [f"replica of rollout[{rank}]" for rank in (0, 2, 4)]
    assert answers(service) == {0, 2, 4}


def test_handles_reach_the_service_once_it_is_there_and_never_for_a_replica():
    worker = SamplingWorker(ActorRolloutRefConfig(model=HFModelConfig(path="nowhere")))
    assert worker.endpoints() == {}, "before the model is loaded"
    service = worker.service = SamplerService({"0": Fake(0)})
    worker.agent_loops = SimpleNamespace()
    assert called_method(worker, "SamplerService.discard", "rollout[0]") == service.discard
    with pytest.raises(WorkerError, match="no object of the class Sampler"):
        called_method(worker, "Sampler.abort", "rollout[0]")


def test_a_batch_says_how_evenly_its_replicas_worked_and_how_many_are_left():
    before = {"a": {"completed": 10.0, "is_lost": 0.0}, "b": {"completed": 4.0, "is_lost": 0.0}}
    after = {
        "a": {"completed": 16.0, "is_lost": 0.0},
        "b": {"completed": 5.0, "is_lost": 1.0},
        "c": {"completed": 2.0, "is_lost": 0.0},
    }
    assert {name: metric.value for name, metric in balance_metrics(before, after, 1.0).items()} == {
        "rollout/replicas/alive": 2.0,
        "rollout/replicas/resent": 1.0,
        "rollout/replicas/requests/min": 1.0,
        "rollout/replicas/requests/max": 6.0,
        "rollout/replicas/requests/mean": 3.0,
    }
    assert balance_metrics(before, {"a": after["a"]}, 0.0) == {}, "one replica has nothing to share"
