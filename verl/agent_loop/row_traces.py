"""Traces of a batch's rows: which rows are recorded, and the record of one."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.failed import COLUMN
from verl.config.schema.rollout import RolloutConfig
from verl.data.settings import read
from verl.observability import traces
from verl.observability.traced_call import TracedCall, add_texts
from verl.observability.traces import Traces
from verl.protocol.tokenizer import Tokenizer

TRACED = "__trace__"
"""Key of a row that is recorded, with what the batch says of it; it is for its runner, the loop does not see it."""
Run = Callable[[dict[str, Any]], Awaitable[AgentLoopOutput]]


def mark_traced(
    config: RolloutConfig,
    rows: Sequence[dict[str, Any]],
    streams: Sequence[tuple[str, int]],
    places: Sequence[int],
    about: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The rows, with a mark on those that are recorded.

    Args:
        config: the ``rollout`` section. Of each runner ``trace.max_samples_per_step_per_worker``
            prompts are recorded, drawn from a generator of their own, with all their samples.
        streams: (uid, sample index) of each row; ``places``: its runner.
        about: ``meta_info`` of the batch.
    """
    section = read(config, "trace")
    if section is None or section.backend is None:
        return list(rows)
    step, validate = int(about.get("global_steps", 0)), bool(about.get("validate"))
    uids = _traced(section.max_samples_per_step_per_worker, streams, places, f"{config.seed} {step} {validate}")
    common = {"step": step, "validate": validate}
    return [
        {**row, TRACED: {**common, "sample_index": row.get("index", uid), "rollout_n": number}} if uid in uids else row
        for row, (uid, number) in zip(rows, streams)
    ]


def _traced(most: int | None, streams: Sequence[tuple[str, int]], places: Sequence[int], seed: str) -> set[str]:
    """The uids that are recorded; a prompt counts for the runner of its first row."""
    runner_of: dict[str, int] = {}
    for (uid, _), place in zip(streams, places):
        runner_of.setdefault(uid, place)
    if most is None:
        return set(runner_of)
    draw = random.Random(seed)
    traced: set[str] = set()
    for place in sorted(set(runner_of.values())):
        uids = [uid for uid, its in runner_of.items() if its == place]
        traced.update(draw.sample(uids, min(most, len(uids))))
    return traced


class RowTraces:
    """Records the rows of this process.

    Args:
        known: where traces go.
        tokenizer: of the policy, for ``token2text``.
    """

    def __init__(self, known: Traces, tokenizer: Tokenizer):
        self._traces, self._tokenizer = known, tokenizer

    @classmethod
    def of(cls, config: RolloutConfig, tokenizer: Tokenizer) -> RowTraces | None:
        """As the ``rollout`` section says; None: nothing is recorded."""
        section = read(config, "trace")
        if section is None or section.backend is None:
            return None
        most = section.max_samples_per_step_per_worker
        names = (section.backend, section.project_name, section.experiment_name)
        return cls(traces.start_traces(*names, token2text=section.token2text, most=most), tokenizer)

    async def run(self, row: Mapping[str, Any], parameters: Mapping[str, Any], run: Run) -> AgentLoopOutput:
        """The trajectory of a row; it is recorded if the row has the mark."""
        mark = row.get(TRACED)
        row = {name: value for name, value in row.items() if name != TRACED}
        if mark is None:
            with traces.left_out():
                return await run(row)
        with traces.trace("agent_loop", _inputs(row, parameters), mark) as root:
            output = await run(row)
            if root is not None:
                self._returned(root, output)
        await self._traces.settled()
        return output

    def _returned(self, root: TracedCall, output: AgentLoopOutput) -> None:
        root.error = str(output.extra_fields.get(COLUMN) or "")
        shown = ("prompt_ids", "response_ids", "response_mask", "reward_score", "num_turns", "finish_reason", "metrics")
        values = {name: getattr(output, name) for name in shown}
        ends = {} if output.unfinished is None else {"goes_on": "in a later step"}
        root.returns({**values, **output.extra_fields, **ends})
        if self._traces.token2text:
            add_texts(root, self._tokenizer.decode)


def _inputs(row: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a person wants to see of a row: its messages, or its tokens where it has none."""
    name = "raw_prompt" if row.get("raw_prompt") is not None else "raw_prompt_ids"
    return {name: row.get(name), "sampling_params": parameters}
