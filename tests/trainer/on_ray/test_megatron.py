"""A run on Megatron-Core's ranks is the run of one process, and each goes on from the other's checkpoint.

`tests.megatron.shim` answers its CUDA calls; it is loaded as the model's external library, in every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.trainer.on_ray.conftest import Run
from tests.trainer.on_ray.test_same_numbers import agree
from verl.models.megatron_conversion import convert_to_megatron

pytestmark = pytest.mark.slow
TWO = "trainer.n_gpus_per_node=2"
MEGATRON = (
    "--config-name=ppo_megatron_trainer",
    "actor_rollout_ref.model.external_lib=tests.megatron.shim",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    TWO,
)
FSDP = ("actor_rollout_ref.actor.strategy=fsdp", "critic.strategy=fsdp", TWO)


@pytest.fixture(scope="module")
def megatron(train: Callable[..., Run], task: Path) -> Run:
    """Tensor parallel 2 on a folder that the converter wrote."""
    convert_to_megatron(task / "model", task / "converted")
    return train("megatron", 3, *MEGATRON, "actor_rollout_ref.model.path=converted", "trainer.save_freq=2")


def test_ranks_that_train_in_tensor_parallel_do_as_one_process_does(megatron: Run, alone: Run):
    agree(megatron, alone, steps=slice(3))
    assert [[s["output"] for s in step] for step in megatron.samples] == [
        [s["output"] for s in step] for step in alone.samples[:3]
    ]


@dataclass(frozen=True)
class Resumed:
    """One step from a run's checkpoint; ``reference`` never stopped."""

    run: Run
    reference: Run

    def check(self) -> None:
        """The same rows and samples, and the same losses."""
        (told,), (rows,) = self.run.steps, self.run.samples
        step = told["training/global_step"] - 1
        for what in ("input", "output"):
            assert [row[what] for row in rows] == [row[what] for row in self.reference.samples[step]]
        for metric in ("actor/loss", "critic/loss"):
            assert told[metric] == pytest.approx(self.reference.steps[step][metric], rel=1e-4, abs=1e-5), metric


@pytest.fixture(scope="module")
def goes_on(train: Callable[..., Run], alone: Run) -> Callable[..., Resumed]:
    """``goes_on(name, source, step, *changes)``: a run that starts with a checkpoint of ``source``."""

    def run(name: str, source: Run, step: int, *changes: str) -> Resumed:
        folder = f"trainer.resume_from_path={source.folder.name}/global_step_{step}"
        # Another folder of the same model (converted or not) counts as another model until somebody says it is not.
        resume = ("trainer.resume_mode=resume_path", "trainer.resume_changed=accept", folder)
        return Resumed(train(name, step + 1, *resume, *changes), alone)

    return run


def test_its_checkpoint_goes_on_with_the_plain_engine_in_one_process(megatron: Run, goes_on: Callable[..., Resumed]):
    goes_on("plain", megatron, 2, "trainer.runtime=local").check()


def test_its_checkpoint_goes_on_with_fsdp_and_that_ones_with_megatron(megatron: Run, goes_on: Callable[..., Resumed]):
    fsdp = goes_on("fsdp", megatron, 2, *FSDP, "trainer.save_freq=3")
    fsdp.check()
    goes_on("megatron_again", fsdp.run, 3, *MEGATRON).check()


def test_an_adapter_trains_and_samples_on_both_ranks_as_in_one_process(train: Callable[..., Run]):
    """Its base is the reference."""
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8")
    alone = train("adapter_alone", 2, "trainer.runtime=local", *lora)
    both = train("adapter", 2, *MEGATRON, *lora)
    agree(both, alone, tolerance=1e-4)
    assert [[s["output"] for s in step] for step in both.samples] == [
        [s["output"] for s in step] for step in alone.samples
    ]


A, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MIXTURE_GRPO = (
    "actor_rollout_ref.model.path=mixture",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    f"{A}.use_kl_loss=true",
    f"{A}.use_prefix_grouper=false",  # Megatron-Core's layers compute, and count, a prompt once for each of its rows.
    f"{A}.optim.lr=1e-3",
    f"{A}.optim.lr_warmup_steps=0",
    f"{ROLLOUT}.dtype=bfloat16",
)
SHARED = (
    *MEGATRON[:2],
    TWO,
    f"{A}.megatron.context_parallel_size=2",
    f"{A}.megatron.expert_model_parallel_size=2",
)


@pytest.fixture(scope="module")
def mixture(task: Path) -> None:
    tiny_model_dir(task / "mixture", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.mark.usefixtures("mixture")
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_grpo_replays_experts_that_two_ranks_share_as_one_process_does(train: Callable[..., Run], mode: str):
    """Reference and updates take the experts of a bf16 sampler (R3) or of the pass over old log-probs (R2)."""
    replay = (f"{A}.router_replay.mode={mode}", f"actor_rollout_ref.ref.router_replay.mode={mode}")
    record = (f"{ROLLOUT}.enable_rollout_routing_replay=true",) if mode == "R3" else ()
    settings = (*MIXTURE_GRPO, *replay, *record)
    alone = train(f"{mode}_alone", 1, "trainer.runtime=local", *settings)
    both = train(f"{mode}_shared", 1, *SHARED, *settings)
    assert [[s["output"] for s in step] for step in both.samples] == [
        [s["output"] for s in step] for step in alone.samples
    ]
    (mine,), (other,) = both.steps, alone.steps
    for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "moe/replay_differs"):
        assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    assert 0 < mine["moe/replay_differs"] < 0.5 and mine["actor/grad_norm"] > 0
