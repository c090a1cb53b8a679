"""Trajectories of different lengths -> one padded batch with the declared columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.errors import RolloutError
from verl.metrics import Metric, MetricSet, notice
from verl.models.router_replay import NO_RECORD
from verl.protocol import DataProto
from verl.protocol.fields import BEFORE, TRAJECTORY_NUMBER

OF_RUN = ("unscorable", "learned", "early_reward", "unfinished", "uid", "sample_index", "__row__", BEFORE,
          TRAJECTORY_NUMBER)  # fmt: skip
"""Columns that no loop's ``extra_fields`` may make, as they decide what is trained on."""
MOST_TRAJECTORIES = 64
"""Of a sample; what an agent loop returns beyond that is not trained on. The endpoint refuses requests for more."""
MOST_RESPONSES = 8
"""Most tokens of a sample, in ``data.max_response_length``: estimators pad a batch to its longest sample."""
SEVERAL_WITH_PICTURES = "several trajectories of a sample with a model that sees pictures"
OF_SAMPLE = ("reward_score", "unfinished", "failure", "finish_reason", "extra_fields", "num_turns")
"""What the last trajectory has of its sample, where that has no sampled token, and an earlier one is the last."""
NO_VERSION = -1
"""Stands in ``token_versions`` where no sampler drew the token: padding and inserted text."""


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype, left: bool = False) -> Tensor:
    """Rows -> (B, longest), padded with ``value``; at least one column wide."""
    there = places([len(row) for row in rows], left)
    table = torch.full(there.shape, value, dtype=dtype)
    entries = np.fromiter(chain.from_iterable(rows), np.float64 if dtype.is_floating_point else np.int64)
    table[there] = torch.from_numpy(entries).to(dtype)
    return table


def places(lengths: Sequence[int], left: bool = False) -> Tensor:
    """(B, longest) bool: where rows of these lengths have entries in a table that is padded on the right, or left."""
    columns, ends = torch.arange(max([1, *lengths])), torch.tensor(lengths, dtype=torch.int64)[:, None]
    return columns >= len(columns) - ends if left else columns < ends


def checked(output: AgentLoopOutput, max_length: int) -> AgentLoopOutput:
    """The output with its response cut to ``max_length`` tokens.

    Raises:
        RolloutError: an empty prompt, or columns of different lengths.
    """
    count = len(output.response_ids)
    columns = {
        "response_mask": output.response_mask,
        "response_logprobs": output.response_logprobs,
        "token_versions": output.token_versions,
    }
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise RolloutError("not one entry per response token", key=name, got=len(column), allowed=f"{count}")
    if not output.prompt_ids:
        raise RolloutError("the loop returned an empty prompt", key="prompt_ids")
    if count <= max_length:
        return output
    return replace(
        output,
        response_ids=output.response_ids[:max_length],
        response_mask=output.response_mask[:max_length],
        response_logprobs=output.response_logprobs and output.response_logprobs[:max_length],
        token_versions=output.token_versions and output.token_versions[:max_length],
        finish_reason="length",
    )


def in_one(made: AgentLoopOutput | Sequence[AgentLoopOutput], max_length: int, max_prompt: int) -> AgentLoopOutput:
    """What a loop returned, checked: its trajectory, or the last of several with the earlier ones as ``before``.

    Of several, one whose prompt is too long for its response loses the end of it, with a notice, and those without a
    sampled token are left out: the score of the sample is on the last one that has some.

    Raises:
        RolloutError: no trajectory, or some that cannot share one score; and as `checked`.
    """
    if isinstance(made, AgentLoopOutput):
        return checked(made, max_length)
    if not isinstance(made, Sequence) or not made or not all(isinstance(one, AgentLoopOutput) for one in made):
        kinds = [type(one).__name__ for one in made] if isinstance(made, list | tuple) else type(made).__name__
        raise RolloutError("the loop returned no trajectory", got=kinds, allowed="one AgentLoopOutput or more")
    if len(made) == 1:
        return checked(made[0], max_length)
    names = [f"trajectory {number} of {len(made)}" for number in range(len(made))]
    *every, end = (_fitted(name, one, max_length, max_prompt) for name, one in zip(names, made))
    for name, one in zip(names, every):
        _check_earlier(name, one, end)
    if end.step_rewards and not any(made[-1].response_mask):
        raise RolloutError("the last trajectory has no sampled token for them", key="step_rewards", fix="Leave it out.")
    every.append(end)
    *before, last = [one for one in every if any(one.response_mask)] or [end]
    if last is not end:
        last = replace(last, **{name: getattr(end, name) for name in OF_SAMPLE})
    is_aborted = any(one.finish_reason == "abort" for one in every)
    reason = "abort" if is_aborted else last.finish_reason
    metrics, measures = _metrics_of_all(every)
    return replace(last, before=before, finish_reason=reason, metrics=metrics, measures=measures)


def _metrics_of_all(every: Sequence[AgentLoopOutput]) -> tuple[AgentLoopMetrics, MetricSet]:
    """New sums; what trajectories share counts once."""
    metrics, measures = AgentLoopMetrics(), MetricSet()
    for one in {id(one.measures): one.measures for one in every}.values():
        measures.merge(one)
    for single in {id(one.metrics): one.metrics for one in every}.values():
        for name, value in vars(single).items():
            if value >= 0:  # below it is unknown
                setattr(metrics, name, max(0, getattr(metrics, name)) + value)
    return metrics, measures


def _fitted(name: str, one: AgentLoopOutput, max_length: int, max_prompt: int) -> AgentLoopOutput:
    most, size = max_prompt + max_length, len(one.prompt_ids) + len(one.response_ids)
    if size > most:
        limit = "data.max_prompt_length + data.max_response_length"
        notice("an agent loop", f"returned {name} with {size} tokens; it is trained on up to {limit} = {most}")
        one = replace(one, prompt_ids=one.prompt_ids[:most])
    return checked(one, max(0, min(max_length, most - len(one.prompt_ids))))


def _check_earlier(which: str, one: AgentLoopOutput, last: AgentLoopOutput) -> None:
    """An earlier trajectory has what the last one has of each token, and no score."""
    for name in ("response_logprobs", "token_versions"):
        if (getattr(one, name) is None) != (getattr(last, name) is None):
            lacks = which if getattr(one, name) is None else "the last trajectory"
            raise RolloutError(f"{lacks} has none, another one has", key=name, allowed="in all trajectories or in none")
    for name in ("reward_score", "step_rewards", "unfinished"):
        if getattr(one, name) is not None:
            raise RolloutError(f"{which} has what belongs to the sample", key=name, fix="Set it in the last one alone.")


def to_batch(outputs: Sequence[AgentLoopOutput], pad_token_id: int, with_log_probs: bool = True) -> DataProto:
    """prompts (B, P) left-padded, responses (B, T) right-padded, both as long as their longest row, and their masks."""
    prompts = pad_rows([o.prompt_ids for o in outputs], pad_token_id, torch.int64, left=True)
    responses = pad_rows([o.response_ids for o in outputs], pad_token_id, torch.int64)
    prompt_mask = places([len(o.prompt_ids) for o in outputs], left=True)
    attention_mask = torch.cat([prompt_mask, places([len(o.response_ids) for o in outputs])], dim=1).long()
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": pad_rows([o.response_mask for o in outputs], 0, torch.int64),
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }
    if with_log_probs and all(o.response_logprobs is not None for o in outputs):
        tensors["rollout_log_probs"] = pad_rows([o.response_logprobs or [] for o in outputs], 0.0, torch.float32)
    if all(o.token_versions is not None for o in outputs):
        tensors["token_versions"] = pad_rows([o.token_versions or [] for o in outputs], NO_VERSION, torch.int32)
    experts = experts_table(outputs, tensors["attention_mask"].bool())
    if experts is not None:
        tensors["routed_experts"] = experts
    columns: dict[str, Sequence[object]] = {
        "__num_turns__": [o.num_turns for o in outputs],
        "finish_reason": [o.finish_reason for o in outputs],
    }
    extras = sorted({name for o in outputs for name in o.extra_fields})
    names = {*columns, *tensors, *extras, *OF_RUN}
    for key in extras:
        name = key
        if key in columns or key in tensors or key in OF_RUN:
            while name in names:
                name = f"loop_{name}"
            names.add(name)
            why = "a column of that name is the run's. It is stored under the second name"
            notice(f"AgentLoopOutput.extra_fields, key {key!r}", f"-> {name!r}: {why}. Return it under another name")
        columns[name] = [o.extra_fields.get(key) for o in outputs]
    if any(o.reward_score is not None for o in outputs):
        columns["reward_score"] = [o.reward_score for o in outputs]
        if all(o.reward_score is not None for o in outputs):
            scores = on_last_sampled_token([o.reward_score or 0.0 for o in outputs], tensors["response_mask"])
            tensors["rm_scores"] = with_step_rewards(scores, [o.step_rewards for o in outputs])
    arrays = {name: array_of_objects(values) for name, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays, meta_info={"pad_token_id": pad_token_id})


def later_images(outputs: Sequence[AgentLoopOutput], rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The columns (B,) of images, where a trajectory has seen more than its row's own; none where all are the rows'."""
    if all(output.multi_modal_inputs is None for output in outputs):
        return {}
    columns: dict[str, np.ndarray] = {}
    for name in ("multi_modal_data", "multi_modal_inputs"):
        values = [getattr(output, name) for output in outputs]
        columns[name] = array_of_objects([row.get(name) if own is None else own for own, row in zip(values, rows)])
    return columns


def experts_table(outputs: Sequence[AgentLoopOutput], attended: Tensor) -> Tensor | None:
    """(B, P+T, layers, top_k) int16, `NO_RECORD` where no experts are recorded; None if none are anywhere.

    Args:
        attended: (B, P+T) where the tokens of each row are.
    """
    records = [output.routed_experts for output in outputs if output.routed_experts is not None]
    if not records:
        return None
    table = torch.full((*attended.shape, *records[0].shape[1:]), NO_RECORD, dtype=torch.int16)
    for row, output in enumerate(outputs):
        if output.routed_experts is not None:
            columns = attended[row].nonzero().flatten()[: len(output.routed_experts)]
            table[row, columns] = torch.from_numpy(output.routed_experts[: len(columns)])
    return table


def on_last_sampled_token(scores: Sequence[float], mask: Tensor) -> Tensor:
    """(B, T) float32: each row's score at its last position with mask 1, zero elsewhere."""
    table = torch.zeros(mask.shape, dtype=torch.float32)
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(-1)
    table[torch.arange(len(mask)), last] = torch.tensor(scores, dtype=torch.float32)
    return table * mask


def with_step_rewards(scores: Tensor, steps: Sequence[Sequence[tuple[int, float]] | None]) -> Tensor:
    """Scores (B, T) where rows that know the reward of each step have it at that step's place instead of at the end."""
    for row, rewards in enumerate(steps):
        if rewards:
            scores[row] = 0.0
            for place, reward in rewards:
                scores[row, min(place, scores.shape[1] - 1)] += reward
    return scores


def array_of_objects(values: Sequence[object]) -> np.ndarray:
    """An object array of these values as they are, lists included."""
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array


def loop_metrics(outputs: Sequence[AgentLoopOutput]) -> dict[str, Metric]:
    """``timing_s/agent_loop/*`` under upstream's names, the slowest trajectory separately, and why responses ended."""
    metrics: dict[str, Metric] = {}
    if not outputs:
        return metrics
    for name in ("generate_sequences", "tool_calls", "compute_score", "num_preempted"):
        values = [float(vars(o.metrics)[name]) for o in outputs]
        metrics[f"timing_s/agent_loop/{name}/min"] = Metric(min(values), "min")
        metrics[f"timing_s/agent_loop/{name}/max"] = Metric(max(values), "max")
        metrics[f"timing_s/agent_loop/{name}/mean"] = Metric(sum(values) / len(values), weight=len(values))
    slowest = max(outputs, key=lambda o: o.metrics.generate_sequences + o.metrics.tool_calls)
    metrics["timing_s/agent_loop/slowest/generate_sequences"] = Metric(slowest.metrics.generate_sequences, "max")
    metrics["timing_s/agent_loop/slowest/tool_calls"] = Metric(slowest.metrics.tool_calls, "max")
    metrics["timing_s/agent_loop/slowest/prompt_length"] = Metric(len(slowest.prompt_ids), "max")
    metrics["timing_s/agent_loop/slowest/response_length"] = Metric(len(slowest.response_ids), "max")
    lengths = [sum(one.response_mask) for o in outputs for one in (*o.before, o)]
    metrics["rollout/sampled_tokens"] = Metric(float(sum(lengths)), "sum")
    for reason in ("stop", "length", "abort"):
        share = sum(o.finish_reason == reason for o in outputs) / len(outputs)
        metrics[f"rollout/finish_reason/{reason}"] = Metric(share, weight=len(outputs))
    measured = MetricSet()
    for output in outputs:
        measured.merge(output.measures)
    return {**metrics, **dict(measured.items())}
