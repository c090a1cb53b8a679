"""Pools, roles and which role gets which pool."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError, WorkerError
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, ResourcePoolManager, Role


def test_a_pool_lists_local_sizes_and_ranks_per_process():
    pool = ResourcePool([2, 1])
    pool.add_node(3)
    assert pool.world_size == 6 and pool.store == [2, 1, 3]
    assert pool.local_world_size_list() == [2, 2, 1, 3, 3, 3]
    assert pool.local_rank_list() == [0, 1, 0, 0, 1, 2]
    assert ResourcePool().world_size == 0
    assert (pool.max_colocate_count, pool.n_gpus_per_node) == (10, 8)
    with pytest.raises(ConfigError, match="at least one process"):
        ResourcePool([0])


def test_construction_is_delayed():
    made = []
    init = ClassWithInitArgs(lambda *a, **k: made.append((a, k)) or "thing", 1, b=2)
    assert not made and init() == "thing" and made == [((1,), {"b": 2})]


def test_the_names_of_the_roles():
    assert [str(role) for role in Role] == [
        "actor",
        "rollout",
        "actor_rollout",
        "critic",
        "ref",
        "rm",
        "actor_rollout_ref",
        "env",
        "teacher",
    ]
    assert Role.from_string("rm") is Role.RewardModel
    with pytest.raises(ConfigError, match="'critic'"):
        Role.from_string("critik")


def test_roles_share_the_pools_they_are_mapped_to():
    manager = ResourcePoolManager({"main": [2, 2], "rm": [1]}, {Role.Actor: "main", "critic": "main", "rm": "rm"})
    assert manager.get_n_gpus() == 5
    assert manager.get_resource_pool(Role.Actor) is manager.get_resource_pool("critic")
    assert manager.get_resource_pool(Role.RewardModel).world_size == 1
    assert manager.resource_pool_dict["main"].store == [2, 2]
    with pytest.raises(WorkerError, match="'ref'"):
        manager.get_resource_pool(Role.RefPolicy)
    with pytest.raises(ConfigError, match="'main'"):
        ResourcePoolManager({"main": [1]}, {Role.Actor: "mian"})


def test_pools_that_exist_already_are_taken():
    pool = ResourcePool([2])
    manager = ResourcePoolManager({"main": [2]}, {Role.Actor: "main"}, 3, {"main": pool})
    assert manager.get_resource_pool(Role.Actor) is pool


def test_pools_are_made_for_as_many_groups_as_are_asked_for():
    pools = [ResourcePoolManager({"main": [2]}, {"actor": "main"}, *count) for count in ([], [3])]
    assert [manager.get_resource_pool("actor").max_colocate_count for manager in pools] == [10, 3]


def test_pools_that_ask_for_more_devices_than_there_are_are_refused_with_both_sizes():
    mapping = {Role.Actor: "main"}
    with pytest.raises(ConfigError) as caught:
        ResourcePoolManager({"main": [8]}, mapping, device_kind="cuda", devices_per_node=[4])
    assert "{'main': [8]}" in str(caught.value) and "devices per node: [4]" in str(caught.value)
    assert "n_gpus_per_node" in str(caught.value)
    ResourcePoolManager({"a": [4], "b": [4, 8]}, {}, device_kind="cuda", devices_per_node=[8, 8])
    with pytest.raises(ConfigError):  # 16 devices in all, but no node has five left for b
        ResourcePoolManager({"a": [5, 5], "b": [5]}, {}, device_kind="cuda", devices_per_node=[8, 8])


def test_this_machine_is_counted_when_no_nodes_are_given(monkeypatch):
    monkeypatch.setattr("verl.device.device_count", lambda kind: 2)
    ResourcePoolManager({"main": [2]}, {}, device_kind="cuda")
    with pytest.raises(ConfigError):
        ResourcePoolManager({"main": [3]}, {}, device_kind="cuda")
    ResourcePoolManager({"main": [64]}, {}, device_kind="cpu")
