"""Every example script runs in small, or is refused by the names of the features that are not built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.brief.machine import guides_machine
from verl.config import load_config
from verl.errors import NotBuiltError
from verl.metrics import reset_notices

SCRIPTS = {
    "grpo_trainer/run_qwen3_8b_fsdp.sh": "ppo_trainer",
    "grpo_trainer/run_qwen3_8b_megatron.sh": "ppo_trainer",
    "ppo_trainer/run_qwen2-7b_seq_balance.sh": "ppo_trainer",
    "ppo_trainer/run_deepseek7b_llm_sp2.sh": "ppo_trainer",
    "split_placement/run.sh": "ppo_trainer",
    "sft/gsm8k/run_qwen_05_peft.sh": "sft_trainer",
    "sft/gsm8k/run_qwen_05_sp2_liger.sh": "sft_trainer",
    "dpo_trainer/run_qwen2.5_0.5b_hh.sh": "dpo_trainer",
    "rm_trainer/run_qwen2.5_0.5b_hh.sh": "rm_trainer",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the tiny runs; the first makes the model and the data that all share."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def bash(project_root: Path, tiny: Path):
    """Runs one script of ``examples`` with variables set; `python3` and `torchrun` are those of this environment."""

    def go(script: str, *settings: str, timeout: float = 600, **variables: str) -> subprocess.CompletedProcess:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(project_root), **variables}
        words = ["bash", str(project_root / "examples" / script), *settings]
        return subprocess.run(
            words, cwd=tiny, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

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
        refused = missing(SCRIPTS[script], words)
    assert all("=" in word for word in words) and len(words) > 10
    assert refused == "" or "not built" in refused


def test_further_settings_on_the_command_line_come_last(bash):
    words = bash("grpo_trainer/run_qwen3_8b_fsdp.sh", "trainer.total_epochs=1", SHOW="1").stdout.splitlines()
    assert words[-1] == "trainer.total_epochs=1" and "trainer.total_epochs=15" in words


@pytest.mark.e2e
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_in_small_or_is_refused_by_name(bash, tiny, monkeypatch, script):
    words = bash(script, TINY="1", SHOW="1").stdout.splitlines()
    monkeypatch.chdir(tiny)
    refused = missing(SCRIPTS[script], words)
    done = bash(script, TINY="1")
    said = done.stdout + done.stderr
    if refused:
        assert done.returncode != 0 and refused.splitlines()[-1] in said
    else:
        assert done.returncode == 0, said[-3000:]
        assert "step:1 - " in said


@pytest.mark.e2e
def test_generation_and_evaluation_leave_a_report(bash, tiny):
    done = bash("generation/run_generation_and_eval.sh", TINY="1")
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tiny / "outputs/tiny/generation"
    assert "| arithmetic | 16 | 64 |" in (folder / "report.md").read_text() and (folder / "report.json").is_file()


@pytest.mark.e2e
def test_from_a_new_model_to_a_report_and_a_folder_that_others_load(bash, tiny):
    """Fine-tuning, pairs, a reward model, PPO with it, generation, evaluation, export; transformers on the folder."""
    done = bash("end_to_end/run.sh", TINY="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    folder = tiny / "outputs/tiny/end_to_end"
    report = (folder / "report.md").read_text()
    assert "| arithmetic | 16 | 64 |" in report and "This run minus the other" in report
    assert "reward_model/score/mean" in done.stdout and "transformers: 8 answers" in done.stdout
    assert (folder / "export/model.safetensors").is_file()
