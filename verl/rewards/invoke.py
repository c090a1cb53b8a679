"""Calls a reward function and turns whatever it returns or raises into results; none of it escapes as an exception."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from verl.errors import VerlError
from verl.rewards.forms import Form
from verl.rewards.function import RewardFunction
from verl.rewards.samples import FailureKind, RewardFailure, RewardResult, RewardSample, all_failed
from verl.rewards.undecided import REASONS

LARGEST = 1e18
"""A score whose square float32 holds, in which advantages are computed."""
ALLOWED = "a finite float, int or bool, or a dict with the key 'score'"


def invoke(function: RewardFunction, samples: Sequence[RewardSample]) -> list[RewardResult]:
    """One call of the function, in this thread; one result per sample."""
    reasons: list[str] = []
    REASONS.set(reasons)
    try:
        raw = function.call(samples)
        if inspect.isawaitable(raw):
            raw = asyncio.run(_wait(raw))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # boundary: the user's code, which may even call sys.exit
        return all_failed(samples, raised(error))
    return _with_reason(results_of(function, raw, len(samples)), reasons)


async def invoke_async(function: RewardFunction, samples: Sequence[RewardSample]) -> list[RewardResult]:
    """The same for an async function, in the running event loop. Cancellation goes through."""
    reasons: list[str] = []
    REASONS.set(reasons)
    try:
        raw = function.call(samples)
        if inspect.isawaitable(raw):
            raw = await raw
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # boundary: the user's code
        return all_failed(samples, raised(error))
    return _with_reason(results_of(function, raw, len(samples)), reasons)


def _with_reason(results: list[RewardResult], reasons: list[str]) -> list[RewardResult]:
    """Of a call with several answers it is not known which one is undecided: the first one is counted."""
    return [replace(results[0], undecided=reasons[0]), *results[1:]] if reasons and results else results


def raised(error: BaseException) -> RewardFailure:
    """The failure for an exception of the user's code, without the frames of this library above it."""
    trace = error.__traceback__
    while (
        trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("verl.rewards.") and trace.tb_next
    ):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    kind: FailureKind = "refused" if isinstance(error, VerlError) else "raised"
    return RewardFailure(kind, text, "".join(lines), _last_own_line(trace), error)


def _last_own_line(trace: TracebackType | None) -> str:
    """``file.py, line 5: return 1 / 0``: the last line of a traceback in the file in which it begins."""
    frames = traceback.extract_tb(trace)
    in_file = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{in_file[-1].filename}, line {in_file[-1].lineno}: {in_file[-1].line}" if in_file else ""


def results_of(function: RewardFunction, raw: Any, count: int) -> list[RewardResult]:
    """What the function returned, as one result per sample."""
    if function.form is Form.SINGLE:
        return [result_of(raw)]
    values = raw.tolist() if hasattr(raw, "tolist") else raw  # numpy arrays and tensors
    if not isinstance(values, (list, tuple)):
        return all_failed(range(count), _bad(f"returned {_kind(raw)} instead of a list of {count} scores"))
    if len(values) != count:
        return all_failed(range(count), _bad(f"returned {len(values)} scores for {count} responses"))
    return [result_of(value) for value in values]


def result_of(value: object) -> RewardResult:
    """One returned value as a score, or as the failure that says what is wrong with it."""
    if type(value) is float and -LARGEST <= value <= LARGEST:  # by far the most frequent
        return RewardResult(value)
    try:
        return _read(value)
    except Exception as error:  # boundary: a value of the user's own class
        return RewardResult(failure=raised(error))


def _read(value: Any) -> RewardResult:
    extra: dict[str, Any] = {}
    if isinstance(value, Mapping):
        extra = {str(key): _plain(item) for key, item in value.items()}
        if "score" not in extra:
            return _failed("returned a dict without the key 'score'", f"Its keys: {list(extra)}.")
        value = extra["score"]
    value = _plain(value)
    if not isinstance(value, numbers.Real):
        return _failed(f"returned {_kind(value)} instead of a score")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        return _failed(f"returned {score}, which is no score")
    if abs(score) > LARGEST:
        return _failed(f"returned {score:g}, which is too large: a score is between -{LARGEST:g} and {LARGEST:g}")
    if extra:
        extra["score"] = score
    return RewardResult(score, extra)


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    """Numpy scalars, arrays and tensors as Python values; a single element as a number."""
    if isinstance(value, (str, bytes, int, float)) or not hasattr(value, "tolist"):
        return value
    listed = value.tolist()
    return listed[0] if isinstance(listed, list) and len(listed) == 1 else listed


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    try:
        shown = repr(value)
    except ValueError:  # whole numbers of some thousand digits
        shown = "too long to be shown"
    short = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"a string ({short})" if isinstance(value, str) else f"{type(value).__name__} ({short})"


def _bad(what: str, *details: str) -> RewardFailure:
    return RewardFailure("value", " ".join([f"{what}.", *filter(None, details), f"Allowed: {ALLOWED}."]))


def _failed(*parts: str) -> RewardResult:
    return RewardResult(failure=_bad(*parts))
