"""An engine over several devices sees those of all ranks of its replica; the lists here are pretended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl import env
from verl.errors import RolloutError
from verl.rollout import devices

VARIABLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch):
    for name in devices.DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_rank_of_a_cluster_has_its_only_device_and_others_the_one_of_their_number(monkeypatch):
    assert [devices.of_rank(rank) for rank in range(2)] == ["0", "1"]
    monkeypatch.setenv(VARIABLE, "GPU-5f3a")
    assert devices.of_rank(3) == "GPU-5f3a"
    monkeypatch.setenv(VARIABLE, "4,5,7")
    assert devices.of_rank(2) == "7"
    with pytest.raises(RolloutError, match=r"a rank has no device.*Got '?4,5,7'?\. Allowed: more than 3"):
        devices.of_rank(3)


def test_an_engine_sees_the_devices_of_its_replica_in_the_order_of_the_ranks(monkeypatch):
    assert devices.shown(["6", "2"], 2, "cuda") == {VARIABLE: "6,2"}
    assert devices.shown(["0", "1"], 2, "npu") == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert devices.shown([], 2, "cuda") == {}, "a process that sees all devices of its machine"
    assert devices.shown(["0", "1"], 2, "cpu") == {}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "6")
    assert devices.shown(["6", "2"], 2, "cuda") == {"HIP_VISIBLE_DEVICES": "6,2"}


def test_devices_that_are_too_few_or_shared_are_refused():
    with pytest.raises(RolloutError, match="an engine of 4 devices cannot use those of 2 ranks"):
        devices.shown(["0", "1"], 4, "cuda")
    with pytest.raises(RolloutError, match="ranks of one replica have the same device"):
        devices.shown(["0", "0"], 2, "cuda")


def test_processes_that_are_started_meanwhile_see_them_and_later_ones_do_not(monkeypatch):
    program = [sys.executable, "-S", "-c", f"import os; print(os.environ.get('{VARIABLE}'))"]
    seen = []
    monkeypatch.setenv(VARIABLE, "6")
    for block in (devices.shown(["6", "2"], 2, "cuda"), {}):
        with env.within(block):
            seen.append(subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip())
    assert seen == ["6,2", "6"]
    with pytest.raises(RuntimeError), env.within({"VERL_TEST_ONLY": "1"}):
        raise RuntimeError
    assert env.get("VERL_TEST_ONLY") is None
