"""Verdicts of an estimate, and the changes that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.planner.estimate import CHANGES, USABLE, Estimate
from verl.planner.from_config import RunPlan
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.shapes import ModelShape

SHAPE = ModelShape.from_config(
    {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)
WORK = Workload(16, 4, Lengths(512, 1024), Lengths(1536, 3072))
ACTOR = RolePlan("actor", "plain", trains=True, micro_tokens=16_384, infer_tokens=4096)
ROLLOUT = RolePlan("rollout", "vllm", memory_fraction=0.5)


def estimate(*roles: RolePlan, devices: str = "H100") -> Estimate:
    return Estimate.of(RunPlan(roles, {role.role: SHAPE for role in roles}, WORK), Cluster.parse(devices))


def test_a_run_that_fits_has_no_problems():
    sound = estimate(replace(ACTOR, recompute=True), ROLLOUT)
    assert sound.problems() == []
    (peak,) = sound.peaks()
    assert peak.total < USABLE * 80e9
    assert peak.total == max(
        sound.memory[0].phase("update").total,
        sound.memory[1].phase("generate").total + sound.memory[0].phase("idle").total,
    )


def test_the_first_change_that_helps_is_named():
    (problem,) = estimate(ACTOR).problems()
    assert problem.key == "actor_rollout_ref.actor"
    assert "enable_gradient_checkpointing=true" in problem.fix
    assert "Most are activations" in problem.fix
    changed = estimate(replace(ACTOR, recompute=True))
    assert changed.problems() == []


def test_advice_never_asks_for_a_budget_below_the_longest_row():
    least = replace(ACTOR, micro_tokens=4096, infer_tokens=4096)  # one row of 1,024 and 3,072 tokens
    name, change = CHANGES[2]
    assert name.startswith("a quarter of the tokens")
    assert change(least, WORK) == least
    assert change(ACTOR, WORK).micro_tokens == 4096


def test_weights_that_no_single_change_fits_need_devices():
    (problem,) = estimate(replace(ACTOR, engine="megatron"), devices="1xCPU").problems()
    assert problem.fix.endswith("No single change makes it fit: take more devices.")


def test_pools_have_devices_of_their_own():
    split = estimate(ACTOR, replace(ROLLOUT, pool="samplers", devices=2, parallel=Parallel(data=2)), devices="2xH100")
    assert {peak.pool for peak in split.peaks()} == {"global_pool", "samplers"}
    assert split.run.devices == 3
    assert any(problem.key == "trainer.n_gpus_per_node" for problem in split.problems())


def test_json_has_what_the_tables_show():
    numbers = estimate(ACTOR, ROLLOUT).to_json()
    assert numbers["tokens_per_second"] == pytest.approx(WORK.tokens / numbers["step"]["likely"])
    assert numbers["checkpoint_bytes"] == 12 * SHAPE.parameters
    assert numbers["price"] is None
