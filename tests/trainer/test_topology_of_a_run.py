"""A run says who lives where before anything is allocated."""

from __future__ import annotations

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.trainer import placement, runtime, sampling


def test_a_run_prints_its_topology_when_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model_dir("model")
    write_prompts("train.parquet", 2)
    words = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu"]
    config = load_config("ppo_trainer", words)
    reset_notices()
    with runtime.run_place(config) as (_, place):
        assert place.kind == placement.topology_of(config).runtime == "local"
    table = notices()["topology"].splitlines()
    assert table[0] == "1 process in this process" and table[3].split() == [
        "global_pool",
        "1",
        "actor,",
        "rollout,",
        "critic",
    ]


def test_a_run_of_one_process_says_that_it_has_no_others_for_agent_loops(tmp_path):
    words = [
        f"data.train_files={write_prompts(tmp_path / 'train.parquet', 2)}",
        f"actor_rollout_ref.model.path={tiny_model_dir(tmp_path / 'model')}",
        "actor_rollout_ref.rollout.agent.num_workers=4",
        "trainer.device=cpu",
    ]
    reset_notices()
    sampling.connect(load_config("ppo_trainer", words), {"rollout": Unreached()}, "cpu")
    assert "set trainer.runtime=ray" in notices()["actor_rollout_ref.rollout.agent.num_workers"]
    with pytest.raises(ConfigError, match=r"agent.num_workers.*Got 0.*1 or more"):
        load_config("ppo_trainer", [*words, "actor_rollout_ref.rollout.agent.num_workers=0"])


class Unreached:
    """A group of which only the handle is asked for."""

    def handle(self, rank):
        return None


def test_weights_cross_machines_from_each_trainers_own_address_or_are_refused(tmp_path):
    key = "actor_rollout_ref.rollout.checkpoint_engine.backend"
    words = [
        f"data.train_files={write_prompts(tmp_path / 'train.parquet', 2)}",
        f"actor_rollout_ref.model.path={tiny_model_dir(tmp_path / 'model')}",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "trainer.device=cpu",
    ]
    over_network = load_config("ppo_trainer", [*words, f"{key}=gloo"])
    actors, elsewhere = ["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]
    assert sampling._hosts(over_network, actors, elsewhere) == ["10.0.0.1", "10.0.0.2"]
    in_memory = load_config("ppo_trainer", [*words, f"{key}=shared_memory"])
    assert sampling._hosts(in_memory, ["10.0.0.1"], ["10.0.0.1"]) == [None]
    with pytest.raises(ConfigError, match=r"lie on 3 machines \(10.0.0.1, .*shared_memory reaches"):
        sampling._hosts(in_memory, actors, elsewhere)
