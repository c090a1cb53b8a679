"""What one program may use, and what it was given to run: the records that cross from the caller into the sandbox."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verl.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a program may use. One case of a test, or one cell of a session, is held to them; the whole is their sum.

    Example:
        >>> Limits(seconds=2.0, memory_mb=256)
    """

    seconds: float = 5.0
    """Wall-clock time of one case. Its processor time is held to the same number, rounded up to a second."""
    memory_mb: int = 512
    """Memory on top of the interpreter's own: address space of each process, and the memory of all together: resident,
    swapped out, and in the buffers of pipes and sockets."""
    processes: int = 16
    """Most processes and threads of the program at once. All of them have the time of one core."""
    open_files: int = 128
    """Most open files of one process."""
    disk_mb: int = 64
    """Size of the private temporary folder, and so of any file in it."""
    output_kb: int = 64
    """Most that is kept of standard output, of standard error, and of a returned value, each. A program that prints
    more is stopped."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError("must be a positive number", key=f"sandbox limit {item.name}", got=value)
            if item.name != "seconds" and not isinstance(value, int):
                raise ConfigError("must be a whole number", key=f"sandbox limit {item.name}", got=value)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StdinCase:
    """One test of a program that reads standard input and prints its answer.

    ``expected`` never enters the sandbox.
    """

    stdin: str = ""
    expected: str = ""


@dataclass(frozen=True)
class CallCase:
    """One test of a function (or of a method ``Solution.name``) of the program: plain arguments, a plain result.

    ``expected`` never enters the sandbox.
    """

    function: str
    arguments: tuple[Any, ...] = ()
    expected: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)
