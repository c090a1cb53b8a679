"""Rollout engines as settings: one that is not there is refused, and settings of one engine are told with another."""

from __future__ import annotations

import pytest

from tests.harness.configs import refused
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.errors import NotBuiltError

R = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    tiny_model_dir(folder / "model")
    write_prompts(folder / "train.parquet", 4)
    return [f"data.train_files={folder}/train.parquet", f"actor_rollout_ref.model.path={folder}/model",
            "algorithm.adv_estimator=grpo", f"{R}.n=2", "trainer.device=cpu"]  # fmt: skip


@pytest.fixture
def ppo(usual):
    return lambda *words: load_config("ppo_trainer", [*usual, *words])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([f"{R}.name=vllm"], "vLLM is not installed in this environment"),
        ([f"{R}.name=sglang"], "SGLang is not installed in this environment"),
        ([f"{R}.name=server"], "needs the address of a server"),
    ],
)
def test_an_engine_that_is_not_there_is_refused_before_anything_starts(ppo, monkeypatch, settings, said):
    monkeypatch.setattr("verl.config.machine.host.is_installed", lambda package: False)
    assert said in refused(ppo, *settings)


def test_a_server_that_runs_needs_nothing_installed(ppo, monkeypatch):
    monkeypatch.setattr("verl.config.machine.host.is_installed", lambda package: False)
    for name in ("sglang", "server"):
        ppo(f"{R}.name={name}", f"{R}.server.url=http://localhost:30000", f"{R}.server.timeout=5")


def test_a_setting_of_one_engine_is_refused_or_told_with_another(ppo, told):
    said = refused(ppo, f"{R}.expert_parallel_size=2", kind=NotBuiltError)
    assert "not built for this sampler: sampling on several ranks" in said
    assert said.endswith("It works with actor_rollout_ref.rollout.name=vllm or sglang.")
    ppo(f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=2", f"{R}.gpu_memory_utilization=0.8")
    assert f"{R}.gpu_memory_utilization" not in told()
    ppo(f"{R}.gpu_memory_utilization=0.8")
    assert f"{R}.gpu_memory_utilization" in told()
