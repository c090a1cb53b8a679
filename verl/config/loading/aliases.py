"""Every spelling that scripts still carry, and what it is called today: one table per program.

``MOVED`` resolves to a current key; a section moves with everything below it. ``REMOVED`` is refused with what to write
instead. ``IGNORED`` changes nothing any more and says so once. What is null in an old script was its default there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.config.schema.node import names_of
from verl.config.schema.role import MEGATRON_SIZES, FSDPEngineConfig, MegatronEngineConfig

_A, _R, _M, _REF, _C = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "actor_rollout_ref.ref",
    "critic",
)


@dataclass(frozen=True)
class MovedKey:
    """Where an old key went; ``convert`` turns the old value into the new one.

    ``silent`` is for a section that takes names of others: a name in it that is no setting goes into a mapping.
    """

    targets: tuple[str, ...]
    convert: Callable[[Any], Any] | None = None
    silent: bool = False


@dataclass(frozen=True)
class Aliases:
    """The three tables of one program."""

    moved: dict[str, MovedKey]
    removed: dict[str, str]
    ignored: dict[str, str]


def to(*targets: str, convert: Callable[[Any], Any] | None = None) -> MovedKey:
    """The keys that an older one became."""
    return MovedKey(targets, convert)


def into(mapping: str) -> MovedKey:
    """The mapping that takes what a section does not name itself."""
    return MovedKey((mapping,), silent=True)


def _word(yes: str, no: str) -> Callable[[Any], str]:
    """A switch that became a name; anything but a switch passes and is judged as that name."""
    return lambda value: {"true": yes, "false": no}.get(str(value).lower(), value)


ENGINE_STRATEGIES = {
    f"{_A}.fsdp_config.strategy": f"{_A}.strategy",
    f"{_REF}.fsdp_config.strategy": f"{_REF}.strategy",
    f"{_C}.fsdp.strategy": f"{_C}.strategy",
}
"""Names of an engine inside its section, and the role's own setting for it."""
_ACTOR = {
    f"{_A}.lr": to(f"{_A}.optim.lr"),
    f"{_A}.max_grad_norm": to(f"{_A}.grad_clip"),
    **{
        f"{_A}.{name}": to(f"{_A}.policy_loss.{name}")
        for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    },
    f"{_A}.policy_loss.tau_pos": to(f"{_A}.tau_pos"),
    f"{_A}.policy_loss.tau_neg": to(f"{_A}.tau_neg"),
    f"{_A}.model_engine": to(f"{_A}.strategy", f"{_REF}.strategy"),
    f"{_A}.lora.r": to(f"{_M}.lora_rank"),
    f"{_A}.lora.alpha": to(f"{_M}.lora_alpha"),
    f"{_A}.lora.target_modules": to(f"{_M}.target_modules"),
    f"{_M}.backend": to(f"{_A}.strategy", f"{_REF}.strategy"),
    f"{_A}.checkpoint.contents": to(f"{_A}.checkpoint.save_contents"),
    f"{_C}.lr": to(f"{_C}.optim.lr"),
    f"{_C}.max_grad_norm": to(f"{_C}.grad_clip"),
    f"{_C}.model.fsdp_config": to(f"{_C}.fsdp"),
    f"{_C}.fsdp_config": to(f"{_C}.fsdp"),
    f"{_C}.model.backend": to(f"{_C}.strategy"),
    f"{_C}.checkpoint.contents": to(f"{_C}.checkpoint.save_contents"),
    **{section: to(role) for section, role in ENGINE_STRATEGIES.items()},
}
SCHEDULE_NAMES = (
    ("warmup_style", "lr_scheduler_type"),
    ("lr_scheduler", "lr_scheduler_type"),
    ("warmup_steps_ratio", "lr_warmup_steps_ratio"),
)
_FSDP_SECTIONS = (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", f"{_C}.fsdp")
_MEGATRON_SECTIONS = (f"{_A}.megatron", f"{_REF}.megatron", f"{_C}.megatron")
_OPEN = {
    f"{section}.override_transformer_config": into(f"{section}.override_mcore_model_config")
    for section in _MEGATRON_SECTIONS
} | {
    "ray_kwargs.ray_init": into("ray_kwargs.ray_init.further"),
    "ray_kwargs.ray_init.runtime_env": into("ray_kwargs.ray_init.runtime_env.further"),
    **{f"{section}.mixed_precision.param_dtype": to(f"{section}.dtype") for section in _FSDP_SECTIONS},
}
_OPTIM = {
    f"{section}.{old}": to(f"{section}.{new}")
    for section in (f"{_A}.optim", f"{_C}.optim")
    for old, new in SCHEDULE_NAMES
}
_MEGATRON = {f"{role}.{name}": to(f"{role}.megatron.{name}") for role in (_A, _REF, _C) for name in MEGATRON_SIZES} | {
    f"{_A}.megatron.router_replay": to(f"{_A}.router_replay"),
    f"{_REF}.megatron.router_replay": to(f"{_REF}.router_replay"),
}
_ROLLOUT = {
    f"{_R}.tensor_parallel_size": to(f"{_R}.tensor_model_parallel_size"),
    f"{_R}.pipeline_parallel_size": to(f"{_R}.pipeline_model_parallel_size"),
    f"{_R}.skip_rollout": to("skip.rollout.enable"),
    f"{_R}.skip_dump_dir": to("skip.rollout.dump_dir"),
    f"{_R}.skip": to("skip.rollout"),
    f"{_R}.update_weights_bucket_megabytes": to(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes"),
    f"{_R}.multi_turn.max_turns": to(f"{_R}.multi_turn.max_assistant_turns"),
    f"{_R}.multi_turn.enable_tokenization_sanity_check": to(
        f"{_R}.multi_turn.tokenization_sanity_check_mode", convert=_word("strict", "disable")
    ),
}
_OWN_POOL = {f"rollout.{name}": to(f"{_R}.{name}") for name in ("nnodes", "n_gpus_per_node")}
"""The samplers' pool, in a section of its own in upstream's asynchronous programs."""
_STREAM = {
    "rollout.total_rollout_steps": to("async_training.total_rollout_steps"),
    "rollout.test_freq": to("trainer.test_freq"),
    "async_training.use_rollout_log_probs": to(f"{_A}.use_rollout_log_probs"),
    "async_training.partial_rollout": to(f"{_R}.requests_at_update", convert=_word("pause", "wait")),
}
_ALGORITHM = {
    "algorithm.rollout_correction.rollout_token_veto_threshold": to("algorithm.rollout_is_veto_threshold"),
    "algorithm.rollout_correction.use_policy_gradient": to(
        "algorithm.rollout_correction.loss_type", convert=_word("reinforce", "ppo_clip")
    ),
}
_REWARD = {
    "custom_reward_function": to("reward.custom_reward_function"),
    "reward_manager": to("reward.reward_manager"),
    "sandbox_fusion": to("reward.sandbox_fusion"),
    "reward_model.enable": to("reward.reward_model.enable"),
    "reward_model.enable_resource_pool": to("reward.reward_model.enable_resource_pool"),
    "reward_model.n_gpus_per_node": to("reward.reward_model.n_gpus_per_node"),
    "reward_model.nnodes": to("reward.reward_model.nnodes"),
    "reward_model.model.path": to("reward.reward_model.model_path"),
    **{
        f"reward_model.{name}": to(f"reward.reward_model.{name}")
        for name in (
            "strategy",
            "micro_batch_size",
            "micro_batch_size_per_gpu",
            "max_length",
            "use_dynamic_bsz",
            "forward_max_token_len_per_gpu",
        )
    },
    "reward_model.ulysses_sequence_parallel_size": to("reward.reward_model.fsdp_config.ulysses_sequence_parallel_size"),
    **{
        f"reward_model.model.{name}": to(f"reward.reward_model.{name}")
        for name in (
            "input_tokenizer",
            "trust_remote_code",
            "external_lib",
            "override_config",
            "use_shm",
            "use_remove_padding",
            "fsdp_config",
        )
    },
    "reward_model.megatron": to("reward.reward_model.megatron"),
    "reward_model.rollout": to("reward.reward_model.rollout"),
    "reward_model.num_workers": to("reward.num_workers"),
    "reward_model.reward_manager": to("reward.reward_manager.name"),
    "reward_model.reward_loop_source": to("reward.reward_manager.source"),
    "reward_model.reward_loop_module_path": to("reward.reward_manager.module.path"),
    "reward_model.reward_loop_class_name": to("reward.reward_manager.name"),
    "reward_model.sandbox_fusion": to("reward.sandbox_fusion"),
    **{
        f"reward_model.{name}": to(f"reward.{name}")
        for name in ("max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout")
    },
    "reward.max_per_minute": to("reward.max_rpm"),
    "reward_model.overlong_buffer": to("reward.reward_kwargs.overlong_buffer_cfg"),
    "reward_model.reward_kwargs": to("reward.reward_kwargs"),
}
_NSYS = "global_profiler.global_tool_config.nsys"
_RUN = {
    "actor_rollout_ref.profiler.discrete": to(f"{_NSYS}.discrete"),
    "actor_rollout_ref.profiler.all_ranks": to(f"{_A}.profiler.all_ranks", f"{_REF}.profiler.all_ranks"),
    "actor_rollout_ref.profiler.ranks": to(f"{_A}.profiler.ranks", f"{_REF}.profiler.ranks"),
    "critic.profiler.discrete": to("critic.profiler.tool_config.nsys.discrete"),
    "trainer.profile_steps": to("global_profiler.steps"),
    "trainer.controller_nsight_options": to(f"{_NSYS}.controller_nsight_options"),
    "trainer.worker_nsight_options": to(f"{_NSYS}.worker_nsight_options"),
    "trainer.val_generations_to_log_to_wandb": to("trainer.log_val_generations"),
    "ray_init.timeline_json_file": to("ray_kwargs.timeline_json_file"),
    "ray_init": to("ray_kwargs.ray_init"),
}

PPO_MOVED: dict[str, MovedKey] = (
    _ACTOR | _OPEN | _OPTIM | _MEGATRON | _ROLLOUT | _OWN_POOL | _STREAM | _ALGORITHM | _REWARD | _RUN
)


def _shared_layers(role: str, section: str) -> str:
    return f"set {role}.strategy=megatron and {section}.tensor_model_parallel_size: Megatron-Core shares linear layers"


PPO_REMOVED: dict[str, str] = {
    f"{_A}.tis_imp_ratio_cap": (
        "set algorithm.rollout_is_threshold=<value>, algorithm.rollout_is=true and "
        "actor_rollout_ref.rollout.calculate_log_probs=true instead"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": (
        "write both bounds in algorithm.rollout_correction.rollout_rs_threshold, as a text '<low>_<high>'"
    ),
    f"{_R}.multi_turn.completion_callback": (
        "write an agent loop and name it in actor_rollout_ref.rollout.agent.default_agent_loop"
    ),
    f"{_R}.chat_scheduler": "write an agent loop and name it in actor_rollout_ref.rollout.agent.default_agent_loop",
    f"{_REF}.model": "the reference policy starts from actor_rollout_ref.model",
    "trainer.npu_profile": "set global_profiler.tool=npu and the options under <role>.profiler.tool_config.npu",
    "data.datagen": "make the rows in a dataset class of your own: data.custom_cls.path and data.custom_cls.name",
    f"{_A}.fsdp_config.tensor_parallel_size": _shared_layers(_A, f"{_A}.megatron"),
    f"{_REF}.fsdp_config.tensor_parallel_size": _shared_layers(_REF, f"{_REF}.megatron"),
    f"{_C}.fsdp.tensor_parallel_size": _shared_layers(_C, f"{_C}.megatron"),
    "reward.reward_model.fsdp_config.tensor_parallel_size": _shared_layers(
        "reward.reward_model", "reward.reward_model.megatron"
    ),
} | {
    f"{role}.profiler.tool_config.torch.{step}": (
        f"use {role}.profiler.tool_config.torch.schedule.skip_first and .active, which count mini-batches"
    )
    for role in (_A, _REF, _R, _C)
    for step in ("step_start", "step_end")
}

_WITH_PARAMETERS = "has no effect: gradients go where the parameters go (param_offload)"
_REDUCED = "has no effect: gradients are summed over processes in float32, and buffers keep their dtype"
_BLOCKS = "has no effect: every transformer block is sharded on its own, or every module of min_num_params parameters"
_LITE = "has no effect: only Megatron Lite, a third party's engine, reads it"
PPO_IGNORED: dict[str, str] = {
    "reward_model.profiler": "has no effect: the seconds of the reward model are logged as timing_s/reward_model",
    "reward_model.launch_reward_fn_async": "has no effect: when samples are scored is no longer a setting",
    "reward_model.use_reward_loop": "has no effect: there is one way of scoring, with reward.reward_manager",
    f"{_A}.sum_pi_squared_checkpointing": "has no effect: the sum of squared probabilities is never recomputed",
    f"{_A}.fsdp_config.grad_offload": _WITH_PARAMETERS,
    f"{_C}.fsdp.grad_offload": _WITH_PARAMETERS,
    **{f"{section}.grad_offload": _WITH_PARAMETERS for section in _MEGATRON_SECTIONS},
    **{f"{section}.mixed_precision": _REDUCED for section in _FSDP_SECTIONS},
    **{f"{section}.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS for section in _FSDP_SECTIONS},
    **{f"{role}.engine": _LITE for role in (_A, _REF, _C)},
    "trainer.log_freq": "has no effect: every step is logged",
    "trainer.use_legacy_worker_impl": "has no effect: there is one implementation of the workers",
    "data.continuous_token": "has no effect: tokens are always carried on as they were sampled",
    "hydra": "has no effect: only Hydra's syntax is used here, not its launcher; see trainer.default_local_dir",
}  # fmt: skip

SFT_MOVED: dict[str, MovedKey] = {
    "engine.mixed_precision.param_dtype": to("engine.dtype"),
    "engine.megatron.override_transformer_config": into("engine.megatron.override_mcore_model_config"),
    "data.micro_batch_size": to("data.micro_batch_size_per_gpu"),
    "data.multiturn.messages_key": to("data.messages_key"),
    "data.multiturn.tools_key": to("data.tools_key"),
    "data.multiturn.enable_thinking_key": to("data.enable_thinking_key"),
    "data.chat_template": to("model.custom_chat_template"),
    "model.partial_pretrain": to("model.path"),
    "model.strategy": to("engine.strategy"),
    "model.fsdp_config.cpu_offload": to("engine.offload_policy"),
    "model.fsdp_config.offload_params": to("engine.param_offload"),
    "model.fsdp_config": to("engine"),
    "optim.lr_scheduler": to("optim.lr_scheduler_type"),
    "optim.warmup_style": to("optim.lr_scheduler_type"),
    "optim.warmup_steps_ratio": to("optim.lr_warmup_steps_ratio"),
    "ulysses_sequence_parallel_size": to("engine.ulysses_sequence_parallel_size"),
    "use_remove_padding": to("model.use_remove_padding"),
    "trainer.checkpoint": to("checkpoint"),
    **{
        f"engine.{name}": to(f"engine.megatron.{name}")
        for name in names_of(MegatronEngineConfig)
        if name not in names_of(FSDPEngineConfig)
    },
    "engine.router_replay": to("engine.megatron.router_replay"),
}
SFT_REMOVED: dict[str, str] = {"engine.tensor_parallel_size": _shared_layers("engine", "engine.megatron")}
SFT_IGNORED: dict[str, str] = {
    "engine.grad_offload": _WITH_PARAMETERS,
    "engine.megatron.grad_offload": _WITH_PARAMETERS,
    "engine.mixed_precision": _REDUCED,
    "engine.wrap_policy.transformer_layer_cls_to_wrap": _BLOCKS,
    "data.multiturn.enable": (
        "has no effect: the messages column is read unless data.prompt_key and data.response_key name two columns"
    ),
    "hydra": PPO_IGNORED["hydra"],
}


PPO_ALIASES = Aliases(PPO_MOVED, PPO_REMOVED, PPO_IGNORED)
SFT_ALIASES = Aliases(SFT_MOVED, SFT_REMOVED, SFT_IGNORED)
_NOT_TRAINED = "has no effect: batch generation trains nothing"
GENERATION_ALIASES = Aliases(
    {_R: to("rollout"), _M: to("model"), "rollout.tensor_parallel_size": to("rollout.tensor_model_parallel_size"), "model.external_libs": to("model.external_lib")},
    {},
    {"actor": _NOT_TRAINED, "critic": _NOT_TRAINED, "ray_init": "has no effect: it runs in this process",
     "ray_kwargs": "has no effect: it runs in this process", "hydra": PPO_IGNORED["hydra"]},
)  # fmt: skip


EVALUATION_ALIASES = Aliases(
    {"reward.custom_reward_function": to("custom_reward_function")},
    {},
    {"ray_kwargs": "has no effect: it runs in this process", "ray_init": "has no effect: it runs in this process",
     "hydra": PPO_IGNORED["hydra"]},
)  # fmt: skip


def longest_prefix(key: str, table: dict[str, Any]) -> str | None:
    """The entry of a table that names ``key`` or the closest section around it."""
    parts = key.split(".")
    for cut in range(len(parts), 0, -1):
        head = ".".join(parts[:cut])
        if head in table:
            return head
    return None
