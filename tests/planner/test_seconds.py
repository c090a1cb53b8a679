"""Seconds from operations and bytes, against arithmetic by hand and a measured step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.errors import ConfigError
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.ranges import EFFICIENCY, Range, Reached
from verl.planner.seconds import HOST_LINK, Seconds, seconds_of, step_seconds
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


@pytest.mark.parametrize(
    ("teraflops", "recompute", "error"), [(455, False, 0.16), (305, True, 0.03), (364, True, 0.23)]
)
def test_measured_steps_are_as_close_as_they_were(teraflops, recompute, error):
    """Rows of docs/appendix/gpu.md. Recomputation's share was not fitted: it is that of the rows without it."""
    measured = 3 * SHAPE.flops_per_token(4096) * 65_536 / (teraflops * 1e12)
    update = seconds_of(replace(ACTOR, recompute=recompute), SHAPE, WORK, Cluster.parse("H100")).phase("update")
    assert update.low < measured < update.high
    assert update.likely == pytest.approx(measured, rel=error)


def test_recomputation_costs_a_third_more_and_devices_divide():
    cluster = Cluster.parse("8xH100")
    once = seconds_of(ACTOR, SHAPE, WORK, cluster).phase("update")
    again = seconds_of(replace(ACTOR, recompute=True), SHAPE, WORK, cluster).phase("update")
    assert again.likely / once.likely == pytest.approx(4 / 3)
    spread = replace(ACTOR, devices=8, parallel=Parallel(data=8))
    assert once.likely / seconds_of(spread, SHAPE, WORK, cluster).phase("update").likely == pytest.approx(8)


def test_what_is_offloaded_crosses_the_link_to_the_host():
    """Weights of 4 bytes come before a pass; with two moments they come and leave around an update."""
    cluster, plan = Cluster.parse("H100"), replace(ACTOR, param_offload=True, optimizer_offload=True)
    resident, offloaded = (seconds_of(role, SHAPE, WORK, cluster) for role in (ACTOR, plan))
    weights = 4 * SHAPE.parameters / HOST_LINK
    for phase, seconds in (("infer", weights), ("update", 2 * 3 * weights)):
        more = offloaded.phase(phase).likely - resident.phase(phase).likely
        assert more == pytest.approx(seconds)


def test_shards_on_the_host_cross_its_link_in_every_pass():
    """An update of 64 tokens in two passes: float32 comes four times, gradients leave twice, Adam works on the host."""
    work, cluster = Workload(2, 1, Lengths(16, 16), Lengths(16, 16)), Cluster.parse("H100")
    plan = replace(ACTOR, engine="fsdp2", micro_tokens=32, infer_tokens=32)
    resident, on_host = (seconds_of(role, SHAPE, work, cluster) for role in (plan, replace(plan, offload_policy=True)))
    weights = 4 * SHAPE.parameters / HOST_LINK
    assert on_host.phase("infer").likely == pytest.approx(2 * weights)
    assert on_host.phase("update").likely == pytest.approx((4 + 2 + 7) * weights)
    assert on_host.phase("update").high == pytest.approx(resident.phase("update").high + 13 * weights)


def test_a_latency_counts_for_every_layer_of_every_pass():
    """Two passes of 28 layers; a backward pass counts two, recomputation one more."""
    device = Cluster.parse("H100").device
    slow = {name: replace(EFFICIENCY[name], latency=0.001) for name in ("train", "infer")}
    cluster = Cluster(replace(device, reached={**EFFICIENCY, **slow}), 1)
    plan = replace(ACTOR, recompute=True, micro_tokens=32_768, infer_tokens=32_768)
    once, delayed = (seconds_of(plan, SHAPE, WORK, one) for one in (Cluster(device, 1), cluster))
    for phase, launches in (("infer", 56), ("update", 224)):
        assert delayed.phase(phase).likely - once.phase(phase).likely == pytest.approx(launches / 1000)


def test_a_share_and_a_latency_are_recovered_from_measurements():
    points = [(ideal, launches, ideal / 0.5 + launches * 0.01) for ideal, launches in ((1, 10), (8, 10), (2, 40))]
    reached = Reached.fitted(points, "made")
    assert (reached.low, reached.likely, reached.high, reached.latency) == pytest.approx((0.5, 0.5, 0.5, 0.01))
    uneven = Reached.fitted([(1, 0, 2), (1, 0, 3)], "made")
    slowness = (1 / 2 + 1 / 3) / (1 / 4 + 1 / 9)
    assert (1 / uneven.low, 1 / uneven.likely, 1 / uneven.high) == pytest.approx((3, slowness, 2))


def test_the_range_has_every_measurement_it_was_fitted_to():
    points = [(1.0, 10.0, 3.0), (8.0, 10.0, 16.0), (2.0, 40.0, 8.0), (1.0, 100.0, 4.0)]
    reached = Reached.fitted(points, "made")
    ranges = [(reached.seconds(ideal, 1.0, launches), seconds) for ideal, launches, seconds in points]
    assert reached.latency > 0
    assert max(seconds / span.high for span, seconds in ranges) == pytest.approx(1)
    assert min(seconds / span.low for span, seconds in ranges) == pytest.approx(1)
    # 4 / 0.5 + 10 x 0.1 s; twice as fast or as slow, launches included
    slow_or_fast = Reached(0.25, 0.5, 1.0, "made", latency=0.1).seconds(4.0, 1.0, 10.0)
    assert (slow_or_fast.low, slow_or_fast.likely, slow_or_fast.high) == pytest.approx((4.5, 9, 18))


def test_seconds_that_fall_with_the_work_are_refused():
    with pytest.raises(ConfigError, match="do not grow with the work"):
        Reached.fitted([(1, 1, 4), (8, 1, 1)], "made", latency=5.0)


def test_a_prompt_is_computed_once_for_its_samples_in_a_micro_batch():
    """Of 8 samples of 512 + 3,584 tokens, 4 fit into 16,384 with their prompt: a quarter of the prompts remains."""
    work, cluster = replace(WORK, prompts=2, samples=8), Cluster.parse("H100")
    plan = replace(ACTOR, infer_tokens=16_384)
    repeated, shared = (seconds_of(p, SHAPE, work, cluster) for p in (plan, replace(plan, shares_prompts=True)))
    for phase, passes in (("infer", 1), ("update", 3)):
        saved = passes * 12 * 512 * SHAPE.flops_per_token(512) / 989e12
        share = EFFICIENCY["train" if passes == 3 else "infer"].likely
        assert repeated.phase(phase).likely - shared.phase(phase).likely == pytest.approx(saved / share)
    # Of 16 optimizer steps each has one row, and no prompt in common; a pass without gradients has no such steps.
    few = replace(plan, mini_batches=16, shares_prompts=True)
    divided, undivided = (seconds_of(p, SHAPE, work, cluster) for p in (few, replace(plan, shares_prompts=True)))
    assert divided.phase("infer") == undivided.phase("infer")
    assert divided.phase("update").likely == pytest.approx(repeated.phase("update").likely)


def update_of(**sizes: object) -> float:
    """Likely seconds of an update on 8 devices, whose share of the peak is as for `ACTOR`."""
    settings = {"engine": "megatron", "devices": 8, "micro_tokens": 4096} | sizes
    return seconds_of(replace(ACTOR, **settings), SHAPE, BATCH, Cluster.parse("8xH100")).phase("update").likely


BATCH = Workload(64, 1, Lengths(512, 512), Lengths(3584, 3584))
COMPUTED = 3 * SHAPE.flops_per_token(4096) * 64 * 4096 / (8 * 989e12 * EFFICIENCY["train"].likely)
"""Seconds of the operations of an update of `BATCH` on 8 H100."""
LINK = 450e9 * EFFICIENCY["link"].likely


def test_a_pipeline_drains_before_every_optimizer_step():
    # 32 micro-batches of one row on each of two pipelines; three pass before the last of four stages works.
    for steps in (1, 4):
        seconds = update_of(parallel=Parallel(data=2, pipeline=4), mini_batches=steps)
        assert seconds == pytest.approx(COMPUTED * (1 + 3 * steps / 32))


def test_tensor_parallelism_waits_for_its_all_reduces_within_the_machine():
    plan = {"parallel": Parallel(data=2, tensor=4), "devices": 8}
    # Two all-reduces per layer and direction of each rank's 32 rows, in a ring of four.
    moved = 4 * 28 * (32 * 4096) * (2 * 3 / 4 * 1536 * 2)
    assert update_of(**plan) == pytest.approx(COMPUTED + moved / LINK)
    half = update_of(**plan | {"parallel": Parallel(data=1, tensor=4, sequence=2)})
    # Each of two ranks has half of the tokens of twice the rows, and passes keys and values of 256 each to the other.
    keys = 3 * 28 * (32 * 4096) * 2 * 512 / 4
    assert half == pytest.approx(COMPUTED + (moved + keys) / LINK)


def test_tensor_parallelism_keeps_to_its_machine_where_the_role_has_several():
    plan = replace(ACTOR, engine="megatron", devices=16, parallel=Parallel(data=2, tensor=8))
    reduced = replace(plan, parallel=Parallel(data=16))
    two, one = (seconds_of(p, SHAPE, BATCH, Cluster.parse("16xH100")).phase("infer").likely for p in (plan, reduced))
    moved = 2 * 28 * (32 * 4096) * (2 * 7 / 8 * 1536 * 2)
    assert two - one == pytest.approx(moved / LINK)


def test_sequences_of_several_ranks_exchange_their_heads():
    wide = {"engine": "fsdp2", "shards": 8, "micro_tokens": 16_384}
    alone = update_of(**wide, parallel=Parallel(data=8))
    shared = update_of(**wide, parallel=Parallel(data=2, sequence=4))
    assert alone == pytest.approx(COMPUTED)
    # Queries, keys, values and outputs of an eighth of the tokens, three quarters to others, forwards and backwards.
    moved = 2 * 28 * (8 * 4096) * 2 * (1536 + 256 + 256 + 1536) * 3 / 4
    assert shared == pytest.approx(COMPUTED + moved / LINK)


def test_an_adapter_saves_the_gradients_of_frozen_matrices_and_their_reduction():
    matrices = 2 * SHAPE.active_parameters * 64 * 4096 / (8 * 989e12 * EFFICIENCY["train"].likely)
    assert update_of(parallel=Parallel(data=8), lora_rank=8) == pytest.approx(COMPUTED - matrices)
    plan = replace(
        ACTOR, engine="fsdp2", devices=16, parallel=Parallel(data=16), shards=16, lora_rank=8, micro_tokens=1
    )
    work = Workload(1, 1, Lengths(8, 8), Lengths(8, 8))  # one token each: links bound it
    update = seconds_of(plan, SHAPE, work, Cluster.parse("16xH100")).phase("update")
    moved = (4 * SHAPE.parameters + 4 * SHAPE.adapter_parameters(8)) * 15 / 16
    assert update.likely == pytest.approx(moved / 50e9 / EFFICIENCY["link"].likely)


def test_at_worst_links_and_operations_take_turns():
    plan = replace(ACTOR, engine="fsdp2", devices=8, parallel=Parallel(data=8), shards=8)
    update = seconds_of(plan, SHAPE, BATCH, Cluster.parse("8xH100")).phase("update")
    alone = seconds_of(replace(plan, shards=1), SHAPE, BATCH, Cluster.parse("8xH100")).phase("update")
    passes = 64 * 4096 / (8 * 16_384)
    moved = passes * 8 * SHAPE.parameters * 7 / 8  # gathered twice in two bytes, reduced in four
    assert update.high == pytest.approx(
        3 * SHAPE.flops_per_token(4096) * 64 * 4096 / (8 * 989e12 * EFFICIENCY["train"].low)
        + moved / (450e9 * EFFICIENCY["link"].low)
    )
    assert update.likely == alone.likely


def test_decoding_over_tensor_parallel_ranks_waits_for_them():
    work = Workload(1, 1, Lengths(1, 1), Lengths(1000, 1000))
    plan = replace(ROLLOUT, devices=4, parallel=Parallel(tensor=4))
    generate = seconds_of(plan, SHAPE, work, Cluster.parse("4xH100")).phase("generate")
    assert generate.likely > 1000 * (2 * 28 * 20e-6 + 2 * SHAPE.parameters / 4 / 3350e9 / EFFICIENCY["decode"].likely)
    alone = seconds_of(ROLLOUT, SHAPE, work, Cluster.parse("H100")).phase("generate")
    assert generate.likely > alone.likely / 2  # four times the bandwidth, and not a quarter of the time


def test_a_step_overlaps_generation_with_the_rest_where_its_schedule_does():
    plans = [RolePlan("actor", "plain"), RolePlan("rollout", "vllm", pool="samplers")]
    seconds = [Seconds("actor", {"infer": Range(1, 2, 3), "update": Range(1, 2, 3)}),
               Seconds("rollout", {"generate": Range(3, 6, 9), "sync": Range(1, 1, 1)})]  # fmt: skip
    assert step_seconds(plans, seconds).likely == 11
    assert step_seconds(plans, seconds, overlaps=True).likely == 7


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
