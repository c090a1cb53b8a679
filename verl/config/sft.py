"""Settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.actor import CHECKPOINT_CONTENTS
from verl.config.engine import FSDPEngineConfig
from verl.config.model import HFModelConfig
from verl.config.node import ConfigNode, section, setting
from verl.config.optim import OptimizerConfig
from verl.config.profiler import ProfilerConfig


@dataclass(frozen=True)
class SFTCustomClassConfig(ConfigNode):
    """``sft.data.custom_cls``."""

    path: str | None = setting(None, "custom Dataset", path=True)
    name: str | None = setting(None, "class")


@dataclass(frozen=True)
class SFTDataConfig(ConfigNode):
    """``sft.data``."""

    train_batch_size: int = setting(256, "global batch")
    micro_batch_size_per_gpu: int = setting(4, "micro-batch (also validation)")
    max_token_len_per_gpu: int = setting(8192, "token budget")
    use_dynamic_bsz: bool = setting(True, "token-budget packing")
    train_files: str | list = setting("~/data/gsm8k/train.parquet", "parquet(s)", path=True)
    val_files: str | list | None = setting(
        None, "parquet(s) or null", upstream="~/data/rlhf/gsm8k/test.parquet", path=True
    )
    train_max_samples: int = setting(-1, "cap")
    val_max_samples: int = setting(-1, "cap")
    messages_key: str = setting("messages", "chat column")
    tools_key: str = setting("tools", "tools column")
    enable_thinking_key: str = setting("enable_thinking", "thinking flag column")
    enable_thinking_default: bool | None = setting(None, "default flag")
    pad_mode: str = setting("no_padding", "no_padding or right", choices=("no_padding", "right"))
    max_length: int = setting(1024, "max tokens")
    truncation: str = setting("error", "error, left, right", choices=("error", "left", "right", "middle"))
    balance_dp_token: bool = setting(
        False, "not implemented", no_effect="batches are balanced over ranks where there are several"
    )
    custom_cls: SFTCustomClassConfig = section(SFTCustomClassConfig)
    use_shm: bool = setting(False, "shared memory")
    apply_chat_template_kwargs: dict = setting({}, "template args")
    num_workers: int = setting(0, "loader workers", upstream=8)
    ignore_input_ids_mismatch: bool = setting(False, "accept turn-wise vs whole tokenization mismatch")
    prompt_key: str | None = setting(None, "column with the prompt, in two-column data")
    response_key: str | None = setting(None, "column with the response, in two-column data")
    prompt_dict_keys: list | None = setting(None, "keys inside the prompt column")
    response_dict_keys: list | None = setting(None, "keys inside the response column")


@dataclass(frozen=True)
class SFTCheckpointConfig(ConfigNode):
    """``sft.checkpoint``."""

    save_contents: list = setting(
        ["model", "optimizer", "extra"], "any of model, optimizer, extra, hf_model", choices=CHECKPOINT_CONTENTS
    )
    load_contents: list | None = setting(None, "as saved", follows=".save_contents", choices=CHECKPOINT_CONTENTS)


@dataclass(frozen=True)
class SFTEngineConfig(FSDPEngineConfig):
    """``sft.engine``."""

    strategy: str = setting(
        "auto",
        "training backend: plain, fsdp, fsdp2, megatron, veomni, torchtitan, automodel; auto decides by the processes",
        upstream="fsdp",
    )


@dataclass(frozen=True)
class SFTRunConfig(ConfigNode):
    """``sft.trainer``."""

    default_local_dir: str = setting(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "checkpoint root", path=True
    )
    default_hdfs_dir: str | None = setting(None, "remote copy", planned="remote checkpoints", path=True)
    project_name: str = setting("gsm8k-sft", "tracker project")
    experiment_name: str = setting("test", "tracker run")
    total_epochs: int = setting(4, "epochs")
    total_training_steps: int | None = setting(None, "steps")
    logger: list = setting(["console", "file"], "backends", upstream=["console", "wandb"])
    seed: int = setting(1, "seed")
    save_freq: int = setting(-1, "steps (-1 end of epoch logic off)")
    test_freq: int = setting(-1, "steps")
    max_ckpt_to_keep: int | None = setting(None, "retention")
    balance_batch: bool = setting(True, "token balance", no_effect="one process has nothing to balance")
    resume_mode: str = setting("auto", "auto, disable, resume_path", choices=("auto", "disable", "resume_path"))
    resume_from_path: str | None = setting(None, "path", path=True)
    device: str | None = setting(None, "device", upstream="cuda")
    nnodes: int = setting(1, "nodes")
    n_gpus_per_node: int | None = setting(None, "GPUs", upstream=8)
    profile_interval: list = setting([-1, -1], "start/stop steps", planned="profiling")


@dataclass(frozen=True)
class SFTTrainerConfig(ConfigNode):
    """A supervised fine-tuning run."""

    data: SFTDataConfig = section(SFTDataConfig)
    checkpoint: SFTCheckpointConfig = section(SFTCheckpointConfig)
    trainer: SFTRunConfig = section(SFTRunConfig)
    model: HFModelConfig = section(HFModelConfig)
    engine: SFTEngineConfig = section(SFTEngineConfig)
    optim: OptimizerConfig = section(OptimizerConfig, lr=1e-3)
    profiler: ProfilerConfig = section(ProfilerConfig)
