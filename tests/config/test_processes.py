"""Where a run may have its processes: named clusters, this process, pools of their own for roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.test_validate import files as files
from tests.config.test_validate import machine as machine
from tests.config.test_validate import ppo as ppo
from tests.config.test_validate import usual as usual
from tests.harness.configs import refused
from verl.metrics import notices


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.nnodes=4", "trainer.n_gpus_per_node=8"],
        ["trainer.n_gpus_per_node=8", "ray_kwargs.ray_init.address=10.0.0.1:6379"],
        ["trainer.device=cpu", "trainer.n_gpus_per_node=4"],
        ["trainer.runtime=ray"],
    ],
)
def test_the_machines_of_a_cluster_are_not_counted_here(ppo, overrides):
    assert ppo(*overrides).trainer.runtime in ("auto", "ray")


def test_a_named_cluster_is_asked_instead_of_this_machine(ppo, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert ppo("trainer.n_gpus_per_node=8").trainer.n_gpus_per_node == 8
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert "this machine has no GPU" in refused(ppo, "trainer.n_gpus_per_node=8")


def test_a_run_in_this_process_has_one_process(ppo):
    said = refused(ppo, "trainer.runtime=local", "trainer.device=cpu", "trainer.n_gpus_per_node=4")
    assert said.startswith("trainer.runtime: ") and "local, with global_pool 4" in said
    assert "Set trainer.runtime=ray, or trainer.nnodes=1 trainer.n_gpus_per_node=1" in said


POOL = "trainer.resource_pools"


@pytest.mark.parametrize(
    "pools, key, words",
    [
        ("{a:{roles:[critc],processes:[1]}}", f"{POOL}.a.roles", "Did you mean 'critic'"),
        ("{a:{roles:[critic]}}", f"{POOL}.a", "not the description of a pool"),
        ("{a:{roles:[critic],processes:[0]}}", f"{POOL}.a.processes", "not a list of processes"),
        ("{a:{roles:[critic],processes:2}}", f"{POOL}.a.processes", "not a list of processes"),
        ("{a:{roles:[],processes:[1]}}", f"{POOL}.a.roles", "not a list of roles"),
        ("{a:{roles:[critic],processes:[1]},b:{roles:[critic],processes:[1]}}", POOL, "'critic' is in two pools"),
    ],
)
def test_a_pool_says_its_roles_and_its_processes(ppo, pools, key, words):
    said = refused(ppo, f"{POOL}={pools}")
    assert said.startswith(f"{key}: ") and words in said


def test_the_mini_batches_of_a_critic_are_shared_by_its_own_processes(ppo):
    ppo("algorithm.adv_estimator=gae", f"{POOL}={{a:{{roles:[critic],processes:[3]}}}}")
    assert "samples do not divide by 3 processes" in notices()["critic.ppo_mini_batch_size"]


def test_pools_on_one_machine_have_its_gpus_together(ppo, machine):
    machine(4)
    own = ["actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1",
           "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"]  # fmt: skip
    said = refused(ppo, *own, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=3")
    assert said.startswith("trainer.n_gpus_per_node: 2 (global_pool) + 3 (rollout_pool) = 5 processes have a GPU each")
    assert "this machine has 4" in said
    ppo(*own, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n_gpus_per_node=2")


UPSTREAM = "uv -v run --frozen --all-packages --extra vllm"
KEY = "ray_kwargs.ray_init.runtime_env.py_executable"


def test_workers_that_this_machine_cannot_start_are_refused(ppo, monkeypatch, tmp_path):
    ray = ("trainer.runtime=ray", "trainer.device=cpu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(ppo, f"{KEY}={UPSTREAM}", *ray).startswith(f"{KEY}: there is no program 'uv'")
    assert "there is no program" in refused(ppo, f"""{KEY}='uv "run'""", *ray)
    (tmp_path / "uv").touch(mode=0o755)
    assert "next to a uv.lock, and there is none here" in refused(ppo, f"{KEY}={UPSTREAM}", *ray)
    Path("uv.lock").touch()
    for words in ((f"{KEY}={UPSTREAM}",), (f"{KEY}=no/python", "ray_kwargs.ray_init.address=10.0.0.1:6379")):
        assert words[0].endswith(ppo(*words, *ray).ray_kwargs.ray_init.runtime_env.py_executable)
    assert ppo(f"{KEY}=no/python", "trainer.runtime=local").trainer.runtime == "local", "nobody is started"
