"""Seconds from operations and bytes, against arithmetic by hand and a measured step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.seconds import EFFICIENCY, Range, Seconds, seconds_of, step_seconds
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
WORK = Workload(16, 1, Lengths(512, 512), Lengths(3584, 3584))
ACTOR = RolePlan("actor", "plain", trains=True, micro_tokens=16_384, compiled=True)
ROLLOUT = RolePlan("rollout", "vllm", memory_fraction=0.5)


def test_a_measured_training_step_is_in_the_range():
    """docs/appendix/gpu.md: 65,536 tokens at 455 TFLOP/s on an H100, which is what the range must hold."""
    measured = 3 * SHAPE.flops_per_token(4096) * 65_536 / 455e12
    update = seconds_of(ACTOR, SHAPE, WORK, Cluster.parse("H100")).phase("update")
    assert update.low < measured < update.high
    assert update.likely == pytest.approx(measured, rel=0.2)


def test_recomputation_costs_a_third_more_and_devices_divide():
    cluster = Cluster.parse("8xH100")
    once = seconds_of(ACTOR, SHAPE, WORK, cluster).phase("update")
    again = seconds_of(replace(ACTOR, recompute=True), SHAPE, WORK, cluster).phase("update")
    assert again.likely / once.likely == pytest.approx(4 / 3)
    spread = replace(ACTOR, devices=8, parallel=Parallel(data=8))
    assert once.likely / seconds_of(spread, SHAPE, WORK, cluster).phase("update").likely == pytest.approx(8)


def test_decoding_one_row_reads_all_weights_for_every_token():
    work = Workload(1, 1, Lengths(1, 1), Lengths(1000, 1000))
    generate = seconds_of(ROLLOUT, SHAPE, work, Cluster.parse("H100")).phase("generate")
    weights = 1000 * 2 * SHAPE.parameters / 3350e9
    assert generate.likely == pytest.approx(weights / EFFICIENCY["decode"].likely, rel=0.02)


def test_rows_beyond_the_cache_wait_for_their_turn():
    work = Workload(512, 8, Lengths(512, 512), Lengths(3584, 3584))
    few, many = (
        seconds_of(replace(ROLLOUT, batch_rows=rows), SHAPE, work, Cluster.parse("H100")).phase("generate").likely
        for rows in (64, 128)
    )
    # Each of 4,096 rows of 3,584 tokens needs a 64th of a step's weights for a token, or a 128th.
    weights = 2 * SHAPE.parameters * 4096 * 3584 * (1 / 64 - 1 / 128)
    assert few - many == pytest.approx(weights / 3350e9 / EFFICIENCY["decode"].likely, rel=1e-6)
    bound = replace(ROLLOUT, batch_rows=4096, memory_fraction=0.1)
    assert seconds_of(bound, SHAPE, work, Cluster.parse("H100")).phase("generate").likely > many


def test_the_length_of_responses_widens_the_range_of_sampling():
    work = Workload(512, 8, Lengths(512, 512), Lengths(1792, 3584))
    generate = seconds_of(ROLLOUT, SHAPE, work, Cluster.parse("H100")).phase("generate")
    assert generate.because == "the mean length of responses"
    assert generate.low < generate.likely < generate.high


def test_pools_work_at_once_and_roles_of_a_pool_in_turn():
    one = Range(1, 2, 3, "a")
    plans = [RolePlan("actor", "plain"), RolePlan("critic", "plain"), RolePlan("ref", "plain", pool="other")]
    seconds = [Seconds(plan.role, {"infer": one}) for plan in plans]
    assert step_seconds(plans, seconds) == Range(2, 4, 6, "a")


def test_gathering_weights_over_the_network_bounds_small_passes():
    work = Workload(64, 1, Lengths(64, 64), Lengths(64, 64))
    plan = replace(ACTOR, engine="fsdp2", devices=16, parallel=Parallel(data=16), shards=16, micro_tokens=128)
    update = seconds_of(plan, SHAPE, work, Cluster.parse("16xH100")).phase("update")
    # Each of 4 passes gathers two bytes per weight twice and reduces four, of which 15 of 16 parts come from others.
    moved = 4 * 8 * SHAPE.parameters * 15 / 16
    assert update.likely == pytest.approx(moved / 50e9 / EFFICIENCY["link"].likely)
