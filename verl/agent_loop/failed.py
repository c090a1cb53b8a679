"""A trajectory that went wrong alone: masked or given 0, counted and shown, unless the user wants a stop.

What the policy can bring about must not pay. What it writes (a call that cannot be read, an answer that a template
refuses, a conversation or an episode over its time) is an ordinary answer and is scored; only what a user's code, a
row or the sampler does is masked, and ``on_error: zero`` gives it 0 where an action may be the cause. An agent at the
endpoint returns the reward itself and has none when its time is over: its row gets 0, once the policy has answered.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.tool_calls import shortened
from verl.errors import ConfigError, RolloutError, VerlError, suggest
from verl.metrics import notice

OnError = Literal["mask", "zero", "raise"]
HINT = "on_error in the loop's YAML: raise stops the run instead, zero gives the score 0."
OUR_FOLDER, PYTHON_FOLDER = str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"]
MOST_CHARACTERS = 2000
"""Of a reason: what a user's code raises may hold everything that it has read."""
COLUMN = "agent_error"
"""Column of a batch that says what went wrong in a row, None where nothing did."""


class RunStops(RolloutError):
    """A failure for which no row is masked: each would have it, or it is to stop the run."""


def check_on_error(value: str) -> OnError:
    """The value, if it is a known one."""
    if value not in get_args(OnError):
        raise ConfigError(
            "unknown value", key="on_error", got=value, allowed=get_args(OnError), fix=suggest(value, get_args(OnError))
        )
    return value  # type: ignore[return-value]


def failed(output: AgentLoopOutput, who: str, error: Exception, on_error: OnError, where: str = "") -> AgentLoopOutput:
    """The output marked as failed: masked and in no baseline, or with the score 0.

    Args:
        who: what failed, for the message; ``where`` names the row.

    Raises:
        RunStops: ``on_error`` is ``raise``.
    """
    text = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}{error_place(error)}"
    text = shortened(f"{where}: {text}" if where else text, MOST_CHARACTERS, "left")
    if on_error == "raise":
        raise RunStops(f"{who} failed: {text}", fix="on_error: mask leaves such rows out.") from error
    done = "gets the score 0" if on_error == "zero" else "is masked"
    notice(
        who,
        f"failed: {text}. The row {done} and counts as rollout/agent/failed; further failures are only counted. {HINT}",
    )
    fields = {**output.extra_fields, COLUMN: text}
    output.measures.add("rollout/agent/failed", 1.0, "sum")
    reason = "abort" if on_error == "mask" else "length" if output.finish_reason == "length" else "stop"
    return replace(
        output, finish_reason=reason, reward_score=0.0, step_rewards=None, extra_fields=fields, failure=error
    )


def error_place(error: BaseException) -> str:
    """Where an exception of a user's code comes from: `` (file.py, line 3)``, the last line in the file that we called.

    Nothing for errors of our own, unless one of the user's is their cause.
    """
    is_ours = type(error).__module__.startswith("verl.")
    if isinstance(error, VerlError) or (is_ours and error.__cause__ is None):
        return ""
    frames = traceback.extract_tb((error.__cause__ if is_ours else error).__traceback__)  # type: ignore[union-attr]
    users = [frame for frame in frames if not _is_between(frame.filename)]
    if is_ours and not users:
        return ""
    last = [frame for frame in users if frame.filename == users[0].filename] or frames
    return f" ({last[-1].filename}, line {last[-1].lineno})" if last else ""


def _is_between(file: str) -> bool:
    """Whether it is of this library or of Python itself, through which a user's code is called."""
    if "site-packages" in Path(file).parts:
        return file.startswith(OUR_FOLDER)
    return file.startswith((OUR_FOLDER, PYTHON_FOLDER, "<"))


def check_some_worked(outputs: Sequence[AgentLoopOutput]) -> None:
    """Stop where every row of a batch failed: there is nothing to learn from.

    Raises:
        RolloutError: with the first row's reason.
    """
    reasons = [output.extra_fields.get(COLUMN) for output in outputs]
    if reasons and all(reasons):
        text = f"all {len(reasons)} rollouts of a batch failed. The first: {reasons[0]}"
        raise RolloutError(text) from outputs[0].failure
