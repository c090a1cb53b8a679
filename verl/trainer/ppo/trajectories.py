"""Several trajectories of one sample: before and after a compaction, or of sub-agents with separate contexts.

Until a step trains on it, a sample is one row: its last trajectory, which is scored, with the earlier ones in the
column ``trajectories_before``. Queue, filters, ledger and checkpoints count samples. `as_rows` then makes a row of each
trajectory (`verl.trainer.ppo.sample_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agent_loop.batch import SEVERAL_WITH_PICTURES, to_batch
from verl.agent_loop.choose import KEY, read_loops
from verl.agent_loop.unfinished import output_of
from verl.config import PPOTrainerConfig
from verl.config.schema.root import of_loss, of_schedule
from verl.errors import ConfigError, NotBuiltError
from verl.protocol import DataProto
from verl.protocol.columns import object_array
from verl.protocol.fields import BEFORE, TRAJECTORY_NUMBER, TURN_STATES, declared_field
from verl.protocol.lazy import row_bounds, zero_rows
from verl.registry import POLICY_LOSSES
from verl.trainer.ppo import group_filter
from verl.trainer.ppo.context import StepContext

Plain = Mapping[str, Any]
"""A trajectory, as `verl.agent_loop.unfinished.plain_output` makes it."""


def as_rows(batch: DataProto, ctx: StepContext) -> DataProto:
    """A row for each trajectory; the earlier ones of a sample precede the row with its score, with its other columns.

    Raises:
        ConfigError: the run has a method that takes one row for one sample.
    """
    earlier = list(_earlier(batch))
    if BEFORE in batch.non_tensor_batch:
        batch = batch.select()
        del batch.non_tensor_batch[BEFORE]
    if not earlier:
        return batch
    _check(ctx.config, has_states=TURN_STATES in batch.non_tensor_batch)
    owners = np.array([row for row, plain in earlier for _ in plain])
    made = _rows_of([one for _, plain in earlier for one in plain], batch, owners)
    names = made.non_tensor_batch.keys() - batch.non_tensor_batch.keys()
    batch.non_tensor_batch |= {name: np.full(len(batch), None, dtype=object) for name in sorted(names)}
    samples = np.concatenate([owners, np.arange(len(batch))])
    order = np.argsort(samples, kind="stable")
    rows = DataProto.concat([made, batch]).select_idxs(order)
    samples = samples[order]
    numbers = np.arange(len(samples)) - np.searchsorted(samples, samples)
    rows.non_tensor_batch[TRAJECTORY_NUMBER] = object_array(numbers.tolist())
    ctx.metrics.add("training/trajectories_per_sample/mean", len(rows) / len(batch), weight=len(batch))
    ctx.metrics.add("training/trajectories_per_sample/max", int(numbers.max()) + 1, "max")
    return rows


def check_branches(config: PPOTrainerConfig, sees: bool) -> None:
    """The same before the first step, for agents at the endpoint whose branches are rows.

    Args:
        sees: whether the model has a processor of pictures.
    """
    entries = read_loops(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    if any(entry.get("branches") == "rows" for entry in entries.values()):
        if sees:
            raise NotBuiltError(SEVERAL_WITH_PICTURES, key=f"{KEY}, branches", got="rows", allowed="error, last")
        _check(config, has_states=False)


def _check(config: PPOTrainerConfig, has_states: bool) -> None:
    algorithm, loss, teaching = config.algorithm, of_loss(config), config.distillation.distillation_loss
    of_teachers = teaching.use_policy_gradient and POLICY_LOSSES.facts(teaching.policy_loss_mode).one_row
    methods = {
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "actor_rollout_ref.actor.policy_loss.loss_mode": loss.pairs or loss.one_row,
        "distillation.distillation_loss.policy_loss_mode": config.distillation.enabled and of_teachers,
        "trainer.v1.trainer_mode": of_schedule(config).one_row,
        "algorithm.adv_estimator": algorithm.adv_estimator == "gigpo" and has_states,
    }
    for key, takes_rows in methods.items():
        if takes_rows:
            raise ConfigError(
                "this method takes each row for a sample, and the agent loop returned several trajectories of one",
                key=key,
                fix="Turn it off, or let the loop return the last trajectory alone.",
            )


def _rows_of(plain: Sequence[Plain], batch: DataProto, owners: np.ndarray) -> DataProto:
    """Rows of earlier trajectories: with their tokens, the other columns of their samples, and no score.

    Args:
        owners: (N,) the row of each one's sample in the batch.
    """
    of_samples, outputs = batch.select_idxs(owners), [output_of(one) for one in plain]
    pad = int(batch.meta_info.get("pad_token_id", 0))
    made = to_batch(outputs, pad, with_log_probs="rollout_log_probs" in batch.tensors.keys())
    response, total = made.tensors["responses"].shape[-1], made.tensors["input_ids"].shape[-1]
    widths = {"P": total - response, "T": response, "P+T": total}
    tensors: dict[str, Tensor] = {}
    for name in batch.tensors.keys():
        field, column = declared_field(name), of_samples.tensors[name]
        if name in made.tensors.keys():
            tensors[name] = made.tensors[name]
        elif field is None or field.time_axis is None:
            tensors[name] = column
        else:
            shape = list(column.shape)
            shape[field.time_axis] = widths[str(field.time_symbol)]
            tensors[name] = torch.full(shape, float(field.padding_value), dtype=column.dtype)
    left_out = group_filter.out_of_statistics(of_samples)
    tensors["response_mask"] = zero_rows(tensors["response_mask"], left_out)
    details = batch.meta_info.get(group_filter.DETAILS, ())
    columns = {name: column for name, column in made.non_tensor_batch.items() if name not in details}
    reasons = columns["finish_reason"]
    reasons[left_out] = of_samples.non_tensor_batch.get("finish_reason", reasons)[left_out]
    return DataProto.from_dict(
        tensors=tensors, non_tensors={**of_samples.non_tensor_batch, **columns}, meta_info=batch.meta_info
    )


def _earlier(samples: DataProto) -> Iterator[tuple[int, Sequence[Plain]]]:
    """Each row that has earlier trajectories, with these."""
    for row, plain in enumerate(samples.non_tensor_batch.get(BEFORE, ())):
        if plain:
            yield row, plain


def version_bounds(samples: DataProto) -> tuple[Tensor, Tensor]:
    """(B,) each: as `row_bounds` of ``token_versions``, over all trajectories of a sample."""
    oldest, newest = row_bounds(samples.tensors["token_versions"])
    if BEFORE in samples.non_tensor_batch:
        oldest, newest = oldest.clone(), newest.clone()
    for row, plain in _earlier(samples):
        drawn = [version for one in plain for version in one["token_versions"] or () if version >= 0]
        oldest[row] = min([int(oldest[row]), *drawn])
        newest[row] = max([int(newest[row]), *drawn])
    return oldest, newest


def sampled_tokens(samples: DataProto) -> list[int]:
    """(B,) the tokens that the policy drew for each sample."""
    counts: list[int] = samples.tensors["response_mask"].sum(-1).tolist()
    for row, plain in _earlier(samples):
        counts[row] += sum(sum(one["response_mask"]) for one in plain)
    return counts
