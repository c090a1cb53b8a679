"""After each weight sync to a sampler with rounded weights: are its log-probs near the trainer's?

Rounding moves every log-prob a little. A scale that is wrong, or a layer that kept old weights, moves them further, and
nothing else would say so: the samples would only be those of another policy.
"""

from __future__ import annotations

import math

import torch

from verl.errors import RolloutError
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base import collected
from verl.trainer.ppo.context import StepContext
from verl.workers.options import InferOptions
from verl.workers.roles import Roles
from verl.workers.sampling import SamplingWorker

KEY = "actor_rollout_ref.rollout.quantization_tolerance"


def check(roles: Roles, ctx: StepContext, version: int) -> None:
    """Compare what every replica reports of a few tokens that it draws with what the trainer computes for them.

    Raises:
        RolloutError: a replica is further away than ``rollout.quantization_tolerance``.
    """
    rollout = ctx.config.actor_rollout_ref.rollout
    if rollout.quantization is None:
        return
    with ctx.timed("check_weights"):
        drawn = collected(roles["rollout"].group, SamplingWorker.probe)(version)
        ctx.metrics.merge(drawn.meta_info.pop("metrics"))
        padded, pad = pad_dataproto_to_divisor(drawn, roles["actor"].num_parts)
        made = unpad_dataproto(roles["actor"].infer(padded, InferOptions()), pad)
        compare(drawn, made, rollout.quantization_tolerance, ctx)


def compare(drawn: DataProto, made: DataProto, most: float, ctx: StepContext) -> None:
    """Report the mean difference of the replica that is furthest away, in nats, and the largest of all.

    Args:
        drawn: rollout_log_probs and response_mask (B, T), and the column ``replica``.
        made: log_probs (B, T), the trainer's.
        most: bound of that mean.
    """
    differences = (made.tensors["log_probs"] - drawn.tensors["rollout_log_probs"]).abs()
    mask, names = drawn.tensors["response_mask"].bool(), drawn.non_tensor_batch["replica"]
    rows_of = {name: mask & torch.from_numpy(names == name)[:, None] for name in dict.fromkeys(names)}
    means = {name: differences[rows].mean().item() for name, rows in rows_of.items()}
    furthest = max(means, key=lambda name: math.inf if math.isnan(means[name]) else means[name])
    ctx.metrics.add("training/reload_log_probs_diff_mean", means[furthest], "last")
    ctx.metrics.add("training/reload_log_probs_diff_max", differences[mask].max().item(), "last")
    if not means[furthest] <= most:
        raise RolloutError(
            f"with the weights of step {ctx.step}, log-probs of {furthest} are {means[furthest]:.3g} away from the "
            f"trainer's, on average over {int(mask.sum())} tokens: a scale or a layer of the sampler is wrong, or this "
            "model cannot be rounded so coarsely",
            key=KEY,
            got=round(means[furthest], 6),
            allowed=f"at most {most}",
            fix="Set actor_rollout_ref.rollout.quantization=null to see whether rounding is the cause; raise the "
            "tolerance if it is, and the rollout correction makes up for it.",
        )
