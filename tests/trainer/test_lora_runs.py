"""Whole runs with an adapter, RL and supervised: what they save, and that the reference policy is the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.rows import turns, write_prompts
from tests.harness.runs import logged, logged_steps, prepare
from tests.harness.scorers import scorer
from verl.config import load_config
from verl.models.merging import merge
from verl.trainer import sft_trainer

LORA = ["lora_rank=4", "lora_alpha=8", "target_modules=[q_proj,v_proj,up_proj]"]


@pytest.fixture
def here(workplace):
    prepare(scorer("len(solution_str) % 5"))
    return workplace


def run_ppo(steps: int, folder: str, *more: str) -> list[dict]:
    return logged_steps(
        folder,
        *(f"actor_rollout_ref.model.{word}" for word in LORA),
        "data.train_batch_size=2",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr=0.05",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        *more,
    )


def test_an_rl_run_trains_the_adapter_against_its_own_base_and_resumes(here):
    first, second, third = run_ppo(3, "whole")[:3]
    assert abs(first["actor/kl_loss"]) < 1e-6, "the adapter starts as no change"
    assert second["actor/kl_loss"] > 1e-5 and third["actor/kl_loss"] > 1e-5
    assert first["actor/prompt_sharing"] > 0.3
    saved = Path("whole/global_step_3/actor/huggingface")
    tensors = load_file(saved / "adapter_model.safetensors")
    assert len(tensors) == 2 * 3 * 2 and not (saved / "model.safetensors").exists()
    sent = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    assert [step["perf/weights_sent_mb"] for step in (first, second, third)] == pytest.approx([sent] * 3)
    run_ppo(2, "cut", "trainer.resume_mode=disable")
    run_ppo(3, "cut", "trainer.resume_mode=auto")
    again = load_file("cut/global_step_3/actor/huggingface/adapter_model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())
    merge("whole/global_step_3/actor", "merged")
    weights, base = load_file("merged/model.safetensors"), load_file("model/model.safetensors")
    changed = {name for name in base if not torch.equal(weights[name], base[name])}
    assert changed == {name for name in base if any(kind in name for kind in ("q_proj.w", "v_proj.w", "up_proj.w"))}


def test_a_supervised_run_trains_the_adapter(here):
    write_prompts("sft.parquet", [{"messages": turns("1+1=", "2")}] * 8)
    config = load_config(
        "sft_trainer",
        [
            "data.train_files=sft.parquet",
            "data.train_batch_size=2",
            "model.path=model",
            *(f"model.{word}" for word in LORA),
            "optim.lr=0.01",
            "trainer.total_training_steps=4",
            "trainer.save_freq=4",
            "trainer.logger=[file]",
            "trainer.project_name=lora",
            "trainer.experiment_name=sft",
            "trainer.default_local_dir=sft",
        ],
    )
    sft_trainer.run_sft(config)
    losses = [step["train/loss"] for step in logged("logs/lora", "sft")]
    assert losses[-1] < losses[0] - 0.1
    (saved,) = Path("sft").glob("global_step_4/*/huggingface/adapter_model.safetensors")
    assert len(load_file(saved)) == 2 * 3 * 2
