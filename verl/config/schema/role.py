"""What every trained role has: an optimizer, checkpoints and a profiler."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import AMOUNT, BETAS, POSITIVE, SHARE, at_least
from verl.config.schema.node import ConfigNode, section, setting


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
    "steps between bitwise comparisons of weights and optimizer states that several ranks hold alike (data-parallel "
    "replicas, norms under tensor parallelism); every checkpoint compares them, too; -1: only then"
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
        no_effect="a checkpoint of a LoRA model always holds the adapter alone; its base stays where model.path says",
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
        "options of nsys for the workers, on top of trace=cuda,nvtx,cublas,ucx, "
        "cuda-memory-usage=true, cuda-graph-trace=graph, capture-range=cudaProfilerApi, kill=none and "
        "capture-range-end=repeat-shutdown:n, n = 6 times the number of steps",
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
