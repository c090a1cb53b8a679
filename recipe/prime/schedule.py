"""PRIME around the library's loop: two models more, and one stage between the samples and their advantages."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from recipe.prime.core import (
    OUTCOMES,
    PROCESS_REWARDS,
    REFERENCE,
    ImplicitRewardLoss,
    pair_accuracy,
    process_rewards,
    sides_met,
)
from verl.algorithms.advantages.prime import shaped
from verl.config import HFModelConfig, PPOTrainerConfig
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.trainer.ppo import group_filter
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.schedules import SYNC
from verl.trainer.ppo.stages import train
from verl.workers.model import ModelRole
from verl.workers.options import InferOptions
from verl.workers.part import PassLimits
from verl.workers.roles import Roles

MODEL, FROZEN = "reward_model", "reward_model_ref"
"""The model that learns, whose name its metrics and its part of a checkpoint bear, and what it started from."""
ROWS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
LOG_PROBS = InferOptions(("log_probs",))
LOSSES = {"ce": ImplicitRewardLoss}


def rate_tokens(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds process_rewards (B, T) and outcomes (B,); the model learns from the outcomes before or after it rates."""
    settings, tensors = ctx.config.reward.reward_model.implicit, batch.tensors
    tensors[OUTCOMES] = outcomes(batch, ctx)
    with ctx.timed("reward_model_ref"):
        tensors[REFERENCE] = reference_log_probs(batch, roles, settings.ref_type)
    if settings.update == "before":
        learn_from_outcomes(batch, roles, ctx)
    with ctx.timed("reward_model"):
        log_probs = roles[MODEL].infer(batch.select(batch_keys=list(ROWS), non_tensor_batch_keys=[]), LOG_PROBS)
    rewards = process_rewards(
        log_probs.tensors["log_probs"], tensors[REFERENCE], tensors["response_mask"], settings.beta_train
    )
    measure(rewards, batch, ctx)
    tensors[PROCESS_REWARDS] = shaped(
        rewards,
        tensors["response_mask"],
        settings.prime_granularity,
        settings.zero_last,
        settings.prime_norm == "batch_norm",
    )
    if settings.update in ("after", "reverse"):
        learn_from_outcomes(batch, roles, ctx)


def models(config: PPOTrainerConfig) -> list[ModelRole]:
    """The model that learns, and the one that it is compared with where that is not the policy."""
    settings = config.reward.reward_model
    implicit = settings.implicit
    if not (implicit.enable and settings.model_path):
        raise ConfigError(
            "PRIME does not run without its reward model",
            key="reward.reward_model.implicit.enable" if settings.model_path else "reward.reward_model.model_path",
            fix="python -m recipe.prime.main_prime sets what it needs but the path of the model.",
        )
    limits = partial(
        PassLimits.of,
        settings.micro_batch_size_per_gpu,
        settings.micro_batch_size,
        settings.use_dynamic_bsz,
        settings.forward_max_token_len_per_gpu,
    )
    learns = ModelRole(
        name=MODEL,
        model=_model(config, str(settings.model_path)),
        key="reward.reward_model.model_path",
        strategy=settings.strategy,
        fsdp=settings.fsdp_config,
        megatron=settings.megatron,
        limits=limits,
        temperature=config.actor_rollout_ref.rollout.temperature,
        optim=implicit.optim,
        loss=partial(LOSSES[implicit.loss_type], implicit.beta_train),
        grad_clip=implicit.grad_clip,
        mini_batch_size=implicit.mini_batch_size,
        pool="rm",
    )
    if implicit.ref_type == "policy":
        return [learns]
    path = str(implicit.ref_path or settings.model_path)
    frozen = dataclasses.replace(
        learns,
        name=FROZEN,
        model=_model(config, path),
        key="reward.reward_model.implicit.ref_path",
        optim=None,
        loss=None,
        mini_batch_size=0,
    )
    return [learns, frozen]


PrimeSchedule = dataclasses.replace(SYNC, stages=(rate_tokens,), models=models)
"""The synchronous schedule with an implicit reward model, which rates tokens and learns from outcomes."""


def _model(config: PPOTrainerConfig, path: str) -> HFModelConfig:
    settings = config.reward.reward_model
    return HFModelConfig(
        path=path,
        trust_remote_code=settings.trust_remote_code,
        external_lib=settings.external_lib,
        override_config=settings.override_config,
        use_shm=settings.use_shm,
        use_remove_padding=settings.use_remove_padding,
        enable_gradient_checkpointing=settings.implicit.enable_gradient_checkpointing,
        use_fused_kernels=settings.implicit.use_fused_kernels,
        fused_kernel_options=config.actor_rollout_ref.model.fused_kernel_options,
    )


def outcomes(batch: DataProto, ctx: StepContext) -> torch.Tensor:
    """(B,) float32 in [0, 1]: ``acc`` of the scorer, else the score; 0 for a sample that is left out anyway.

    Raises:
        DataError: something else than a rate of being right.
    """
    accuracy = torch.from_numpy(group_filter.accuracies(batch)).float()
    counted = torch.from_numpy(~group_filter.out_of_statistics(batch))
    wrong = counted & ~((accuracy >= 0) & (accuracy <= 1))
    if wrong.any():
        raise DataError(
            "PRIME's reward model learns whether answers are right, so an outcome is a number from 0 to 1",
            key="reward.custom_reward_function",
            got=accuracy[wrong][0].item(),
            fix="Return it as 'acc' next to 'score' from the reward function.",
        )
    return torch.where(counted, accuracy, 0.0)


def reference_log_probs(batch: DataProto, roles: Roles, ref_type: str) -> torch.Tensor:
    """(B, T) log-probs of the frozen model, or of the policy that sampled."""
    rows = batch.select(batch_keys=list(ROWS), non_tensor_batch_keys=[])
    if ref_type == "freeze":
        return roles[FROZEN].infer(rows, LOG_PROBS).tensors["log_probs"]
    if "old_log_probs" in batch.tensors.keys():
        return batch.tensors["old_log_probs"]
    return roles["actor"].infer(rows, LOG_PROBS).tensors["log_probs"]


def learn_from_outcomes(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Every optimizer step of the reward model on this batch."""
    with ctx.timed("update_reward_model"):
        train(roles[MODEL], batch, ctx, keys=(*ROWS, OUTCOMES, REFERENCE))


def measure(rewards: torch.Tensor, batch: DataProto, ctx: StepContext) -> None:
    """How well the ratings that the policy is paid by tell right answers from wrong ones: ``reward_model/dpo_acc``."""
    mask, labels = batch.tensors["response_mask"].bool(), batch.tensors[OUTCOMES]
    logits, counted = rewards.sum(-1), mask.any(-1)
    uids = list(batch.non_tensor_batch["uid"])
    ctx.metrics.add(f"{MODEL}/dpo_acc", pair_accuracy(logits, labels, uids, counted), "last")
    if counted.any():
        ctx.metrics.add(f"{MODEL}/rated_acc_abs", sides_met(logits, labels)[counted].mean().item(), "last")
        ctx.metrics.add(f"{MODEL}/process_reward/mean", rewards[mask].mean().item(), "last")
        ctx.metrics.add("critic/acc/mean", labels[counted].mean().item(), "last")
