"""Recorded commands with images, small, on tiny models of their families: each trains, or is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from scripts.compatibility import read_commands
from tests.brief.small import ONE_PROCESS, PPO_SIZES, SFT_SIZES
from tests.harness.programs import PROJECT, command, metrics
from tests.harness.vision import vision_dir, vision_example
from verl.config import load_config
from verl.errors import VerlError

pytestmark = pytest.mark.slow
HERE = {
    "trainer.device": "cpu", "trainer.save_freq": "-1", "trainer.test_freq": "-1", "trainer.val_before_train": "false",
    "trainer.resume_mode": "disable", "trainer.default_local_dir": "run",
}  # fmt: skip
PPO = {
    **PPO_SIZES, **ONE_PROCESS, **HERE, "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "reward.custom_reward_function.path": str(PROJECT / "examples/vision/reward.py"),
}  # fmt: skip
SFT = {**SFT_SIZES, **HERE, "engine.ulysses_sequence_parallel_size": "1"}
"""Sizes, files and the place; the built-in sampler in one process. Algorithm, engine and passes stay as printed."""
TRAINED = {
    "examples/grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh": "qwen2_5_vl",
    "examples/grpo_trainer/run_qwen3_vl_8b_fsdp.sh": "qwen3_vl",
    "examples/tuning/lora/run_qwen2_5_vl_7b_fsdp.sh": "qwen2_5_vl",
    "examples/sft/vlm/run_qwen3_vl_2b_fsdp.sh": "qwen3_vl",
}
REFUSED = {
    "examples/grpo_trainer/run_qwen3_vl_8b_megatron.sh": "qwen3_vl",
    "examples/grpo_trainer/run_qwen3_vl_30b_a3b_megatron.sh": "qwen3_vl_moe",
}
"""Script -> family of its model; those of Megatron are refused with a model that sees."""


@pytest.fixture(scope="module")
def recorded(shared: Path) -> dict[str, list[dict]]:
    rows = read_commands(shared / "migration" / "commands.jsonl")
    return {row["script"]: row["commands"] for row in rows}


def shrunk(words: list[str], settings: dict[str, str]) -> list[str]:
    """The printed words but for these settings; where workers start by ``uv`` does not matter here."""
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in settings]
    kept = [word for word in kept if not word.startswith(("ray_kwargs.", "custom_reward_function."))]
    return [*kept, *(f"{key}={value}" for key, value in settings.items())]


@pytest.mark.parametrize("script", TRAINED)
def test_a_recorded_command_trains_a_step_in_small(recorded, tmp_path, script):
    vision_dir(tmp_path / "model", TRAINED[script])
    made = vision_example("make_data").rows("colour", {"train": 4, "sft": 4}, 56, 0)
    pd.DataFrame(made["train"]).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame(made["sft"]).to_parquet(tmp_path / "chats.parquet")
    (line,) = recorded[script]
    is_sft = line["program"] == "verl.trainer.sft_trainer"
    done = command(line["program"], *shrunk(line["argv"], SFT if is_sft else PPO), cwd=tmp_path)
    (step,) = metrics(tmp_path, "guide", "run")
    assert math.isfinite(step["train/grad_norm" if is_sft else "actor/grad_norm"]), done.stdout[-2000:]


@pytest.mark.parametrize("script", REFUSED)
def test_a_recorded_command_of_megatron_is_refused_by_name(recorded, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    vision_dir(tmp_path / "model", REFUSED[script])
    (line,) = recorded[script]
    config = "ppo_megatron_trainer" if any("ppo_megatron_trainer" in word for word in line["argv"]) else "ppo_trainer"
    words = [
        word for word in line["argv"] if "=" in word and not word.startswith(("--", "actor_rollout_ref.model.path"))
    ]
    with pytest.raises(VerlError, match=r"megatron|Megatron"):
        load_config(config, [*words, "actor_rollout_ref.model.path=model", "trainer.device=cpu"])
