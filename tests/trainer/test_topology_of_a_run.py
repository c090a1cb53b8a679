"""A run says who lives where before anything is allocated."""

from __future__ import annotations

from tests.support import tiny_model_dir, write_prompts
from verl.config import load_config
from verl.metrics import notices, reset_notices
from verl.trainer import placement, runtime


def test_a_run_prints_its_topology_when_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model_dir("model")
    write_prompts("train.parquet", 2)
    words = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "trainer.device=cpu"]
    config = load_config("ppo_trainer", words)
    reset_notices()
    with runtime.enter(config) as place:
        assert place.kind == placement.topology_of(config).runtime == "local"
    table = notices()["topology"].splitlines()
    assert table[0] == "1 process in this process" and table[3].split() == [
        "global_pool",
        "1",
        "actor,",
        "rollout,",
        "critic",
    ]
