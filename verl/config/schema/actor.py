"""Settings of the trained roles: actor, reference policy and critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ABSENT, ConfigNode, section, setting
from verl.config.schema.role import (
    LIKE_ACTOR,
    LIKE_ACTOR_STAGES,
    CheckpointConfig,
    CriticCheckpointConfig,
    FSDPEngineConfig,
    MegatronEngineConfig,
    OptimizerConfig,
    ProfilerConfig,
)
from verl.config.schema.torchtitan import TITAN_LIKE_ACTOR, TorchTitanEngineConfig
from verl.config.schema.tree import AMOUNT, COUNT, KL_KIND, LOSS_AGG_MODE, PORTION, POSITIVE, ValueBound

_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class PolicyCorrectionConfig(ConfigNode):
    """What the loss of the bypass mode has to know of algorithm.rollout_correction, whose mirror this is."""

    rollout_is: str | None = setting(
        None, "importance weights inside the loss", choices=("token", "sequence"), follows=f"{_CORRECTION}.rollout_is"
    )
    rollout_is_threshold: float | str | None = setting(
        2.0, "upper bound of these weights", follows=f"{_CORRECTION}.rollout_is_threshold"
    )
    rollout_rs: str | list | None = setting(None, "rejection inside the loss", follows=f"{_CORRECTION}.rollout_rs")
    rollout_rs_threshold: float | str | list | None = setting(
        None, "its thresholds", follows=f"{_CORRECTION}.rollout_rs_threshold"
    )
    bypass_mode: bool = setting(
        False,
        "use the sampler's log-probs as old log-probs, with the bypass_mode loss",
        follows=f"{_CORRECTION}.bypass_mode",
    )
    loss_type: str = setting(
        "ppo_clip",
        "loss of the bypass mode: ppo_clip or reinforce",
        choices=("ppo_clip", "reinforce"),
        follows=f"{_CORRECTION}.loss_type",
    )
    rollout_is_batch_normalize: bool = setting(
        False, "scale the weights of a mini-batch to mean 1", follows=f"{_CORRECTION}.rollout_is_batch_normalize"
    )


@dataclass(frozen=True)
class PolicyLossConfig(ConfigNode):
    """The policy loss and its constants."""

    loss_mode: str = setting("vanilla", "policy loss: a registered name, or a dotted path my_pkg.my_mod:my_loss")
    clip_cov_ratio: float = setting(0.0002, "clip_cov: share of tokens left out of the loss", within=PORTION)
    clip_cov_lb: float = setting(1.0, "clip_cov: lower covariance bound of tokens that may be left out")
    clip_cov_ub: float = setting(5.0, "clip_cov: upper covariance bound of tokens that may be left out")
    kl_cov_ratio: float = setting(
        0.0002, "kl_cov: share of tokens, by highest covariance, that get a KL term", within=PORTION
    )
    ppo_kl_coef: float = setting(0.1, "kl_cov: weight of the KL term")
    dro_beta: float | None = setting(None, "dro: weight of the squared log-ratio; required, above 0", within=POSITIVE)
    rollout_correction: PolicyCorrectionConfig = section(PolicyCorrectionConfig)


@dataclass(frozen=True)
class RouterReplayConfig(ConfigNode):
    """Experts of a mixture that were recorded in one pass and are chosen again in another."""

    mode: str = setting(
        "disabled",
        "replay of a mixture's experts in updates: R3 takes the sampler's (rollout.enable_rollout_routing_replay=true; also "
        "in the pass over old log-probs), R2 those of that pass",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True)
class RefRouterReplayConfig(ConfigNode):
    """Experts that the reference policy of a mixture chooses again."""

    mode: str = setting(
        "disabled",
        "replay of experts in the reference's pass: the actor's mode (actor.router_replay.mode), to take its experts; "
        "disabled: it chooses its own",
        choices=("disabled", "R2", "R3"),
    )


@dataclass(frozen=True)
class ActorConfig(ConfigNode):
    """The trained policy: batches, loss, optimizer and backend."""

    rollout_n: int = setting(1, "samples per prompt; copied from rollout.n", follows="actor_rollout_ref.rollout.n")
    strategy: str = setting(
        "auto",
        "training backend: plain, fsdp, fsdp2, fsdp_turbo, megatron, veomni, torchtitan, automodel; auto: plain in one process",
        upstream="fsdp",
    )
    ppo_mini_batch_size: int = setting(
        256,
        "prompts per optimizer step, over all processes (times rollout.n samples); divides data.train_batch_size",
        within=COUNT,
    )
    ppo_micro_batch_size: int | None = setting(
        None,
        "deprecated: samples per pass over all processes; use ppo_micro_batch_size_per_gpu",
        within=COUNT,
    )
    ppo_micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per forward and backward pass of one process; null: an automatic token budget",
        within=COUNT,
    )
    use_dynamic_bsz: bool = setting(
        False, "build micro-batches by token count (ppo_max_token_len_per_gpu), not by sample count"
    )
    ppo_max_token_len_per_gpu: int = setting(
        16384,
        "tokens per micro-batch of one process with use_dynamic_bsz; at least the longest sample",
        within=COUNT,
    )
    clip_ratio: float = setting(
        0.2, "PPO clip range: the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]", within=POSITIVE
    )
    clip_ratio_low: float | None = setting(None, "lower clip range; null: clip_ratio", upstream=0.2, within=POSITIVE)
    clip_ratio_high: float | None = setting(
        None,
        "upper clip range (clip-higher, as in DAPO); null: clip_ratio",
        upstream=0.2,
        within=POSITIVE,
    )
    positive_lm_coef: float = setting(
        0.0,
        "VAPO: weight of a language-model loss on correct answers (by acc, else by a score above 0)",
        upstream=ABSENT,
        within=AMOUNT,
    )
    tau_pos: float = setting(1.0, "SAPO: gate temperature for positive advantages", within=POSITIVE)
    tau_neg: float = setting(1.05, "SAPO: gate temperature for advantages of 0 or less", within=POSITIVE)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    clip_ratio_c: float = setting(
        3.0,
        "dual clip: for negative advantages, bound the loss at clip_ratio_c times |advantage|; above 1",
        within=ValueBound("above 1", lambda value: value > 1),
    )
    loss_agg_mode: str = setting(
        "token-mean",
        "how token losses are aggregated: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm",
        within=LOSS_AGG_MODE,
    )
    loss_scale_factor: float | None = setting(
        None,
        "seq-mean-token-sum-norm: divisor in tokens; null: data.max_response_length",
        within=POSITIVE,
        needs=".loss_agg_mode=seq-mean-token-sum-norm",
    )
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus; 0: none")
    calculate_entropy: bool = setting(False, "report the entropy during updates, even without a bonus")
    calculate_sum_pi_squared: bool = setting(
        False,
        "compute the sum of squared probabilities with the old log-probs; the optimal-token-baseline estimators need it",
    )
    use_kl_loss: bool = setting(False, "add a KL term to the loss; loads the reference policy")
    use_prefix_grouper: bool = setting(True, "compute each prompt once for all its samples; exact", upstream=False)
    use_torch_compile: bool | None = setting(
        None, "compile the transformer layers; null: on a GPU, for large models (see fsdp_config)", upstream=True
    )
    kl_loss_coef: float = setting(0.001, "weight of the KL term", within=AMOUNT, needs=".use_kl_loss=true")
    kl_loss_type: str = setting(
        "low_var_kl",
        "KL estimator: kl (k1), abs, mse (k2), low_var_kl (k3), full; a trailing + keeps the value and takes the gradient of k2",
        needs=".use_kl_loss=true",
        within=KL_KIND,
    )
    use_rollout_log_probs: bool = setting(
        False,
        "take the sampler's log-probs as the old ones in the loss, for samples of older versions of the policy; "
        "algorithm.rollout_correction.bypass_mode takes them everywhere",
    )
    ppo_epochs: int = setting(1, "epochs over each batch of samples", within=COUNT)
    shuffle: bool = setting(False, "reshuffle samples between mini-batches in every step and epoch")
    data_loader_seed: int = setting(42, "seed of the shuffling")
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    use_fused_kernels: bool = setting(
        False,
        "compute log-probs without materialising the logits",
        follows="actor_rollout_ref.model.use_fused_kernels",
        no_effect="actor_rollout_ref.model.use_fused_kernels decides",
    )
    freeze_vision_tower: bool = setting(
        False, "train everything but what turns images into features: the vision tower and its projector"
    )
    grad_clip: float = setting(
        1.0, "gradient clipping: maximum gradient norm", follows=".optim.clip_grad", within=POSITIVE
    )
    ulysses_sequence_parallel_size: int = setting(1, "deprecated; use fsdp_config.ulysses_sequence_parallel_size")
    entropy_from_logits_with_chunking: bool = setting(False, "compute the entropy in chunks of rows, to save memory")
    entropy_from_logits_chunk_size: int = setting(2048, "rows per chunk")
    entropy_checkpointing: bool = setting(False, "recompute the entropy in the backward pass, to save memory")
    pad_to_length: bool = setting(False, "pad packed micro-batches to a multiple of fsdp_config.pad_to_length_bucket")
    use_remove_padding: bool = setting(
        False,
        "pack rows without padding",
        follows="actor_rollout_ref.model.use_remove_padding",
        no_effect="actor_rollout_ref.model.use_remove_padding decides",
    )
    optim: OptimizerConfig = section(OptimizerConfig)
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig)
    torchtitan: TorchTitanEngineConfig = section(TorchTitanEngineConfig)
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)

    @property
    def global_batch_info(self) -> dict[str, Any]:
        """Empty, and no setting: losses written for upstream pass it on to `agg_loss`, which has the norm already."""
        return {}


@dataclass(frozen=True)
class RefConfig(ConfigNode):
    """The reference policy of the KL terms: the model before training."""

    rollout_n: int = setting(
        1,
        "samples per prompt; copied from rollout.n",
        follows="actor_rollout_ref.rollout.n",
        no_effect="actor_rollout_ref.rollout.n decides",
    )
    strategy: str = setting(
        "auto", "backend of the reference's forward passes", follows="actor_rollout_ref.actor.strategy", upstream="fsdp"
    )
    use_torch_compile: bool | None = setting(
        None,
        "compile the transformer layers",
        follows="actor_rollout_ref.actor.use_torch_compile",
        upstream=True,
    )
    log_prob_micro_batch_size: int | None = setting(
        None,
        "deprecated: samples per pass over all processes; use log_prob_micro_batch_size_per_gpu",
        within=COUNT,
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None,
        "samples per forward pass of one process; null: an automatic token budget",
        within=COUNT,
    )
    log_prob_use_dynamic_bsz: bool = setting(
        False, "build micro-batches by token count", follows="actor_rollout_ref.actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int = setting(
        16384,
        "tokens per micro-batch of one process with log_prob_use_dynamic_bsz",
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        within=COUNT,
    )
    ulysses_sequence_parallel_size: int = setting(
        1,
        "deprecated; use fsdp_config.ulysses_sequence_parallel_size",
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )
    entropy_from_logits_with_chunking: bool = setting(
        False, "compute the entropy in chunks of rows", no_effect="the reference policy's entropy is never computed"
    )
    entropy_from_logits_chunk_size: int = setting(
        2048, "rows per chunk", no_effect="the reference policy's entropy is never computed"
    )
    entropy_checkpointing: bool = setting(
        False,
        "recompute the entropy in the backward pass",
        no_effect="the reference policy's entropy is never computed",
    )
    pad_to_length: bool = setting(
        False,
        "pad packed micro-batches to a multiple of fsdp_config.pad_to_length_bucket",
        follows="actor_rollout_ref.actor.pad_to_length",
    )
    fsdp_config: FSDPEngineConfig = section(FSDPEngineConfig)
    megatron: MegatronEngineConfig = section(MegatronEngineConfig, LIKE_ACTOR_STAGES)
    torchtitan: TorchTitanEngineConfig = section(TorchTitanEngineConfig, TITAN_LIKE_ACTOR)
    router_replay: RefRouterReplayConfig = section(RefRouterReplayConfig)
    profiler: ProfilerConfig = section(ProfilerConfig)


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
