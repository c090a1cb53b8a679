"""A trajectory that went wrong by what a user's code did: masked, counted and shown, unless the user wants a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from verl.agent_loop.base import AgentLoopOutput
from verl.errors import ConfigError, RolloutError, suggest
from verl.metrics import notice

OnError = Literal["mask", "raise"]
COLUMN = "agent_error"
"""Column of a batch that says what went wrong in a row, None where nothing did."""


def check_on_error(value: str) -> OnError:
    """The value, if it is one of the two."""
    if value not in get_args(OnError):
        raise ConfigError(
            "unknown value", key="on_error", got=value, allowed=get_args(OnError), fix=suggest(value, get_args(OnError))
        )
    return value  # type: ignore[return-value]


def failed(output: AgentLoopOutput, who: str, error: Exception, on_error: OnError) -> AgentLoopOutput:
    """The output marked as failed: its tokens are in the batch, masked, and it is in no baseline.

    Raises:
        RolloutError: ``on_error`` is ``raise``.
    """
    text = f"{type(error).__name__}: {error}" if not isinstance(error, RolloutError) else str(error)
    if on_error == "raise":
        raise RolloutError(f"{who} failed: {text}", fix="on_error: mask leaves such rows out.") from error
    notice(
        who,
        f"failed: {text}. The row is masked and counted as rollout/agent/failed; further failures are only counted. "
        "on_error: raise in the loop's YAML stops the run instead.",
    )
    fields = {**output.extra_fields, COLUMN: text[:2000]}
    output.measures.add("rollout/agent/failed", 1.0, "sum")
    return replace(output, finish_reason="abort", reward_score=0.0, step_rewards=None, extra_fields=fields)


def check_some_worked(outputs: Sequence[AgentLoopOutput]) -> None:
    """Stop where every row of a batch failed: there is nothing to learn from.

    Raises:
        RolloutError: with the first row's reason.
    """
    reasons = [output.extra_fields.get(COLUMN) for output in outputs]
    if reasons and all(reasons):
        raise RolloutError(f"all {len(reasons)} rollouts of a batch failed. The first: {reasons[0]}")
