"""Exploration around the library's loop: a frozen model more, and a stage between samples and advantages."""

from __future__ import annotations

import dataclasses

import torch

from recipe.rep_exp.core import BONUS, leverages, paid_bonus, random_projection
from recipe.rep_exp.states import STATES, with_states_of_tokens
from verl.config import PPOTrainerConfig
from verl.protocol import DataProto
from verl.trainer.models import reference
from verl.trainer.ppo import group_filter
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.schedules import SYNC
from verl.workers.model import ModelRole
from verl.workers.options import InferOptions
from verl.workers.roles import Roles

MODEL = "representations"


def add_bonus(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds `BONUS` (B,); a row that could not be scored neither earns one nor is compared with.

    Metrics: ``rep_exp/bonus``, the mean over the rows with a score, also where it is not paid; ``rep_exp/paid``, the
    share of them whose prompt has a right answer.
    """
    algorithm, index = ctx.config.algorithm, list(batch.non_tensor_batch["uid"])
    with ctx.timed(MODEL):
        states = roles[MODEL].infer(with_states_of_tokens(batch), InferOptions((STATES,))).tensors[STATES].double()
    if algorithm.rep_exp_dim:
        seed = [ctx.config.trainer.seed, ctx.step]
        states = states @ random_projection(states.shape[-1], algorithm.rep_exp_dim, seed)
    counted = torch.from_numpy(~group_filter.out_of_statistics(batch))
    right = torch.from_numpy(group_filter.accuracies(batch)) > 0
    bonus = leverages(states, index, counted, algorithm.rep_exp_lambda)
    batch.tensors[BONUS] = paid_bonus(bonus, right, index, counted).float()
    if counted.any():
        shares = paid_bonus(torch.ones_like(bonus), right, index, counted)
        for name, values in (("bonus", bonus), ("paid", shares)):
            ctx.metrics.add(f"rep_exp/{name}", values[counted].mean().item(), weight=int(counted.sum()))


def models(config: PPOTrainerConfig) -> list[ModelRole]:
    """The initial policy, which does not learn; it runs with the settings of ``actor_rollout_ref.ref``."""
    return [
        dataclasses.replace(
            reference(config),
            name=MODEL,
            strategy="recipe.rep_exp.states:StatesEngine",
            kind="value",
            share_prompts=False,
            reference_of="",
            router_replay="disabled",
            has_tokenizer=False,
        )
    ]


RepExpSchedule = dataclasses.replace(SYNC, stages=(add_bonus,), models=models)
"""The synchronous schedule with the bonus."""
