"""The quickstart's task is learned in bf16, in 4 and 8 bits, by processes that share sequences, and by a mixture.

LoRA is in `test_learning`, two nodes are in `test_two_nodes`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.mixture import write_dense, write_mixture
from tests.e2e.test_learning import ACCURACY, learn
from tests.harness.programs import command, curve

pytestmark = pytest.mark.slow
GRPO, STEPS, WARM_UP = "algorithm.adv_estimator=grpo", 10, 320
TWO = ["trainer.nnodes=1", "trainer.n_gpus_per_node=2", "trainer.device=cpu", "actor_rollout_ref.actor.strategy=fsdp2"]

REPLAY = [
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    "actor_rollout_ref.rollout.dtype=bfloat16",
]


def check(steps: list[dict]) -> None:
    before, *_, after = curve(steps, ACCURACY)
    rewards = curve(steps, "critic/score/mean")
    print(f"accuracy {before:.2f} -> {after:.2f}, reward {sum(rewards[:3]) / 3:.2f} -> {sum(rewards[-3:]) / 3:.2f}")
    assert before <= 0.6
    assert after >= 0.85
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_grpo_learns_in_bf16(arithmetic):
    """Sampler and training multiply in bf16; weights and optimizer stay in float32."""
    both = ["actor_rollout_ref.actor.fsdp_config.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
    check(learn(arithmetic, "bf16", STEPS, GRPO, *both))


def test_grpo_teaches_an_adapter_on_a_base_in_four_bits(arithmetic):
    """QLoRA: the sampler is sent the rounded weights with the adapter in them, so it samples the policy that learns."""
    model = [
        f"actor_rollout_ref.model.{word}" for word in ("lora_rank=16", "lora_alpha=32", "lora_base_quantization=nf4")
    ]
    others = [
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.rollout_is=true",
        "algorithm.rollout_is_threshold=2",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
    ]
    steps = learn(arithmetic, "qlora", STEPS + 4, GRPO, *model, *others)
    check(steps)
    assert curve(steps, ACCURACY)[-1] >= 0.9
    assert abs(curve(steps, "actor/kl_loss")[0]) < 1e-6, "the reference is the rounded base"
    for name in ("min", "max"):
        assert curve(steps, f"mismatch/rollout_is_{name}") == pytest.approx([1.0] * (STEPS + 4), abs=1e-3)


def test_grpo_learns_from_a_sampler_whose_weights_are_in_eight_bits(arithmetic):
    """FP8, rounded at each weight sync and compared with the trainer; importance weights make up for the difference."""
    rounded = ["actor_rollout_ref.rollout.quantization=fp8", "algorithm.rollout_correction.rollout_is=token"]
    steps = learn(arithmetic, "fp8", STEPS - 2, GRPO, *rounded)
    check(steps)
    differences = curve(steps, "training/reload_log_probs_diff_mean")
    assert len(differences) >= STEPS - 2 and min(differences) > 1e-4 and max(differences) < 0.2


def test_grpo_learns_with_sequences_shared_by_two_processes(arithmetic):
    steps = learn(arithmetic, "ulysses", STEPS, GRPO, *TWO, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    check(steps)


@pytest.fixture(scope="module")
def mixture(arithmetic) -> Path:
    """A Qwen3-MoE that can add as well as the quickstart's model does: its experts start as copies of an MLP."""
    folder = arithmetic.folder / "mixture"
    write_dense(folder / "base", like=arithmetic.model)
    command(
        "verl.trainer.sft_trainer",
        "data.train_files=data/pupil.parquet",
        "data.train_batch_size=128",
        "data.max_length=32",
        "model.path=mixture/base",
        "optim.lr=3e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        f"trainer.total_training_steps={WARM_UP}",
        f"trainer.save_freq={WARM_UP}",
        "trainer.default_local_dir=mixture/sft",
        "trainer.project_name=e2e",
        "trainer.experiment_name=mixture_sft",
        "trainer.logger=[file]",
        "checkpoint.save_contents=[model]",
        cwd=arithmetic.folder,
    )
    write_mixture(folder / "model", folder / "sft" / f"global_step_{WARM_UP}" / "model" / "huggingface")
    return folder / "model"


def test_grpo_teaches_a_mixture_whose_experts_two_processes_share(arithmetic, mixture):
    """Each process holds two of the four experts of a layer; updates replay the experts that a bf16 sampler chose."""
    changes = [f"actor_rollout_ref.model.path={mixture}", "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2"]
    steps = learn(arithmetic, "experts", 2 * STEPS, GRPO, *TWO, *changes, *REPLAY)
    check(steps)
    differs = curve(steps, "moe/replay_differs")
    assert len(differs) == 2 * STEPS and 0 < max(differs) < 0.05
