"""The stages that `step.collect` and `step.learn` name, one function each.

A stage takes a batch and adds declared fields to it; it never decides what comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from verl.algorithms.advantages import call_estimator
from verl.algorithms.balancing import balance_within_mini_batches, log_seqlen_unbalance, members_of
from verl.algorithms.groups import same_outcome
from verl.algorithms.kl import KLController, apply_kl_penalty
from verl.algorithms.masked import masked_mean
from verl.algorithms.micro_batches import mini_batches
from verl.config.schema.root import of_estimator, updates_once
from verl.metrics import MetricSet
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.lazy import scattered_rows, zero_rows
from verl.single_controller.base import by_rank
from verl.trainer.ppo import correction, experts, group_filter, learned_rows, sample_rows, teachers
from verl.trainer.ppo.context import StepContext
from verl.trainer.ppo.scoring import measure_parts, score_samples, tell_missing_parts
from verl.workers.model import ModelWorker
from verl.workers.options import InferOptions, TrainOptions
from verl.workers.roles import RoleHandle, Roles


def generate(rows: DataProto, roles: Roles, ctx: StepContext) -> DataProto:
    """A response to each row of `repeated`; adds responses, masks, rollout log-probs and token versions."""
    return sample(rows, roles["rollout"], ctx.metrics)


def repeated(prompts: DataProto, ctx: StepContext) -> DataProto:
    """``rollout.n`` adjacent rows per prompt, one for each response."""
    rows = rows_of(prompts, ctx.run.samples_per_prompt)
    rows.meta_info = {**rows.meta_info, "global_steps": ctx.step, "validate": False}
    return rows


def rows_of(prompts: DataProto, each: int) -> DataProto:
    """``each`` adjacent rows per prompt, with their ``sample_index``."""
    rows = prompts.repeat(each, interleave=True)
    number_samples(rows)
    return rows


def sample(prompts: DataProto, rollout: RoleHandle, metrics: MetricSet) -> DataProto:
    """One call of the sampler for all rows of ``prompts``; the rows keep their order."""
    number_samples(prompts)
    padded, pad = pad_dataproto_to_divisor(prompts, rollout.num_parts)
    return with_answers(prompts, unpad_dataproto(rollout.sample(padded), pad), metrics)


def with_answers(prompts: DataProto, made: DataProto, metrics: MetricSet) -> DataProto:
    """The rows with what the sampler made of them; its metrics are added to ``metrics``."""
    for name, parts in made.meta_info.pop("metrics", {}).items():
        for metric in parts if isinstance(parts, list) else [parts]:  # a list where ranks were put together
            metrics.merge({name: metric})
    for name in ("multi_modal_data", "multi_modal_inputs"):
        if name in made.non_tensor_batch:  # with the images of later turns
            prompts.non_tensor_batch.pop(name, None)
    return prompts.union(made)


def number_samples(prompts: DataProto) -> None:
    """Write ``sample_index``: the samples of a prompt draw different numbers, whichever workers they go to."""
    uids = prompts.non_tensor_batch.get("uid")
    if uids is None or "sample_index" in prompts.non_tensor_batch:
        return
    seen: Counter[str] = Counter()
    index = np.empty(len(uids), dtype=object)
    for row, uid in enumerate(uids):
        index[row] = seen[uid]
        seen[uid] += 1
    prompts.non_tensor_batch["sample_index"] = index


def score(samples: DataProto, roles: Roles, ctx: StepContext) -> DataProto:
    """Adds token_level_scores (B, T); a sample that could not be scored is masked and leaves its group's baseline.

    So is an aborted one (``finish_reason`` abort): it is no answer, right or wrong.
    """
    scored = score_samples(samples, roles, ctx.run.reward, ctx.metrics)
    samples.tensors["token_level_scores"] = scored["reward_tensor"]
    details = scored.get("reward_extra_info", {})
    for name, values in details.items():
        samples.non_tensor_batch[name] = np.array(values, dtype=object)
    samples.meta_info = {**samples.meta_info, group_filter.DETAILS: list(details)}
    measure_parts(details, ctx.config.algorithm.gdpo_reward_keys or (), ctx.metrics)
    ctx.metrics.merge(scored.get("metrics", {}))
    left_out = np.array(scored.get("unscorable", [False] * len(samples)), dtype=bool)
    aborted = samples.non_tensor_batch.get("finish_reason", np.full(len(samples), "")) == "abort"
    if aborted.any():
        ctx.metrics.add("training/aborted_samples", int(aborted.sum()), "sum")
    leave_out(samples, left_out | aborted)
    out = samples.non_tensor_batch["unscorable"].tolist()
    tell_missing_parts(details, ctx.config.algorithm.gdpo_reward_keys or (), out)
    return samples


def leave_out(samples: DataProto, rows: np.ndarray) -> None:
    """Mask rows (B,) bool for the loss, and note in ``unscorable`` that they are in no baseline either."""
    samples.non_tensor_batch["unscorable"] = group_filter.out_of_statistics(samples) | rows
    if rows.any():  # a new tensor, because what comes from workers may be memory that is shared and read-only
        samples.tensors["response_mask"] = zero_rows(samples.tensors["response_mask"], rows)


def add_reward_baselines(samples: DataProto, prompts: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds reward_baselines (B,): the reward of one greedy response to each prompt (ReMax, arXiv 2310.10505).

    The samples of a prompt whose greedy response could not be scored are left out; prompts without samples get none.
    """
    prompts = _prompts_of(samples, prompts, ctx.run.samples_per_prompt)
    columns = {name: column for name, column in prompts.non_tensor_batch.items() if name != "sample_index"}
    inputs = DataProto(prompts.batch, columns, {**prompts.meta_info, "global_steps": ctx.step, "do_sample": False})
    greedy = sample(inputs, roles["rollout"], MetricSet())
    scored = score_samples(greedy, roles, ctx.run.reward, MetricSet())
    rewards = scored["reward_tensor"].sum(-1)
    failed = np.array(scored.get("unscorable", [False] * len(greedy)), dtype=bool)
    if not failed.all():
        counted = rewards[torch.from_numpy(~failed)]
        ctx.metrics.add("critic/reward_baselines/mean", counted.mean().item(), weight=len(counted))
    samples.tensors["reward_baselines"] = rewards.repeat_interleave(ctx.run.samples_per_prompt)
    leave_out(samples, np.repeat(failed, ctx.run.samples_per_prompt))


def _prompts_of(samples: DataProto, prompts: DataProto, each: int) -> DataProto:
    """The prompts of the samples, in their order; as the samples have them where they are of another step."""
    uids = samples.non_tensor_batch["uid"][::each].tolist()
    places = {uid: row for row, uid in enumerate(prompts.non_tensor_batch["uid"])}
    if set(uids) <= set(places):
        return prompts if len(uids) == len(places) else prompts.select_idxs([places[uid] for uid in uids])
    columns = [name for name in prompts.non_tensor_batch if name in samples.non_tensor_batch]
    return samples.select_idxs(range(0, len(samples), each)).select([], columns, [])


def flat_groups(samples: DataProto, groups: np.ndarray, ctx: StepContext) -> tuple[np.ndarray, np.ndarray]:
    """(G,) bool: groups that dynamic sampling drops, since all their samples have the same outcome.

    And (G,) bool: groups of which two or more samples count, which says something of their prompts.

    Args:
        groups: (B,) int, of each row, 0 .. G - 1.
    """
    algorithm = ctx.config.algorithm
    rule = algorithm.filter_groups
    metrics = [rule.metric if rule.enable else None]
    listed = of_estimator(ctx.config).rewards
    if rule.metric is None and listed is not None and algorithm[listed]:
        metrics = list(algorithm[listed])  # one varying reward is enough
    columns = [group_filter.outcomes(samples, metric) for metric in metrics]
    left_out = group_filter.out_of_statistics(samples)
    flat, is_compared = same_outcome(groups, columns, left_out), np.bincount(groups, weights=~left_out) > 1
    ctx.metrics.add("training/zero_variance_groups", float(flat.mean()), weight=len(flat))
    if not rule.enable:
        return np.zeros_like(flat), is_compared
    ctx.metrics.add("training/filter_groups/dropped_groups", int(flat.sum()), "sum")
    ctx.metrics.add("training/filter_groups/evicted_samples", int(flat[groups].sum()), "sum")
    return flat, is_compared


def measure_balance(batches: Sequence[DataProto], roles: Roles, ctx: StepContext) -> None:
    """Tokens of each of the actor's data-parallel ranks: ``global_seqlen/*``, over all batches of a step.

    ``min`` and ``max`` are those of the rows cut as they are, as passes without gradient are; ``balanced_*`` those of
    the mini-batches of one epoch, as updates split them.
    """
    role, all_lengths = roles["actor"], list[int]()
    shares: list[list[int]] = [[] for _ in range(role.num_parts)]
    for batch in batches:
        for rows in rows_of_updates(batch, role, ctx, epochs=1):
            for share, piece in zip(shares, np.array_split(rows, role.num_parts)):
                share += (piece + len(all_lengths)).tolist()
        all_lengths += batch.tensors["attention_mask"].sum(-1).tolist()
    ctx.metrics.add("perf/total_num_tokens", sum(all_lengths), "last")
    for name, value in log_seqlen_unbalance(all_lengths, shares, "global_seqlen").items():
        ctx.metrics.add(name, value, "last")


def infer(batch: DataProto, role: RoleHandle, ctx: StepContext, *outputs: str) -> TensorDictBase:
    """One pass of a model without a gradient; the outputs by name, (B, T, ...)."""
    return role.infer(experts.for_pass(batch, role.name, ctx), InferOptions(outputs)).tensors


def add_old_log_prob(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds old_log_probs, and reports the entropy and the distance to the sampler's own log-probs.

    Also sum_pi_squared (B, T), the sum of squared probabilities, where the estimator reads it, and ref_kl (B, T), the
    KL to the reference over the whole vocabulary, where the reward is charged with it.
    """
    if ctx.config.algorithm.rollout_correction.bypass_mode:
        correction.use_rollout_log_probs(batch)
        return
    columns = ctx.run.outputs_read
    made = infer(batch, roles["actor"], ctx, "log_probs", "entropy", *columns)
    for name, column in columns.items():
        batch.tensors[column] = made[name]
    if "entropy" in made.keys():
        mask = batch.tensors["response_mask"]
        ctx.metrics.add("actor/entropy", masked_mean(made["entropy"], mask).item(), weight=int(mask.sum()))
        if ctx.run.dumps_tokens:
            batch.tensors["entropys"] = made["entropy"]
    batch.tensors["old_log_probs"] = made["log_probs"]
    correction.measure_sampler(batch, ctx)


def add_ref_log_prob(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds ref_log_prob (B, T), the log-probs of the reference policy."""
    batch.tensors["ref_log_prob"] = infer(batch, roles["ref"], ctx, "log_probs")["log_probs"]


def add_values(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds values (B, T), the critic's estimates before each response token."""
    batch.tensors["values"] = infer(batch, roles["critic"], ctx, "values")["values"]


def measure_chunks(batch: DataProto, ctx: StepContext) -> None:
    """The spreads and quantiles of a step that learned from several batches: over all their samples, not the last."""
    if ctx.run.needs_old_log_prob:
        correction.measure_sampler(batch, ctx)
    correct_rollout(batch.select(), ctx)  # what was trained on has its weights


def correct_rollout(batch: DataProto, ctx: StepContext) -> None:
    """Adds rollout_is_weights and the mask after rejection, where ``algorithm.rollout_*`` asks for them."""
    for name, value in correction.correct(batch, ctx.config.algorithm).items():
        ctx.metrics.add(name, value, "last")


def add_advantages(batch: DataProto, ctx: StepContext) -> None:
    """Adds token_level_rewards, advantages and returns; unscorable samples get zeros and are in no baseline."""
    algorithm = ctx.config.algorithm
    if algorithm.use_kl_in_reward:
        charged = charge_kl(batch, ctx.run.kl_controller, algorithm.kl_penalty)
        filled = int(sample_rows.per_sample(batch, batch.tensors["response_mask"].sum(-1)).count_nonzero())
        ctx.metrics.add("actor/reward_kl_penalty", charged.pop("actor/reward_kl_penalty"), weight=filled)
        for name, value in charged.items():
            ctx.metrics.add(name, value, "last")
    else:
        batch.tensors["token_level_rewards"] = batch.tensors["token_level_scores"]
    compute_advantage(batch, ctx.run.estimator, algorithm)
    learned_rows.mark_right_answers(batch, ctx)
    number = int(group_filter.group_numbers(batch).max()) + 1
    ctx.metrics.add("training/zero_advantage_groups", group_filter.share_without_advantage(batch), weight=number)


def charge_kl(batch: DataProto, controller: KLController, kind: str = "kl") -> dict[str, float]:
    """Adds token_level_rewards: scores minus the KL to the reference; returns its metrics, which are over samples."""
    trajectories = sample_rows.OneRowEach.of(batch)
    tensors = batch.tensors if trajectories is None else trajectories.batch(batch).tensors
    rewards, metrics = apply_kl_penalty(
        tensors["token_level_scores"],
        tensors["old_log_probs"],
        tensors.get("ref_log_prob", None),
        tensors["response_mask"],
        controller,
        kind,
        tensors.get("ref_kl", None) if kind == "full" else None,
    )
    batch.tensors["token_level_rewards"] = rewards if trajectories is None else trajectories.parted(rewards)
    return metrics


def compute_advantage(batch: DataProto, estimator: Any, algorithm: Any) -> None:
    """Call the estimator on the scorable rows and write advantages and returns (B, T)."""
    unscorable = batch.non_tensor_batch.get("unscorable")
    rows = np.arange(len(batch)) if unscorable is None else np.flatnonzero(~unscorable.astype(bool))
    part = batch if len(rows) == len(batch) else batch.select_idxs(rows)
    trajectories = sample_rows.OneRowEach.of(part)
    part = part if trajectories is None else trajectories.batch(part)
    inputs = {name: part.tensors[name] for name in part.tensors.keys()}
    advantages, returns = call_estimator(
        estimator,
        **inputs,
        index=part.non_tensor_batch.get("uid"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        singleton=algorithm.singleton,
        config=algorithm,
        non_tensor_batch=part.non_tensor_batch,
    )
    for name, values in (("advantages", advantages), ("returns", returns)):
        values = values if trajectories is None else trajectories.parted(values)
        batch.tensors[name] = scattered_rows(values.float(), rows, len(batch))


TRAIN_KEYS = (
    "prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "advantages", "returns",
    "values", "old_log_probs", "ref_log_prob", "rollout_log_probs", "rollout_is_weights", "positive",
    experts.COLUMN, *teachers.COLUMNS,
)  # fmt: skip
TRAIN_COLUMNS = ("multi_modal_inputs",)


def train(role: RoleHandle, batch: DataProto, ctx: StepContext, keys: Sequence[str] = TRAIN_KEYS) -> None:
    """Every optimizer step of one role on this batch.

    Mini-batches are formed here, from the sample order, so their rows do not depend on the number of ranks; inside each
    one the rows are split so that every rank gets as many tokens. The rows of a pair stay together.
    """
    # Where there is one update the loss takes its own log-probs as the old ones: a ratio of exactly 1, to the last bit
    # the same whether or not another reader needs old log-probs.
    unread = {"old_log_probs"} if updates_once(ctx.config) else set()
    batch = experts.for_update(batch, role.name, ctx)
    present = [key for key in keys if key in batch.tensors.keys() and key not in unread]
    columns = [name for name in TRAIN_COLUMNS if name in batch.non_tensor_batch]
    data = batch.select(batch_keys=present, non_tensor_batch_keys=columns)
    if correction.KEPT_MASK in batch.tensors.keys():
        data.tensors["response_mask"] = batch.tensors[correction.KEPT_MASK]
    data.meta_info = {"global_steps": ctx.step}
    plan = list(rows_of_updates(batch, role, ctx, role.epochs, pairs=ctx.run.learns_from_pairs))
    samples = sample_rows.sample_numbers(batch)
    for number, rows in enumerate(plan, start=1):
        mini_batch = data.select_idxs(rows)
        sample_rows.mask_repeated(mini_batch, rows)
        if samples is not None:
            sample_rows.as_sequences(mini_batch, rows, samples)
        learned_rows.weigh_right_answers(mini_batch)
        goes_on = ctx.goes_on or number < len(plan)
        metrics = role.train(mini_batch, TrainOptions(more_updates=goes_on, is_mini_batch=True))
        ctx.run.spans.progress()
        ctx.run.updates.add(role.name, metrics.values())
        # A name with its own prefix (rollout_corr/kl) keeps it.
        ctx.metrics.merge({name if "/" in name else f"{role.name}/{name}": m for name, m in metrics.items()})


def move_reference(roles: Roles, ctx: StepContext) -> None:
    """The reference policy takes over the actor's weights, where both are held."""
    by_rank(roles["ref"].group, ModelWorker.update_from)("actor")
    ctx.metrics.add("training/ref_updated", 1.0, "last")


def rows_of_updates(
    batch: DataProto, role: RoleHandle, ctx: StepContext, epochs: int, pairs: bool = False
) -> Iterator[list[int]]:
    """The rows of each mini-batch, in the order in which ranks get them, each rank as many tokens as the others.

    Rows of a pair stay on one rank. Rows of a prompt that is computed once do where prompts fit the ranks. A mini-batch
    has all trajectories of its samples. Where its rows do not divide by the ranks, the shortest is repeated.
    """
    each, together = (2, 2) if pairs else (ctx.run.samples_per_prompt, 1)
    lengths, groups = batch.tensors["attention_mask"].sum(-1).tolist(), None
    if pairs:
        groups = [row // together for row in range(len(batch))]
    elif ctx.config.actor_rollout_ref.actor.use_prefix_grouper and "uid" in batch.non_tensor_batch:
        groups = list(batch.non_tensor_batch["uid"])
    balances = ctx.config.trainer.balance_batch and role.num_parts > 1
    size, seed = role.mini_batch_size * each, role.seed + ctx.step
    samples = sample_rows.sample_numbers(batch)
    members = None if samples is None else members_of(samples.tolist())
    for rows in mini_batches(len(members or batch), size, epochs, role.shuffle, seed, together):
        if members is not None:
            rows = [row for sample in rows for row in members[sample]]
        if not pairs:
            rows = rows + [min(rows, key=lengths.__getitem__)] * (-len(rows) % role.num_parts)
        if balances:
            ids = None if groups is None else [groups[row] for row in rows]
            order = balance_within_mini_batches(
                [lengths[row] for row in rows], len(rows), role.num_parts, group_ids=ids
            )
            rows = [rows[place] for place in order]
        yield rows
