"""Every spelling that scripts still carry, one row each, written from the releases' key lists, not from the table."""

import pytest

from verl.config import load_config
from verl.config.loading.aliases import PPO_ALIASES, SFT_ALIASES
from verl.config.loading.configuration import read_config
from verl.config.loading.groups import PPO, SFT
from verl.config.schema.node import schema_of
from verl.errors import ConfigError, NotBuiltError

A, R, M, REF = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "actor_rollout_ref.ref",
)
NSYS = "global_profiler.global_tool_config.nsys"
RM = "reward.reward_model"

WORKS = [
    (f"{A}.lora.r", "16", f"{M}.lora_rank", 16),
    (f"{A}.megatron.router_replay.mode", "R2", f"{A}.router_replay.mode", "R2"),
    (f"{REF}.megatron.router_replay.mode", "R2", f"{REF}.router_replay.mode", "R2"),
    (f"{A}.policy_loss.tau_pos", "2.0", f"{A}.tau_pos", 2.0),
    (f"{A}.policy_loss.tau_neg", "3.0", f"{A}.tau_neg", 3.0),
    *(
        (f"{A}.{name}", value, f"{A}.policy_loss.{name}", expected)
        for name, value, expected in (
            ("loss_mode", "kl_cov", "kl_cov"),
            ("clip_cov_ratio", "0.1", 0.1),
            ("clip_cov_lb", "2.0", 2.0),
            ("clip_cov_ub", "6.0", 6.0),
            ("kl_cov_ratio", "0.2", 0.2),
            ("ppo_kl_coef", "0.3", 0.3),
        )
    ),
    (f"{A}.model_engine", "megatron", f"{A}.strategy", "megatron"),
    (f"{A}.model_engine", "megatron", f"{REF}.strategy", "megatron"),
    (f"{A}.fsdp_config.mixed_precision.param_dtype", "bf16", f"{A}.fsdp_config.dtype", "bf16"),
    (f"{REF}.fsdp_config.mixed_precision.param_dtype", "bf16", f"{REF}.fsdp_config.dtype", "bf16"),
    ("critic.model.fsdp_config.mixed_precision.param_dtype", "bf16", "critic.fsdp.dtype", "bf16"),
    ("critic.fsdp.mixed_precision.param_dtype", "bf16", "critic.fsdp.dtype", "bf16"),
    (f"{A}.lora.alpha", "32", f"{M}.lora_alpha", 32),
    (f"{R}.skip_rollout", "true", "skip.rollout.enable", True),
    (f"{R}.skip_dump_dir", "/d", "skip.rollout.dump_dir", "/d"),
    (f"{R}.skip.action", "repeat", "skip.rollout.action", "repeat"),
    (f"{A}.lora.target_modules", "[q_proj,v_proj]", f"{M}.target_modules", ["q_proj", "v_proj"]),
    ("critic.model.fsdp_config.fsdp_size", "4", "critic.fsdp.fsdp_size", 4),
    (f"{A}.lr", "5e-7", f"{A}.optim.lr", 5e-7),
    (f"{A}.max_grad_norm", "0.5", f"{A}.grad_clip", 0.5),
    (f"{M}.backend", "megatron", f"{A}.strategy", "megatron"),
    (f"{M}.backend", "megatron", f"{REF}.strategy", "megatron"),
    (f"{A}.fsdp_config.strategy", "fsdp2", f"{A}.strategy", "fsdp2"),
    (f"{REF}.fsdp_config.strategy", "fsdp2", f"{REF}.strategy", "fsdp2"),
    (f"{A}.checkpoint.contents", "[model,hf_model]", f"{A}.checkpoint.save_contents", ["model", "hf_model"]),
    (f"{A}.optim.warmup_style", "cosine", f"{A}.optim.lr_scheduler_type", "cosine"),
    (f"{A}.optim.lr_scheduler", "cosine", f"{A}.optim.lr_scheduler_type", "cosine"),
    (f"{A}.optim.warmup_steps_ratio", "0.1", f"{A}.optim.lr_warmup_steps_ratio", 0.1),
    ("critic.lr", "2e-5", "critic.optim.lr", 2e-5),
    ("critic.max_grad_norm", "2", "critic.grad_clip", 2.0),
    ("critic.model.backend", "megatron", "critic.strategy", "megatron"),
    ("critic.fsdp.strategy", "fsdp2", "critic.strategy", "fsdp2"),
    ("critic.checkpoint.contents", "[model]", "critic.checkpoint.save_contents", ["model"]),
    ("critic.optim.warmup_style", "cosine", "critic.optim.lr_scheduler_type", "cosine"),
    ("critic.optim.lr_scheduler", "cosine", "critic.optim.lr_scheduler_type", "cosine"),
    ("critic.optim.warmup_steps_ratio", "0.1", "critic.optim.lr_warmup_steps_ratio", 0.1),
    ("critic.model.fsdp_config.param_offload", "true", "critic.fsdp.param_offload", True),
    ("critic.model.fsdp_config.strategy", "fsdp2", "critic.strategy", "fsdp2"),
    ("critic.fsdp_config.optimizer_offload", "true", "critic.fsdp.optimizer_offload", True),
    (
        f"{R}.update_weights_bucket_megabytes",
        "512",
        f"{R}.checkpoint_engine.update_weights_bucket_megabytes",
        512,
    ),
    ("rollout.nnodes", "2", f"{R}.nnodes", 2),
    ("rollout.n_gpus_per_node", "6", f"{R}.n_gpus_per_node", 6),
    (f"{R}.multi_turn.max_turns", "4", f"{R}.multi_turn.max_assistant_turns", 4),
    (
        f"{R}.multi_turn.enable_tokenization_sanity_check",
        "false",
        f"{R}.multi_turn.tokenization_sanity_check_mode",
        "disable",
    ),
    ("rollout.total_rollout_steps", "512", "async_training.total_rollout_steps", 512),
    ("rollout.test_freq", "7", "trainer.test_freq", 7),
    ("async_training.use_rollout_log_probs", "true", f"{A}.use_rollout_log_probs", True),
    ("async_training.partial_rollout", "true", f"{R}.requests_at_update", "pause"),
    ("custom_reward_function.path", "/r.py", "reward.custom_reward_function.path", "/r.py"),
    ("custom_reward_function.name", "score", "reward.custom_reward_function.name", "score"),
    ("custom_reward_function.reward_kwargs.k", "3", "reward.custom_reward_function.reward_kwargs", {"k": 3}),
    ("reward_manager.source", "importlib", "reward.reward_manager.source", "importlib"),
    ("reward_manager.name", "dapo", "reward.reward_manager.name", "dapo"),
    ("reward_manager.module.path", "/m.py", "reward.reward_manager.module.path", "/m.py"),
    ("reward_manager.module.name", "mine", "reward.reward_manager.module.name", "mine"),
    ("reward_model.num_workers", "4", "reward.num_workers", 4),
    *(
        (f"reward_model.{name}", "3", f"reward.{name}", 3)
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")
    ),
    ("reward.max_per_minute", "90", "reward.max_rpm", 90.0),
    ("reward_model.reward_manager", "dapo", "reward.reward_manager.name", "dapo"),
    ("reward_model.reward_loop_source", "importlib", "reward.reward_manager.source", "importlib"),
    ("reward_model.reward_loop_module_path", "/m.py", "reward.reward_manager.module.path", "/m.py"),
    (
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "1e-3",
        "algorithm.rollout_is_veto_threshold",
        1e-3,
    ),
    (
        "algorithm.rollout_correction.use_policy_gradient",
        "true",
        "algorithm.rollout_correction.loss_type",
        "reinforce",
    ),
    ("reward_model.reward_loop_class_name", "Mine", "reward.reward_manager.name", "Mine"),
    (
        "reward_model.overlong_buffer.len",
        "512",
        "reward.reward_kwargs",
        {"overlong_buffer_cfg": {"len": 512}},
    ),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
        "true",
        "reward.reward_kwargs",
        {"overlong_buffer_cfg": {"enable": True}},
    ),
    ("reward_model.reward_kwargs.max_resp_len", "2048", "reward.reward_kwargs", {"max_resp_len": 2048}),
    ("reward_model.enable", "true", f"{RM}.enable", True),
    ("reward_model.enable_resource_pool", "true", f"{RM}.enable_resource_pool", True),
    ("reward_model.n_gpus_per_node", "4", f"{RM}.n_gpus_per_node", 4),
    ("reward_model.nnodes", "1", f"{RM}.nnodes", 1),
    ("reward_model.rollout.name", "server", f"{RM}.rollout.name", "server"),
    ("reward_model.strategy", "fsdp2", f"{RM}.strategy", "fsdp2"),
    ("reward_model.micro_batch_size", "4", f"{RM}.micro_batch_size", 4),
    ("reward_model.micro_batch_size_per_gpu", "4", f"{RM}.micro_batch_size_per_gpu", 4),
    ("reward_model.max_length", "512", f"{RM}.max_length", 512),
    ("reward_model.use_dynamic_bsz", "true", f"{RM}.use_dynamic_bsz", True),
    ("reward_model.forward_max_token_len_per_gpu", "512", f"{RM}.forward_max_token_len_per_gpu", 512),
    (
        "reward_model.ulysses_sequence_parallel_size",
        "2",
        f"{RM}.fsdp_config.ulysses_sequence_parallel_size",
        2,
    ),
    ("reward_model.model.path", "/rm", f"{RM}.model_path", "/rm"),
    ("reward_model.model.input_tokenizer", "/t", f"{RM}.input_tokenizer", "/t"),
    ("reward_model.model.trust_remote_code", "true", f"{RM}.trust_remote_code", True),
    ("reward_model.model.external_lib", "a.b", f"{RM}.external_lib", "a.b"),
    ("reward_model.model.override_config.k", "3", f"{RM}.override_config", {"k": 3}),
    ("reward_model.model.use_shm", "true", f"{RM}.use_shm", True),
    ("reward_model.model.use_remove_padding", "false", f"{RM}.use_remove_padding", False),
    ("reward_model.model.fsdp_config.param_offload", "true", f"{RM}.fsdp_config.param_offload", True),
    ("reward_model.megatron.tensor_model_parallel_size", "2", f"{RM}.megatron.tensor_model_parallel_size", 2),
    ("actor_rollout_ref.profiler.all_ranks", "true", f"{A}.profiler.all_ranks", True),
    ("actor_rollout_ref.profiler.ranks", "[0]", f"{REF}.profiler.ranks", [0]),
    ("actor_rollout_ref.profiler.discrete", "true", f"{NSYS}.discrete", True),
    ("critic.profiler.discrete", "true", "critic.profiler.tool_config.nsys.discrete", True),
    ("trainer.worker_nsight_options.trace", "cuda", f"{NSYS}.worker_nsight_options", {"trace": "cuda"}),
    ("trainer.profile_steps", "[1,2]", "global_profiler.steps", [1, 2]),
    ("reward_model.sandbox_fusion.url", "http://s", "reward.sandbox_fusion.url", "http://s"),
    *(
        (f"{role}.{name}", "8", f"{role}.megatron.{name}", 8)
        for role in (A, REF, "critic")
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "context_parallel_size",
        )
    ),
    *(
        (f"{role}.sequence_parallel", "false", f"{role}.megatron.sequence_parallel", False)
        for role in (A, REF, "critic")
    ),
    (f"{R}.tensor_parallel_size", "8", f"{R}.tensor_model_parallel_size", 8),
    ("sandbox_fusion.max_concurrent", "8", "reward.sandbox_fusion.max_concurrent", 8),
    ("trainer.val_generations_to_log_to_wandb", "5", "trainer.log_val_generations", 5),
    ("ray_init.num_cpus", "4", "ray_kwargs.ray_init.num_cpus", 4),
    ("ray_init.timeline_json_file", "/t.json", "ray_kwargs.timeline_json_file", "/t.json"),
]

OPEN = [
    *(
        (
            f"{role}.megatron.override_transformer_config.moe_router_dtype",
            "fp64",
            f"{role}.megatron.override_mcore_model_config",
            {"moe_router_dtype": "fp64"},
        )
        for role in (A, REF, "critic")
    ),
    ("ray_kwargs.ray_init.log_to_driver", "false", "ray_kwargs.ray_init.further", {"log_to_driver": False}),
    (
        "ray_kwargs.ray_init.runtime_env.working_dir",
        "/w",
        "ray_kwargs.ray_init.runtime_env.further",
        {"working_dir": "/w"},
    ),
    (
        "ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG",
        "INFO",
        "ray_kwargs.ray_init.runtime_env.env_vars",
        {"NCCL_DEBUG": "INFO"},
    ),
]
"""Sections that take names of others: what they do not name themselves goes into a mapping."""

IDLE = [
    ("reward_model.rollout.prompt_length", "64", f"{RM}.rollout.prompt_length", "engine_kwargs"),
    ("trainer.controller_nsight_options.trace", "cuda", f"{NSYS}.controller_nsight_options", "nsys profile"),
    (f"{A}.veomni.moe_implementation", "eager", f"{A}.veomni", "VeOmni"),
    (f"{A}.automodel.tp_size", "2", f"{A}.automodel", "AutoModel"),
    (f"{A}.fsdp_config.turbo_config.memory.recompute", "true", f"{A}.fsdp_config.turbo_config", "fsdp_turbo"),
    ("transfer_queue.backend.storage_backend", "MooncakeStore", "transfer_queue.backend.storage_backend", "Ray's"),
    ("critic.nccl_timeout", "60", "critic.nccl_timeout", "actor_rollout_ref"),
    (f"{A}.megatron.use_dist_checkpointing", "true", f"{A}.megatron.use_dist_checkpointing", "folder of the model"),
    (f"{A}.megatron.dist_checkpointing_path", "/d", f"{A}.megatron.dist_checkpointing_path", "folder of the model"),
    (f"{R}.engine_kwargs.vllm.swap_space", "4", f"{R}.engine_kwargs.vllm", "another engine"),
    (f"{R}.engine_kwargs.sglang.attention_backend", "fa3", f"{R}.engine_kwargs.sglang", "another engine"),
    (f"{R}.engine_kwargs.trtllm.batch_wait_timeout_iters", "3", f"{R}.engine_kwargs.trtllm", "TensorRT-LLM"),
    ("global_profiler.relocate_results", "true", "global_profiler.relocate_results", "save_path"),
    (f"{A}.profiler.tool_config.npu.level", "level1", f"{A}.profiler.tool_config.npu.level", "Ascend"),
]
"""Keys of families whose switch is off, or whose engine is another one."""

NOT_BUILT = [
    (
        f"{REF}.megatron.router_replay.record_file",
        "/f",
        f"{REF}.router_replay.record_file",
        "router replay from a file",
    ),
    (f"{A}.megatron.router_replay.record_file", "/f", f"{A}.router_replay.record_file", "router replay from a file"),
    (f"{R}.pipeline_parallel_size", "2", f"{R}.pipeline_model_parallel_size", "sampling on several ranks"),
    ("skip.rollout_tq.enable", "true", "skip.rollout_tq.enable", "replay of rollouts by the transfer queue"),
]

REMOVED = [
    (f"{A}.tis_imp_ratio_cap", "2", "algorithm.rollout_is_threshold=<value>"),
    (f"{A}.tis_imp_ratio_cap", "2", "algorithm.rollout_is=true"),
    (f"{A}.tis_imp_ratio_cap", "2", f"{R}.calculate_log_probs=true"),
    ("algorithm.rollout_correction.rollout_rs_threshold_lower", "0.5", "rollout_rs_threshold"),
    (f"{R}.multi_turn.completion_callback", "a.b", f"{R}.agent.default_agent_loop"),
    (f"{R}.chat_scheduler", "a.b", f"{R}.agent.default_agent_loop"),
    (f"{REF}.model.path", "/m", "actor_rollout_ref.model"),
    ("trainer.npu_profile.options.level", "level1", "global_profiler.tool=npu"),
    ("data.datagen.path", "/d.py", "data.custom_cls.path"),
    (f"{A}.fsdp_config.tensor_parallel_size", "2", f"{A}.megatron.tensor_model_parallel_size"),
    (f"{REF}.fsdp_config.tensor_parallel_size", "2", f"{REF}.strategy=megatron"),
    ("critic.fsdp.tensor_parallel_size", "2", "critic.megatron.tensor_model_parallel_size"),
    ("reward.reward_model.fsdp_config.tensor_parallel_size", "2", "reward.reward_model.strategy=megatron"),
    (f"{A}.profiler.tool_config.torch.step_start", "1", f"{A}.profiler.tool_config.torch.schedule.skip_first"),
    ("critic.profiler.tool_config.torch.step_end", "1", "critic.profiler.tool_config.torch.schedule"),
]

IGNORED = [
    ("reward_model.profiler.discrete", "true", "timing_s/reward_model"),
    ("reward_model.launch_reward_fn_async", "true", "no effect"),
    ("reward_model.use_reward_loop", "true", "reward.reward_manager"),
    (f"{A}.sum_pi_squared_checkpointing", "true", "no effect"),
    (f"{A}.fsdp_config.grad_offload", "true", "param_offload"),
    ("critic.model.fsdp_config.grad_offload", "true", "param_offload"),
    *((f"{role}.megatron.grad_offload", "true", "param_offload") for role in (A, REF, "critic")),
    *(
        (f"{section}.mixed_precision.reduce_dtype", "bf16", "float32")
        for section in (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
    ),
    *(
        (f"{section}.wrap_policy.transformer_layer_cls_to_wrap", "[QwenLayer]", "every transformer block")
        for section in (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp")
    ),
    *((f"{role}.engine.tp", "2", "Megatron Lite") for role in (A, REF, "critic")),
    ("trainer.log_freq", "1", "every step"),
    ("trainer.use_legacy_worker_impl", "disable", "no effect"),
    ("data.continuous_token.enable", "true", "no effect"),
    ("hydra.run.dir", "/x", "trainer.default_local_dir"),
    ("hydra/job_logging", "none", "trainer.default_local_dir"),
]

SFT_WORKS = [
    ("data.micro_batch_size", "8", "data.micro_batch_size_per_gpu", 8),
    ("data.prompt_key", "question", "data.prompt_key", "question"),
    ("data.response_key", "answer", "data.response_key", "answer"),
    ("data.prompt_dict_keys", "['question']", "data.prompt_dict_keys", ["question"]),
    ("data.response_dict_keys", "['answer']", "data.response_dict_keys", ["answer"]),
    ("data.multiturn.messages_key", "chat", "data.messages_key", "chat"),
    ("data.multiturn.tools_key", "t", "data.tools_key", "t"),
    ("data.multiturn.enable_thinking_key", "think", "data.enable_thinking_key", "think"),
    ("data.chat_template", "x", "model.custom_chat_template", "x"),
    ("model.partial_pretrain", "Qwen/Qwen2.5-0.5B", "model.path", "Qwen/Qwen2.5-0.5B"),
    ("model.strategy", "fsdp2", "engine.strategy", "fsdp2"),
    ("model.fsdp_config.model_dtype", "bf16", "engine.model_dtype", "bf16"),
    ("model.fsdp_config.offload_params", "true", "engine.param_offload", True),
    ("optim.lr_scheduler", "cosine", "optim.lr_scheduler_type", "cosine"),
    ("model.fsdp_config.cpu_offload", "true", "engine.offload_policy", True),
    ("model.fsdp_config.wrap_policy.min_num_params", "5", "engine.wrap_policy.min_num_params", 5),
    ("ulysses_sequence_parallel_size", "2", "engine.ulysses_sequence_parallel_size", 2),
    ("optim.warmup_style", "cosine", "optim.lr_scheduler_type", "cosine"),
    ("optim.warmup_steps_ratio", "0.1", "optim.lr_warmup_steps_ratio", 0.1),
    ("use_remove_padding", "true", "model.use_remove_padding", True),
    ("trainer.checkpoint.save_contents", "[model]", "checkpoint.save_contents", ["model"]),
    ("trainer.checkpoint.load_contents", "[model]", "checkpoint.load_contents", ["model"]),
    *((f"engine.{name}_size", "2", f"engine.megatron.{name}_size", 2) for name in (
        "tensor_model_parallel", "pipeline_model_parallel", "virtual_pipeline_model_parallel",
        "expert_model_parallel", "expert_tensor_parallel", "context_parallel")),
    *((f"engine.{name}", "false", f"engine.megatron.{name}", False) for name in (
        "sequence_parallel", "use_distributed_optimizer", "use_mbridge", "use_remove_padding",
        "pad_bshd_to_minibatch_max")),
    *((f"engine.{name}", "true", f"engine.megatron.{name}", True) for name in (
        "use_dist_checkpointing", "vanilla_mbridge", "dist_ckpt_optim_fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient")),
    *((f"engine.{name}", "/x", f"engine.megatron.{name}", "/x") for name in (
        "dist_checkpointing_path", "dist_checkpointing_prefix")),
    ("engine.mixed_precision.param_dtype", "bf16", "engine.dtype", "bf16"),
    ("engine.override_transformer_config.recompute_granularity", "full",
     "engine.megatron.override_transformer_config.recompute_granularity", "full"),
    ("engine.override_mcore_model_config", "{qk_clip: true}",
     "engine.megatron.override_mcore_model_config", {"qk_clip": True}),
    ("engine.override_ddp_config", "{bucket_size: 1}", "engine.megatron.override_ddp_config", {"bucket_size": 1}),
]  # fmt: skip
SFT_OPEN = [
    (
        "engine.megatron.override_transformer_config.fp8",
        "hybrid",
        "engine.megatron.override_mcore_model_config",
        {"fp8": "hybrid"},
    )
]
SFT_NOT_BUILT = [
    (f"engine.{name}", value, f"engine.megatron.{name}")
    for name, value in (
        ("dynamic_context_parallel", "true"), ("max_seqlen_per_dp_cp_rank", "9"),
        ("use_megatron_fsdp", "true"), ("router_replay.mode", "R2"),
    )
]  # fmt: skip


def at(cfg, key):
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


@pytest.mark.parametrize(("old", "value", "new", "expected"), WORKS, ids=lambda x: str(x)[-40:])
def test_an_old_spelling_sets_the_current_setting_and_says_its_name(old, value, new, expected, told):
    cfg = read_config("ppo_trainer", [f"{old}={value}"])
    assert at(cfg, new) == expected
    assert new in " ".join(told().values()), told()


@pytest.mark.parametrize(("old", "value", "new", "expected"), OPEN, ids=lambda x: str(x)[-40:])
def test_a_section_takes_names_of_others_into_a_mapping(old, value, new, expected, told):
    assert at(read_config("ppo_trainer", [f"{old}={value}"]), new) == expected
    assert "now called" not in " ".join(told().values())


def test_a_field_of_megatron_core_goes_beside_those_that_are_given_by_its_mapping():
    section = f"{A}.megatron"
    words = [f"{section}.override_mcore_model_config.qk_clip=true", f"{section}.override_transformer_config.fp8=hybrid"]
    made = at(read_config("ppo_trainer", words), section)
    assert made.override_mcore_model_config == {"qk_clip": True, "fp8": "hybrid"}


@pytest.mark.parametrize(("old", "value", "new", "why"), IDLE, ids=lambda x: str(x)[-40:])
def test_a_key_of_what_is_switched_off_is_accepted_and_said(old, value, new, why, told):
    read_config("ppo_trainer", [f"{old}={value}"])
    assert "has no effect" in told()[new] and why in told()[new]


def test_a_family_that_is_switched_on_is_refused_by_its_switch_alone():
    mtp = "actor_rollout_ref.model.mtp"
    words = [f"{mtp}.enable=true", f"{mtp}.num_speculative_tokens=2", f"{mtp}.method=eagle"]
    with pytest.raises(NotBuiltError, match="multi-token prediction") as caught:
        read_config("ppo_trainer", words)
    assert caught.value.key == f"{mtp}.enable" and len(str(caught.value).splitlines()) == 1


def test_an_engine_that_is_not_built_is_the_only_reason_even_with_its_settings():
    for engine in ("veomni", "automodel", "mlite"):
        words = [f"model_engine={engine}", f"{A}.veomni.fsdp_size=2", f"{A}.automodel.tp_size=2"]
        with pytest.raises(NotBuiltError, match=engine) as caught:
            read_config("ppo_trainer", words)
        assert f"{A}.veomni" not in str(caught.value)


def test_the_settings_of_fsdp_turbo_are_no_reason_beside_their_engine():
    words = [f"{A}.strategy=fsdp_turbo", f"{A}.fsdp_config.turbo_config.distributed.fully_shard_parallel_size=4"]
    with pytest.raises(NotBuiltError, match="'fsdp_turbo'") as caught:
        load_config("ppo_trainer", words)
    assert caught.value.key == f"{A}.strategy" and "turbo_config" not in str(caught.value)


def test_the_group_of_a_role_chooses_its_engine():
    with pytest.raises(NotBuiltError, match="'mlite'"):
        read_config("ppo_trainer", ["actor@actor_rollout_ref.actor=mlite_actor"])


@pytest.mark.parametrize(("old", "value", "new", "expected"), SFT_WORKS, ids=lambda x: str(x)[-40:])
def test_an_old_spelling_of_supervised_runs_sets_the_current_setting(old, value, new, expected, told):
    cfg = read_config("sft_trainer", [f"{old}={value}"])
    assert old == new or new in told()[old]
    if new in schema_of(SFT.root).upstream_only:
        assert "has no effect" in told()[new]
    else:
        assert at(cfg, new) == expected


def test_supervised_runs_take_fields_of_megatron_core_too():
    ((old, value, new, expected),) = SFT_OPEN
    assert at(read_config("sft_trainer", [f"{old}={value}"]), new) == expected


@pytest.mark.parametrize(("old", "value", "new"), SFT_NOT_BUILT, ids=lambda x: str(x)[-40:])
def test_a_missing_feature_of_supervised_runs_is_refused_by_its_name(old, value, new):
    with pytest.raises(NotBuiltError, match=new):
        read_config("sft_trainer", [f"{old}={value}"])


@pytest.mark.parametrize(("old", "value", "new", "feature"), NOT_BUILT, ids=lambda x: str(x)[-40:])
def test_an_old_spelling_of_a_missing_feature_is_refused_by_its_name(old, value, new, feature):
    with pytest.raises(NotBuiltError) as caught:
        read_config("ppo_trainer", [f"{old}={value}"])
    assert new in str(caught.value) and feature in str(caught.value)


@pytest.mark.parametrize(("old", "value", "instead"), REMOVED, ids=lambda x: str(x)[-40:])
def test_a_removed_setting_names_its_replacement(old, value, instead):
    with pytest.raises(ConfigError) as caught:
        read_config("ppo_trainer", [f"{old}={value}"])
    assert instead in str(caught.value) and "no longer exists" in str(caught.value)


def test_supervised_runs_name_the_engine_that_shares_linear_layers():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: no longer exists.*engine\.strategy=megatron"):
        read_config("sft_trainer", ["engine.tensor_parallel_size=2"])


@pytest.mark.parametrize(("old", "value", "says"), IGNORED, ids=lambda x: str(x)[-40:])
def test_a_setting_that_means_nothing_any_more_gives_one_notice(old, value, says, told):
    cfg = read_config("ppo_trainer", [f"{old}={value}"])
    assert cfg == read_config("ppo_trainer", [])
    assert any("has no effect" in text and says in text for text in told().values())


def test_supervised_runs_ignore_the_switch_of_the_old_dataset(told):
    read_config("sft_trainer", ["data.multiturn.enable=true", "hydra.run.dir=/x", "engine.grad_offload=true"])
    assert "param_offload" in told()["engine.grad_offload"]
    assert "data.prompt_key" in told()["data.multiturn.enable"]
    assert "has no effect" in told()["hydra"]


@pytest.mark.parametrize("program", [PPO, SFT], ids=lambda p: p.name)
def test_every_alias_leads_to_a_setting_or_a_section_that_exists(program):
    schema = schema_of(program.root)
    for old, moved in program.aliases.moved.items():
        for target in moved.targets:
            known = schema.split(target) or schema.is_section(target) or target in program.aliases.moved
            assert known, f"{old} -> {target}"
            if moved.silent:  # of what the section does not name itself
                continue
            assert schema.split(old) is None and not schema.is_section(old), f"{old} is a current name"


def test_every_alias_is_tried_by_a_test_above():
    def covered(key, rows):
        return any(row[0] == key or row[0].replace("/", ".").startswith(f"{key}.") for row in rows)

    tried = WORKS + NOT_BUILT + OPEN + IDLE
    assert [key for key in PPO_ALIASES.moved if not covered(key, tried)] == []
    assert [key for key in PPO_ALIASES.ignored if not covered(key, IGNORED) and "fsdp.grad" not in key] == []
    steps = [key for key in PPO_ALIASES.removed if not covered(key, REMOVED)]
    assert all(key.endswith(("torch.step_start", "torch.step_end")) for key in steps)
    assert [key for key in SFT_ALIASES.moved if not covered(key, SFT_WORKS + SFT_NOT_BUILT + SFT_OPEN)] == []


def test_what_is_null_in_an_old_file_was_its_default_and_changes_nothing(tmp_path, told):
    (tmp_path / "old.yaml").write_text(
        "reward_model:\n  reward_manager: null\n  enable: null\n  strategy: null\n  model: {path: null}\n"
        "actor_rollout_ref: {ref: {model: null}, actor: {optim: {warmup_style: null}}}\n"
    )
    cfg = read_config("ppo_trainer", ["--config-path", str(tmp_path), "--config-name", "old"])
    assert cfg == read_config("ppo_trainer", [])


def test_two_spellings_with_two_values_contradict_each_other():
    with pytest.raises(ConfigError, match="two values for one setting") as caught:
        read_config("ppo_trainer", [f"{A}.lr=1e-5", f"{A}.optim.lr=2e-5"])
    assert f"{A}.lr=1e-05" in str(caught.value) and f"{A}.optim.lr=2e-05" in str(caught.value)


def test_two_spellings_with_the_same_value_agree():
    cfg = read_config(
        "ppo_trainer", [f"{A}.lr=1e-5", f"{A}.optim.lr=0.00001", f"{M}.backend=fsdp2", f"{A}.strategy=fsdp2"]
    )
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-5 and cfg.actor_rollout_ref.ref.strategy == "fsdp2"


def test_an_old_spelling_on_the_command_line_wins_over_the_current_one_in_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {actor: {optim: {lr: 1e-4}}}\n")
    cfg = read_config("ppo_trainer", ["-cp", str(tmp_path), "-cn", "mine", f"{A}.lr=1e-5"])
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-5


def test_an_old_section_with_mapping_values_is_translated_whole(told):
    cfg = read_config("ppo_trainer", ["+custom_reward_function={path: /r.py, name: f, reward_kwargs: {a: 1}}"])
    assert cfg.reward.custom_reward_function.path == "/r.py"
    assert cfg.reward.custom_reward_function.reward_kwargs == {"a": 1}


def test_an_error_names_the_spelling_that_was_used():
    with pytest.raises(ConfigError, match=r"actor.optim.lr: wrong type, given as actor_rollout_ref.actor.lr"):
        read_config("ppo_trainer", [f"{A}.lr=fast"])


def test_lora_switched_off_in_its_old_section_asks_for_nothing():
    lora = [f"{A}.lora.r=16", f"{A}.lora.alpha=32", f"{A}.lora.enabled=false"]
    assert read_config("ppo_trainer", lora) == read_config("ppo_trainer", [])


def test_lora_switched_on_without_a_rank_asks_for_one():
    with pytest.raises(ConfigError, match=r"needs a rank.*model\.lora_rank"):
        read_config("ppo_trainer", [f"{A}.lora.enabled=true"])


def test_deleting_an_old_spelling_resets_the_current_setting(tmp_path):
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref: {actor: {optim: {lr: 1e-4}}}\n")
    cfg = read_config("ppo_trainer", ["-cp", str(tmp_path), "-cn", "mine", f"~{A}.lr"])
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-6
