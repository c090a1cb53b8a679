"""GPUs that are reserved for servers: Ray counts them as used, and says when there are not enough."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError
from verl.single_controller.ray import runtime
from verl.single_controller.ray.reserved import reserve_gpus

pytestmark = pytest.mark.slow


def test_reserved_gpus_have_names_and_are_free_for_nobody_else():
    sizes = {"num_cpus": 2, "num_gpus": 3, "object_store_memory": 200 << 20}  # Ray counts GPUs and does not look
    runtime.start_cluster([1], "cpu", {"address": "local", **sizes})
    try:
        two = reserve_gpus(2, "some.key", 300.0)
        names = two.names
        assert len(set(names)) == 2 and set(names) < {"0", "1", "2"}
        with pytest.raises(ConfigError, match=r"some\.key: .*no 2 free GPUs.*1 are free"):
            reserve_gpus(2, "some.key", 3.0)
        (last,) = reserve_gpus(1, "some.key", 300.0).names
        assert {*names, last} == {"0", "1", "2"}
        two.release()
        assert set(reserve_gpus(2, "some.key", 300.0).names) == set(names), "those that were given back"
        with pytest.raises(ConfigError, match=r"some\.key: .*no 5 free GPUs"):
            reserve_gpus(5, "some.key", 300.0)
    finally:
        runtime.stop_cluster()
    two.release()  # of a cluster that has ended
