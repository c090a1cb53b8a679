"""What a model has, against what shares it: the arithmetic is in the message, before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest

from tests.harness.configs import PPO, describe, refused
from verl.config import OptimizerConfig, load_config
from verl.config.rules import optimizers
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notices, reset_notices

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
RM = "reward.reward_model"
EIGHT = ["trainer.device=cpu", "trainer.n_gpus_per_node=8", f"{A}.strategy=fsdp2"]
FSDP = f"{A}.fsdp_config"
ULYSSES, EXPERT = f"{FSDP}.ulysses_sequence_parallel_size", f"{FSDP}.expert_parallel_size"
DENSE = {"num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 3}
MIXTURE = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2, "num_experts": 6}


@pytest.fixture
def run(workplace):
    """Loads a configuration of a model that says this of itself."""

    def load(facts, *words):
        describe(facts)
        return load_config("ppo_trainer", [*PPO, "data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", *words])

    return load


@pytest.mark.parametrize(
    ("facts", "words", "says"),
    [
        (DENSE, [f"{ULYSSES}=8"], "12 attention heads cannot be split evenly over 8 processes. Got 8. Allowed: 1"),
        (DENSE, [f"{EXPERT}=2"], "a model without experts cannot share them among processes. Got 2. Allowed: 1."),
        (MIXTURE, [f"{EXPERT}=4"], "6 experts cannot be split evenly over 4 processes. Got 4. Allowed: 1, 2, 3, 6."),
        (DENSE, [f"{FSDP}.fsdp_size=3"], "8 processes do not divide into groups of 3 that share one copy"),
        (MIXTURE, [f"{EXPERT}=2", f"{FSDP}.fsdp_size=4"], "cannot be shared under hybrid sharding (fsdp_size=4)"),
        (DENSE, [f"{ULYSSES}=2", f"{M}.use_remove_padding=false"], "where rows are packed, and actor"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_evenly_is_refused_with_the_numbers(run, facts, words, says):
    assert says in refused(run, facts, *EIGHT, *words)
    run(facts, *EIGHT)


def test_sizes_that_divide_pass(run):
    run(DENSE, *EIGHT, f"{ULYSSES}=4")
    run(MIXTURE, *EIGHT, f"{EXPERT}=2", f"{M}.lora_rank=4", f"{M}.target_modules=[q_proj]")
    run(DENSE, *EIGHT, f"{FSDP}.fsdp_size=4")


NEXT = {**DENSE, "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
PADDED = f"{M}.use_remove_padding=false"


def test_processes_do_not_share_the_tokens_of_layers_that_carry_a_state(run):
    said = refused(run, NEXT, *EIGHT, f"{ULYSSES}=2", kind=NotBuiltError)
    assert said.startswith(f"{ULYSSES}: qwen3_next has layers that carry a state from token to token")
    run(NEXT, *EIGHT)


@pytest.mark.parametrize("family", ["mamba2", "zaya"])
def test_packed_rows_of_a_family_that_cannot_pack_are_refused_with_what_to_set(run, family):
    facts = {"model_type": family, "num_hidden_layers": 2}
    said = refused(run, facts, *EIGHT, kind=NotBuiltError)
    assert said.startswith(f"{M}.use_remove_padding: packed rows of {family} would carry a state")
    assert f"Set {PADDED}: padded rows are exact." in said
    run(facts, *EIGHT, PADDED)


def test_the_hf_sampler_refuses_families_with_a_cache_of_their_own(run):
    said = refused(run, {"model_type": "rwkv"}, *EIGHT, PADDED, kind=NotBuiltError)
    assert said.startswith(f"{R}.name: the hf sampler cannot run rwkv") and "Allowed: vllm, sglang" in said


def test_what_is_not_built_together_says_so(run):
    said = refused(run, MIXTURE, *EIGHT, f"{EXPERT}=2", f"{M}.lora_rank=4", kind=NotBuiltError)
    assert said.startswith(f"{M}.target_modules: an adapter on the experts of a mixture is not built yet with")
    named = (f"{M}.lora_rank=4", f"{M}.target_modules=[q_proj]", f"{M}.target_parameters=[mlp.experts.down_proj]")
    said = refused(run, MIXTURE, *EIGHT, f"{EXPERT}=2", *named, kind=NotBuiltError)
    assert said.startswith(f"{M}.target_parameters: an adapter on the experts of a mixture is not built yet with")


def test_an_adapter_on_a_tied_head_is_refused_before_it_is_loaded(run):
    words = (*EIGHT, f"{M}.lora_rank=4", f"{M}.target_modules=[q_proj,lm_head]")
    said = refused(run, {**DENSE, "tie_word_embeddings": True}, *words)
    assert said.startswith(f"{M}.target_modules: an adapter on lm_head cannot be merged")
    assert "Leave lm_head out" in said
    run({**DENSE, "tie_word_embeddings": False}, *words)
    run({**DENSE, "tie_word_embeddings": True}, *words, f"+{M}.override_config.tie_word_embeddings=false")
    run({**DENSE, "tie_word_embeddings": True}, *EIGHT, f"{M}.lora_rank=4")
    run({**DENSE, "tie_word_embeddings": True}, *EIGHT, f"{M}.target_modules=[q_proj,lm_head]")  # no adapter at all


def test_a_model_that_is_trained_whole_has_one_process(run):
    said = refused(run, DENSE, "trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{A}.strategy=plain")
    assert f"{A}.strategy: the plain engine trains in one process, and the pool has 2" in said


def test_one_engine_of_a_sampler_splits_heads_and_layers_too(run, monkeypatch):
    from verl.config.machine import host

    monkeypatch.setattr(host, "is_installed", lambda name: True)
    vllm = [*EIGHT, f"{R}.name=vllm"]
    said = refused(run, DENSE, *vllm, f"{R}.tensor_model_parallel_size=8")
    assert f"{R}.tensor_model_parallel_size: the model's 12 attention heads cannot be split evenly over 8" in said
    said = refused(run, DENSE, *vllm, f"{R}.pipeline_model_parallel_size=4")
    assert "3 layers are fewer than the 4 stages of a pipeline. Got 4. Allowed: at most 3." in said
    run(DENSE, *vllm, f"{R}.tensor_model_parallel_size=4")  # two KV heads are copied to four processes


SHORT = {**DENSE, "max_position_embeddings": 2048}
LONG = {**SHORT, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
REFUSED_BY_VLLM = [
    ([f"{R}.max_num_seqs=512", f"{R}.max_num_batched_tokens=256"],
     "a step computes 256 tokens, which are fewer than one for each of 512 responses. Got 512. Allowed: at most 256."),
    ([f"{R}.max_model_len=4096"], "the model knows 2048 positions (max_position_embeddings in its config.json). Got"),
    ([f"{M}.lora_rank=1024"], "no room for an adapter of this rank. Got 1024. Allowed: at most 512."),
    ([f"{M}.lora_rank=-1"], f"{M}.lora_rank: out of range. Got -1. Allowed: 0 or more."),
    ([f"{R}.gpu_memory_utilization=1.5"], "out of range. Got 1.5. Allowed: above 0, at most 1."),
    ([f"{A}.optim.override_optimizer_config={{betas:[0.9]}}"], "betas: out of range. Got [0.9]. Allowed: two numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), REFUSED_BY_VLLM)
def test_what_vllm_or_an_optimizer_refuses_at_its_start_is_refused_before(run, monkeypatch, words, says):
    from verl.config.machine import host

    monkeypatch.setattr(host, "is_installed", lambda name: True)
    assert says in refused(run, SHORT, *EIGHT, f"{R}.name=vllm", *words)


def test_what_vllm_takes_passes(run, monkeypatch):
    from verl.config.machine import host

    monkeypatch.setattr(host, "is_installed", lambda name: True)
    vllm = [*EIGHT, f"{R}.name=vllm"]
    run(LONG, *vllm, f"{R}.max_model_len=4096", f"{M}.lora_rank=512")
    of_kinds = {"sliding_attention": {"rope_type": "default"}, "full_attention": LONG["rope_scaling"]}
    run({**SHORT, "rope_parameters": of_kinds}, *vllm, f"{R}.max_model_len=4096")
    run({**SHORT, "rope_scaling": ["yarn"]}, *vllm, f"{R}.max_model_len=4096")  # damaged, which vLLM says itself
    run(SHORT, *vllm, f"{R}.max_model_len=2048", f"{M}.lora_rank=1024", f"{M}.lora.merge=true")
    few = [f"{R}.max_num_seqs=512", f"{R}.max_num_batched_tokens=256"]
    run(SHORT, *vllm, *few, f"{R}.enable_chunked_prefill=false")  # a step has room for the longest sequence then
    run(SHORT, *EIGHT, *few)


def test_the_same_is_said_of_a_supervised_run_and_of_a_printed_configuration(run, tmp_path, capsys, monkeypatch):
    run(DENSE)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="12 attention heads cannot be split evenly over 8 processes"):
        load_config("sft_trainer", ["data.train_files=rows.parquet", "model.path=model", "trainer.device=cpu",
                                    "ulysses_sequence_parallel_size=8"])  # fmt: skip
    said = refused(run, DENSE, *EIGHT, f"{ULYSSES}=8", "--cfg", "job")
    assert (
        "12 attention heads cannot be split evenly over 8" in said and "adv_estimator: grpo" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("program", "words", "says"),
    [
        ("ppo_trainer", ["algorithm.adv_estimator=grop"], "unknown advantage estimator"),
        ("ppo_trainer", [f"{A}.optim.optimizer=LBFGS"], "this optimizer cannot train here"),
        ("sft_trainer", ["engine.strategy=plane"], "unknown training backend"),
        ("sft_trainer", ["optim.override_optimizer_config={momentun: 1}"], "AdamW takes no such argument"),
        ("rm_trainer", ["rm.centering=-1"], "out of range"),
    ],
)
def test_a_printed_configuration_is_checked_for_names_and_numbers(capsys, program, words, says):
    with pytest.raises(ConfigError, match=says):
        load_config(program, ["--cfg", "job", *words])
    assert "trainer:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{M}.use_liger=true"], "Liger's kernels need a GPU"),
        ([f"{M}.use_fused_kernels=true", f"{M}.fused_kernel_options.impl_backend=triton"], "triton kernels need a GPU"),
        ([f"+{M}.override_config.attn_implementation=flash_attention_2"], "needs the package flash_attn"),
        ([f"+{M}.override_config.attn_implementation=flash"], "unknown value. Got 'flash'"),
        ([f"{M}.lora_adapter_path=/no/adapter"], "no such folder"),
        ([f"{A}.optim.optimizer_impl=no_such.optim"], "no such module. Got 'no_such.optim'"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_3"], "no such folder"),
        ([f"{RM}.enable=true", f"{RM}.model_path=/no/rm"], "no such model folder. Got '/no/rm'"),
        ([f"{A}.strategy=megatron"], "Megatron-Core is not installed"),
    ],
)
def test_what_this_machine_lacks_refuses_a_run_and_no_printed_configuration(run, words, says, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "megatron" else find(name, *a))
    assert says in refused(run, DENSE, "trainer.device=cpu", *words)
    with pytest.raises(SystemExit) as left:
        run(DENSE, "trainer.device=cpu", *words, "--cfg", "job")
    assert left.value.code == 0


def test_attention_of_a_module_of_ones_own_and_kernels_that_are_fetched_are_taken(run, monkeypatch):
    name = f"+{M}.override_config.attn_implementation"
    run(DENSE, "trainer.device=cpu", f"{M}.external_lib=math", f"{name}=mine")
    find, there = importlib.util.find_spec, importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: there if n == "kernels" else find(n, *a))
    run(DENSE, "trainer.device=cpu", f"{name}=flash_attention_2")


def test_fields_of_megatrons_optimizer_that_move_its_state_have_no_effect_there_and_say_so():
    given = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1, "eps": 1e-6}
    optim = OptimizerConfig(override_optimizer_config=given)
    reset_notices()
    assert optimizers.of_section("actor.optim", optim, "megatron") == []
    assert "optimizer_cpu_offload" in notices()["actor.optim.override_optimizer_config"]
    assert optimizers.for_megatron(optim).override_optimizer_config == {"eps": 1e-6}
    [problem] = optimizers.of_section("actor.optim", optim, "fsdp2")
    assert "AdamW takes no such argument" in str(problem)
