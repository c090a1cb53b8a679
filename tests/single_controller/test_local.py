"""The local runtime: places, random numbers, errors, async methods, colocation."""

from __future__ import annotations

import asyncio
import os
import random
import threading

import numpy as np
import pytest
import torch

from tests.harness.programs import python
from verl.errors import WorkerError
from verl.protocol import DataProto
from verl.single_controller.base import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    ResourcePool,
    RngState,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    worker_seed,
)
from verl.single_controller.local import LocalWorkerGroup, create_colocated_worker_cls


class Dice(Worker):
    def __init__(self, sides: int = 6):
        super().__init__()
        self.sides = sides
        self.first = torch.rand(1).item()
        self.set_dispatch_collect("dice", self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def throw(self) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    @register(Dispatch.ONE_TO_ALL)
    async def throw_async(self) -> float:
        before = torch.rand(1).item()
        await asyncio.sleep(0)
        return before

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple:
        return self.rank, self.world_size, self.info.local_rank, self.info.local_world_size, self.info.role

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, on_rank: int):
        if self.rank == on_rank:
            raise KeyError("the user's own error")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self):
        raise KeyError("later")

    @register(Dispatch.ONE_TO_ALL)
    def nested(self, other: LocalWorkerGroup) -> list:
        mine = torch.rand(1).item()
        return [mine, other.throw()[0], torch.rand(1).item()]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, data: DataProto) -> DataProto:
        data.meta_info["secret"] = 1
        data.batch["new"] = data.batch["x"] + 1
        return data.select(batch_keys=["new"], meta_info_keys=[])

    @register(make_nd_compute_dataproto_dispatch_fn("dice"))
    def on_mesh(self, data: DataProto) -> DataProto:
        return data


def dice(workers: int = 1, prefix: str = "dice", **options) -> LocalWorkerGroup:
    return LocalWorkerGroup(ResourcePool([workers]), ClassWithInitArgs(Dice), name_prefix=prefix, **options)


# ---- places ----------------------------------------------------------------------------------------------------


def test_every_worker_knows_its_place_and_the_environment_does_not(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    before = dict(os.environ)
    group = LocalWorkerGroup(ResourcePool([2, 1]), ClassWithInitArgs(Dice), name_prefix="dice")
    assert group.place() == [(0, 3, 0, 2, "dice"), (1, 3, 1, 2, "dice"), (2, 3, 0, 1, "dice")]
    assert dict(os.environ) == before
    assert group.world_size == 3 and group.worker_names == ["dice[0]", "dice[1]", "dice[2]"]
    address, port = group.workers[2].get_master_addr_port()
    assert (address, port) == (group.master_address, group.master_port) and int(port) > 0


def test_a_worker_that_nobody_placed_reads_the_environment(monkeypatch):
    assert (Dice().rank, Dice().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "1234")
    worker = Dice()
    assert (worker.rank, worker.world_size, worker.get_master_addr_port()) == (2, 4, ("127.0.0.1", "1234"))
    assert "RANK" in Worker.env_keys() and "CUDA_VISIBLE_DEVICES" in Worker.env_keys()


def test_a_worker_that_neither_calls_our_constructor_nor_asks_is_placed_all_the_same():
    class Silent(Worker):
        def __init__(self):
            self.started = True

    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Silent), name_prefix="silent")
    assert [(w.rank, w.world_size, w.fused_worker_dict) for w in group.workers] == [(0, 2, {}), (1, 2, {})]
    group.workers[0].set_dispatch_collect("m", 0, True)
    assert group.workers[1].meshes() == {}


def test_visible_devices_come_from_the_argument_or_the_environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert Worker().get_cuda_visible_devices() == "not set"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert Worker().get_cuda_visible_devices() == "1,2"
    assert Worker(cuda_visible_devices="3").get_cuda_visible_devices() == "3"


# ---- random numbers --------------------------------------------------------------------------------------------


def test_a_worker_draws_the_same_numbers_whoever_lives_beside_it():
    alone = dice()
    expected = [alone.throw()[0] for _ in range(3)]
    first, other = dice(), dice(prefix="other")
    torch.manual_seed(99)
    found = []
    for _ in range(3):
        other.throw()
        random.random(), np.random.rand(), torch.rand(5)
        found.append(first.throw()[0])
    assert found == expected and other.throw()[0] not in expected
    assert dice(2).throw()[1] != dice(2).throw()[0]
    assert dice(seed=1).throw() != dice(seed=2).throw() == dice(seed=2).throw()


def test_the_controllers_own_generators_are_not_touched():
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    group = dice(2)
    group.throw()
    group.throw_async()
    assert state() == before
    with pytest.raises(KeyError):
        group.fail(1)
    assert state() == before


def test_the_constructor_and_async_methods_draw_from_the_workers_state_too():
    seed = worker_seed(0, "dice", 0)
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    group = dice()
    found = [group.workers[0].first, group.throw_async()[0], group.throw()[0][2]]
    assert found == drawn


def test_a_call_from_inside_a_call_swaps_states_and_swaps_back():
    seed = worker_seed(0, "dice", 0)
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    inner = dice(prefix="inner")
    expected_inner = dice(prefix="inner").throw()[0]
    [[before, thrown, after]] = dice().nested(inner)
    assert [before, after] == drawn[1:] and thrown == expected_inner


def test_calls_from_two_threads_wait_for_each_other():
    groups = [dice(prefix=f"thread{i}") for i in range(2)]
    results: dict[int, list] = {}

    def many(index: int) -> None:
        results[index] = [groups[index].throw()[0] for _ in range(20)]

    threads = [threading.Thread(target=many, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for index in range(2):
        again = dice(prefix=f"thread{index}")
        assert results[index] == [again.throw()[0] for _ in range(20)]


def test_an_rng_state_moves_on_between_uses():
    rng = RngState(5)
    with rng.active():
        first = torch.rand(2)
    with rng.active():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), torch.rand(4, generator=torch.Generator().manual_seed(5)))


# ---- errors and isolation --------------------------------------------------------------------------------------


def test_a_workers_exception_arrives_unchanged_with_a_note():
    with pytest.raises(KeyError) as caught:
        dice(2).fail(1)
    assert caught.value.args == ("the user's own error",)
    assert caught.value.__notes__ == ["(in worker dice[1].fail)"]
    assert caught.traceback[-1].name == "fail"


def test_the_exception_of_a_call_that_does_not_wait_is_raised_when_fetched():
    group = dice()
    references = group.fail_later()
    with pytest.raises(KeyError, match="later"):
        group.wait(references)


def test_a_failing_constructor_is_noted_too():
    class Broken(Worker):
        def __init__(self):
            raise OSError("no weights")

    with pytest.raises(OSError, match="no weights") as caught:
        LocalWorkerGroup(None, ClassWithInitArgs(Broken), name_prefix="actor")
    assert caught.value.__notes__ == ["(in worker actor[0].__init__)"]


def test_what_a_worker_adds_to_its_batch_stays_its_own():
    data = DataProto.from_dict({"x": torch.arange(2)}, meta_info={"k": 1})
    out = dice().scribble(data)
    assert out.batch["new"].tolist() == [1, 2]
    assert data.meta_info == {"k": 1} and list(data.batch.keys()) == ["x"]


def test_the_tensors_themselves_are_not_copied():
    seen = []

    class Eyes(Worker):
        @register(Dispatch.DP_COMPUTE_METRIC)
        def look(self, data):
            return data.batch["x"].data_ptr()

    data = DataProto.from_dict({"x": torch.arange(4)})
    seen = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Eyes)).look(data)
    assert seen == [data.batch["x"].data_ptr(), data.batch["x"].data_ptr() + 16]


def test_methods_can_be_executed_by_name():
    group = dice(2)
    assert [r.result() for r in group.execute_all("place")] == group.execute_all_sync("place") == group.place()
    assert group.execute_rank_zero_sync("place") == group.execute_rank_zero("place").result() == group.place()[0]
    with pytest.raises(WorkerError, match="'throw'"):
        group.execute_all_sync("thorw")


def test_a_worker_method_must_not_hide_the_groups_own():
    class Clash(Worker):
        @register()
        def spawn(self):
            return None

    with pytest.raises(WorkerError, match="'spawn'"):
        LocalWorkerGroup(None, ClassWithInitArgs(Clash))
    with pytest.raises(WorkerError, match="ClassWithInitArgs"):
        LocalWorkerGroup(ResourcePool([1]))


# ---- async methods ---------------------------------------------------------------------------------------------

COMPUTES = """
import asyncio, threading, torch
from verl.single_controller.local.event_loop import run_coroutine

async def for_ever(begun):
    weights = torch.randn(300, 300)
    while True:
        for _ in range(20):
            weights @ weights
        begun.set()
        await asyncio.sleep(0)

begun = threading.Event()
threading.Thread(target=run_coroutine, args=(for_ever(begun),), daemon=True).start()
begun.wait()
"""


def test_a_program_that_ends_while_a_method_computes_ends_in_order():
    python("-c", COMPUTES)


class Agent(Worker):
    def __init__(self):
        super().__init__()
        self.ticks = 0

    @register(Dispatch.ONE_TO_ALL)
    async def loop_id(self) -> int:
        return id(asyncio.get_running_loop())

    @register(Dispatch.ONE_TO_ALL)
    async def leave_a_task(self) -> None:
        self.ticked = asyncio.Event()

        async def tick():
            await asyncio.sleep(0.01)
            self.ticks += 1
            self.ticked.set()

        self.task = asyncio.create_task(tick())

    @register(Dispatch.ONE_TO_ALL)
    async def ticks_later(self) -> int:
        await asyncio.wait_for(self.ticked.wait(), 60)
        return self.ticks

    @register(Dispatch.ONE_TO_ALL)
    async def call_group(self, group) -> object:
        return group.loop_id()


def test_async_methods_share_one_loop_that_goes_on_between_calls():
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Agent))
    other = LocalWorkerGroup(None, ClassWithInitArgs(Agent))
    assert len({*group.loop_id(), *other.loop_id()}) == 1
    group.leave_a_task()
    assert group.ticks_later() == [1, 1]


def test_a_group_can_be_called_where_a_loop_is_running_already():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Agent))

    async def notebook():
        return group.loop_id()

    assert asyncio.run(notebook()) == group.loop_id()


def test_an_async_method_that_would_wait_for_itself_is_told_to_use_a_handle():
    group = LocalWorkerGroup(None, ClassWithInitArgs(Agent))
    with pytest.raises(WorkerError, match="handle"):
        group.call_group(group)


# ---- colocation ------------------------------------------------------------------------------------------------


class Critic(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data):
        return DataProto.from_dict({"values": data.batch["x"] * 2})

    @register(Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def colocated(self):
        return self.get_fused_worker_by_name("actor"), self.get_fused_worker_by_name("nobody")


def colocated() -> LocalWorkerGroup:
    kind = create_colocated_worker_cls(
        {"actor": ClassWithInitArgs(Dice, sides=20), "critic": ClassWithInitArgs(Critic)}
    )
    return LocalWorkerGroup(ResourcePool([2]), kind, name_prefix="all")


def test_colocated_roles_have_prefixed_methods_and_spawn_gives_them_back_unprefixed():
    group = colocated()
    data = DataProto.from_dict({"x": torch.arange(2)})
    assert group.critic_compute_values(data).batch["values"].tolist() == [0, 2]
    assert group.actor_place() == [(0, 2, 0, 2, "actor"), (1, 2, 1, 2, "actor")]
    roles = group.spawn({"actor", "critic"})
    assert roles["critic"].compute_values(data).batch["values"].tolist() == [0, 2]
    assert roles["actor"].workers[0] is group.workers[0].worker_dict["actor"]
    assert roles["actor"].workers[0].sides == 20 and roles["actor"].worker_names == ["actor[0]", "actor[1]"]
    assert roles["actor"].master_port == group.master_port
    with pytest.raises(WorkerError, match="'actor'"):
        group.spawn(["acto"])
    with pytest.raises(WorkerError, match="no role"):
        dice().spawn(["actor"])


def test_colocated_roles_find_each_other():
    group = colocated()
    actor, nobody = group.spawn(["critic"])["critic"].colocated()
    assert actor is group.workers[0].worker_dict["actor"] and nobody is None


def test_a_role_draws_the_same_numbers_alone_and_colocated_and_by_either_name():
    alone = dice(2, prefix="actor")
    expected = [alone.throw(), alone.throw()]
    group = colocated()
    assert group.workers[0].worker_dict["actor"].first == alone.workers[0].first
    assert [group.actor_throw(), group.spawn(["actor"])["actor"].throw()] == expected


def test_the_mesh_of_a_role_answers_under_the_prefixed_name_too():
    data = DataProto.from_dict({"x": torch.arange(4)})
    group = colocated()
    assert group.actor_on_mesh(data).batch["x"].tolist() == [0, 1, 2, 3]
    assert group.spawn(["actor"])["actor"].on_mesh(data).batch["x"].tolist() == [0, 1, 2, 3]


def test_roles_that_disagree_about_a_mesh_are_refused_under_prefixed_names():
    group = colocated()
    group.workers[0].worker_dict["critic"].set_dispatch_collect("dice", 5, False)
    with pytest.raises(WorkerError, match="two roles"):
        group.actor_on_mesh(DataProto.from_dict({"x": torch.arange(4)}))


# ---- aliveness -------------------------------------------------------------------------------------------------


def test_a_dead_worker_is_found_and_every_further_call_says_so():
    class Mortal(LocalWorkerGroup):
        dead = threading.Event()
        looked = threading.Event()

        def _is_worker_alive(self, worker):
            self.looked.set()
            return not (self.dead.is_set() and worker.rank == 1)

    group = Mortal(ResourcePool([2]), ClassWithInitArgs(Dice), name_prefix="dice")
    group.start_worker_aliveness_check(every_n_seconds=0.005)
    assert group.looked.wait(60) and group.place()
    group.dead.set()
    group._checker.join(60)
    with pytest.raises(WorkerError, match=r"dice\[1\] is dead"):
        group.place()
    group.stop_worker_aliveness_check()


def test_local_workers_are_alive_and_the_check_can_be_stopped():
    group = dice()
    group.start_worker_aliveness_check(every_n_seconds=0.005)
    group.start_worker_aliveness_check()
    group.stop_worker_aliveness_check()
    assert group.place() and isinstance(group, WorkerGroup)


def test_connections_of_the_loop_of_local_workers_end_with_the_program():
    program = (
        "from verl.single_controller.local.event_loop import run_coroutine\n"
        "async def connection():\n"
        "    try:\n"
        "        yield 1\n"
        "    finally:\n"
        "        print('closed')\n"
        "async def begin(held):\n"
        "    return await anext(held)\n"
        "held = connection()\n"
        "print(run_coroutine(begin(held)))\n"
    )
    assert python("-c", program).stdout.split() == ["1", "closed"]
