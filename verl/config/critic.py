"""Settings of the critic."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.actor import CHECKPOINT_CONTENTS
from verl.config.engine import FSDPEngineConfig
from verl.config.megatron import MegatronEngineConfig
from verl.config.model import HFModelConfig
from verl.config.node import ConfigNode, section, setting
from verl.config.optim import OptimizerConfig
from verl.config.profiler import ProfilerConfig
from verl.config.torchtitan import TorchtitanEngineConfig
from verl.config.veomni import VeOmniEngineConfig


@dataclass(frozen=True)
class CriticCheckpointConfig(ConfigNode):
    """``critic.checkpoint``."""

    save_contents: list = setting(["model", "optimizer", "extra"], "as actor", choices=CHECKPOINT_CONTENTS)
    load_contents: list | None = setting(None, "as actor", follows=".save_contents", choices=CHECKPOINT_CONTENTS)
    async_save: bool = setting(False, "as actor", planned="asynchronous checkpoints")


@dataclass(frozen=True)
class CriticModelConfig(HFModelConfig):
    """The critic starts from the actor's model unless it is given its own."""

    path: str = setting(
        "~/models/deepseek-llm-7b-chat",
        "HF id or local/HDFS path; follows the actor's model",
        follows="actor_rollout_ref.model.path",
        path=True,
    )
    trust_remote_code: bool = setting(
        False, "allow custom code; follows the actor's model", follows="actor_rollout_ref.model.trust_remote_code"
    )
    external_lib: str | None = setting(
        None,
        "module imported before load; follows the actor's model",
        follows="actor_rollout_ref.model.external_lib",
    )
    tokenizer_path: str | None = setting(
        None, "tokenizer elsewhere", path=True, no_effect="the critic reads the tokens of the policy's tokenizer"
    )
    custom_chat_template: str | None = setting(
        None, "Jinja template of the prompts", no_effect="the critic reads the tokens of the policy's tokenizer"
    )


@dataclass(frozen=True)
class CriticConfig(ConfigNode):
    """The value model."""

    rollout_n: int = setting(1, "mirrors rollout.n", follows="actor_rollout_ref.rollout.n")
    strategy: str = setting("auto", "backend", upstream="fsdp")
    enable: bool | None = setting(None, "null = on only when adv_estimator is gae")
    ppo_mini_batch_size: int = setting(256, "follows actor", follows="actor_rollout_ref.actor.ppo_mini_batch_size")
    ppo_micro_batch_size: int | None = setting(None, "deprecated")
    ppo_micro_batch_size_per_gpu: int | None = setting(None, "per-GPU micro-batch", follows=".ppo_micro_batch_size")
    use_dynamic_bsz: bool = setting(False, "follows actor", follows="actor_rollout_ref.actor.use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = setting(32768, "token budget")
    forward_max_token_len_per_gpu: int | None = setting(
        None, "token budget for value inference", follows=".ppo_max_token_len_per_gpu"
    )
    ppo_epochs: int = setting(1, "follows actor", follows="actor_rollout_ref.actor.ppo_epochs")
    shuffle: bool = setting(False, "follows actor", follows="actor_rollout_ref.actor.shuffle")
    data_loader_seed: int = setting(42, "seed")
    cliprange_value: float = setting(0.5, "value clip range")
    loss_agg_mode: str = setting("token-mean", "follows actor", follows="actor_rollout_ref.actor.loss_agg_mode")
    loss_scale_factor: float | None = setting(
        None, "follows actor", follows="actor_rollout_ref.actor.loss_scale_factor"
    )
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig)
    forward_micro_batch_size: int | None = setting(
        None, "legacy global inference batch", follows=".ppo_micro_batch_size"
    )
    forward_micro_batch_size_per_gpu: int | None = setting(
        None, "per-GPU inference batch", follows=".ppo_micro_batch_size_per_gpu"
    )
    ulysses_sequence_parallel_size: int = setting(1, "deprecated alias", planned="Ulysses sequence parallelism")
    grad_clip: float = setting(1.0, "max gradient norm", follows=".optim.clip_grad")
    optim: OptimizerConfig = section(OptimizerConfig, lr=1e-5)
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig)
    model: CriticModelConfig = section(CriticModelConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig)
    veomni: VeOmniEngineConfig = section(VeOmniEngineConfig)
    torchtitan: TorchtitanEngineConfig = section(TorchtitanEngineConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)
