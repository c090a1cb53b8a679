"""SmolLM2-135M-Instruct, a published model: every engine computes what transformers does, and its reward rises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.published import FirstStep, answers, clipped_loss, expected
from tests.harness.programs import PROJECT, curve, python
from tests.harness.published import STEPS, A, R, digits, to_digits
from tests.harness.ranks import run_cells

pytestmark = pytest.mark.slow
ENGINES = {"plain": 1, "fsdp2": 2, "megatron": 3, "torchtitan": 3}
"""An engine's ranks. The last two share every layer: the model's 9 heads divide by 3 (tensor parallel), not by 2."""


# ---- one step ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(published):
    return answers(published)


@pytest.fixture(scope="module")
def reference(published, batch):
    return expected(published, batch)


@pytest.mark.parametrize("engine", ENGINES)
def test_log_probs_and_the_first_loss_are_those_of_transformers(published, batch, reference, tmp_path, engine):
    step = FirstStep(engine, published, dict(batch.batch.items()))
    by_rank = run_cells(ENGINES[engine], [step], tmp_path)[engine]
    log_probs = torch.empty_like(reference["log_probs"])
    for rank, one in enumerate(by_rank):
        log_probs[rank :: len(by_rank)] = torch.tensor(one["log_probs"])
    gap = float((log_probs - reference["log_probs"]).abs().max())
    assert gap < 1e-4
    # Advantages of both signs cancel in the mean: rounding of log-probs bounds its distance from transformers, and the
    # formula on the engine's log-probs says what the loss is.
    bound, loss = reference["slope"] * gap + 1e-6, float(clipped_loss(log_probs, batch))
    for rank, one in enumerate(by_rank):
        off, rest = abs(one["loss"] - reference["loss"]), abs(one["loss"] - loss)
        print(f"{engine}, rank {rank}: log-probs {gap:.1e}, loss {off:.1e} of {bound:.1e}, of its formula {rest:.1e}")
        assert rest < 1e-6 * abs(loss) and off <= bound
        assert one["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
        assert one["next_loss"] < one["loss"]


# ---- runs ----------------------------------------------------------------------------------------------------------

RANKS = ("trainer.nnodes=1", "trainer.device=cpu")
POOL = ("actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1",
        f"{R}.checkpoint_engine.backend=shared_memory", "trainer.runtime=ray")  # fmt: skip
PLACES = {
    "plain": (),
    "fsdp2": (*RANKS, "trainer.n_gpus_per_node=2", f"{A}.strategy=fsdp2"),
    "megatron": (*RANKS, "trainer.n_gpus_per_node=3", "--config-name=ppo_megatron_trainer",
                 f"{A}.megatron.tensor_model_parallel_size=3",
                 "actor_rollout_ref.model.external_lib=tests.megatron.shim"),
    "torchtitan": (*RANKS, "trainer.n_gpus_per_node=3", f"{A}.strategy=torchtitan",
                   f"{A}.torchtitan.tensor_parallel_size=3"),
    "one_step_off": (*RANKS, *POOL, "trainer.n_gpus_per_node=1", "trainer.v1.trainer_mode=one_step_off",
                     "algorithm.rollout_correction.bypass_mode=true"),
    "fully_async": (*RANKS, *POOL, "trainer.n_gpus_per_node=1", "trainer.v1.trainer_mode=fully_async",
                    "async_training.staleness_threshold=1", "async_training.trigger_parameter_sync_step=1",
                    "algorithm.rollout_correction.bypass_mode=true"),
}  # fmt: skip
"""Engines, and schedules with separate samplers on Ray."""
RESUMED = ("plain", "megatron")
"""Each takes a minute more; every engine's checkpoints are tested on small models."""


@pytest.mark.parametrize("place", PLACES)
def test_the_reward_rises_and_what_is_saved_can_be_used(published, digits_task, place):
    """Answers become numbers; in every engine the sampler's probabilities are the trainer's; transformers loads it."""
    steps = to_digits(published, digits_task, place, *PLACES[place])
    rewards = curve(steps, "critic/score/mean")
    print(place, [round(reward, 3) for reward in rewards])
    assert len(rewards) == STEPS and rewards[-1] > rewards[0] + 0.1
    gaps = curve(steps, "training/rollout_probs_diff_max")  # none where the schedule trains on the sampler's
    assert len(gaps) == STEPS or place not in ENGINES
    assert all(gap < 1e-4 for gap in gaps)
    saved = digits_task / place / f"global_step_{STEPS - 1}"
    assert digits(saved / "actor" / "huggingface") > digits(published) + 0.05
    if place in RESUMED:
        again = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
        (resumed,) = to_digits(published, digits_task, f"{place}_again", *PLACES[place], *again)
        assert resumed["critic/score/mean"] == rewards[-1]
        assert resumed["actor/grad_norm"] == pytest.approx(steps[-1]["actor/grad_norm"], rel=1e-4)
    for folder in digits_task.glob(f"{place}*"):
        shutil.rmtree(folder)


def test_the_printed_command_says_what_it_measured_first_and_last(published, tmp_path):
    """A few prompts, answers and steps; everything else as it stands in the README."""
    small = ("trainer.total_training_steps=2", "trainer.save_freq=2", "data.val_max_samples=8",
             "data.train_batch_size=4", f"{A}.ppo_mini_batch_size=4", f"{R}.n=2")  # fmt: skip
    example = f"{PROJECT}/examples/smollm2/run.py"
    python(example, "addition", "--model", f"{published}", "--out", f"{tmp_path}", *small)
    summary = json.loads((tmp_path / "logs/addition-0.summary.json").read_text())
    assert summary["measured"] == "val-core/addition/reward/mean@1" and summary["steps"] == 2
    assert 0 <= summary["first"] <= 1 and 0 <= summary["last"] <= 1 and Path(summary["plot"]).is_file()
    assert (tmp_path / "addition-0/global_step_2/actor/huggingface/model.safetensors").is_file()
