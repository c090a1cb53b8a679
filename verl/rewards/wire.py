"""Samples and results as JSON types, for messages (`verl.sandbox.frames`) to processes that run reward functions.

Not the codec of batches, which imports torch: 2.3 s and 280 MB for each process. No pickle: what comes back was
produced by a process that ran arbitrary code over model output, and JSON can carry a forged score at worst, never code.
"""

from __future__ import annotations

import base64
from typing import Any

from verl.rewards.samples import RewardFailure, RewardResult, RewardSample

TAG = "__verl__"


class NotPlainError(TypeError):
    """A value that JSON cannot carry (an image, a model, a function)."""


def to_plain(value: Any) -> Any:
    """A value as JSON types; tuples, bytes, other keys than strings and numpy arrays come back as what they were."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and TAG not in value:
            return {key: to_plain(item) for key, item in value.items()}
        return {TAG: "dict", "items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {TAG: "tuple", "items": [to_plain(item) for item in value]}
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        if value.ndim and value.dtype.kind in "biuf":
            data = base64.b64encode(value.tobytes()).decode()
            return {TAG: "numbers", "dtype": str(value.dtype), "shape": list(value.shape), "data": data}
        listed = to_plain(value.tolist())
        return {TAG: "array", "dtype": str(value.dtype), "items": listed} if value.ndim else listed
    raise NotPlainError(f"a value of type {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: from_plain(item) for key, item in value.items()}
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "numbers":
        return _numbers(**{name: value[name] for name in ("dtype", "shape", "data")})
    items = from_plain(value["items"])
    if kind == "array":
        return _array(items, value["dtype"])
    return tuple(items) if kind == "tuple" else dict(items)


def _numbers(dtype: str, shape: list[int], data: str) -> Any:
    import numpy as np  # only where the data holds arrays

    return np.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape)


def _array(items: list[Any], dtype: str) -> Any:
    import numpy as np  # only where the data holds arrays

    if dtype != "object":
        return np.array(items, dtype=dtype)
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def pack_samples(samples: Any) -> list[Any]:
    """Samples as JSON types; raises `NotPlainError` where a row holds something that cannot travel."""
    return [
        [to_plain(s.data_source), s.solution_str, to_plain(s.ground_truth), to_plain(s.extra_info), s.row]
        for s in samples
    ]


def unpack_samples(rows: list[Any]) -> list[RewardSample]:
    return [RewardSample(from_plain(a), b, from_plain(c), from_plain(d), row) for a, b, c, d, row in rows]


def pack_results(results: list[RewardResult]) -> list[Any]:
    """Results as JSON types; a detail that cannot travel goes as its text."""
    return [
        [
            r.score,
            {k: _detail(v) for k, v in r.extra.items()},
            r.failure and pack_failure(r.failure),
            r.caught and pack_failure(r.caught),
            r.undecided,
        ]
        for r in results
    ]


def unpack_results(rows: list[Any]) -> list[RewardResult]:
    return [
        RewardResult(score, from_plain(extra), error and unpack_failure(error), caught and unpack_failure(caught), why)
        for score, extra, error, caught, why in rows
    ]


def pack_failure(failure: RewardFailure) -> list[str]:
    name = type(failure.exception).__name__ if failure.exception is not None else ""
    return [failure.kind, failure.message, failure.trace, failure.line, name]


def unpack_failure(parts: list[str]) -> RewardFailure:
    """A failure with an exception of the same name where Python has it, so that it can be raised from."""
    kind, message, trace, line, name = parts
    return RewardFailure(kind, message, trace, line, _exception(name, message, trace) if name else None)  # type: ignore[arg-type]


class UserCodeError(Exception):
    """An exception of the user's code in another process; its text is that traceback."""


def _exception(name: str, message: str, trace: str) -> BaseException:
    import builtins

    kind = vars(builtins).get(name)
    text = message.removeprefix(f"{name}: ")
    remote = UserCodeError(f"\n{trace}")
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return remote
    try:
        error = kind(text)
    except TypeError:  # UnicodeDecodeError and the like need more than a text
        return remote
    error.__cause__ = remote
    return error


def _detail(value: Any) -> Any:
    try:
        return to_plain(value)
    except NotPlainError:
        return repr(value)
