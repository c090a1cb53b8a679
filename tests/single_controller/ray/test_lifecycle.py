"""What happens when a worker dies, a group is stopped, or the run that made it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.harness.waiting import wait_until
from tests.single_controller.ray.workers import Counter, Dice, PlainUserError
from verl.errors import ConfigError, WorkerError
from verl.journal.spans import Spans
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.ray import fleet as fleets
from verl.single_controller.ray import host_object, runtime
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.watchdog import Watchdog

pytestmark = pytest.mark.slow
HANGS = 60.0
"""Seconds after which nothing will come any more."""


def own_handler(*_: object) -> None:
    """What a run does on SIGTERM."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[runtime.RayCluster]:
    before = signal.signal(signal.SIGTERM, own_handler)
    try:
        # Ray believes what it is told: with two GPUs that are not there, placement on devices can be followed.
        settings = {"address": "local", "num_cpus": 2, "num_gpus": 2, "object_store_memory": 200 << 20}
        yield runtime.start_cluster([2], "cuda", settings)
    finally:
        runtime.stop_cluster()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def pool(cluster) -> RayResourcePool:
    return RayResourcePool([2])


def dice(pool: RayResourcePool | None, **options) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(Dice), name_prefix="dice", **options)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_runs_own_handler_of_sigterm_goes_on(cluster):
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_a_worker_that_dies_in_a_call_ends_the_group_at_once_with_its_last_words(pool):
    group = dice(pool)
    group.stop_worker_aliveness_check()
    pids = group.pid()
    calls = group.execute_all_async("die", 1, HANGS)  # rank 0 sleeps, as in a collective
    with pytest.raises(WorkerError, match=r"the worker dice\[1\] died.*process") as error:
        group.wait(calls)
    assert str(pids[1]) in str(error.value) and "these are the last words" in str(error.value)
    assert group.node_ids[1][:8] in str(error.value)
    wait_until(lambda: all(map(gone, pids)))  # nobody waits for the dead
    with pytest.raises(WorkerError, match=r"dice\[1\] died"):
        group.wait(calls[0])  # rank 0 was stopped because of it, its sleep is not over
    with pytest.raises(WorkerError, match=r"dice\[1\] died"):
        group.throw()
    assert not group._is_worker_alive(group.workers[1])


def test_groups_of_one_pool_share_its_devices(pool):
    first, second = dice(pool), RayWorkerGroup(pool, RayClassWithInitArgs(Dice), name_prefix="second")
    seen = [
        [one["CUDA_VISIBLE_DEVICES"] for one in group.environment(["CUDA_VISIBLE_DEVICES"])]
        for group in (first, second)
    ]
    assert sorted(seen[0]) == ["0", "1"] and seen[0] == seen[1]
    free = ray.available_resources()
    assert free.get("GPU", 0) == 0 and free["CPU"] == 2  # devices are reserved, the cores next to them are not
    first.close()
    second.close()
    with pytest.raises(ConfigError, match=r"needs 1 node with 3 GPUs.*has: 1 node \(.*: 2\)"):
        RayResourcePool([3]).get_placement_groups()


def test_a_worker_that_is_killed_between_calls_is_noticed_without_a_call(pool, caplog):
    group = dice(pool)
    pids = group.pid()
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: "dice[0] died" in caplog.text)
    wait_until(lambda: gone(pids[1]))
    with pytest.raises(WorkerError, match=r"dice\[0\] died"):
        group.throw()


def test_a_worker_that_never_comes_back_from_a_failed_call_is_named_instead_of_waited_for(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(fleets, "UNFINISHED_SECONDS", 0.3)
    group, come_back = dice(pool), tmp_path / "come back"
    with pytest.raises(PlainUserError, match="before the collective"):
        group.fail_while_others_wait(str(come_back))
    with pytest.raises(WorkerError, match=r"1 worker\(s\) of 'dice' never came back"):
        group.throw()
    come_back.touch()
    assert len(ray.wait(list(group._fleet._unfinished), timeout=HANGS)[0]) == 1
    assert len(group.throw()) == 2  # it came back after all
    group.close()


def test_a_worker_that_a_signal_has_stopped_is_named_and_the_wait_for_it_ends(pool, tmp_path):
    group, spans = dice(pool), Spans()
    pids = group.pid()
    stopped = f"waits for dice\\[1\\] \\(process {pids[1]}, stopped by a signal\\)"
    os.kill(pids[1], signal.SIGSTOP)
    watchdog = Watchdog(spans, 0.5, tmp_path, group.look_at_processes)
    with pytest.raises(WorkerError, match=stopped), watchdog, spans.span("gen", 2):
        group.throw()
    report = (tmp_path / "hang.txt").read_text()
    # Whether it sleeps in this very moment is a matter of chance: Ray's own threads work now and then.
    assert any(f"dice[0] (process {pids[0]}, {state})\n" in report for state in ("sleeping", "running"))
    group.close()
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_a_closed_group_leaves_no_process_and_says_so_when_it_is_called():
    group = dice(None)
    pids = group.pid()
    group.close()
    group.close()
    wait_until(lambda: all(map(gone, pids)))
    with pytest.raises(WorkerError, match="'dice' were stopped"):
        group.throw()


def test_a_group_that_is_forgotten_ends():
    group = dice(None)
    pids = group.pid()
    del group
    gc.collect()
    wait_until(lambda: all(map(gone, pids)))


def test_detached_workers_are_found_again_by_prefix_names_or_handles(pool):
    first = dice(pool, detached=True)
    drawn, pids = first.throw(), first.pid()
    by_prefix = RayWorkerGroup.from_detached("dice", ray_cls_with_init=RayClassWithInitArgs(Dice))
    assert by_prefix.pid() == pids and by_prefix.world_size == 2
    assert by_prefix.throw() != drawn  # the same workers, further on
    assert (by_prefix.master_address, by_prefix.master_port) == (first.master_address, first.master_port)
    by_name = RayWorkerGroup.from_detached(
        worker_names=["dice[1]"], ray_cls_with_init=ClassWithInitArgs(Dice), name_prefix="second"
    )
    assert by_name.pid() == pids[1:]
    by_handle = RayWorkerGroup.from_detached(
        worker_handles=first.workers, ray_cls_with_init=RayClassWithInitArgs(Dice), name_prefix="third"
    )
    assert by_handle.add(1) == [1, 101]
    with pytest.raises(WorkerError, match=r"name.*dice\[0\].*taken"):
        dice(pool, detached=True)
    with pytest.raises(WorkerError, match=r"no detached worker 'dcie\[0\]'.*dice"):
        RayWorkerGroup.from_detached("dcie", ray_cls_with_init=RayClassWithInitArgs(Dice))
    del first, by_name, by_handle
    gc.collect()
    assert by_prefix.pid() == pids  # they outlive the groups
    by_prefix.close()
    wait_until(lambda: all(map(gone, pids)))


def test_an_object_that_dies_is_reported_with_its_name():
    handle = host_object(ClassWithInitArgs(Counter), "scorer")
    with pytest.raises(WorkerError, match=r"the worker scorer\[0\] died"):
        asyncio.run(handle.call(Counter.die))


def test_processes_that_do_not_come_up_are_named_after_the_timeout(pool):
    hungry = RayClassWithInitArgs(Dice)
    hungry.set_additional_resource({"unicorn": 1})
    with pytest.raises(WorkerError, match=r"1 of 1 worker processes did not start within 0.5 s.*dice\[0\]") as error:
        RayWorkerGroup(None, hungry, name_prefix="dice", ray_wait_register_center_timeout=0.5)
    assert "ray status" in str(error.value)
    logs = Path(re.search(r"(/\S+) on each node", str(error.value)).group(1))
    assert list(logs.glob("raylet*")), "the folder of this cluster, wherever its files lie"
    with pytest.raises(WorkerError, match=r"unicorn.*cannot fit"):
        RayWorkerGroup(pool, hungry, name_prefix="dice")
