"""Fields of Megatron-Core's TransformerConfig that a run replaces, and what becomes of each.

Every field of Megatron-Core 0.16 stands in one of these tables: it is handed on, belongs to Transformer Engine, is the
model's own, is decided by the engine, or changes nothing. The same for the fields of its data-parallel wrapper. Of
those that are handed on, `STAGES` say how many layers each stage of a pipeline has: see `stage_depths`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl.config.rules.checks import Problems, divisors_of
from verl.config.schema.role import MEGATRON_SIZES
from verl.errors import ConfigError, suggest
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.role import MegatronEngineConfig

_STAGE, _VIRTUAL = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_SIZES = "parallel sizes have settings of their own"
_SHARED = "all rows share one context-parallel size, which has a setting of its own"
_ROUTERS = "load-balancing losses are no part of any engine's loss; moe/load_balance shows how evenly experts are used"
_CHOSEN = "every token goes to the experts that its router chooses, as in the sampler"
_LOSS = "the loss carries its own denominators"
_DTYPE = "dtype is a setting next to this section"
_STEPS = "the engine drives the schedule, and its functions are no values of a setting"
_PLAN = "how stages send to each other follows from virtual_pipeline_model_parallel_size"
_GRAPHS = "packed rows have another length in every step, which a CUDA graph cannot"
_AHEAD = "layers that predict further tokens are neither trained nor saved"


def _size(name: str) -> Callable[[Any, Any], bool]:
    return lambda section, value: section.get(name, 1) == value


def _is(*values: object) -> Callable[[Any, Any], bool]:
    return lambda section, value: value in values


def _all(names: str, why: str, agrees: Callable[[Any, Any], bool]) -> dict[str, tuple[str, Callable[[Any, Any], bool]]]:
    return dict.fromkeys(names.split(), (why, agrees))


DECIDED: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    **{name: (_SIZES, _size(name)) for name in MEGATRON_SIZES},
    **_all("moe_extended_tp", _SIZES, _is(False)),
    **_all("hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank", _SHARED, _is(None)),
    **_all("hybrid_context_parallel", _SHARED, _is(False)),
    **_all("moe_router_load_balancing_type", _ROUTERS, _is("none")),
    **_all("moe_router_force_load_balancing moe_token_dropping moe_pad_expert_input_to_capacity", _CHOSEN, _is(False)),
    **_all("moe_expert_capacity_factor moe_input_jitter_eps", _CHOSEN, _is(None)),
    **_all("moe_enable_routing_replay", "router_replay is a setting next to this section", _is(False)),
    **_all("moe_token_dispatcher_type", "only alltoall takes rows of any length", _is("alltoall", "flex")),
    **_all("calculate_per_token_loss", _LOSS, _is(True)),
    **_all("pipeline_num_transformer_layers", "pipeline_model_parallel_layout says it", _is(None)),
    **_all("heterogeneous_block_specs", "every layer of a kind is alike", _is(False)),
    **_all("variable_seq_lengths", "every micro-batch is as long as its longest row", _is(True)),
    **_all("fp16 bf16 params_dtype pipeline_dtype", _DTYPE, _is()),
    **_all("enable_autocast autocast_dtype", _DTYPE, _is(False, None)),
    **_all(
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func init_method "
        "output_layer_init_method embedding_init_method activation_func fp8_quantizer_factory fp4_quantizer_factory "
        "quant_recipe _cpu_offloading_context pipeline_model_parallel_comm_backend",
        _STEPS,
        _is(None),
    ),
    **_all("overlap_p2p_comm", _PLAN, lambda section, value: value == bool(section.get(_VIRTUAL))),
    **_all("batch_p2p_comm", _PLAN, lambda section, value: value == (not section.get(_VIRTUAL))),
    **_all("use_ring_exchange_p2p overlap_p2p_comm_warmup_flush", _PLAN, _is(False)),
    **_all("microbatch_group_size_per_vp_stage", _PLAN, lambda section, value: value in (None, section.get(_STAGE, 1))),
    **_all(
        "num_microbatches_with_partial_activation_checkpoints", "every micro-batch is computed again alike", _is(None)
    ),
    **_all("mtp_num_layers", _AHEAD, _is(None, 0)),
    **_all("mtp_standalone", _AHEAD, _is(False)),
    **_all("qk_clip", "no optimizer step here clips queries and keys", _is(False)),
    **_all("attention_backend", "it is a setting of override_transformer_config", _is()),
    **_all("enable_cuda_graph external_cuda_graph", _GRAPHS, _is(False)),
    **_all("cuda_graph_impl", _GRAPHS, _is("none")),
}
"""Fields that may not be replaced: why, and whether a value is what the engine takes anyway."""

_ASCEND = "only MindSpeed, which runs on Ascend, reads it"
_MODEL = "the model's own config.json says it"
_FOLDER = "weights are read from the model's folder"
_SAMPLES = "Megatron-Core samples nothing here"
_REPORTS = "the engine reports its own metrics and times"
_KINDS = "whether Transformer Engine is installed decides which layers run"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _idle(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


IDLE: dict[str, str] = {
    "moe_aux_loss_coeff": _ROUTERS,
    "moe_token_drop_policy": _CHOSEN,
    "use_distributed_optimizer": "a setting of that name stands next to this section",
    "seq_length": "every micro-batch is as long as its longest row",
    "multi_head_latent_attention": _MODEL,
    "swiglu": _MODEL,
    **{f"rope_scaling_{name}": _MODEL for name in ("type", "mscale", "mscale_all_dim")},
    "yarn_scaling_factor": _MODEL,
    **_idle("perform_initialization use_cpu_initialization init_model_with_meta_device", _FOLDER),
    **_idle("init_method_std embedding_init_method_std hetereogenous_dist_checkpoint", _FOLDER),
    "moe_router_bias_update_rate": "the biases of routers stay as they are in the folder",
    "mtp_loss_scaling_factor": _AHEAD,
    **_idle("barrier_with_L1_time config_logger_dir moe_per_layer_logging log_max_attention_logit test_mode", _REPORTS),
    **_idle("qk_clip_alpha qk_clip_threshold", "no optimizer step here clips queries and keys"),
    **_idle("cross_entropy_loss_fusion cross_entropy_fusion_impl", "the loss is computed by parts of the vocabulary"),
    **_idle("cuda_graph_use_single_mempool cuda_graph_retain_backward_graph", _GRAPHS),
    **_idle("cuda_graph_warmup_steps cuda_graph_scope", _GRAPHS),
    **_idle("flash_decode inference_rng_tracker inference_sampling_seed symmetric_ar_type", _SAMPLES),
    **_idle("use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill", _SAMPLES),
    "cache_mla_latents": _SAMPLES,
    "transformer_impl": _KINDS,
    "async_tensor_model_parallel_allreduce": "Megatron-Core reads it no more",
    "swap_optimizer": _ASCEND,
    "context_parallel_algo": _ASCEND,
    "apply_dsa_kernel_fusion": _ASCEND,
    "use_arbitrary_attention_mask": _ASCEND,
    "use_flash_attn": _ASCEND,
    "use_naive_l2norm": _ASCEND,
    **{
        f"use_fused_{name}": _ASCEND for name in ("mhc", "ring_attention_update", "rmsnorm", "rotary_pos_emb", "swiglu")
    },
}
"""Names that change nothing, and why."""

OF_THE_MODEL = _names(
    "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale "
    "softmax_type apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma "
    "add_bias_linear add_qkv_bias gated_linear_unit glu_linear_offset activation_func_clamp_value "
    "rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm "
    "attention_output_gate multi_latent_attention no_rope_freq experimental_attention_variant "
    "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff "
    "dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads num_moe_experts "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size "
    "moe_router_topk moe_router_topk_limited_devices moe_router_num_groups moe_router_group_topk "
    "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function "
    "moe_router_enable_expert_bias moe_apply_probs_on_input moe_latent_size mrope_section is_hybrid_model "
    "mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path "
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
)
"""Fields that describe the model: a value stands that agrees with its config.json."""

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
WITH_EMBEDDING, WITH_LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
STAGES = (FIRST, LAST, WITH_EMBEDDING, WITH_LOSS, LAYOUT)
"""Fields that say how many layers each stage of a pipeline has."""

HANDED_ON = frozenset(STAGES) | _names(
    "hidden_dropout attention_dropout fp32_residual_connection attention_softmax_in_fp32 "
    "apply_query_key_layer_scaling disable_bf16_reduced_precision_matmul deterministic_mode "
    "clone_scatter_output_in_embedding batch_p2p_sync deallocate_pipeline_outputs recompute_granularity "
    "recompute_method recompute_num_layers recompute_modules distribute_saved_activations moe_layer_recompute "
    "moe_router_dtype moe_z_loss_coeff"
)
"""Fields that Megatron-Core gets as they are, with every kind of layer."""

KERNELS = _names(
    "apply_rope_fusion bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion "
    "masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm fused_single_qkv_rope "
    "use_fused_weighted_squared_relu use_te_rng_tracker use_te_activation_func batch_invariant_mode "
    "moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms moe_grouped_gemm "
    "moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_shared_expert_overlap "
    "moe_router_padding_for_quantization moe_router_padding_for_fp8 overlap_moe_expert_parallel_comm "
    "delay_wgrad_compute ep_overlap_early_attn_memory_release defer_embedding_wgrad_compute "
    "wgrad_deferral_limit tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
    "tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs "
    "tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend "
    "cp_comm_type cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights "
    "cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
    "fp8 fp8_recipe fp8_param fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 "
    "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 activation_func_fp8_input_store fp4 fp4_recipe fp4_param "
    "use_kitchen use_kitchen_attention kitchen_attention_backend disable_parameter_transpose_cache"
)
"""Fields that choose kernels of Transformer Engine: without it they are said, and not handed on."""

_SUMS = "the engine sums gradients itself, in float32, and carries its own denominators"
_WEIGHTS = "weights are gathered at once after a step"
_FSDP = "Megatron-FSDP is not built; strategy=fsdp2 shards weights"
WRAPPER_IDLE: dict[str, str] = {
    **_idle("grad_reduce_in_fp32 overlap_grad_reduce average_in_collective gradient_reduce_div_fusion", _SUMS),
    **_idle("bucket_size pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation nccl_ub", _SUMS),
    **_idle("disable_symmetric_registration delay_wgrad_compute", _SUMS),
    **_idle("overlap_param_gather align_param_gather", _WEIGHTS),
    **_idle(
        "check_for_nan_in_grad check_for_large_grads", "an optimizer step without a finite norm is skipped and said"
    ),
    "use_distributed_optimizer": "a setting of that name stands next to this section",
    **_idle("suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache", _FSDP),
    **_idle("fsdp_double_buffer fsdp_manual_registration", _FSDP),
}
"""Fields of Megatron-Core's DistributedDataParallelConfig that change nothing, and why."""
WRAPPER_DECIDED: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    **_all("use_megatron_fsdp use_custom_fsdp", _FSDP, _is(False)),
    **_all("data_parallel_sharding_strategy outer_dp_sharding_strategy", _FSDP, _is("no_shard")),
    **_all(
        "num_distributed_optimizer_instances", "the optimizer's state is sharded over all data-parallel ranks", _is(1)
    ),
    **_all("fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag", "weights are in the model's dtype", _is(False)),
}
"""Those that may not be replaced."""


def problems(key: str, section: MegatronEngineConfig) -> Problems:
    """Fields that do not exist or that the engine decides otherwise; one notice for those that change nothing.

    Args:
        key: of the ``megatron`` section, for messages.
        section: that section.
    """
    wrong = _problems(f"{key}.override_mcore_model_config", section, "override_mcore_model_config", DECIDED, IDLE)
    return wrong + _problems(
        f"{key}.override_ddp_config", section, "override_ddp_config", WRAPPER_DECIDED, WRAPPER_IDLE
    )


def _problems(
    key: str, section: Any, mapping: str, decided: Mapping[str, Any], no_effect: Mapping[str, str]
) -> Problems:
    fields = section[mapping]
    wrong = [
        ConfigError(
            f"this field of Megatron-Core is decided by the engine: {why}",
            key=f"{key}.{name}",
            got=fields[name],
            fix="Leave it out.",
        )
        for name, (why, agrees) in decided.items()
        if name in fields and not agrees(section, fields[name])
    ]
    valid = {*decided, *no_effect, *((OF_THE_MODEL | HANDED_ON | KERNELS) if decided is DECIDED else ())}
    wrong += [
        ConfigError("Megatron-Core has no such field", key=f"{key}.{name}", got=fields[name], fix=suggest(name, valid))
        for name in fields
        if name not in valid
    ]
    idle: dict[str, list[str]] = {}
    for name in fields:
        if name in no_effect:
            idle.setdefault(no_effect[name], []).append(name)
    if idle:
        reasons = "; ".join(f"{', '.join(names)} ({why})" for why, names in idle.items())
        notice(key, f"these fields have no effect: {reasons}")
    return wrong


def refuse_low_precision(key: str, section: MegatronEngineConfig) -> None:
    """Raise `ConfigError` for matrix products in FP8 or FP4, where Transformer Engine is not installed."""
    for name in ("fp8", "fp4"):
        value = section.override_mcore_model_config.get(name)
        if value not in (None, False):
            fix = "Leave it out, or install transformer-engine."
            message = f"products in {name.upper()} need Transformer Engine"
            raise ConfigError(message, key=f"{key}.{name}", got=value, fix=fix)


def handed_on(
    key: str, section: MegatronEngineConfig, fixed: Mapping[str, Any], usual: Mapping[str, Any], fast: bool
) -> dict[str, Any]:
    """The fields that Megatron-Core gets; a notice for those that are left to Transformer Engine.

    Args:
        key: of the mapping, for messages.
        fixed: fields that the engine and the family give.
        usual: Megatron-Core's defaults of all fields that this model's configuration has.
        fast: whether Transformer Engine is installed.

    Raises:
        ConfigError: a field that describes another model than config.json.
    """
    fields = section.override_mcore_model_config
    overrides, slow = {}, []
    for name, value in fields.items():
        if name in OF_THE_MODEL and value != fixed.get(name, usual.get(name)):
            raise ConfigError(
                f"{_MODEL}, and it says otherwise",
                key=f"{key}.{name}",
                got=value,
                allowed=[fixed.get(name, usual.get(name))],
                fix="Leave it out; what every engine and sampler shall read belongs in override_config of the model.",
            )
        if name in HANDED_ON:
            overrides[name] = value
        elif name in KERNELS or value == "flex":  # its dispatcher of tokens is DeepEP's
            slow.append(name)
    if fast:
        return {**overrides, **{name: fields[name] for name in slow}}
    if slow:
        notice(key, f"without Transformer Engine these fields have no effect: {', '.join(slow)}")
    return overrides


# ---- stages of a pipeline ------------------------------------------------------------------------------------------


def layer_groups(key: str, section: MegatronEngineConfig) -> int | None:
    """Groups of consecutive layers per stage (the interleaved schedule); None: one.

    Raises:
        ConfigError: a layout that cannot be read, or that has another number of groups.
    """
    value, stages, virtual = _field(section, LAYOUT), section[_STAGE], section[_VIRTUAL]
    if value is None:
        return virtual  # type: ignore[no-any-return]
    count = len(_layout(key, value))
    if count % stages:
        raise ConfigError(
            f"its {count} groups of layers do not divide over {stages} stages",
            key=f"{key}.override_mcore_model_config.{LAYOUT}",
            got=value,
            fix=f"Write a multiple of {stages} groups with | between them.",
        )
    groups = count // stages
    if virtual not in (None, groups):
        fix = f"Leave it out: {LAYOUT} says it."
        message = f"the layout has {groups} group(s) of layers per stage"
        raise ConfigError(message, key=f"{key}.{_VIRTUAL}", got=virtual, allowed=[groups], fix=fix)
    return groups if groups > 1 else None


def stage_depths(key: str, section: MegatronEngineConfig, layers: int) -> tuple[int, ...]:
    """How many layers each group has, in the order of the model: group ``g * stages + s`` is the g-th of stage ``s``.

    Every stage has as many, unless one of `STAGES` says otherwise, by the rules of Megatron-Core 0.16: the first and
    the last stage have another number, or count the embedding and the loss as a layer each, or a layout lists all.

    Args:
        key: of the ``megatron`` section, for messages.
        layers: of the model.

    Raises:
        ConfigError: layers that do not divide, or fields that contradict each other.
    """
    fields, stages, groups = f"{key}.override_mcore_model_config", section[_STAGE], layer_groups(key, section) or 1
    typed = _typed_stages(fields, section)
    if LAYOUT in typed:
        return _depths_of_layout(f"{fields}.{LAYOUT}", typed[LAYOUT], _layout(key, typed[LAYOUT]), layers)
    counted = layers + (WITH_EMBEDDING in typed) + (WITH_LOSS in typed)
    ends = [typed.get(FIRST), typed.get(LAST)]
    middle, rest = stages - sum(end is not None for end in ends), counted - sum(end or 0 for end in ends)
    if rest < 0 or (rest % middle if middle else rest) or (middle and not rest):
        raise _uneven(key, typed, layers, stages, middle, rest)
    depths = [end or rest // middle for end in (ends[0], *[None] * (stages - 2), ends[1])] if stages > 1 else [counted]
    for depth in depths:
        if depth % groups:
            raise ConfigError(
                f"the {depth} layers of a pipeline stage cannot be split evenly over {groups} layer groups",
                key=f"{key}.{_VIRTUAL}", got=groups, allowed=divisors_of(depth), fix="Set it to one of these.",
            )  # fmt: skip
    made = [depth // groups for _ in range(groups) for depth in depths]
    made[0] -= WITH_EMBEDDING in typed
    made[-1] -= WITH_LOSS in typed
    return tuple(made)


def _field(section: MegatronEngineConfig, name: str) -> object:
    return section.override_mcore_model_config.get(name)


def _typed_stages(key: str, section: MegatronEngineConfig) -> dict[str, Any]:
    """Those of `STAGES` that a run sets, in one way out of three."""
    typed: dict[str, Any] = {
        name: value for name in STAGES if (value := _field(section, name)) is not None and value is not False
    }
    for name in (FIRST, LAST):
        if name in typed and (type(typed[name]) is not int or typed[name] < 1):
            raise ConfigError(
                "a stage has a number of layers", key=f"{key}.{name}", got=typed[name], allowed="1 or more"
            )
    ways = [way for way in ((FIRST, LAST), (WITH_EMBEDDING, WITH_LOSS), (LAYOUT,)) if typed.keys() & way]
    names = [next(name for name in way if name in typed) for way in ways]
    if len(ways) > 1:
        message = f"it says how many layers a stage has, and {names[0]} says it in another way"
        raise ConfigError(message, key=f"{key}.{names[1]}", got=typed[names[1]], fix="Leave one of them out.")
    if section[_STAGE] < 2 and names and ways[0] != (WITH_EMBEDDING, WITH_LOSS):
        fix = f"Leave it out, or set {_STAGE} to 2 or more."
        raise ConfigError("stages of a pipeline need one", key=f"{key}.{names[0]}", got=typed[names[0]], fix=fix)
    return typed


def _uneven(key: str, typed: Mapping[str, object], layers: int, stages: int, middle: int, rest: int) -> ConfigError:
    first = f"{key}.override_mcore_model_config"
    if typed.keys() & {FIRST, LAST}:
        name = FIRST if FIRST in typed else LAST
        return ConfigError(
            f"{rest} of the model's {layers} layers are left for {middle} stage(s), which cannot share them evenly",
            key=f"{first}.{name}",
            got=dict(typed),
            fix=f"Change {FIRST} or {LAST}.",
        )
    extra = f" (with {' and '.join(name for name in typed)})" if typed else ""
    return ConfigError(
        f"the model's {layers} layers{extra} cannot be split evenly over {stages} processes",
        key=f"{key}.{_STAGE}",
        got=stages,
        allowed=divisors_of(layers + len(typed)),
        fix=f"Set it to one of these, or give the first and last stage another number with {first}.{FIRST} and {LAST}.",
    )


_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_TIMES = re.compile(r"(.)\*(\d{1,4})")
_LETTERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}


def _layout(key: str, value: object) -> list[str]:
    """The groups of a layout, a letter per layer; it is Megatron-Core's string, or a list of lists of names."""
    if isinstance(value, str):
        text = value.replace(",", "").replace(" ", "")
        for pattern in (_GROUP, _TIMES):
            text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    else:
        lists = value if isinstance(value, list) and all(isinstance(group, list) for group in value) else [["?"]]
        text = "|".join("".join(_LETTERS.get(str(name).lower(), "?") for name in group) for group in lists)
    if not re.fullmatch(r"E[t|]*L", text):
        ahead = " Layers that predict further tokens (m) are neither trained nor saved." if "m" in text else ""
        raise ConfigError(
            "this is no layout of a pipeline",
            key=f"{key}.override_mcore_model_config.{LAYOUT}",
            got=value,
            allowed="e.g. Et*3|t*4|t*3L: E the embedding, t a layer, L the loss, | between stages" + ahead,
        )
    return text.split("|")


def _depths_of_layout(key: str, value: object, groups: list[str], layers: int) -> tuple[int, ...]:
    depths = tuple(group.count("t") for group in groups)
    if sum(depths) != layers:
        message = f"it has {sum(depths)} layers, and the model has {layers}"
        raise ConfigError(message, key=key, got=value, fix=f"Write {layers} times t.")
    return depths
