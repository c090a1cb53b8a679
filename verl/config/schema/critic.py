"""Settings of the critic."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config.schema.bounds import COUNT, LOSS_AGG_MODE, POSITIVE
from verl.config.schema.checkpoint import CriticCheckpointConfig
from verl.config.schema.engine import FSDPEngineConfig
from verl.config.schema.megatron import LIKE_ACTOR, MegatronEngineConfig
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, section, setting
from verl.config.schema.optim import OptimizerConfig
from verl.config.schema.profiler import ProfilerConfig


@dataclass(frozen=True)
class CriticModelConfig(HFModelConfig):
    """The critic's initial model; a language model gets a new scalar head."""

    tokenizer_path: str | None = setting(
        None,
        "folder or hub name of a tokenizer",
        path=True,
        no_effect="the critic reads the tokens of the policy's tokenizer",
    )
    custom_chat_template: str | None = setting(
        None, "chat template (Jinja text)", no_effect="the critic reads the tokens of the policy's tokenizer"
    )


LIKE_POLICY = {name: f"actor_rollout_ref.model.{name}" for name in ("path", "trust_remote_code", "external_lib")}


@dataclass(frozen=True)
class CriticConfig(ConfigNode):
    """The value model of PPO."""

    rollout_n: int = setting(1, "samples per prompt; copied from rollout.n", follows="actor_rollout_ref.rollout.n")
    strategy: str = setting("auto", "training backend, as for the actor", upstream="fsdp")
    enable: bool | None = setting(None, "train a critic; null: if algorithm.adv_estimator needs values (gae, vapo)")
    ppo_mini_batch_size: int = setting(
        256,
        "prompts per optimizer step, over all processes",
        follows="actor_rollout_ref.actor.ppo_mini_batch_size",
        within=COUNT,
    )
    ppo_micro_batch_size: int | None = setting(None, "deprecated; use ppo_micro_batch_size_per_gpu", within=COUNT)
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per forward and backward pass of one process; null: an automatic token budget",
        follows=".ppo_micro_batch_size",
        within=COUNT,
    )
    use_dynamic_bsz: bool = setting(
        False, "build micro-batches by token count", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    ppo_max_token_len_per_gpu: int = setting(
        32768,
        "tokens per micro-batch of one process with use_dynamic_bsz; at least the longest sample",
        within=COUNT,
    )
    forward_max_token_len_per_gpu: int | None = setting(
        None, "the same for forward-only passes (values)", follows=".ppo_max_token_len_per_gpu"
    )
    ppo_epochs: int = setting(
        1, "epochs over each batch of samples", follows="actor_rollout_ref.actor.ppo_epochs", within=COUNT
    )
    shuffle: bool = setting(False, "shuffle samples between mini-batches", follows="actor_rollout_ref.actor.shuffle")
    data_loader_seed: int = setting(42, "seed of the shuffling")
    cliprange_value: float = setting(0.5, "clip range of the value loss around the old values", within=POSITIVE)
    loss_agg_mode: str = setting(
        "token-mean",
        "how token losses are aggregated",
        follows="actor_rollout_ref.actor.loss_agg_mode",
        within=LOSS_AGG_MODE,
    )
    loss_scale_factor: float | None = setting(
        None,
        "seq-mean-token-sum-norm: divisor in tokens; null: data.max_response_length",
        follows="actor_rollout_ref.actor.loss_scale_factor",
        within=POSITIVE,
    )
    checkpoint: CriticCheckpointConfig = section(CriticCheckpointConfig)
    forward_micro_batch_size: int | None = setting(
        None,
        "deprecated; use forward_micro_batch_size_per_gpu",
        follows=".ppo_micro_batch_size",
        within=COUNT,
    )
    forward_micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per forward-only pass of one process (values)",
        follows=".ppo_micro_batch_size_per_gpu",
        within=COUNT,
    )
    ulysses_sequence_parallel_size: int = setting(1, "deprecated; use fsdp.ulysses_sequence_parallel_size")
    grad_clip: float = setting(
        1.0, "gradient clipping: maximum gradient norm", follows=".optim.clip_grad", within=POSITIVE
    )
    optim: OptimizerConfig = section(OptimizerConfig, lr=1e-5)
    fsdp: FSDPEngineConfig = section(FSDPEngineConfig)
    model: CriticModelConfig = section(CriticModelConfig, LIKE_POLICY)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, LIKE_ACTOR)
    profiler: ProfilerConfig = section(ProfilerConfig)
