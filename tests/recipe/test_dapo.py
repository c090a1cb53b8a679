"""The DAPO recipe: its settings are defaults of `main_ppo`, and its scripts run in small."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipe.dapo.dapo_ray_trainer import RayDAPOTrainer
from recipe.dapo.main_dapo import DAPO
from tests.brief.machine import guides_machine
from tests.harness.models import tiny_model_dir
from tests.harness.programs import run
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.config.machine.topology import Topology
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

REQUIRED = ["data.train_files=train.jsonl", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.model.path=model"]  # fmt: skip


@pytest.fixture
def here(workplace: Path) -> None:
    """A working directory in which the required settings can stand."""
    write_prompts(Path("train.jsonl"), 4)
    tiny_model_dir("model")


def script(root: Path, folder: Path, name: str, *settings: str, **variables: str) -> subprocess.CompletedProcess:
    return run(["bash", str(root / "recipe/dapo" / name), *settings], cwd=folder, check=False, **variables)


def test_the_settings_are_those_of_the_paper_and_the_command_line_wins(here):
    config = load_config("ppo_trainer", [*DAPO, *REQUIRED, "algorithm.filter_groups.metric=seq_reward"])
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert config.algorithm.filter_groups.enable and config.algorithm.filter_groups.metric == "seq_reward"
    assert not actor.use_kl_loss and not config.algorithm.use_kl_in_reward
    assert config.reward.reward_manager.name == "dapo" and config.actor_rollout_ref.rollout.n == 16


def test_the_trainer_is_the_librarys():
    assert issubclass(RayDAPOTrainer, RayPPOTrainer) and RayDAPOTrainer.fit is RayPPOTrainer.fit


def test_the_script_with_importance_sampling_adds_its_settings(project_root, tmp_path):
    shown = script(project_root, tmp_path, "run_dapo_qwen2.5_32b_tis.sh", "trainer.total_epochs=1", SHOW="1")
    words = shown.stdout.splitlines()
    assert words[-1] == "trainer.total_epochs=1" and "algorithm.rollout_is_threshold=2.0" in words
    assert "actor_rollout_ref.rollout.calculate_log_probs=true" in words and "data.gen_batch_size=1536" in words


def test_the_full_command_is_accepted_and_four_gpus_hold_an_engine(project_root, tmp_path):
    with guides_machine(tmp_path) as home:
        write_prompts(home / "prompts.jsonl", 4)
        files = ["data.train_files=prompts.jsonl", "data.val_files=prompts.jsonl"]
        shown = script(project_root, home, "run_dapo_qwen2.5_32b.sh", *files, SHOW="1", MODEL=str(home / "model"))
        topology = Topology.of(load_config("ppo_trainer", [*DAPO, *shown.stdout.splitlines()]))
    assert (topology.engine, topology.processes, len(topology.replicas)) == ("vllm", 128, 32)


ONE_PROCESS = ["trainer.nnodes=1", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf",
               "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
               "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1"]  # fmt: skip


@pytest.mark.slow
def test_the_script_trains_in_one_process_with_the_built_in_sampler(project_root, tmp_path):
    done = script(project_root, tmp_path, "run_dapo_qwen2.5_32b_tis.sh", *ONE_PROCESS, TINY="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for name in ("training/filter_groups/carried_samples", "mismatch/rollout_is_mean", "training/num_gen_batches"):
        assert f"{name}:" in done.stdout
