"""Two Ray nodes on one machine: ranks on both, results and errors from both, a node that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from tests.single_controller.ray.workers import Dice
from verl.errors import ConfigError, WorkerError
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, ResourcePoolManager, register
from verl.single_controller.ray import address as addresses
from verl.single_controller.ray import cluster as nodes
from verl.single_controller.ray import runtime, security
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.slow


class Summer(Dice):
    """Its ranks form a process group of torch."""

    @register(Dispatch.ONE_TO_ALL)
    def all_reduce(self) -> float:
        dist.init_process_group("gloo", init_method="env://")
        mine = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(mine)
        dist.destroy_process_group()
        return mine.item()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    security.demand_token()
    small = {"num_cpus": 1, "object_store_memory": 120 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        cluster.add_node(**small)
        yield cluster
    finally:
        runtime.stop_cluster()
        cluster.shutdown()


def test_a_run_on_two_nodes_holds_ranks_of_one_process_group_on_both(two_nodes, capsys):
    started = runtime.start_cluster([1, 1], ray_init={"address": two_nodes.address})
    assert not started.is_owned and len(started.nodes) == 2
    pool = RayResourcePool([1, 1])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Summer), name_prefix="summer")
    print(group.placement())
    shown = capsys.readouterr().out
    assert set(group.node_ids) == {node.id for node in started.nodes}
    assert all(node in shown for node in group.node_ids) and "summer[1]: node" in shown
    assert group.all_reduce() == [3.0, 3.0]
    assert [place[:4] for place in group.place()] == [(0, 2, 0, 1), (1, 2, 0, 1)]  # each is alone on its node
    seen = group.look_at_processes()
    assert [one.name for one in seen] == ["summer[0]", "summer[1]"] and sorted(bool(one.node) for one in seen) == [0, 1]
    assert all("most recent call first" in one.stacks for one in seen), "each node has looked at its own"
    assert group.master_address == started.nodes[0].address
    batch = DataProto.from_dict(tensors={"x": torch.ones(4, 100_000)})  # the second part crosses to the other node
    assert group.total(batch) == [200_000.0, 200_000.0]
    with pytest.raises(KeyError):
        group.fail(1)
    pool.close()  # ends the workers too


def test_the_cluster_is_found_and_joined_with_its_token_only(two_nodes, project_root):
    assert addresses.find_address() == two_nodes.address  # as `ray start` left it
    code = (
        "import sys; from verl.single_controller.ray import address, security; from verl.errors import ConfigError\n"
        "try: address.wait_for_cluster(sys.argv[1], 5); print('joined', security.env.get('RAY_AUTH_MODE'))\n"
        "except ConfigError as error: print(error)"
    )

    def said(**changed: str) -> str:
        environment = {**os.environ, "RAY_AUTH_MODE": "", "HOME": "/nowhere", **changed}
        command = [sys.executable, "-c", code, two_nodes.address]
        run = subprocess.run(command, check=True, cwd=project_root, env=environment, capture_output=True, text=True)
        return run.stdout

    assert said().strip() == "joined token"
    assert "this machine has none" in said(RAY_AUTH_TOKEN="")
    assert "refuses this machine's token" in said(RAY_AUTH_TOKEN="0" * 64)


def test_sizes_of_pools_are_checked_against_the_nodes(two_nodes):
    runtime.start_cluster([1], ray_init={"address": two_nodes.address})
    assert nodes.devices_per_node("cpu") == [1, 1]
    manager = ResourcePoolManager(
        {"both": [1, 1]},
        {"actor": "both"},
        device_kind="cpu",
        devices_per_node=nodes.devices_per_node("cpu"),
        pool_class=RayResourcePool,
    )
    assert isinstance(manager.get_resource_pool("actor"), RayResourcePool)
    with pytest.raises(ConfigError, match=r"needs 1 node with 2 CPUs.*has: 2 nodes \(.*: 1, .*: 1\)"):
        runtime.start_cluster([2], ray_init={"address": two_nodes.address}, join_seconds=0.1)
    assert ray.is_initialized()  # a cluster that others share is not ended


def test_the_loss_of_a_node_ends_the_group_and_says_where_the_worker_was(two_nodes):
    runtime.start_cluster([1, 1], ray_init={"address": two_nodes.address})
    pool = RayResourcePool([1, 1])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Dice), name_prefix="dice")
    head = ray.get_runtime_context().get_node_id()
    rank = next(rank for rank, node in enumerate(group.node_ids) if node != head)
    calls = group.execute_all_async("die", 9, 60.0)
    two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)
    with pytest.raises(WorkerError, match=rf"the worker dice\[{rank}\] died") as error:
        group.wait(calls)
    assert group.node_ids[rank][:8] in str(error.value) and "its node has died" in str(error.value)
    with pytest.raises(ConfigError, match=r"trainer.nnodes.*needs 2 nodes with 1, 1 CPUs.*has: 1 node"):
        RayResourcePool([1, 1]).get_placement_groups()
