"""The error tree, and the one way in which a message names what to do.

Every error says what was wrong, where, what is allowed and what to change. The parts are kept as attributes, so that a
program can read them, and every error survives pickling between processes.
"""

from __future__ import annotations

import difflib
import heapq
import re
import sys
from collections.abc import Callable, Iterable
from itertools import takewhile
from operator import eq
from typing import Any

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """The text as a terminal may be shown it: what is neither a letter nor a line break nor a tab is written out.

    What a model, a tool or a row says could otherwise clear the screen, rename the window, or change the direction of a
    line: ``\\x1b``, ``\\u202e``.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def suggest(name: str, choices: Iterable[str], limit: int = 3) -> str:
    """A sentence with the nearest names: ``Did you mean 'grpo'?``; empty if nothing is near."""
    candidates = _likely(str(name), [str(c) for c in choices])
    near = difflib.get_close_matches(str(name), candidates, n=limit, cutoff=0.6)
    lowered = {c.lower(): c for c in candidates}
    if not near and str(name).lower() in lowered:
        near = [lowered[str(name).lower()]]
    if not near:
        return ""
    return "Did you mean " + " or ".join(repr(n) for n in near) + "?"


MANY, LONG = 1000, 200


def _likely(name: str, known: list[str]) -> list[str]:
    """All names, or of very many those that begin and end as ``name`` does; comparing takes milliseconds for each."""
    near = [c for c in known if len(c) <= LONG] if len(name) <= LONG else []
    if len(near) <= MANY:
        return near

    def in_common(choice: str) -> int:
        ahead = sum(1 for _ in takewhile(bool, map(eq, name, choice)))
        return ahead + sum(1 for _ in takewhile(bool, map(eq, reversed(name), reversed(choice))))

    return heapq.nlargest(MANY, near, key=in_common)


HIDDEN = "<hidden>"
"""Stands where a secret was."""
_USER = re.compile(r"(?<=://)[^/?#\s'\"]+@")
_QUERY = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|password|passwd|pwd|signature|sig|auth|credential)=)[^&#;\s'\"]+", re.IGNORECASE
)
_KEY = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16})"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
)


def hide_in_text(text: str) -> str:
    """The text without the secrets that its own form shows."""
    if "://" in text:
        text = _USER.sub(f"{HIDDEN}@", text)
    return _KEY.sub(HIDDEN, _QUERY.sub(rf"\g<1>{HIDDEN}", text))


class VerlError(Exception):
    """Base of all errors that this library raises on purpose.

    Args:
        message: what is wrong, one sentence.
        key: the configuration key, column, or file that is at fault.
        got: the value found there.
        allowed: what would be accepted (a sentence or a list of names).
        fix: what the person should change.
    """

    def __init__(self, message: str, *, key: str | None = None, got: object = None, allowed: Any = None, fix: str = ""):
        self.message, self.key, self.got, self.allowed, self.fix = message, key, got, allowed, fix
        super().__init__(printable(self._text()))

    def _text(self) -> str:
        parts = [f"{self.key}: {self.message}" if self.key else self.message]
        if self.got is not None:
            parts.append(f"Got {self.got!r}.")
        if self.allowed is not None:
            allowed = self.allowed if isinstance(self.allowed, str) else ", ".join(str(a) for a in self.allowed)
            parts.append(f"Allowed: {allowed}.")
        if self.fix:
            parts.append(self.fix)
        if len(parts) > 1 and not parts[0].endswith((".", "!", "?", ":")):
            parts[0] += "."
        return hide_in_text(" ".join(parts))

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.key, self.got, self.allowed, self.fix)


def _rebuild(cls: type[VerlError], message: str, key: str | None, got: Any, allowed: Any, fix: str) -> VerlError:
    return cls(message, key=key, got=got, allowed=allowed, fix=fix)


class ConfigError(VerlError, ValueError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one.

    Attributes:
        problems: every one of several problems, where the message lists the first of them.
    """

    problems: tuple[ConfigError, ...] = ()


class NotBuiltError(ConfigError, NotImplementedError):
    """The setting is known, but the feature behind it does not exist in this version.

    Attributes:
        feature: its name, where several settings wait for the same one.
    """

    feature: str = ""


class DataError(VerlError, ValueError):
    """A file, row or column of the user's data is not what it should be."""


class BatchError(DataError, AssertionError):
    """Rows, keys or shapes of a `DataProto` do not fit the call; an AssertionError too, which upstream raises."""


class ModelError(VerlError, ValueError):
    """A model folder, tokenizer or checkpoint cannot be used."""


class RewardError(VerlError, RuntimeError):
    """A reward function is missing, has the wrong form, or failed."""


class SandboxError(VerlError, RuntimeError):
    """The sandbox cannot run a program, or broke; never a fault of the program, which is an outcome."""


class EngineError(VerlError, RuntimeError):
    """A training backend cannot do what a call or a setting needs."""


class RolloutError(VerlError, RuntimeError):
    """A sampler cannot do what a request or a setting needs."""


class WorkerError(VerlError, RuntimeError):
    """A worker failed or a worker group was called in a wrong way."""


class ReplayError(VerlError, RuntimeError):
    """A replay does not do what its recording says, or cannot."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint is missing, damaged, or of another kind."""


class MissingDependencyError(VerlError, ImportError):
    """An optional package is needed and not installed; ``fix`` holds the install command."""


def print_answer(answer: Callable[[], object]) -> int:
    """Print what a program answers, or the message of its error; returns the exit status: 0, or 2 after an error."""
    try:
        text = str(answer())
    except (VerlError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(text)
    return 0


def portable(error: Exception) -> Exception:
    """What may go to another process: an error of the library's own, or its words as one of sampling.

    A user's subclass of ours goes in words, too: with parameters of its own it may not survive the copy.
    """
    is_ours = isinstance(error, VerlError) and type(error).__module__.partition(".")[0] == "verl"
    return error if is_ours else RolloutError(f"{type(error).__name__}: {error}")
