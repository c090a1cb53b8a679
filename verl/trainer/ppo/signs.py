"""Signs in a step of RL of a run that cannot learn: no signal, or no update.

`verl.trainer.watch` reports a sign once it has held for some steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from verl.algorithms.groups import SAME
from verl.protocol import DataProto
from verl.trainer.ppo import correction, group_filter
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.sample_rows import last_rows

NO_ENTROPY = 1e-4
"""Nats per token below which a policy says one thing only."""
SAMPLES = "trainer.log_train_generations and trainer.rollout_data_dir show the samples"


def signs_of(batch: DataProto, ctx: StepContext) -> dict[str, str]:
    """Signs in a step of RL of a run that cannot learn; empty if there are none.

    Args:
        batch: as `learn` leaves it, with token_level_scores, response_mask, advantages (B, T).
    """
    signs: dict[str, str] = {}
    mask = batch.tensors.get(correction.KEPT_MASK, batch.tensors["response_mask"])
    if not mask.any():
        return {
            "response_mask": "no token of any sample was trained on. Every sample was masked: it could not be scored, "
            "was aborted, or was rejected. reward/unscorable, training/aborted_samples and rollout_corr/* say which"
        }
    lengths = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :].sum(-1)
    signs |= _of_lengths(lengths, batch, ctx)
    signs |= _of_rewards(batch, ctx.metrics.values())
    signs |= _of_update(ctx, explained="critic/score" in signs or "training/zero_advantage_groups" in signs)
    entropy = _entropy(batch, ctx)
    if entropy < NO_ENTROPY:
        signs["actor/entropy"] = (
            f"the policy was certain of every token (entropy {entropy:.1e}), so the samples of a prompt do not differ. "
            "It has collapsed, or began so: a lower actor_rollout_ref.actor.optim.lr, a KL to the reference "
            f"(actor_rollout_ref.actor.use_kl_loss) or a higher actor_rollout_ref.rollout.temperature keep it "
            f"diverse; {SAMPLES}"
        )
    return signs


def _of_lengths(lengths: torch.Tensor, batch: DataProto, ctx: StepContext) -> dict[str, str]:
    limit, rollout = ctx.config.data.max_response_length, ctx.config.actor_rollout_ref.rollout
    if limit > 1 and bool((lengths <= 1).all()):
        return {
            "response_length/max": "every answer was empty: it ended with its first token. The policy has collapsed, "
            f"or the prompt makes the model end at once (its chat template, the end token); {SAMPLES}"
        }
    reasons = batch.non_tensor_batch.get("finish_reason")
    if reasons is not None and not rollout.ignore_eos and bool((reasons == "length").all()):
        return {
            "response_length/clip_ratio": "every sample was cut off by data.max_response_length or, with tools or an "
            "environment, by its turns, so no answer was complete when it was scored. The limit is too small, or the "
            f"model never ends its turn (its chat template, the end token); {SAMPLES}"
        }
    return {}


def _of_rewards(batch: DataProto, metrics: Mapping[str, float]) -> dict[str, str]:
    batch = last_rows(batch)
    counted = ~group_filter.out_of_statistics(batch)
    scores = batch.tensors["token_level_scores"].double().sum(-1).numpy()[counted]
    if len(scores) > 1 and np.ptp(scores) <= SAME:
        return {
            "critic/score": f"every sample scored {scores[0]:g}, so nothing tells a good answer from a bad one. The "
            "reward looks for another form of answer or another type of ground truth than there is, or the task is too "
            f"hard or too easy for this model; {SAMPLES}, and `python -m verl.rewards.check` runs the reward on data"
        }
    if metrics.get("training/zero_advantage_groups") == 1.0:
        return {
            "training/zero_advantage_groups": "the samples of each prompt scored the same, so no group had an "
            "advantage. Prompts are too hard or too easy for this model, or its samples do not differ: a larger "
            f"actor_rollout_ref.rollout.n, a higher actor_rollout_ref.rollout.temperature or other data; {SAMPLES}"
        }
    return {}


def _of_update(ctx: StepContext, explained: bool) -> dict[str, str]:
    if ctx.step < ctx.config.trainer.critic_warmup:
        return {}
    metrics = ctx.metrics.values()
    if metrics.get("actor/lr") == 0.0:
        return {"actor/lr": "the learning rate was 0, so no weight has moved: look at actor_rollout_ref.actor.optim"}
    if metrics.get("actor/grad_norm") == 0.0 and not explained:
        return {
            "actor/grad_norm": "the gradient of the policy was 0, so no weight has moved. All advantages are 0, every "
            "token is clipped (actor/pg_clipfrac), or the loss does not reach the weights that are trained"
        }
    return {}


def _entropy(batch: DataProto, ctx: StepContext) -> float:
    """Of the policy in nats per token, or its estimate from the sampler's log-probs."""
    entropy = ctx.metrics.values().get("actor/entropy")
    if entropy is not None:
        return entropy
    if "rollout_log_probs" not in batch.tensors.keys() or not ctx.config.actor_rollout_ref.rollout.do_sample:
        return math.inf
    mask = batch.tensors["response_mask"].bool()
    return -batch.tensors["rollout_log_probs"][mask].mean().item()
