"""How the first rollout worker comes to know the replicas of other processes."""

from __future__ import annotations

import asyncio

from verl.config import ActorRolloutRefConfig, HFModelConfig
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.service import SamplerService
from verl.single_controller.local.handle import LocalHandle
from verl.workers.sampling import RolloutWorker


class Answering:
    """What answers at the other end of a handle, with its number as the only token."""

    version = 0

    def __init__(self, number):
        self.number = number

    async def generate(self, request):
        return Completion(request.id, (self.number,), (-0.1,), "stop", (0,))


def test_replicas_of_other_processes_join_the_service_that_the_agent_loops_have():
    worker = RolloutWorker(ActorRolloutRefConfig(model=HFModelConfig(path="nowhere")))
    service = worker.service = SamplerService({worker.replica_name(0): Answering(0)})
    worker.connect({worker.replica_name(rank): LocalHandle(Answering(rank)) for rank in (2, 4)})
    assert worker.service is service
    assert [replica.name for replica in service.replicas] == [f"replica of rollout[{rank}]" for rank in (0, 2, 4)]

    async def run():
        asked = [Request(str(i), (1,), SamplingParams(max_tokens=1)) for i in range(6)]
        return await asyncio.gather(*map(service.generate, asked))

    assert {done.token_ids for done in asyncio.run(run())} == {(0,), (2,), (4,)}
