"""Predicted bytes against real steps, against published tables, and against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.planner.hardware import device
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of, pool_memory
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
def test_peaks_of_an_h100_are_met_within_ten_percent(settings, gigabytes):
    """The rows of docs/appendix/gpu.md with compiled layers and rows of 4,096 tokens."""
    plan = replace(ACTOR, compiled=True, **settings)
    memory = memory_of(plan, ModelShape.from_config(QWEN_1_5B), WORK)
    assert memory.phase("update").total / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_weights_and_state_take_sixteen_bytes_per_parameter_and_shard():
    shape = ModelShape.from_config(QWEN_1_5B)
    plan = replace(ACTOR, engine="fsdp2", devices=8, parallel=Parallel(data=8), shards=8)
    update = memory_of(plan, shape, WORK).phase("update")
    assert update.weights + update.gradients + update.optimizer == 16 * shape.parameters / 8
    offloaded = memory_of(replace(plan, param_offload=True, optimizer_offload=True), shape, WORK)
    assert offloaded.phase("idle").total == 0
    assert offloaded.host - memory_of(plan, shape, WORK).host == 12 * shape.parameters / 8


def test_an_adapter_trains_few_weights():
    shape = ModelShape.from_config(QWEN_1_5B)
    update = memory_of(replace(ACTOR, lora_rank=16), shape, WORK).phase("update")
    # Inputs and outputs of q and o (1536 + 1536), of k and v (1536 + 256), of gate, up and down (1536 + 8960).
    adapter = 28 * 16 * (2 * 3072 + 2 * 1792 + 3 * 10_496)
    assert update.gradients == 4 * adapter
    assert update.optimizer == 8 * adapter
    assert update.weights == 4 * (shape.parameters + adapter)
    assert memory_of(replace(ACTOR, lora_rank=16), shape, WORK).checkpoint == 12 * adapter


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
    assert memory_of(replace(ACTOR, recompute=True, entropy=True), shape, WORK).peak.dominant == "logits"


def test_an_engine_or_optimizer_without_costs_is_refused():
    shape = ModelShape.from_config(QWEN_1_5B)
    with pytest.raises(ConfigError, match="Did you mean 'megatron'"):
        memory_of(replace(ACTOR, engine="megatrom"), shape, WORK)
    with pytest.raises(ConfigError, match="Did you mean 'AdamW'"):
        memory_of(replace(ACTOR, optimizer="AdemW"), shape, WORK)
