"""Groups on a real Ray of one node: every call gives what the local group gives, down to the random numbers."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Iterator

import numpy as np
import pytest
import ray
import torch
from tensordict import TensorDict

from tests.single_controller.ray.workers import (
    Answerer,
    Broken,
    Counter,
    Dice,
    Friendly,
    Holding,
    PlainUserError,
)
from verl.errors import ConfigError, WorkerError
from verl.protocol import DataProto, DataProtoFuture
from verl.registry import load_from_module
from verl.single_controller.base import ClassWithInitArgs, ResourcePool
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.local import create_colocated_worker_cls as local_colocated
from verl.single_controller.ray import host_object, runtime
from verl.single_controller.ray.base import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    SubRayResourcePool,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    extract_pg_from_exist,
    merge_resource_pool,
    split_resource_pool,
)
from verl.single_controller.ray.failures import RemoteTraceback

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[runtime.RayCluster]:
    try:
        yield runtime.start_cluster([2], ray_init={"address": "local", "num_cpus": 2, "object_store_memory": 200 << 20})
    finally:
        runtime.stop_cluster()


@pytest.fixture(scope="module")
def pool(cluster) -> RayResourcePool:
    return RayResourcePool([2])


@pytest.fixture(scope="module")
def dice(pool) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Dice), name_prefix="dice", seed=5)
    yield group
    group.close()


@pytest.fixture(scope="module")
def friendly(pool) -> Iterator[RayWorkerGroup]:
    """One worker with async methods, beside `dice` in the same pool."""
    part = split_resource_pool(pool, [1, 1])[0]
    group = RayWorkerGroup(part, RayClassWithInitArgs(Friendly), name_prefix="friendly")
    yield group
    group.close()


def local(workers: int = 2, kind: type = Dice, prefix: str = "dice", **options) -> LocalWorkerGroup:
    return LocalWorkerGroup(ResourcePool([workers]), ClassWithInitArgs(kind), name_prefix=prefix, **options)


def batch(rows: int = 4) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3)},
        non_tensors={"uid": np.array([f"row{i}" for i in range(rows)], dtype=object)},
        meta_info={"scale": 2},
    )


def same(left: DataProto, right: DataProto) -> None:
    assert set(left.batch.keys()) == set(right.batch.keys())
    for key, value in left.batch.items():
        assert value.dtype == right.batch[key].dtype and torch.equal(value, right.batch[key]), key
    assert left.non_tensor_batch.keys() == right.non_tensor_batch.keys()
    for key, column in left.non_tensor_batch.items():
        assert column.tolist() == right.non_tensor_batch[key].tolist()
    assert left.meta_info == right.meta_info


# ---- every dispatch mode -----------------------------------------------------------------------------------------


def test_one_to_all_gives_every_worker_the_same_and_returns_a_list(dice):
    assert dice.add(7) == local().add(7) == [7, 107]
    assert dice.add(7, more=1) == [8, 108]


def test_rank_zero_alone_gets_the_arguments_themselves(dice):
    assert dice.only_first([1, 2]) == local().only_first([1, 2]) == (0, [1, 2])


def test_all_to_all_and_dp_compute_hand_out_lists_one_entry_per_worker(dice):
    assert dice.each_its_own([1, 2]) == local().each_its_own([1, 2]) == [1, 102]
    assert dice.one_each([1, 2]) == local().one_each([1, 2]) == [1, 102]
    with pytest.raises(WorkerError, match="one entry per worker"):
        dice.one_each([1, 2, 3])


def test_a_batch_is_split_and_the_results_are_joined(dice):
    result = dice.double(batch())
    same(result, local().double(batch()))
    assert result.batch["y"][2].tolist() == [13, 15, 17]  # rank 1: 2 * (6, 7, 8) + 1
    assert result.non_tensor_batch["uid"].tolist() == ["row0@0", "row1@0", "row2@1", "row3@1"]


def test_a_batch_that_does_not_divide_is_padded_and_trimmed(dice):
    uid = np.array(["a", "b", "c"], dtype=object)
    odd = DataProto.from_dict(
        tensors={"x": torch.ones(3, 1)}, non_tensors={"uid": uid}, meta_info={"scale": 2}, auto_padding=True
    )
    result = dice.double(odd)
    assert len(result) == 3
    assert torch.equal(result.batch["y"], local().double(odd).batch["y"])


def test_a_tensordict_is_split_and_joined_too(dice):
    given = TensorDict({"x": torch.arange(4.0)}, batch_size=4)
    assert torch.equal(dice.halve_tensordict(given)["x"], torch.tensor([0, 0.5, 1, 1.5]))


def test_metrics_come_back_as_a_list(dice):
    assert dice.total(batch()) == local().total(batch()) == [15.0, 51.0]


def test_workers_of_one_data_parallel_rank_get_the_same_part_and_one_of_them_is_heard(dice):
    result = dice.on_mesh(batch())
    same(result, local().on_mesh(batch()))
    assert torch.equal(result.batch["y"], batch().batch["x"])  # rank 0 speaks, rank 1 (plus 1000) does not


def test_a_plain_function_runs_as_if_it_were_a_method(dice):
    def triple(worker, data):
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 3 + worker.rank})

    same(dice.execute_with_func_generator(triple, batch()), local().execute_with_func_generator(triple, batch()))
    assert dice.execute_func_rank_zero(max, 3, 4) == 4


def test_a_call_that_does_not_wait_gives_a_future_that_the_next_call_takes(dice):
    future = dice.double_later(batch())
    assert isinstance(future, DataProtoFuture)
    again = dice.double_later(future)
    assert torch.equal(again.get().batch["x"], batch().batch["x"] * 4)


def test_execute_all_and_rank_zero_work_by_name(dice):
    assert dice.execute_all_sync("add", [1, 2]) == [1, 102]
    assert dice.execute_all_sync("add", 1, more=2) == [3, 103]
    assert dice.execute_rank_zero_sync("add", 5) == 5
    assert dice.wait(dice.execute_all_async("add", 1)) == dice.wait(dice.execute_all("add", 1)) == [1, 101]
    assert dice.wait(dice.execute_rank_zero("add", 2)) == dice.wait(dice.execute_rank_zero_async("add", 2)) == 2


def test_calls_run_in_the_order_in_which_they_were_made(friendly):
    for number in range(50):
        friendly.note(number)
    assert friendly.execute_rank_zero_sync("state")["seen"] == list(range(50))
    friendly.execute_rank_zero_sync("forget")


def test_a_worker_can_be_called_directly_through_its_actor(dice):
    import ray

    assert ray.get(dice.workers[1].add.remote(1)) == 101


# ---- what workers know -------------------------------------------------------------------------------------------


def test_every_worker_knows_its_place_also_through_the_environment(dice):
    ours = [place[:5] for place in dice.place()]
    assert ours == [place[:5] for place in local().place()] == [(0, 2, 0, 2, "dice"), (1, 2, 1, 2, "dice")]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert dice.environment(names)[1] == dict(zip(names, ["1", "2", "1", "2", "127.0.0.1", dice.master_port]))
    assert dice.master_address == "127.0.0.1" and dice.worker_names == ["dice[0]", "dice[1]"]
    assert dice.world_size == 2 and len(set(dice.node_ids)) == 1 and dice.node_ids[0] in dice.placement()


def test_the_draws_are_those_of_the_local_group(dice, pool):
    ours, theirs = RayWorkerGroup(pool, RayClassWithInitArgs(Dice), name_prefix="dice", seed=9), local(seed=9)
    assert ours.place() == theirs.place()  # a draw in the constructor
    for _ in range(3):
        assert ours.throw() == theirs.throw()  # python, numpy and torch
    assert ours.throw() != dice.throw()  # another seed
    ours.close()


def test_the_environment_of_the_run_reaches_the_workers_before_their_modules_load(pool, monkeypatch):
    monkeypatch.setenv("VERL_TEST_VARIABLE", "seen")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    group = RayWorkerGroup(
        split_resource_pool(pool, 1)[1], RayClassWithInitArgs(Dice), worker_env={"MINE": "yes"}, name_prefix="env"
    )
    found = group.environment(["VERL_TEST_VARIABLE", "MINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"])[0]
    assert (found["VERL_TEST_VARIABLE"], found["MINE"]) == ("seen", "yes")
    assert found["CUDA_VISIBLE_DEVICES"] != "7"  # devices are Ray's to hand out
    assert group.threads() == [int(found["OMP_NUM_THREADS"])] == [torch.get_num_threads()]
    group.close()


# ---- values on the way -------------------------------------------------------------------------------------------


def test_loose_tensors_of_every_kind_arrive_as_they_were(dice):
    given = {
        "float": torch.randn(300, 100),
        "bf16": torch.randn(5).to(torch.bfloat16),
        "strided": torch.arange(12).reshape(3, 4).t(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "sparse": torch.eye(3).to_sparse(),
    }
    first, second = dice.weights(given)
    for name, tensor in given.items():
        assert first[name].dtype == tensor.dtype
        assert torch.equal(first[name].to_dense(), tensor.to_dense()), name
        assert torch.equal(second[name].to_dense(), tensor.to_dense() * 2), name


def test_a_shared_argument_is_put_once_and_small_ones_are_not(dice, monkeypatch):
    import ray

    put, count = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: count.append(1) or put(value))
    dice.weights({"w": torch.zeros(100_000)})
    assert len(count) == 1
    dice.add(1)
    dice.weights({"w": torch.zeros(10)})
    assert len(count) == 1


def test_writing_into_a_batch_that_arrived_is_refused_by_name(dice):
    with pytest.raises(WorkerError, match=r"wrote into the tensor 'x'.*clone") as error:
        dice.scribble(batch())
    assert "dice[0].scribble" in "".join(error.value.__notes__)


def test_classes_from_a_users_file_and_folders_added_to_the_path_reach_the_workers(tmp_path, monkeypatch):
    (tmp_path / "verl_test_folder").mkdir()
    (tmp_path / "verl_test_folder" / "verl_test_helper.py").write_text("def triple(x):\n    return 3 * x\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.single_controller.base import Dispatch, Worker, register\n"
        "from verl_test_helper import triple\n"
        "class Mine(Worker):\n"
        "    @register(Dispatch.ONE_TO_ALL)\n"
        "    def compute(self, x):\n"
        "        return triple(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "verl_test_folder"))
    mine = load_from_module(str(file), "Mine")  # a module without an importable name
    group = RayWorkerGroup(None, RayClassWithInitArgs(mine))
    assert group.compute(4) == [12]
    group.close()


def test_a_class_that_workers_cannot_import_says_which_module_is_missing():
    kind = type("Nowhere", (Dice,), {"__module__": "verl_test_nowhere"})
    module = types.ModuleType("verl_test_nowhere")
    module.Nowhere = kind
    sys.modules["verl_test_nowhere"] = module
    try:
        with pytest.raises(WorkerError, match=r"no module 'verl_test_nowhere'.*importable on every node"):
            RayWorkerGroup(None, RayClassWithInitArgs(kind))
    finally:
        del sys.modules["verl_test_nowhere"]


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_workers_own_exception_arrives_with_its_traceback_and_who_raised_it(dice, rank):
    with pytest.raises(PlainUserError, match=r"^the user's own error") as error:
        dice.fail(rank, "user")
    assert error.value.__notes__ == [f"(in worker dice[{rank}].fail)"]
    assert isinstance(error.value.__cause__, RemoteTraceback)
    assert 'raise PlainUserError("the user\'s own error")' in str(error.value.__cause__)
    assert "single_controller/ray/hosted_worker" not in str(error.value.__cause__)  # only the user's frames
    assert dice.add(1) == [1, 101]  # the group lives on


def test_an_exception_that_cannot_travel_is_told_by_its_type_and_message(dice):
    with pytest.raises(WorkerError, match="UserError: code 7: cannot be copied"):
        dice.fail(1, "odd")


def test_an_exception_of_a_call_that_does_not_wait_comes_when_it_is_asked_for(dice):
    references = dice.fail_later()
    with pytest.raises(KeyError, match="later"):
        dice.wait(references)


def test_a_method_that_does_not_exist_names_the_nearest(dice):
    with pytest.raises(WorkerError, match=r"dice\[0\] has no method 'thrwo'.*throw"):
        dice.execute_rank_zero_sync("thrwo")


def test_a_constructor_that_fails_says_so_and_leaves_no_process(pool):
    with pytest.raises(PlainUserError, match="no model here") as error:
        RayWorkerGroup(split_resource_pool(pool, 1)[0], RayClassWithInitArgs(Broken), name_prefix="broken")
    assert error.value.__notes__ == ["(in worker broken[0].__init__)"]


def test_wrong_arguments_of_a_group_are_refused():
    with pytest.raises(WorkerError, match="needs a class"):
        RayWorkerGroup(RayResourcePool([1]))
    with pytest.raises(TypeError, match="nonsense"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Dice), nonsense=1)


# ---- several roles in one process --------------------------------------------------------------------------------


def test_colocated_roles_share_processes_and_draw_as_they_do_locally(pool):
    roles = {"actor": ClassWithInitArgs(Dice), "critic": ClassWithInitArgs(Dice, sides=8)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), name_prefix="all", seed=3)
    theirs = LocalWorkerGroup(ResourcePool([2]), local_colocated(roles), name_prefix="all", seed=3)
    assert group.actor_add(1) == theirs.actor_add(1) == [1, 101]  # the outer group has both roles' methods
    ours, other = group.spawn({"actor", "critic"}), theirs.spawn({"actor", "critic"})
    assert ours["actor"].pid() == ours["critic"].pid() == group.critic_pid()
    for role in ("actor", "critic", "actor", "actor", "critic"):
        assert ours[role].throw() == other[role].throw()
    assert ours["critic"].place() == other["critic"].place()
    same(ours["critic"].double(batch()), other["critic"].double(batch()))
    with pytest.raises(KeyError) as error:
        ours["critic"].fail(1)
    assert error.value.__notes__ == ["(in worker critic[1].fail)"]
    with pytest.raises(WorkerError, match=r"no role 'critik'.*critic"):
        group.spawn({"critik"})
    (helper,) = ours["critic"].start_helpers(ClassWithInitArgs(Counter), 1, "counter")
    assert asyncio.run(helper.call(Counter.add, 2)) == 2
    group.close()
    with pytest.raises(WorkerError, match="were stopped"):
        ours["actor"].add(1)
    with pytest.raises(WorkerError, match="'counter' were stopped"):
        asyncio.run(helper.call(Counter.add, 1))


def test_fused_roles_are_attributes_of_the_group(pool):
    import ray

    decorated = ray.remote(num_cpus=0)(Dice)  # upstream's way to name a class
    roles = {"actor": RayClassWithInitArgs(decorated), "ref": RayClassWithInitArgs(Dice)}
    part = split_resource_pool(pool, 1)[1]
    group = RayWorkerGroup(part, create_colocated_worker_cls_fused(roles), name_prefix="fused")
    group.fuse({"actor", "ref"})
    assert group.actor.add(1) == group.ref.add(1) == [1]
    assert group.spawn_fused({"ref"})["ref"].pid() == group.actor.pid()
    assert not hasattr(group, "actor_add")
    group.close()


def test_roles_that_want_different_options_cannot_share_a_process():
    actor, critic = RayClassWithInitArgs(Dice), RayClassWithInitArgs(Dice)
    actor.update_options({"num_cpus": 1})
    critic.update_options({"num_cpus": 2})
    critic.set_additional_resource({"special": 1})
    with pytest.raises(WorkerError, match="different Ray options 'num_cpus'"):
        create_colocated_worker_cls({"actor": actor, "critic": critic})
    critic.update_options({"num_cpus": 1})
    together = create_colocated_worker_cls({"actor": actor, "critic": critic})
    assert together.options == {"num_cpus": 1} and together.additional_resource == {"special": 1}


# ---- pools -------------------------------------------------------------------------------------------------------


def test_a_pool_is_split_into_parts_that_know_their_processes(pool):
    parts = split_resource_pool(pool, 1)
    assert [part.world_size for part in parts] == [1, 1] and all(isinstance(p, SubRayResourcePool) for p in parts)
    assert [part.slots()[0].bundle for part in parts] == [0, 1]
    assert [part.store for part in split_resource_pool(pool, [2])] == [[2]]
    assert split_resource_pool(parts[1], 1)[0].slots()[0].bundle == 1
    with pytest.raises(WorkerError, match="cannot be split"):
        split_resource_pool(pool, [2, 1])


def test_pools_are_merged_and_their_placement_groups_found_again(pool):
    whole = RayResourcePool([1])
    whole.pgs = pool.get_placement_groups()[:1]
    merged = merge_resource_pool(pool, whole)
    assert merged.store == [2, 1] and merged.get_placement_groups() == [*pool.get_placement_groups(), *whole.pgs]
    found = extract_pg_from_exist({"a": pool}, ["a"], RayResourcePool([2]))
    assert found == pool.get_placement_groups()
    with pytest.raises(WorkerError, match="cannot hold"):
        extract_pg_from_exist({"a": pool}, ["a"], RayResourcePool([1, 1]))
    with pytest.raises(WorkerError, match="different settings"):
        merge_resource_pool(pool, RayResourcePool([1], use_gpu=False))


def test_a_pool_larger_than_the_cluster_is_refused_with_both_sizes():
    with pytest.raises(ConfigError, match=r"needs 1 node with 3 CPUs.*1 node \(.*: 2\)"):
        RayResourcePool([3]).get_placement_groups()
    with pytest.raises(ConfigError, match=r"trainer.nnodes.*needs 2 nodes with 1, 1 CPUs"):
        RayResourcePool([1, 1]).get_placement_groups()


def test_a_pool_that_others_occupy_is_refused_after_a_while(pool, monkeypatch):
    from verl.single_controller.ray import resource_pool

    pool.get_placement_groups()
    monkeypatch.setattr(resource_pool, "PLACEMENT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="did not free it"):
        RayResourcePool([1]).get_placement_groups()


# ---- handles -----------------------------------------------------------------------------------------------------


def test_requests_run_beside_each_other_and_can_be_cancelled(friendly):
    handle = friendly.handle(0)

    async def many() -> None:
        await asyncio.gather(*(handle.with_timeout(60).call(Friendly.meet, 20) for _ in range(20)))

    async def begun() -> int:
        return (await handle.call(Friendly.state))["begun"]

    async def cancelled() -> None:
        call = asyncio.ensure_future(handle.call(Friendly.generate))
        while not await begun():
            await asyncio.sleep(0.01)
        assert handle.cancel(Friendly.generate) == 1
        with pytest.raises(WorkerError, match="cancelled"):
            await call
        seconds = 0.1
        while await begun() < 2:  # a call that is given up before it reaches the worker is never begun
            seconds *= 2
            with pytest.raises(WorkerError, match="did not answer within"):
                await handle.with_timeout(seconds).call(Friendly.generate)

    asyncio.run(many())
    asyncio.run(cancelled())
    deadline = time.monotonic() + 60  # who gave up waiting does not wait for the worker to hear of it either
    while (state := friendly.execute_rank_zero_sync("state"))["cancelled"] < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state["begun"] == state["cancelled"] == 2


def test_async_methods_of_a_group_draw_as_they_do_locally(friendly):
    theirs = local(1, Friendly, "friendly")
    assert friendly.throw_async() == theirs.throw_async()
    assert friendly.throw() == theirs.throw()


def test_a_handle_reports_errors_by_worker_and_method(friendly, dice):
    async def run() -> None:
        with pytest.raises(KeyError) as error:
            await friendly.handle(0).call(Friendly.fail, 0)
        assert error.value.__notes__ == ["(in worker friendly[0].fail)"]
        with pytest.raises(WorkerError, match=r"no object of the class Counter.*Friendly"):
            await friendly.handle(0).call(Counter.add, 1)
        assert await dice.handle(1).call(Dice.add, 1) == 101  # a worker without async methods has a handle too
        with pytest.raises(WorkerError, match="did not answer within"):
            await dice.handle(1, timeout=0.2).call(Dice.die, 9, 2.0)  # goes on, and nobody hears its end
        assert await dice.handle(1).call(Dice.add, 2) == 102

    asyncio.run(run())
    with pytest.raises(WorkerError, match="one at a time"):
        dice.handle(0, max_concurrency=4)


def test_a_handle_reaches_async_methods_of_what_a_plain_worker_holds(pool):
    group = RayWorkerGroup(split_resource_pool(pool, [1, 1])[0], RayClassWithInitArgs(Holding), name_prefix="holding")
    assert group.add(1) == [2]
    assert asyncio.run(group.handle(0).call(Answerer.double, 4)) == 8
    with pytest.raises(WorkerError, match=r"holding\[0\] has no object of the class Counter.*Holding.*Answerer"):
        asyncio.run(group.handle(0).call(Counter.add, 1))
    group.close()


def test_a_plain_object_lives_in_a_process_of_its_own_and_its_handle_travels(dice, tmp_path):
    handle = host_object(ClassWithInitArgs(Counter, start=5), "counter[0]", timeout=20)

    def seconds_of_a_file(path):
        while not path.exists():
            time.sleep(0.02)
        return 0.0

    def ask(worker, data):
        value = asyncio.run(worker.handle.call(Counter.add, 1))
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 0 + value})

    def remember(worker, data, handle=handle):
        worker.handle = handle
        return data

    async def run() -> None:
        assert sorted(await asyncio.gather(*(handle.call(Counter.add, 1) for _ in range(3)))) == [
            6,
            7,
            8,
        ]  # one at a time
        reference = ray.remote(seconds_of_a_file).options(num_cpus=0).remote(tmp_path / "made")
        later = asyncio.ensure_future(handle.call(Counter.slow, reference))
        assert await handle.call(Counter.slow, 0.0) == "done", "what waits for its argument does not hold others up"
        assert not later.done()
        (tmp_path / "made").touch()
        assert await later == "done"
        with pytest.raises(PlainUserError, match="of a plain object"):
            await handle.call(Counter.fail)

    asyncio.run(run())
    dice.execute_with_func_generator(remember, batch())
    assert sorted(dice.execute_with_func_generator(ask, batch(2)).batch["x"][:, 0].tolist()) == [9, 10]
    handle.close()
    with pytest.raises(WorkerError, match="stopped"):
        asyncio.run(handle.call(Counter.add, 1))
