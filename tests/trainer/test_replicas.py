"""Which runs have replicas that are replaced when they are lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.config import load_config
from verl.config.machine import pools
from verl.config.rules.checks import out_of_bounds
from verl.metrics import notices, reset_notices
from verl.single_controller.ray import unit

OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
)


def configured(*changes: str):
    return load_config("ppo_trainer", ["data.train_files=x.parquet", "actor_rollout_ref.model.path=m", *changes])


@pytest.fixture
def no_files(monkeypatch):
    """Only the rules about replicas, whatever this machine has."""
    monkeypatch.setattr("verl.config.rules.validate.validate", lambda cfg, served=False: None)
    yield


@pytest.mark.usefixtures("no_files")
def test_replicas_of_a_separate_pool_are_replaced_and_elsewhere_a_notice_says_why_not():
    allowed = "actor_rollout_ref.rollout.max_replacements=2"
    own = configured(*OWN_POOL, allowed)
    assert pools.is_elastic(own) and not pools.elastic_problems(own)
    assert not pools.is_elastic(configured(*OWN_POOL))
    pools.tell_elastic(own)
    assert not notices().get(pools.REPLACED)
    for changes, why in (
        ((), "the samplers share the trainers' processes"),
        (
            ("actor_rollout_ref.rollout.name=server", "actor_rollout_ref.rollout.server.url=http://127.0.0.1:1"),
            "servers",
        ),
    ):
        reset_notices()
        here = configured(*changes, allowed)
        pools.tell_elastic(here)
        assert not pools.is_elastic(here) and why in notices()[pools.REPLACED]


@pytest.mark.usefixtures("no_files")
def test_a_pool_that_samplers_share_with_a_model_is_refused_and_so_is_a_negative_number():
    pool = "trainer.resource_pools={apart:{roles:[rollout,rm],processes:[2]}}"
    ours = configured(pool, "actor_rollout_ref.rollout.max_replacements=2")
    (error,) = pools.elastic_problems(ours)
    assert error.key == pools.REPLACED and "replaced together with rm, which share its process" in str(error)
    (error,) = out_of_bounds(configured("actor_rollout_ref.rollout.max_replacements=-1"))
    assert error.key == pools.REPLACED and "Allowed: 0 or more" in str(error)


def test_only_a_process_that_still_goes_by_its_title_is_ended():
    waits = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "up\n"
        unit.end_process(other.pid, "ray::ReplicaWorker")
        assert other.poll() is None
        unit.end_process(other.pid, sys.executable)
        assert other.wait() == -9
