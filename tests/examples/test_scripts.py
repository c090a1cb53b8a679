"""Every example script trains in small: as it stands where this machine can, else in one process, and that is said."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from tests.brief.machine import guides_machine
from tests.harness.programs import run
from verl.config import load_config
from verl.errors import NotBuiltError
from verl.metrics import reset_notices

TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
HF, ONE = "actor_rollout_ref.rollout.name=hf", "trainer.n_gpus_per_node=1"
ONE_CRITIC = "trainer.resource_pools.critic={roles: [critic], processes: [1]}"
MEGATRON = tuple(
    f"actor_rollout_ref.{role}.megatron.{size}_model_parallel_size=1"
    for role in ("actor", "ref")
    for size in ("tensor", "pipeline")
)
SCRIPTS = {
    "grpo_trainer/run_qwen3_8b_fsdp.sh": ("ppo_trainer", (HF, ONE)),
    "grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh": ("ppo_trainer", (HF, ONE, TENSOR)),
    "grpo_trainer/run_qwen3_8b_megatron.sh": ("ppo_trainer", (HF, ONE, *MEGATRON)),
    "ppo_trainer/run_qwen2-7b_seq_balance.sh": ("ppo_trainer", (HF, ONE)),
    "ppo_trainer/run_deepseek7b_llm_sp2.sh": ("ppo_trainer", (HF, "trainer.n_gpus_per_node=2")),
    "split_placement/run.sh": ("ppo_trainer", (HF, ONE, ONE_CRITIC)),
    "sft/gsm8k/run_qwen_05_peft.sh": ("sft_trainer", ()),
    "sft/gsm8k/run_qwen_05_sp2_liger.sh": ("sft_trainer", ("model.use_liger=False",)),
    "dpo_trainer/run_qwen2.5_0.5b_hh.sh": ("dpo_trainer", ()),
    "rm_trainer/run_qwen2.5_0.5b_hh.sh": ("rm_trainer", ()),
}
"""Script -> program, and what has to be another thing than it prints so that it trains here; nothing: as it stands."""
RECIPES = ("dapo/run_dapo_qwen2.5_32b.sh", "prime/run_prime_eurus2_7b.sh", "spin/run_spin.sh")
SIZES = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n", "critic.ppo_micro_batch_size_per_gpu", "reward_model.mini_batch_size",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",  # in DAPO: the small model has four heads
    "reward.reward_kwargs.max_resp_len", "reward.reward_kwargs.overlong_buffer_cfg.len",
    "trainer.save_freq", "trainer.test_freq", "trainer.total_training_steps",
}  # fmt: skip
FILES = {
    "actor_rollout_ref.model.path", "critic.model.path", "model.path", "reward_model.model.path",
    "reward.custom_reward_function.path", "algorithm.filter_groups.metric", "trainer.default_local_dir",
}  # fmt: skip
PLACE = {"trainer.device", "trainer.logger", "trainer.resume_mode", "actor_rollout_ref.model.external_lib"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the tiny runs; the first makes the model and the data that all share."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def bash(project_root: Path, tiny: Path):
    """Runs one script of ``examples`` with variables set; `python3` and `torchrun` are those of this environment."""

    def go(script: str, *settings: str, timeout: float = 600, **variables: str) -> subprocess.CompletedProcess:
        words = ["bash", str(project_root / "examples" / script), *settings]
        return run(words, cwd=tiny, timeout=timeout, check=False, **variables)

    return go


def missing(program: str, words: list[str]) -> str:
    """What of a command is not built; empty if nothing is. torchrun has started eight processes, so it seems."""
    reset_notices()
    started = {} if program == "ppo_trainer" else {"WORLD_SIZE": "8"}
    try:
        with mock.patch.dict(os.environ, started):
            load_config(program, words)
    except NotBuiltError as error:
        return str(error)
    finally:
        reset_notices()
    return ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_full_command_resolves_or_is_refused_by_name(bash, tmp_path, script):
    with guides_machine(tmp_path) as home:
        shown = bash(script, SHOW="1", HOME=str(home))
        assert shown.returncode == 0, shown.stderr
        words = shown.stdout.splitlines()
        refused = missing(SCRIPTS[script][0], words)
    assert all("=" in word for word in words) and len(words) > 10
    assert refused == "" or "not built" in refused


def test_further_settings_on_the_command_line_come_last(bash):
    words = bash("grpo_trainer/run_qwen3_8b_fsdp.sh", "trainer.total_epochs=1", SHOW="1").stdout.splitlines()
    assert words[-1] == "trainer.total_epochs=1" and "trainer.total_epochs=15" in words


def settings(shown: subprocess.CompletedProcess) -> dict[str, str]:
    assert shown.returncode == 0, shown.stderr
    words = [word.lstrip("+").partition("=") for word in shown.stdout.splitlines()]
    return {key: value for key, _, value in words}


@pytest.mark.parametrize("script", [*SCRIPTS, *(f"../recipe/{name}" for name in RECIPES)])
def test_tiny_changes_sizes_files_and_places_and_nothing_else(bash, script):
    """Not the engine, the sampler, the number of processes or a feature."""
    printed, small = settings(bash(script, SHOW="1")), settings(bash(script, SHOW="1", TINY="1"))
    changed = {key for key in printed | small if printed.get(key) != small.get(key)}
    changed = {key for key in changed if not key.startswith("data.")}
    assert len(changed) > 5 and changed - SIZES - FILES - PLACE == set()


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script, (_, swaps) in SCRIPTS.items() if not swaps])
def test_a_script_trains_in_small_as_it_stands(bash, script):
    done = bash(script, TINY="1")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "step:1 - " in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script, (_, swaps) in SCRIPTS.items() if swaps])
def test_a_script_trains_in_one_or_two_processes_with_what_runs_here_in_place_of_vllm_and_liger(bash, script):
    done = bash(script, *SCRIPTS[script][1], TINY="1")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "step:1 - " in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("grpo_trainer/run_qwen3_8b_fsdp.sh", ["actor_rollout_ref.rollout.name", "vLLM"]),
        ("sft/gsm8k/run_qwen_05_sp2_liger.sh", ["model.use_liger", "need a GPU"]),
    ],
)
def test_a_script_whose_sampler_or_kernels_are_missing_says_so_and_takes_no_other(bash, script, says):
    done = bash(script, TINY="1")
    assert done.returncode != 0 and all(words in done.stderr for words in says), done.stderr[-3000:]


@pytest.mark.slow
def test_generation_and_evaluation_leave_a_report_with_the_built_in_sampler(bash, tiny):
    done = bash("generation/run_generation_and_eval.sh", TINY="1", SAMPLER="hf")
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tiny / "outputs/tiny/generation"
    assert "| arithmetic | 16 | 64 |" in (folder / "report.md").read_text() and (folder / "report.json").is_file()


@pytest.mark.slow
def test_from_a_new_model_to_a_report_and_a_folder_that_others_load_with_the_built_in_sampler(bash, tiny):
    """Fine-tuning, pairs, a reward model, PPO with it, generation, evaluation, export; transformers on the folder."""
    done = bash("end_to_end/run.sh", TINY="1", SAMPLER="hf")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    folder = tiny / "outputs/tiny/end_to_end"
    report = (folder / "report.md").read_text()
    assert "| arithmetic | 16 | 64 |" in report and "This run minus the other" in report
    assert "reward_model/score/mean" in done.stdout and "transformers: 8 answers" in done.stdout
    assert (folder / "export/model.safetensors").is_file()
