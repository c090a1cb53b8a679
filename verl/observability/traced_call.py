"""What a trace is: a call with the calls inside it, as plain data; and what a tool that takes traces offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from verl.config.loading.secrets import hide
from verl.errors import MissingDependencyError
from verl.json_text import Json

KEY = "actor_rollout_ref.rollout.trace.backend"
LONGEST_TEXT, LARGEST, DEEPEST = 1000, 65536, 12
"""Characters that are kept of a value which is shown by its ``repr``; elements of an array, and levels of containers,
above which it is shown so."""
TEXTS = {"prompt_ids": "prompt_text", "response_ids": "response_text", "token_ids": "response_text"}
"""Where a value is token ids: the name under which ``token2text`` stores their text."""


@dataclass
class TracedCall:
    """One call; the outermost is a trace.

    Args:
        kind: agent, llm, tool, user or function.
        inputs, outputs: plain data.
        begin, end: nanoseconds since 1970.
        error: what it raised, empty where nothing.
        calls: those inside it, in the order of their beginnings.
        attributes: of a trace: step, sample_index, rollout_n, validate, experiment_name.
    """

    name: str
    kind: str
    inputs: dict[str, Any]
    begin: int
    end: int = 0
    outputs: Any = None
    error: str = ""
    calls: list[TracedCall] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    def fails(self, error: BaseException) -> None:
        """What the call raised."""
        self.error = f"{type(error).__name__}: {error}"

    def returns(self, value: object) -> None:
        """What the call gave."""
        shown = plain_copy(value)
        self.outputs = hide(shown) if isinstance(shown, dict) else shown


class TraceBackend(ABC):
    """A tool that takes traces; it is used by one thread.

    Args:
        project: groups traces (``trainer.project_name``).
        experiment: names the run.

    Raises:
        MissingDependencyError: its package is not installed.
    """

    client: Any = None
    """What user code may call directly."""

    def __init__(self, project: str, experiment: str):
        self.project, self.experiment = project, experiment

    @abstractmethod
    def write(self, trace: TracedCall) -> None:
        """Store a trace that has ended; whatever it raises switches the tool off."""

    def close(self) -> None:  # noqa: B027 - nothing to close by default
        """Send what it still keeps; the process ends."""


@contextmanager
def trace_package(name: str, install: str = "") -> Iterator[None]:
    """Within the block the package of a backend is imported; `MissingDependencyError` says how to ``install`` it."""
    try:
        yield
    except ImportError as error:
        message = f"the package {name} is not installed"
        fix = f"{install or f'pip install {name}'}, or leave the setting out."
        raise MissingDependencyError(message, key=KEY, got=name, fix=fix) from error


def add_texts(call: TracedCall, decode: Callable[[Sequence[int]], str]) -> None:
    """The text of tokens next to their ids, in a trace and all its calls."""
    for values in (call.inputs, call.outputs):
        if isinstance(values, dict):
            ids = {name: values[name] for name in TEXTS if isinstance(values.get(name), list)}
            values.update({TEXTS[name]: _text(decode, tokens) for name, tokens in ids.items()})
    for inner in call.calls:
        add_texts(inner, decode)


def _text(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> str:
    try:
        return str(decode(tokens))
    except Exception as error:  # boundary: what a call named so holds may be no tokens
        return f"<no text: {type(error).__name__}: {error}>"


def plain_copy(value: object, depth: int = 0) -> Json:
    """A copy as plain data: numbers, text, lists, dicts; anything else, and what is large or deep, by its ``repr``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        inside = _inside_of(value) if depth < DEEPEST else None
        if isinstance(inside, dict):
            return {str(name): plain_copy(item, depth + 1) for name, item in inside.items()}
        if isinstance(inside, list):
            return [plain_copy(item, depth + 1) for item in inside]
        return inside if isinstance(inside, int | float | str) else repr(value)[:LONGEST_TEXT]
    except Exception as error:  # boundary: code of any object; a trace that lacks it is better than no sample
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _inside_of(value: object) -> Any:
    """A dict or a list of what is in a value, or the number that it holds; None for one that is shown as it is."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if hasattr(value, "tolist"):
        count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
        return value.tolist() if count <= LARGEST else None
    if hasattr(value, "model_dump"):
        return dict(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    return None


def plain_dict(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values of a mapping, or of arguments by name, as plain data without secrets."""
    shown: dict[str, Any] = hide({str(name): plain_copy(value) for name, value in values.items()})
    return shown
