"""Trajectories that resume in a later batch: their state as plain data, which a file and another process can take.

A row's state is a dict. One that has ended, and waits for the other samples of its prompt, has ``ended``: all of its
output. One that resumes has ``turn``, the number of its request, ``part``, what that request has so far, and ``loop``,
what the loop itself keeps of earlier turns. A resumed turn has the key of its random numbers, so the rest
is drawn as if it had not been interrupted; nothing of earlier turns happens again.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from verl.agent_loop.base import AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.batch import NO_VERSION, array_of_objects
from verl.errors import RolloutError
from verl.metrics import Metric, MetricSet
from verl.protocol.fields import BEFORE
from verl.rollout.base import Completion

LEFT, EARLIER = "unfinished", "earlier"
"""Columns: the state of each row of a batch, None where its prompt is complete; the same of the next prompts."""
ENOUGH = "enough_prompts"
"""Key of ``meta_info``: the number of complete prompts that ends a batch; what is left comes back unfinished."""
PROCESS = uuid.uuid4().hex
"""Tells whether what tools and users keep in memory is that of a trajectory's earlier turns."""


def plain_output(output: AgentLoopOutput) -> dict[str, Any]:
    """A trajectory that has ended."""
    plain = {field.name: getattr(output, field.name) for field in fields(output)}
    plain["metrics"] = dict(vars(output.metrics))
    plain["measures"] = plain_metrics(output.measures)
    plain["failure"] = None if output.failure is None else str(output.failure)
    plain["before"] = [plain_output(one) for one in output.before]
    return plain


def output_of(plain: Mapping[str, Any]) -> AgentLoopOutput:
    """The reverse of `plain_output`; a failure is one of our errors with its text."""
    failure = None if plain["failure"] is None else RolloutError(plain["failure"])
    measures, metrics = metrics_of(plain["measures"]), AgentLoopMetrics(**plain["metrics"])
    before = [output_of(one) for one in plain.get("before", ())]  # earlier checkpoints have none
    made = {"metrics": metrics, "measures": measures, "failure": failure, "before": before}
    return AgentLoopOutput(**{**plain, **made})


def trajectories_before(outputs: Sequence[AgentLoopOutput]) -> dict[str, np.ndarray]:
    """The column (B,) `BEFORE`; none where each sample is one trajectory."""
    if not any(output.before for output in outputs):
        return {}
    return {BEFORE: array_of_objects([[plain_output(one) for one in output.before] or None for output in outputs])}


def plain_metrics(metrics: MetricSet) -> dict[str, list[Any]]:
    """Name -> value, reduction, weight."""
    return {name: [metric.value, metric.reduction, metric.weight] for name, metric in metrics.items()}


def metrics_of(plain: Mapping[str, Sequence[Any]]) -> MetricSet:
    """The reverse of `plain_metrics`."""
    return MetricSet({name: Metric(*values) for name, values in plain.items()})


def plain_part(part: Completion) -> dict[str, Any]:
    """What a request has so far."""
    return {**vars(part), "routed_experts": part.routed_experts}


def from_plain_part(plain: Mapping[str, Any]) -> Completion:
    """The reverse of `plain_part`."""
    names = ("token_ids", "log_probs", "token_versions")
    return Completion(**{**plain, **{name: tuple(plain[name]) for name in names}})


def are_complete(outputs: Sequence[AgentLoopOutput], uids: Sequence[str]) -> list[bool]:
    """Which rows are of a prompt whose samples have all ended."""
    left = {uid for uid, output in zip(uids, outputs) if output.unfinished is not None}
    return [uid not in left for uid in uids]


def states_of(
    outputs: Sequence[AgentLoopOutput], uids: Sequence[str], places: Sequence[int]
) -> list[dict[str, Any] | None]:
    """The state of each row, None where its prompt is complete.

    Args:
        places: number of the runner that has each row's tools.
    """
    states: list[dict[str, Any] | None] = []
    for output, is_over, place in zip(outputs, are_complete(outputs, uids), places):
        state = output.unfinished or {"ended": plain_output(output)}
        states.append(None if is_over else {**state, "runner": place})
    return states


def partial_metrics(
    rows: Sequence[Mapping[str, Any]], outputs: Sequence[AgentLoopOutput], states: Sequence[Mapping[str, Any] | None]
) -> dict[str, Metric]:
    """``rollout/partial/*``: rows that resume later, resumed here, wait for others; versions of complete ones."""
    left = [state for state in states if state is not None and "ended" not in state]
    before = [row[EARLIER] for row in rows if row.get(EARLIER) is not None]
    done = [output for output, state in zip(outputs, states) if state is None]
    versions = [len(set(output.token_versions or ()) - {NO_VERSION}) for output in done]
    metrics = {
        "left": Metric(float(len(left)), "sum"),
        "left_tokens": Metric(float(sum(len(state["part"]["token_ids"]) for state in left)), "sum"),
        "waiting": Metric(float(sum(state is not None for state in states) - len(left)), "sum"),
        "resumed": Metric(float(sum("ended" not in state for state in before)), "sum"),
        "versions/max": Metric(float(max(versions, default=0)), "max"),
        "versions/mean": Metric(sum(versions) / max(1, len(versions)), weight=len(versions)),
    }
    return {f"rollout/partial/{name}": metric for name, metric in metrics.items()}


class Members:
    """Which rows belong to which prompt, and which prompts have all their samples.

    Args:
        uids: of each row.
    """

    def __init__(self, uids: Sequence[str]):
        self.uids = list(uids)
        self._left = Counter(self.uids)
        self.num_complete = 0

    def end(self, row: int) -> list[int]:
        """A row has ended; the rows of its prompt if it was the last of them, else none."""
        uid = self.uids[row]
        self._left[uid] -= 1
        if self._left[uid]:
            return []
        self.num_complete += 1
        return [number for number, other in enumerate(self.uids) if other == uid]
