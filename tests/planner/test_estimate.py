"""Verdicts of an estimate, and the changes that it names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verl.config.loading.configuration import read_config
from verl.planner.estimate import CHANGES, USABLE, Estimate
from verl.planner.from_config import RunPlan, run_plan
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


def test_megatron_is_told_the_setting_that_it_reads():
    (problem,) = estimate(replace(ACTOR, engine="megatron")).problems()
    assert "recompute_granularity=full" in problem.fix and "enable_gradient_checkpointing" not in problem.fix


@pytest.mark.parametrize(("engine", "fused", "offloads", "rank"), [
    ("plain", "torch", False, 32), ("fsdp2", "torch", True, 32),
    ("torchtitan", "", False, 0), ("megatron", "", False, 32),
])  # fmt: skip
def test_no_engine_is_advised_a_setting_that_it_lacks(engine, fused, offloads, rank):
    role, changes = replace(ACTOR, engine=engine), dict(CHANGES)
    assert changes["use_fused_kernels=true in the model's section"](role, WORK).fused_head == fused
    assert changes["offload_policy=true of each role on fsdp2"](role, WORK).offload_policy is offloads
    advice = changes["actor_rollout_ref.model.lora_rank=32: an adapter instead of all weights"]
    assert advice(role, WORK).lora_rank == rank
    assert advice(replace(role, role="critic"), WORK).lora_rank == 0  # another model's setting


def test_megatron_has_no_fused_head_whatever_the_model_says():
    words = ["actor_rollout_ref.model.use_fused_kernels=true",
             "actor_rollout_ref.model.enable_activation_offload=true"]  # fmt: skip
    for base, fused in (("ppo_trainer", "torch"), ("ppo_megatron_trainer", "")):
        actor = run_plan(read_config(base, words), False, lambda path, key: SHAPE).roles[0]
        assert (actor.fused_head, actor.activation_offload) == (fused, bool(fused))


def test_advice_leaves_a_cache_for_one_sequence():
    """200,000 tokens take 5.7 GB; 40 % of 24 GB less the weights and buffers are 4.5."""
    work = Workload(1, 1, Lengths(512, 1024), Lengths(100_000, 200_000))
    actor = replace(ACTOR, lora_rank=8, recompute=True, fused_head="torch", micro_tokens=1024, infer_tokens=1024)
    roles = (actor, replace(ROLLOUT, memory_fraction=0.9, sleeps=False))
    run = RunPlan(roles, {role.role: SHAPE for role in roles}, work)
    (problem,) = Estimate.of(run, Cluster.parse("RTX4090")).problems()
    assert "No single change makes it fit" in problem.fix
    shorter = replace(run, work=replace(work, response=Lengths(50_000, 100_000)))
    (problem,) = Estimate.of(shorter, Cluster.parse("RTX4090")).problems()
    assert "gpu_memory_utilization=0.4" in problem.fix


@pytest.mark.parametrize(("base", "word", "shared"), [
    ("ppo_trainer", "algorithm.adv_estimator=gae", {"actor", "ref", "critic"}),
    ("ppo_trainer", "actor_rollout_ref.actor.use_prefix_grouper=false", {"critic"}),
    ("ppo_trainer", "actor_rollout_ref.model.use_remove_padding=false", {"critic"}),
    ("ppo_megatron_trainer", "algorithm.adv_estimator=gae", set()),
])  # fmt: skip
def test_prompts_are_shared_where_the_engine_shares_them(base, word, shared):
    words = ["actor_rollout_ref.actor.use_kl_loss=true", "critic.enable=true", word]
    run = run_plan(read_config(base, words), False, lambda path, key: SHAPE)
    assert {role.role for role in run.roles if role.shares_prompts} == shared


def test_settings_of_a_role_reach_its_plan():
    words = ["algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2", "critic.ppo_epochs=3",
             "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false",
             "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"]  # fmt: skip
    config = read_config("ppo_trainer", words)
    run = run_plan(config, False, lambda path, key: SHAPE)
    plans = {plan.role: plan for plan in run.roles}
    actor, critic = plans["actor"], plans["critic"]
    assert (actor.epochs, actor.keeps_gathered, actor.weight_bytes) == (1, True, 2)
    assert (critic.epochs, critic.keeps_gathered, critic.weight_bytes) == (3, False, 4)
    assert not run.overlaps


def test_rows_over_all_ranks_are_divided_by_the_data_ranks():
    """Four devices in pairs that share sequences are two data ranks: 4 of 8 rows each, cut in two."""
    words = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.ppo_micro_batch_size=8",
             "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
             "data.max_prompt_length=512", "data.max_response_length=1024"]  # fmt: skip
    actor = run_plan(read_config("ppo_trainer", words), False, lambda path, key: SHAPE).roles[0]
    assert (actor.parallel.data, actor.parallel.sequence, actor.micro_tokens) == (2, 2, 4 * 1536 // 2)


def test_an_asynchronous_run_takes_the_longer_of_sampling_and_training():
    words = ["trainer.v1.trainer_mode=one_step_off", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
             "actor_rollout_ref.rollout.name=vllm",
             "+trainer.resource_pools.samplers={roles: [rollout], processes: [1]}"]  # fmt: skip
    run = run_plan(read_config("ppo_trainer", words), False, lambda path, key: SHAPE)
    assert run.overlaps
    step, phases = Estimate.of(run, Cluster.parse("2xH100")), {}
    for role in step.seconds:
        phases |= {name: phases.get(name, 0) + phase.likely for name, phase in role.phases.items()}
    longer = max(phases["generate"] + phases["sync"], phases["infer"] + phases["update"])
    assert step.step.likely == pytest.approx(longer)


def test_advice_never_asks_for_a_budget_below_the_longest_row():
    least = replace(ACTOR, micro_tokens=4096, infer_tokens=4096)  # one row of 1,024 and 3,072 tokens
    (change,) = [change for name, change in CHANGES if name.startswith("a quarter of the tokens")]
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


def test_hosts_hold_what_is_offloaded_and_what_a_checkpoint_copies():
    """Of 16 devices in machines of 8: shards of float32 weights with two moments, and the sampler that sleeps."""
    sizes = {"devices": 16, "parallel": Parallel(data=16)}
    actor = replace(
        ACTOR, engine="fsdp2", shards=16, param_offload=True, optimizer_offload=True, async_save=True, **sizes
    )
    hosts = estimate(actor, replace(ROLLOUT, **sizes), devices="16xH100").hosts()["global_pool"]
    assert hosts["offloaded"] == pytest.approx(8 * (12 / 16 + 2) * SHAPE.parameters)
    assert hosts["checkpoint"] == pytest.approx(8 * 12 / 16 * SHAPE.parameters)
    assert hosts["processes"] == 8 * 3e9 and hosts["batch"] == 64 * 64 * 4096
    resident = replace(actor, param_offload=False, optimizer_offload=False, async_save=False)
    assert estimate(resident, devices="16xH100").hosts()["global_pool"]["offloaded"] == 0
    on_host = estimate(replace(resident, offload_policy=True), devices="16xH100").hosts()["global_pool"]
    assert on_host["offloaded"] == pytest.approx(8 * 16 / 16 * SHAPE.parameters)


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_no_head_over_the_vocabulary(tied):
    """It has one weight per width in place of those of an untied head, and besides those of a tied embedding."""
    shape = replace(SHAPE, tied=tied)
    config = read_config("ppo_trainer", ["algorithm.adv_estimator=gae"])
    run = run_plan(config, False, lambda path, key: shape)
    critic = run.shapes["critic"]
    assert critic.parameters == shape.parameters - (0 if tied else 151_936 * 1536) + 1536
    assert critic.active_parameters == shape.active_parameters - 151_936 * 1536 + 1536
    assert run.shapes["actor"] == shape


@pytest.mark.parametrize(("rows", "phases"), [(64, {"update"}), (32, {"infer", "update"})])
def test_one_update_per_step_needs_no_pass_for_old_log_probs(rows, phases):
    words = ["algorithm.adv_estimator=grpo", "data.train_batch_size=64", "actor_rollout_ref.rollout.n=4",
             f"actor_rollout_ref.actor.ppo_mini_batch_size={rows}"]  # fmt: skip
    run = run_plan(read_config("ppo_trainer", words), False, lambda path, key: SHAPE)
    assert Estimate.of(run, Cluster.parse("H100")).seconds[0].phases.keys() == phases
