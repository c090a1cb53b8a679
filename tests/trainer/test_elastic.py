"""On how many machines a run starts again; the machines are listed by the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import PPOTrainerConfig, load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.single_controller.ray import cluster
from verl.single_controller.ray.cluster import ClusterNode
from verl.trainer import elastic

SAMPLERS = (
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
)


@pytest.fixture
def run(tmp_path):
    """Of three machines with one process each."""
    words = [
        f"data.train_files={write_prompts(tmp_path / 'train.parquet', 6)}",
        f"actor_rollout_ref.model.path={tiny_model_dir(tmp_path / 'model')}",
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "trainer.device=cpu",
        "trainer.runtime=ray",
        "trainer.nnodes=3",
        "trainer.n_gpus_per_node=1",
    ]

    def configured(*more: str) -> PPOTrainerConfig:
        return load_config("ppo_trainer", [*words, *more])

    return configured


def machines(*processors: int) -> list[ClusterNode]:
    return [ClusterNode("", f"10.0.0.{place}", {"CPU": float(count)}) for place, count in enumerate(processors, 1)]


@pytest.fixture
def present(monkeypatch):
    """Lists machines at each look, the last list again and again; by default the wait ends at the first look."""

    def listed(*lists: Sequence[ClusterNode], seconds: float = 0.0) -> None:
        reset_notices()
        left = list(lists)
        monkeypatch.setattr(cluster, "nodes", lambda: left.pop(0) if len(left) > 1 else left[0])
        monkeypatch.setattr(elastic, "RESTART_SECONDS", seconds)
        monkeypatch.setattr(elastic, "POLL_SECONDS", 0.0)

    return listed


@pytest.mark.parametrize(("processors", "count"), [((1, 1, 1), 3), ((1, 1), 2), ((4,), 1), ((1, 0, 1), 2)])
def test_a_restart_takes_the_most_machines_that_are_there(run, present, processors, count):
    present(machines(*processors))
    assert elastic.on_present_nodes(run(), "cpu").trainer.nnodes == count
    assert ("trainer.nnodes" in notices()) == (count < 3)


def test_a_restart_takes_the_machine_that_joins_while_it_waits(run, present):
    present(machines(1, 1), machines(1, 1), machines(1, 1, 1), seconds=600.0)
    config = run()
    assert elastic.on_present_nodes(config, "cpu") is config
    assert notices()["cluster"].endswith("for 3 machines; there are 10.0.0.1, 10.0.0.2")


def test_a_number_of_machines_that_the_settings_refuse_is_passed_over(run, present):
    present(machines(1, 1, 1))
    config = run("trainer.nnodes=4", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    assert elastic.on_present_nodes(config, "cpu").trainer.nnodes == 2
    assert "the run cannot continue on that number: " in notices()["trainer.nnodes=3"]


def test_without_a_machine_a_restart_ends_with_what_the_run_needs(run, present):
    present([])
    with pytest.raises(ConfigError, match=r"needs 3 nodes with 1, 1, 1 CPUs.*has: 0 nodes\. "):
        elastic.on_present_nodes(run(), "cpu")


def test_samplers_in_a_separate_pool_keep_their_room(run, present):
    config = run(*SAMPLERS)
    assert not elastic.has_room(config, machines(1, 1, 1), "CPU")
    assert elastic.has_room(config, machines(1, 1, 1, 2), "CPU")
    present(machines(1, 1, 2))
    assert elastic.on_present_nodes(config, "cpu").trainer.nnodes == 2
