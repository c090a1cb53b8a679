"""What every trained role has, an engine, an optimizer, checkpoints and a profiler; and what every run has."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.tree import AMOUNT, BETAS, COPIES, COUNT, DTYPE, MODEL_DTYPE, POSITIVE, SHARE, at_least


@dataclass(frozen=True)
class WrapPolicyConfig(ConfigNode):
    """Which modules FSDP shards as units."""

    min_num_params: int = setting(
        0,
        "minimum parameters of a module that is sharded on its own; 0: every transformer block",
        within=AMOUNT,
    )


@dataclass(frozen=True)
class FSDPEngineConfig(ConfigNode):
    """Training engines plain (one device) and FSDP2."""

    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    param_offload: bool = setting(
        False,
        "offload the weights to host memory while another role works; no effect on a CPU",
    )
    optimizer_offload: bool = setting(
        False, "offload the optimizer's state to host memory while another role works; no effect on a CPU"
    )
    offload_policy: bool = setting(
        False,
        "keep weights, gradients and optimizer in host memory during training too",
    )
    reshard_after_forward: bool = setting(
        True,
        "free gathered weights after the forward pass (ZeRO-3); false keeps them for the backward pass (ZeRO-2)",
    )
    fsdp_size: int = setting(
        -1, "size of a sharding group, which holds one copy of the weights; -1: all processes; fewer: HSDP"
    )
    forward_prefetch: bool = setting(False, "gather the next layer while this one runs")
    model_dtype: str = setting("fp32", "dtype of the master weights", within=MODEL_DTYPE)
    use_orig_params: bool = setting(
        False, "expose the original parameters to the optimizer", no_effect="FSDP2 keeps parameters as they are"
    )
    seed: int = setting(42, "seed of new weights (a value head)", no_effect="a run has one seed: trainer.seed")
    full_determinism: bool = setting(False, "deterministic kernels only, for debugging; slower")
    ulysses_sequence_parallel_size: int = setting(
        1,
        "sequence-parallel size (DeepSpeed-Ulysses); must divide the attention heads",
        follows="..ulysses_sequence_parallel_size",
        within=COUNT,
    )
    expert_parallel_size: int = setting(
        1,
        "expert-parallel size; must divide the number of experts",
        upstream=ABSENT,
        within=COUNT,
    )
    entropy_from_logits_with_chunking: bool = setting(
        False,
        "compute the entropy in chunks of rows, to save memory",
        follows="actor_rollout_ref.actor.entropy_from_logits_with_chunking",
    )
    entropy_from_logits_chunk_size: int = setting(
        2048,
        "rows per chunk",
        follows="actor_rollout_ref.actor.entropy_from_logits_chunk_size",
    )
    use_torch_compile: bool | None = setting(
        None,
        "compile the transformer layers (the first step takes a minute longer); null: only on a GPU, "
        "in one process, from half a billion parameters",
        follows="..use_torch_compile",
        upstream=True,
    )
    entropy_checkpointing: bool = setting(
        False,
        "recompute the entropy in the backward pass, to save memory",
        follows="actor_rollout_ref.actor.entropy_checkpointing",
    )
    use_no_sync_for_gradient_accumulation: bool = setting(
        False, "sum gradients over processes only at the last micro-batch"
    )
    pad_to_length: bool = setting(
        False,
        "pad packed micro-batches to a multiple of pad_to_length_bucket, for fewer distinct lengths",
        follows="..pad_to_length",
    )
    pad_to_length_bucket: int = setting(1024, "pad_to_length: the multiple, in tokens")
    dtype: str = setting(
        "auto",
        "dtype of matrix products; auto: float32 on CPU, bfloat16 on an accelerator",
        upstream="bfloat16",
        within=DTYPE,
    )


@dataclass(frozen=True)
class MegatronEngineOverrideTransformerConfigConfig(ConfigNode):
    """Fields of Megatron-Core's TransformerConfig; any other belongs in override_mcore_model_config."""

    recompute_granularity: str | None = setting(
        None,
        "activation recomputation: full, selective, or null (none)",
        choices=("full", "selective"),
    )
    recompute_modules: list = setting(["core_attn"], "modules to recompute with selective")
    recompute_method: str | None = setting(
        None, "how full picks layers: uniform or block; null: uniform", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = setting(None, "layers per recomputed group with full; null: 1")
    attention_backend: str = setting(
        "flash",
        "attention kernels of Transformer Engine; without it the local attention runs",
        choices=("flash", "fused", "unfused", "local", "auto"),
    )


MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
)
"""Settings of `MegatronEngineConfig` that say how ranks share a model."""


@dataclass(frozen=True)
class MegatronEngineConfig(ConfigNode):
    """The Megatron-Core engine."""

    param_offload: bool = setting(False, "offload the weights to host memory while another role works")
    optimizer_offload: bool = setting(False, "offload the optimizer's state to host memory while another role works")
    tensor_model_parallel_size: int = setting(
        1, "tensor-parallel size; must divide the attention and KV heads", within=COUNT
    )
    expert_model_parallel_size: int = setting(
        1, "expert-parallel size; must divide the number of experts", within=COUNT
    )
    expert_tensor_parallel_size: int | None = setting(
        None, "tensor-parallel size of the experts; null: the model's", within=COUNT
    )
    pipeline_model_parallel_size: int = setting(
        1,
        "pipeline-parallel size; divides the number of layers, unless a field says how many a stage has",
        within=COUNT,
    )
    virtual_pipeline_model_parallel_size: int | None = setting(
        None, "layer groups per pipeline stage (interleaved schedule); null: one", within=COUNT
    )
    context_parallel_size: int = setting(
        1, "context-parallel size: peers that share the tokens of packed rows", within=COUNT
    )
    sequence_parallel: bool = setting(True, "shard activations between tensor-parallel layers")
    use_distributed_optimizer: bool = setting(True, "shard the optimizer's state over data-parallel processes")
    seed: int = setting(42, "seed of the engine", no_effect="a run has one seed: trainer.seed")
    override_transformer_config: MegatronEngineOverrideTransformerConfigConfig = section(
        MegatronEngineOverrideTransformerConfigConfig
    )
    override_mcore_model_config: dict = setting({}, "fields of Megatron-Core's TransformerConfig to override")
    override_ddp_config: dict = setting(
        {}, "fields of Megatron-Core's data-parallel wrapper, for scripts that carry them: the engine has none"
    )
    dtype: str = setting(
        "auto",
        "dtype of weights and matrix products; auto: float32 on CPU, bfloat16 (over float32 copies) on an accelerator",
        upstream="bfloat16",
    )


LIKE_ENGINE = {name: f"engine.{name}" for name in ("param_offload", "optimizer_offload", "dtype")}
"""In supervised training what every engine has is set once, in the section around it."""
LIKE_ACTOR = {
    name: f"actor_rollout_ref.actor.megatron.{name}"
    for name in (
        "tensor_model_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "dtype",
    )
}
"""Of a role that shares processes with the actor: Megatron-Core has one set of groups per process."""
LIKE_ACTOR_STAGES = {
    **LIKE_ACTOR,
    "override_mcore_model_config": "actor_rollout_ref.actor.megatron.override_mcore_model_config",
}
"""Of the reference, which is the actor's model: its pipeline stages have as many layers."""


@dataclass(frozen=True)
class OptimizerConfig(ConfigNode):
    """Optimizer and learning-rate schedule of one trained model."""

    optimizer: str = setting("AdamW", "optimizer class")
    optimizer_impl: str = setting("torch.optim", "module of the optimizer class")
    lr: float = setting(1e-06, "learning rate, after any warm-up", within=AMOUNT)
    lr_warmup_steps_ratio: float = setting(
        0.0, "warm-up as a share of the run; lr_warmup_steps above 0 overrides it", within=SHARE
    )
    total_training_steps: int = setting(-1, "length of the schedule in steps; -1: the length of the run")
    weight_decay: float = setting(0.01, "decoupled weight decay", within=AMOUNT)
    lr_warmup_steps: int | None = setting(
        -1, "warm-up steps; 0, -1 or null: lr_warmup_steps_ratio decides", within=at_least(-1)
    )
    betas: list[float] = setting([0.9, 0.999], "Adam betas", within=BETAS)
    clip_grad: float = setting(
        1.0, "gradient clipping: maximum gradient norm; a grad_clip of the role overrides it", within=POSITIVE
    )
    min_lr_ratio: float = setting(0.0, "cosine, wsd: minimum learning rate, as a share of lr", within=SHARE)
    num_cycles: float = setting(0.5, "cosine, wsd: cosine waves until the end; 0.5 falls once", within=POSITIVE)
    lr_scheduler_type: str = setting(
        "constant",
        "constant; cosine; wsd (constant, then a cosine over the last tenth)",
        choices=("constant", "cosine", "wsd"),
    )
    zero_indexed_step: bool = setting(
        True, "cosine: number steps from 0; false: from 1, so that the first warm-up step has a learning rate above 0"
    )
    override_optimizer_config: dict | None = setting(None, "extra arguments of the optimizer class")
    lr_warmup_init: float = setting(0.0, "learning rate at the start of the warm-up", within=AMOUNT)
    lr_decay_steps: float | None = setting(
        None,
        "lr_decay_style: steps until min_lr, warm-up included; null: the length of the schedule",
        within=POSITIVE,
        needs=".lr_decay_style=linear, cosine, inverse_square_root or WSD",
    )
    lr_decay_style: str = setting(
        "constant",
        "Megatron's name for the schedule, instead of lr_scheduler_type",
        choices=("constant", "linear", "cosine", "inverse_square_root", "WSD"),
    )
    min_lr: float = setting(
        0.0,
        "lr_decay_style: minimum learning rate",
        within=AMOUNT,
        needs=".lr_decay_style=linear, cosine, inverse_square_root or WSD",
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "lr_decay_style=WSD: shape of the decay",
        choices=("linear", "cosine", "exponential", "minus_sqrt"),
        needs=".lr_decay_style=WSD",
    )
    lr_wsd_decay_steps: float | None = setting(
        None, "lr_decay_style=WSD: steps of the decay; required", within=POSITIVE, needs=".lr_decay_style=WSD"
    )


CONTENTS = ("model", "optimizer", "extra", "hf_model")
COPY_CHECK = (
    "steps between bitwise comparisons of the weights and optimizer states that several ranks hold alike; -1: only at "
    "checkpoints"
)


@dataclass(frozen=True)
class CheckpointContentsConfig(ConfigNode):
    """What a checkpoint holds."""

    save_contents: list = setting(
        ["model", "optimizer", "extra"],
        "contents to save: model, optimizer, extra (random states and schedules), hf_model (a Hugging Face folder)",
        choices=CONTENTS,
    )
    load_contents: list | None = setting(
        None,
        "contents to load on resume; null: save_contents",
        follows=".save_contents",
        choices=CONTENTS,
    )


@dataclass(frozen=True)
class CriticCheckpointConfig(CheckpointContentsConfig):
    """What a checkpoint of the critic holds."""

    async_save: bool = setting(False, "save in the background: copy the state, then write it while training continues")


@dataclass(frozen=True)
class CheckpointConfig(CriticCheckpointConfig):
    """What a checkpoint of the actor holds."""

    strict: bool = setting(
        True, "stop on a weight that cannot be exported", no_effect="weights are always exported strictly"
    )
    save_lora_only: bool = setting(
        False,
        "write only the adapters of a LoRA model",
        no_effect="a checkpoint of a LoRA model always holds the adapter alone; its base stays at model.path",
    )
    mbridge_config: dict = setting(
        {},
        "arguments of Megatron-Bridge when it writes weights",
        no_effect="weights are written by the tables of verl/models/megatron.py",
    )


TOOLS = ("torch", "torch_memory", "nsys", "npu", "precision_debugger")
_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack")


@dataclass(frozen=True)
class ProfilerToolTorchScheduleConfig(ConfigNode):
    """Which mini-batches the torch profiler records."""

    skip_first: int = setting(0, "mini-batches to skip")
    wait: int = setting(0, "mini-batches to wait")
    warmup: int = setting(0, "mini-batches to warm up")
    active: int = setting(0, "mini-batches to record; 0: the whole step, without a schedule")
    repeat: int = setting(0, "how often this is repeated; 0: to the end of the step")


@dataclass(frozen=True)
class ProfilerToolTorchConfig(ConfigNode):
    """The torch profiler."""

    contents: list = setting(
        [], "what is recorded: cpu, cuda, memory, shapes, stack; empty: cpu and cuda", choices=_CONTENTS
    )
    discrete: bool = setting(False, "write one file per method call instead of one per step")
    schedule: ProfilerToolTorchScheduleConfig = section(ProfilerToolTorchScheduleConfig)


@dataclass(frozen=True)
class ProfilerToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(
        100000,
        "maximum number of recorded allocations",
        follows="global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
    )


@dataclass(frozen=True)
class ProfilerToolNsysConfig(ConfigNode):
    """Nsight Systems."""

    discrete: bool = setting(
        False,
        "capture every call of this role's methods alone",
        follows="global_profiler.global_tool_config.nsys.discrete",
    )


@dataclass(frozen=True)
class ProfilerToolConfigConfig(ConfigNode):
    """Settings of the tools."""

    nsys: ProfilerToolNsysConfig = section(ProfilerToolNsysConfig)
    torch: ProfilerToolTorchConfig = section(ProfilerToolTorchConfig)
    torch_memory: ProfilerToolTorchMemoryConfig = section(ProfilerToolTorchMemoryConfig)


@dataclass(frozen=True)
class ProfilerConfig(ConfigNode):
    """Profiling of one role."""

    tool: str | None = setting(None, "tool of this role", follows="global_profiler.tool", choices=TOOLS)
    enable: bool = setting(False, "profile this role")
    all_ranks: bool = setting(False, "profile every process of this role")
    ranks: list = setting([], "ranks of the processes to profile; empty: rank 0")
    save_path: str | None = setting(None, "folder of the results", follows="global_profiler.save_path", path=True)
    tool_config: ProfilerToolConfigConfig = section(ProfilerToolConfigConfig)


@dataclass(frozen=True)
class GlobalProfilerGlobalToolTorchMemoryConfig(ConfigNode):
    """Torch's record of memory."""

    trace_alloc_max_entries: int = setting(100000, "maximum number of recorded allocations")


@dataclass(frozen=True)
class GlobalProfilerGlobalToolNsysConfig(ConfigNode):
    """Nsight Systems, which Ray starts around every worker process."""

    discrete: bool = setting(False, "capture every call of a role's methods alone instead of whole steps")
    controller_nsight_options: dict = setting(
        {},
        "options of nsys for the controller",
        no_effect="the controller is the program itself: start it with `nsys profile`",
    )
    worker_nsight_options: dict = setting(
        {},
        "options of nsys for the workers, on top of trace=cuda,nvtx,cublas,ucx, memory, graphs, and a capture range "
        "that ends with the recorded steps",
    )


@dataclass(frozen=True)
class GlobalProfilerGlobalToolConfigConfig(ConfigNode):
    """Settings of the tools; the default of every role."""

    nsys: GlobalProfilerGlobalToolNsysConfig = section(GlobalProfilerGlobalToolNsysConfig)
    torch_memory: GlobalProfilerGlobalToolTorchMemoryConfig = section(GlobalProfilerGlobalToolTorchMemoryConfig)


@dataclass(frozen=True)
class GlobalProfilerConfig(ConfigNode):
    """Profiling of the whole run."""

    tool: str | None = setting(
        None,
        "torch: traces; torch_memory: CUDA's allocations; nsys: Nsight Systems, by Ray; null: none",
        choices=TOOLS,
    )
    steps: list | None = setting(None, "step numbers to profile")
    profile_continuous_steps: bool = setting(False, "record consecutive steps into one file")
    save_path: str = setting("outputs/profile", "folder of the results", path=True)
    global_tool_config: GlobalProfilerGlobalToolConfigConfig = section(GlobalProfilerGlobalToolConfigConfig)


@dataclass(frozen=True)
class RunConfig(ConfigNode):
    """The name, length, trackers and checkpoints of a run."""

    project_name: str = setting("verl_examples", "project of the run, for trackers and folders")
    experiment_name: str = setting("gsm8k", "name of the run, for trackers and folders")
    default_local_dir: str = setting(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "folder of the run: checkpoints and the resolved configuration",
        path=True,
    )
    default_hdfs_dir: str | None = setting(
        None,
        "remote folder (hdfs://, s3://, gs://, ..., or a mounted path) to which each complete checkpoint is copied; "
        "resume_mode=auto takes the newer of the two; null: none",
        path=True,
    )
    remote_timeout: float = setting(
        300.0,
        "time limit of one request to default_hdfs_dir, in seconds; the copy of a file has a second more for each 10 MB",
        upstream=ABSENT,
        within=POSITIVE,
        needs=".default_hdfs_dir",
    )
    total_epochs: int = setting(30, "passes over the training data", within=COUNT)
    total_training_steps: int | None = setting(None, "length of the run in steps; null: total_epochs", within=COUNT)
    logger: list = setting(
        ["console", "file"],
        "trackers: console, file (JSON lines), tensorboard, wandb, ... (docs/howto/tracking.md), or dotted paths",
        upstream=["console", "wandb"],
    )
    console: str = setting(
        "auto",
        "what console prints of a step: table, line (all metrics) or both; auto: a table in a terminal, else a line",
        choices=("auto", "table", "line", "both"),
        upstream=ABSENT,
    )
    viewer: bool = setting(
        False,
        "start the page of this run, as verl view does: the console names the file with its link, and it ends with the run",
        upstream=ABSENT,
    )
    copy_check_freq: int = setting(-1, COPY_CHECK, upstream=ABSENT, within=COPIES)
    best_metric: str | None = setting(
        None,
        "validation metric by which checkpoints are compared; the best one is never deleted, and best_checkpoint.json "
        "in the run's folder names it; null: none",
        upstream=ABSENT,
    )
    best_mode: str = setting(
        "max",
        "whether the larger (max) or smaller (min) value is better",
        upstream=ABSENT,
        choices=("max", "min"),
        needs=".best_metric",
    )
    resume_mode: str = setting(
        "auto",
        "auto: resume from the last checkpoint, if any; resume_path: from resume_from_path; disable: start from scratch",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = setting(
        None,
        "folder of a step (.../global_step_20) for resume_mode=resume_path",
        path=True,
        needs=".resume_mode=resume_path",
    )
    resume_changed: str = setting(
        "refuse",
        "resuming with settings, data or files that change the results: refuse or accept",
        choices=("refuse", "accept"),
    )
    device: str | None = setting(
        None,
        "cuda, npu or cpu; null or auto: the accelerator if there is one",
        upstream="cuda",
        choices=("auto", "cuda", "npu", "cpu"),
    )
