"""One iteration of RL training: this file is the algorithm, everything else serves it.

`collect` gives the prompts of a batch their scored responses; `learn` turns a batch into one update of the critic and
the actor. Between the two is the stream of groups (`verl.trainer.ppo.stream`), which admits prompts, filters groups and
holds those that wait; a schedule says how far it may be ahead. Each of the two writes into its context `ctx`, and those
of two steps may be open at once. Shapes: B rows (prompts x `rollout.n`), T response tokens; a comment at each stage
names what it adds to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl.protocol import DataProto
from verl.trainer.ppo import learned_rows, stages, teachers
from verl.trainer.ppo.context import StepContext
from verl.workers.roles import Roles

Stage = Callable[[DataProto, Roles, StepContext], None]
"""Adds declared fields to a batch."""
Generate = Callable[[DataProto, Roles, StepContext], DataProto]
"""From prompts to samples."""


def collect(prompts: DataProto, roles: Roles, ctx: StepContext, generate: Generate) -> DataProto:
    """The scored samples of a batch of prompts."""
    with ctx.timed("gen"):
        samples = generate(prompts, roles, ctx)  # responses, response_mask, rollout_log_probs, ...
    with ctx.timed("reward"):
        stages.score(samples, roles, ctx)  # token_level_scores; unscorable samples are masked
    if ctx.run.needs_reward_baselines:
        with ctx.timed("gen_max"):
            stages.add_reward_baselines(samples, prompts, roles, ctx)  # reward_baselines
    return samples


def learn(batch: DataProto, roles: Roles, ctx: StepContext, more: Sequence[Stage] = ()) -> DataProto:
    """Estimate advantages on the batch, then update the critic and the actor; ``more`` are stages of a recipe."""
    if ctx.run.needs_old_log_prob or ctx.run.bypasses_old_log_prob:
        with ctx.timed("old_log_prob"):
            stages.add_old_log_prob(batch, roles, ctx)  # old_log_probs
    if "ref" in roles and ctx.run.needs_ref_log_prob:
        with ctx.timed("ref"):
            stages.add_ref_log_prob(batch, roles, ctx)  # ref_log_prob
    if ctx.config.distillation.enabled:
        with ctx.timed("teacher"):
            teachers.add_teacher_log_probs(batch, roles, ctx)  # teacher_log_probs, or those of several tokens
    if "critic" in roles:
        with ctx.timed("values"):
            stages.add_values(batch, roles, ctx)  # values
    for stage in more:
        stage(batch, roles, ctx)

    with ctx.timed("rollout_correction"):
        stages.correct_rollout(batch, ctx)  # rollout_is_weights, rollout_rs_mask
    with ctx.timed("adv"):
        stages.add_advantages(batch, ctx)  # token_level_rewards, advantages, returns
    rows = learned_rows.rows_to_train(batch, ctx)  # all; PF-PPO: drawn by their scores; losses on pairs: best and worst

    if "critic" in roles:
        with ctx.timed("update_critic"):
            stages.train(roles["critic"], rows, ctx)
    if ctx.step >= ctx.config.trainer.critic_warmup:
        with ctx.timed("update_actor"):
            stages.train(roles["actor"], rows, ctx)
    if "ref" in roles and ctx.moves_reference:
        with ctx.timed("update_ref"):
            stages.move_reference(roles, ctx)
    return batch
