"""What a person is told where a run on Ray cannot start: one message, exit status 2, within seconds."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.trainer.on_ray.conftest import SETTINGS
from verl.single_controller.ray import runtime as cluster
from verl.trainer import main_ppo

pytestmark = pytest.mark.slow


@pytest.fixture
def said(task: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """``said(*changes)``: what a run that is refused prints."""
    monkeypatch.chdir(task)

    def run(*changes: str) -> str:
        assert main_ppo.main([*SETTINGS, "trainer.total_training_steps=1", "trainer.runtime=ray", *changes]) == 2
        return capsys.readouterr().err

    return run


def test_an_address_that_does_not_answer_is_named_within_seconds(said, monkeypatch):
    monkeypatch.setattr(cluster.start_cluster, "__defaults__", ((1,), "cpu", None, 1.0, 1.0, 0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    message = said(f"ray_kwargs.ray_init.address={address}")
    assert time.monotonic() - start < 20
    assert address in message and message.startswith("error: ")


def test_a_cluster_that_is_smaller_than_the_run_is_described_with_its_sizes(said, two_nodes, monkeypatch):
    monkeypatch.setattr(cluster.start_cluster, "__defaults__", ((1,), "cpu", None, 60.0, 0.5, 0))
    message = said(
        f"ray_kwargs.ray_init.address={two_nodes}",
        "trainer.nnodes=4",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=4",
    )
    assert "trainer.nnodes: the Ray cluster is smaller than the run" in message
    assert "which needs 4 nodes with 2, 2, 2, 2 CPUs. Allowed: what the cluster has: 2 nodes (" in message


def test_pools_that_do_not_fit_beside_each_other_are_refused_with_the_devices_of_each_node(said, two_nodes):
    pools = "trainer.resource_pools={critics:{roles:[critic],processes:[2,2]}}"
    message = said(f"ray_kwargs.ray_init.address={two_nodes}", "trainer.n_gpus_per_node=2", "trainer.nnodes=2", pools)
    assert "the machines do not have the cpu devices that the resource pools ask for" in message
    assert "devices per node: [3, 3]" in message


def test_a_run_on_ray_without_ray_says_how_to_install_it(said, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("verl.single_controller.ray")]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))
    message = said()
    assert "trainer.runtime" in message and "pip install -e '.[ray]'" in message


def test_a_sampler_that_does_not_start_is_named_in_one_error_and_leaves_no_process(said, two_nodes):
    """Each is a unit of its own, which does not end with the others."""

    def workers() -> set[int]:
        names = ("ray::ReplicaWorker", "ray::SamplingWorker", "ray::Colocated")
        named = {child.pid: "".join(_words(child)) for child in psutil.Process().children(recursive=True)}
        return {pid for pid, words in named.items() if words.startswith(names)}

    before = workers()
    message = said(
        f"ray_kwargs.ray_init.address={two_nodes}",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
        "actor_rollout_ref.rollout.max_replacements=1",
        "actor_rollout_ref.rollout.max_model_len=100000",
    )
    assert message.startswith("error: max_model_len: longer than the model's context.")
    assert message.count("error: ") == 1 and re.search(r"\(in worker replica [01]\.init_model\)", message), message
    end = time.monotonic() + 30
    while left := workers() - before:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []
