"""How samples get their scores: from a reward model where the run has one, and from the reward manager.

The model's scores are in the batch when the manager is called. The manager decides how to use both: without a
function of the user's the model's score is the reward, a function of the user's reads it and has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.metrics import MetricSet, notice
from verl.protocol import DataProto, declared_field, pad_dataproto_to_divisor, unpad_dataproto
from verl.rewards.managers.rows import EARLY
from verl.single_controller.base import Role
from verl.trainer.ppo.group_filter import SCORE_SUMS
from verl.workers.roles import Roles

RM = str(Role.RewardModel)
SCORE = "rm_score"
READ = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def score_samples(
    samples: DataProto, roles: Roles, reward: Callable[..., dict[str, Any]], metrics: MetricSet
) -> dict[str, Any]:
    """What the reward manager returns for these samples, with ``rm_score`` among the details of each.

    Args:
        metrics: gets ``reward_model/*``.
    """
    scores = add_rm_scores(samples, roles, metrics) if RM in roles else None
    columns = {*samples.non_tensor_batch, *samples.tensors.keys()} - {*samples.meta_info.get("reward_extra_keys", ())}
    scored, label = reward(samples), getattr(reward, "label", type(reward).__name__)
    details = under_free_names(scored.get("reward_extra_info", {}), columns, label)
    if scores is None:
        samples.non_tensor_batch.pop(EARLY, None)  # the manager has read it
    else:
        details.setdefault(SCORE, [score if math.isfinite(score) else None for score in scores])
    return {**scored, "reward_extra_info": details}


def under_free_names(
    details: Mapping[str, Sequence[object]], columns: Collection[str], label: str
) -> dict[str, Sequence[object]]:
    """What a reward function returned besides the scores, under names that are no columns of the run.

    Names may come from the text of an answer: ``finish_reason`` and ``unscorable`` would decide what is trained on.
    A name that means the sum of the scores (`SCORE_SUMS`) is none for a detail, either.

    Args:
        columns: that the batch had before it was scored, without details that came with it; declared ones are the run's
            in any case.
        label: of the function, for the notice.
    """
    free, taken = dict[str, Sequence[object]](), {*columns, *SCORE_SUMS}
    for key, values in details.items():
        name = key
        while name in taken or declared_field(name) is not None or (name != key and name in details):
            name = f"reward_{name}"
        if name != key:
            why = "the name means the score itself" if key in SCORE_SUMS else "a column of that name is the run's"
            stored = "It is stored under the second name, by which filters and estimators may name it"
            notice(f"{label}, key {key!r}", f"-> {name!r}: {why}. {stored}. Return it under another name")
        free[name] = values
        taken.add(name)
    return free


def add_rm_scores(samples: DataProto, roles: Roles, metrics: MetricSet) -> list[float]:
    """Adds ``rm_scores`` (B, T) and the column ``rm_score`` (B,), which is returned: NaN where the model has none."""
    if "rm_scores" in samples.tensors.keys():
        notice("reward.reward_model.enable", "the agent loop's own scores give way to those of the reward model")
        samples.tensors.pop("rm_scores")
    columns = [name for name in ("raw_prompt", "multi_modal_inputs") if name in samples.non_tensor_batch]
    inputs = samples.select(batch_keys=list(READ), non_tensor_batch_keys=columns)
    inputs.meta_info = {}
    role = roles[RM]
    padded, added = pad_dataproto_to_divisor(inputs, role.group.world_size)
    scored = unpad_dataproto(role.score(padded), added)
    samples.tensors["rm_scores"] = scored.tensors["rm_scores"]
    scores = scored.tensors["rm_scores"].sum(-1)
    samples.non_tensor_batch[SCORE] = np.array(scores.tolist(), dtype=object)
    _measure(scores[samples.tensors["response_mask"].bool().any(-1)], metrics)
    cut = scored.non_tensor_batch.get("rm_truncated")
    if cut is not None:
        metrics.add("reward_model/truncated", int(np.sum(cut.astype(bool))), "sum")
    return scores.tolist()


def _measure(scores: torch.Tensor, metrics: MetricSet) -> None:
    """Over the samples that have a response; what the model could not score is only counted."""
    finite = scores[scores.isfinite()]
    metrics.add("reward_model/failed", len(scores) - len(finite), "sum")
    if len(finite):
        metrics.add("reward_model/score/mean", finite.mean().item(), weight=len(finite))
        metrics.add("reward_model/score/max", finite.max().item(), "max")
        metrics.add("reward_model/score/min", finite.min().item(), "min")
        metrics.add("reward_model/score/std", finite.std(correction=0).item(), weight=len(finite))


def measure_parts(details: Mapping[str, Sequence[Any]], keys: Sequence[str], metrics: MetricSet) -> None:
    """``gdpo/<key>/*`` of every reward that is normalised separately, over the samples that have it."""
    for key in keys:
        values = np.array([value for value in details.get(key, ()) if value is not None], dtype=np.float64)
        if not len(values):
            continue
        for name, value in (("mean", values.mean()), ("std", values.std())):
            metrics.add(f"gdpo/{key}/{name}", float(value), weight=len(values))
        metrics.add(f"gdpo/{key}/max", float(values.max()), "max")
        metrics.add(f"gdpo/{key}/min", float(values.min()), "min")


def tell_missing_parts(details: Mapping[str, Sequence[Any]], keys: Sequence[str], left_out: Sequence[bool]) -> None:
    """A notice where samples lack a reward that is normalised separately; those that are left out need none."""
    for key in keys:
        lacking = sum(value is None and not out for value, out in zip(details.get(key, ()), left_out))
        if lacking:
            notice(
                f"algorithm.gdpo_reward_keys ({key})",
                f"{lacking} of {len(left_out)} samples of a batch have no such reward: they are in no baseline, and "
                "their advantage is 0. Let the reward function return it for every answer.",
            )
