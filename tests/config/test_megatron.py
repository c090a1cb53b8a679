"""strategy=megatron is held against processes, models and packages before anything is allocated."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from tests.harness.configs import PPO, describe
from verl.config import load_config
from verl.config.rules.validate_megatron import missing_or_other
from verl.errors import ConfigError, NotBuiltError

A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
T, P, V, E = (f"megatron.{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline", "expert"))
C = "megatron.context_parallel_size"
DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
MIXTURE = {**DENSE, "num_experts": 6}


@pytest.fixture
def run(workplace):
    """The configuration of a run of eight processes whose model has the given facts."""

    def go(*words: str, facts=DENSE):
        describe(facts)
        eight = ("trainer.device=cpu", "trainer.n_gpus_per_node=8", f"{A}.strategy=megatron")
        return load_config("ppo_trainer", [*PPO, *eight, *words])

    return go


REFUSED = {
    f"{A}.{T}=3": "8 process(es) cannot be cut into copies of 3 (tensor) x 1",
    f"{A}.{T}=4 {A}.{P}=4": "Allowed: tensor x pipeline of 1 x 1, 1 x 2, 1 x 4, 1 x 8, 2 x 1, 2 x 2, 2 x 4, 4 x 1",
    f"{A}.{T}=8": "4 KV heads cannot be split evenly over 8 processes. Got 8. Allowed: 1, 2, 4.",
    f"{A}.{P}=4": "6 layers cannot be split evenly over 4 processes. Got 4. Allowed: 1, 2, 3, 6.",
    f"{A}.{P}=2 {A}.{V}=2": (
        "3 layers of a pipeline stage cannot be split evenly over 2 layer groups. Got 2. Allowed: 1, 3."
    ),
    f"{A}.{V}=2": "layer groups need a pipeline",
    f"{A}.{C}=3": "copies of 1 x 1 processes cannot be cut into groups of 3 (context). Got 3. Allowed: 1, 2, 4, 8.",
    f"{A}.{C}=2 actor_rollout_ref.model.use_remove_padding=false": "are shared only where rows are packed",
    f"{A}.{T}=0": "out of range. Got 0. Allowed: 1 or more.",
    f"{A}.{E}=2": "a model without experts",
    f"{A}.megatron.dtype=fp16": "needs loss scaling, which this engine does not have. Got 'fp16'",
    f"{A}.use_kl_loss=true {A}.{T}=2 {REF}.{T}=4": "is 2, and Megatron-Core has one set of groups per process",
    f"{A}.optim.lr_decay_style=cosine {A}.optim.lr_scheduler_type=wsd": "are two schedules",
    f"{A}.optim.lr_decay_style=WSD": "needs the length of its last part",
    f"{A}.optim.min_lr=1": "Got 1.0. Allowed: at most",
    f"{A}.megatron.override_transformer_config.moe_router_load_balancing_type=aux_loss": "load-balancing losses are no",
    f"{A}.{P}=4 {A}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=2": (
        "4 of the model's 6 layers are left for 3 stage(s)"
    ),
    f"{A}.megatron.override_transformer_config.mtp_num_layers=1": "layers that predict further tokens are neither",
    f"{A}.megatron.override_transformer_config.fp8=hybrid": "products in FP8 need Transformer Engine",
    f"{A}.megatron.override_transformer_config.moe_z_los_coeff=1": "Did you mean 'moe_z_loss_coeff'",
    f"{A}.megatron.override_ddp_config.use_megatron_fsdp=true": "strategy=fsdp2 shards weights",
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_laid_out_is_refused_with_what_can(run, words):
    with pytest.raises(ConfigError) as caught:
        run(*words.split())
    assert REFUSED[words] in str(caught.value)


def test_fields_that_ask_for_nothing_are_taken(run, told):
    fields = f"{A}.megatron.override_transformer_config"
    run(f"{fields}.moe_z_loss_coeff=1e-3", f"{fields}.fp8=false", f"{fields}.moe_aux_loss_coeff=0.01",
        f"{A}.megatron.override_ddp_config.overlap_grad_reduce=true")  # fmt: skip
    assert "overlap_grad_reduce (the engine sums gradients itself" in told()[f"{A}.megatron.override_ddp_config"]
    assert "moe_aux_loss_coeff (load-balancing losses" in told()[f"{A}.megatron.override_mcore_model_config"]


def test_the_reference_has_the_stages_of_the_actor(run):
    words = (f"{A}.{P}=4", f"{A}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=3")
    policy = run(*words, f"{A}.use_kl_loss=true").actor_rollout_ref
    assert policy.ref.megatron.override_mcore_model_config == {"num_layers_in_first_pipeline_stage": 3}
    assert policy.actor.megatron.override_mcore_model_config == {"num_layers_in_first_pipeline_stage": 3}


def test_heads_are_split_over_the_processes_that_share_a_row(run):
    four = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 6}
    assert run(f"{A}.{T}=2", f"{A}.{C}=2", facts=four).actor_rollout_ref.actor.megatron.context_parallel_size == 2
    with pytest.raises(
        ConfigError, match=r"the 2 attention heads of a tensor-parallel process cannot be .* over 4\. Got"
    ):
        run(f"{A}.{T}=2", f"{A}.{C}=4", facts=four)


def test_experts_are_split_over_processes_of_a_stage(run):
    assert run(f"{A}.{E}=2", facts=MIXTURE).actor_rollout_ref.actor.megatron.expert_model_parallel_size == 2
    with pytest.raises(
        ConfigError, match=r"6 experts cannot be split evenly over 4 processes. Got 4. Allowed: 1, 2, 3, 6."
    ):
        run(f"{A}.{E}=4", facts=MIXTURE)
    with pytest.raises(ConfigError, match=r"the 8 process.* copies of 2 \(expert\) x 8"):
        run(f"{A}.{E}=2", f"{A}.megatron.expert_tensor_parallel_size=8", facts=MIXTURE)


def test_an_adapter_goes_on_the_attention_and_the_complete_experts_of_a_mixture(run):
    assert run("actor_rollout_ref.model.lora_rank=8").actor_rollout_ref.model.lora_rank == 8
    with pytest.raises(
        NotBuiltError,
        match="lora_rank: LoRA on the routers of a mixture, which all-linear includes, is not built yet on Mega",
    ):
        run("actor_rollout_ref.model.lora_rank=8", facts=MIXTURE)
    named = "actor_rollout_ref.model.target_modules=[q_proj,v_proj]"
    experts = "actor_rollout_ref.model.target_parameters=[mlp.experts.down_proj]"
    run("actor_rollout_ref.model.lora_rank=8", named, experts, facts=MIXTURE)
    router = "actor_rollout_ref.model.target_parameters=[mlp.experts.down_proj,mlp.gate.weight]"
    with pytest.raises(NotBuiltError, match="LoRA on the routers"):
        run("actor_rollout_ref.model.lora_rank=8", named, router, facts=MIXTURE)
    with pytest.raises(NotBuiltError, match=r"2 processes have a part each.*expert_tensor_parallel_size=1"):
        run("actor_rollout_ref.model.lora_rank=8", named, experts, f"{A}.{T}=2", facts=MIXTURE)
    assert run("actor_rollout_ref.model.lora_rank=8", named, facts=MIXTURE).actor_rollout_ref.model.lora_rank == 8


def test_the_reference_has_the_sizes_of_the_actor(run):
    cfg = run(f"{A}.use_kl_loss=true", f"{A}.{T}=2", f"{A}.megatron.sequence_parallel=false").actor_rollout_ref.ref
    assert (cfg.megatron.tensor_model_parallel_size, cfg.megatron.sequence_parallel) == (2, False)


def test_a_role_in_a_pool_of_its_own_has_sizes_of_its_own(run):
    words = [f"{A}.use_kl_loss=true", f"{A}.{T}=4", f"{REF}.{T}=2", "trainer.n_gpus_per_node=4"]
    pool = "trainer.resource_pools={frozen:{roles:[ref],processes:[2]}}"
    assert run(*words, pool).actor_rollout_ref.ref.megatron.tensor_model_parallel_size == 2
    with pytest.raises(ConfigError, match=r"2 process\(es\) cannot be cut into copies of 4"):
        run(f"{A}.use_kl_loss=true", f"{A}.{T}=4", "trainer.n_gpus_per_node=4", pool)


def test_settings_of_the_other_backend_get_a_notice(run, told):
    run(f"{A}.fsdp_config.fsdp_size=2", f"{A}.optim.min_lr=1e-7", f"{A}.use_kl_loss=true", f"{REF}.strategy=fsdp2",
        f"{REF}.{T}=2")  # fmt: skip
    said = told()
    assert "settings are actor_rollout_ref.actor.megatron" in said[f"{A}.fsdp_config.fsdp_size"]
    assert f"without {REF}.strategy=megatron" in said[f"{REF}.{T}"]
    assert "lr_decay_style" in said[f"{A}.optim.min_lr"]


def test_a_missing_or_another_megatron_core_is_told_with_the_line_that_installs_it(monkeypatch):
    assert missing_or_other("k") == []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.2")
    assert "Got 'megatron-core 0.12.2'. Allowed: 0.16 or newer, before 0.17." in str(missing_or_other("k")[0])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = missing_or_other("k")
    assert "not installed" in str(problem) and "pip install 'megatron-core>=0.16,<0.17'" in str(problem)
