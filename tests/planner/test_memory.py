"""Predicted bytes against real steps, against published tables, and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.planner.hardware import device
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of, pool_memory, sequence_cache
from verl.planner.shapes import ModelShape

QWEN_1_5B = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
WORK = Workload(64, 4, Lengths(512, 512), Lengths(3584, 3584))
ACTOR = RolePlan("actor", "plain", trains=True, micro_tokens=16_384)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import bench_planner

    return bench_planner


@pytest.mark.parametrize("number", range(4))
def test_a_real_step_takes_what_is_predicted_within_five_percent(bench, number, tmp_path):
    case = bench.QUICK[number]
    real = bench.measured(case, tmp_path)
    assert real > sum(file.stat().st_size for file in tmp_path.rglob("model.safetensors"))
    assert bench.predict(case) == pytest.approx(real, rel=0.05)


@pytest.mark.slow
def test_a_sharded_step_takes_what_is_predicted(bench, tmp_path):
    case = bench.Case("fsdp2", length=512, ranks=2)
    assert bench.predict(case) == pytest.approx(bench.measured(case, tmp_path), rel=0.05)


@pytest.mark.parametrize(
    ("settings", "gigabytes"),
    [
        ({"recompute": True}, 46),
        ({"recompute": True, "fused_head": "triton"}, 30),
        ({"fused_head": "triton"}, 64),
    ],
)
def test_peaks_of_an_h100_are_met_within_three_percent(settings, gigabytes):
    """The rows of docs/appendix/gpu.md with compiled layers and rows of 4,096 tokens."""
    plan = replace(ACTOR, compiled=True, **settings)
    memory = memory_of(plan, ModelShape.from_config(QWEN_1_5B), WORK)
    assert memory.phase("update").total / 1e9 == pytest.approx(gigabytes, rel=0.025)


def test_shared_prompts_leave_room_for_more_logits_in_a_micro_batch():
    """Four samples of 512 + 3,584 tokens fit into 16,384 with one prompt: 3,584 of 3,712 tokens have float32 logits."""
    plan, shape = replace(ACTOR, recompute=True, infer_tokens=16_384), ModelShape.from_config(QWEN_1_5B)
    repeated, shared = (memory_of(p, shape, WORK) for p in (plan, replace(plan, shares_prompts=True)))
    for phase in ("infer", "update"):
        more = shared.phase(phase).logits - repeated.phase(phase).logits
        assert more == pytest.approx(8 * 151_936 * 16_384 * (3584 / 3712 - 3584 / 4096))
    few = replace(plan, shares_prompts=True, micro_tokens=0, mini_batches=64)  # a prompt and its samples at a time
    tokens = 512 + 4 * 3584
    logits = memory_of(few, shape, WORK).phase("update").logits
    assert logits == pytest.approx(8 * 151_936 * tokens * 3584 / 3712)
    assert memory_of(few, shape, WORK).phase("infer") == shared.phase("infer"), "it has no mini-batches"


def mixture() -> ModelShape:
    """Qwen3-30B-A3B."""
    return ModelShape.from_config(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "head_dim": 128,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "tie_word_embeddings": False,
        }
    )


EXPERTS = 48 * 128 * 3 * 2048 * 768
"""Weights of all routed experts of `mixture`."""


@pytest.mark.parametrize(
    ("parallel", "expert_copies"),
    [
        (Parallel(data=8, expert=8), 8),
        (Parallel(data=4, tensor=2, expert=4), 8),  # each matrix of an expert is divided by tensor, too
        (Parallel(data=4, tensor=2, expert=4, expert_tensor=1), 4),
        (Parallel(data=2, pipeline=2, sequence=2, expert=2), 4),
    ],
)
def test_megatron_divides_dense_weights_and_experts_by_different_sizes(parallel, expert_copies):
    shape = mixture()
    assert shape.expert_parameters == EXPERTS
    plan = replace(ACTOR, engine="megatron", devices=8, parallel=parallel)
    update = memory_of(plan, shape, WORK).phase("update")
    dense = (shape.parameters - EXPERTS) / (parallel.tensor * parallel.pipeline)
    assert update.weights == pytest.approx(2 * (dense + EXPERTS / expert_copies))
    assert update.gradients == pytest.approx(4 * (dense + EXPERTS / expert_copies))
    assert update.optimizer == pytest.approx(12 * shape.parameters / 8)  # once over all eight processes


def test_weights_in_bfloat16_have_gradients_and_moments_in_bfloat16():
    shape = ModelShape.from_config(QWEN_1_5B)
    update = memory_of(replace(ACTOR, weight_bytes=2), shape, WORK).phase("update")
    assert update.weights + update.gradients + update.optimizer == 8 * shape.parameters


def test_gathered_weights_that_stay_take_the_bytes_of_all_layers():
    shape = ModelShape.from_config(QWEN_1_5B)
    plan = replace(ACTOR, engine="fsdp2", devices=8, parallel=Parallel(data=8), shards=8, fused_head="torch")
    resharded, stays = (
        memory_of(replace(plan, keeps_gathered=keeps), shape, WORK).phase("update").transient for keeps in (False, True)
    )
    # At the head: without resharding the copies of all layers in two bytes are still there.
    assert stays - resharded == 2 * sum(block.parameters for block in shape.blocks)


def test_a_first_pipeline_stage_holds_inputs_of_as_many_micro_batches_as_stages():
    shape = ModelShape.from_config(QWEN_1_5B)
    plan = replace(ACTOR, engine="megatron", devices=4, recompute=True, fused_head="torch", micro_tokens=4096)
    deep = memory_of(replace(plan, parallel=Parallel(pipeline=4)), shape, WORK).phase("update")
    wide = memory_of(replace(plan, parallel=Parallel(data=4)), shape, WORK).phase("update")
    assert deep.activations == wide.activations > 28 * 4096 * 2 * 1536


def test_a_cache_is_divided_by_no_more_than_its_heads():
    shape = ModelShape.from_config(QWEN_1_5B)  # two heads of keys and values
    plan = RolePlan("rollout", "vllm", devices=4)
    one, two, four = (
        sequence_cache(replace(plan, parallel=Parallel(tensor=tensor)), shape, 4096) for tensor in (1, 2, 4)
    )
    assert one == 2 * two == 2 * four == 28 * 2 * 2 * 128 * 2 * 4096


def test_weights_and_state_take_sixteen_bytes_per_parameter_and_shard():
    shape = ModelShape.from_config(QWEN_1_5B)
    plan = replace(ACTOR, engine="fsdp2", devices=8, parallel=Parallel(data=8), shards=8)
    update = memory_of(plan, shape, WORK).phase("update")
    assert update.weights + update.gradients + update.optimizer == 16 * shape.parameters / 8
    offloaded = memory_of(replace(plan, param_offload=True, optimizer_offload=True), shape, WORK)
    assert offloaded.phase("idle").total == 0


def test_an_adapter_trains_few_weights():
    shape = ModelShape.from_config(QWEN_1_5B)
    update = memory_of(replace(ACTOR, lora_rank=16), shape, WORK).phase("update")
    # Inputs and outputs of q and o (1536 + 1536), of k and v (1536 + 256), of gate, up and down (1536 + 8960).
    adapter = 28 * 16 * (2 * 3072 + 2 * 1792 + 3 * 10_496)
    assert update.gradients == 4 * adapter
    assert update.optimizer == 8 * adapter
    assert update.weights == 4 * (shape.parameters + adapter)
    assert memory_of(replace(ACTOR, lora_rank=16), shape, WORK).checkpoint == 12 * adapter
    lowered = memory_of(replace(ACTOR, lora_rank=16, weight_bytes=2), shape, WORK)
    in_16_bits = lowered.phase("update")  # of the base alone: the adapter stays float32
    assert update.weights - in_16_bits.weights == 2 * shape.parameters and lowered.checkpoint == 12 * adapter
    assert (in_16_bits.gradients, in_16_bits.optimizer) == (update.gradients, update.optimizer)


def test_a_sampler_fills_its_share_of_the_device():
    shape, h100 = ModelShape.from_config(QWEN_1_5B), device("H100")
    plan = RolePlan("rollout", "vllm", devices=2, parallel=Parallel(tensor=2), memory_fraction=0.5)
    generate = memory_of(plan, shape, WORK, h100).phase("generate")
    assert generate.weights == shape.parameters  # two bytes, two devices
    assert generate.total == pytest.approx(0.5 * h100.memory)
    assert memory_of(plan, shape, WORK, h100).phase("idle").total == 0


def test_roles_of_a_pool_take_turns():
    shape = ModelShape.from_config(QWEN_1_5B)
    actor = memory_of(ACTOR, shape, WORK)
    critic = memory_of(replace(ACTOR, role="critic", scalar_head=True), shape, WORK)
    together = pool_memory([actor, critic], "update", active="critic")
    assert together == critic.phase("update").total + 12 * shape.parameters


def test_the_dominating_term_is_named():
    shape = ModelShape.from_config(QWEN_1_5B)
    assert memory_of(ACTOR, shape, WORK).phase("update").dominant == "activations"
    assert memory_of(replace(ACTOR, recompute=True, entropy=True), shape, WORK).phase("update").dominant == "logits"


def test_an_engine_or_optimizer_without_costs_is_refused():
    shape = ModelShape.from_config(QWEN_1_5B)
    with pytest.raises(ConfigError, match="Did you mean 'megatron'"):
        memory_of(replace(ACTOR, engine="megatrom"), shape, WORK)
    with pytest.raises(ConfigError, match="Did you mean 'AdamW'"):
        memory_of(replace(ACTOR, optimizer="AdemW"), shape, WORK)
