"""A warm pool of sandboxes: programs start within milliseconds, because a prepared interpreter is forked for each."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from verl.errors import ConfigError
from verl.sandbox.answers import to_outcome
from verl.sandbox.channel import Channel
from verl.sandbox.kernel.landlock import NEWEST
from verl.sandbox.layers import check_names
from verl.sandbox.limits import CallCase, Limits, StdinCase
from verl.sandbox.outcome import CaseResult, Outcome
from verl.sandbox.process import KeeperProcess
from verl.sandbox.verdicts import Compare, judge


class Pool:
    """Runs programs in sandboxes, at most ``size`` at once. Safe to use from several threads.

    Nothing starts before the first run (or `prepare`). What a program does is an `Outcome`; an error is raised only
    where no program could be run, so that a sample is then left unscored and not held against the policy.

    Args:
        size: programs that run at once; None: one for each core that this process may use.
        allow_missing: layers of the sandbox that may be missing on this machine, by name. Without a name here a missing
            layer is refused.
        packages: whether programs can import the packages installed here. They can then read them.
        preload: modules imported once for all programs, such as ``numpy``.
        without: layers that are left out even where the machine has them; each must also be in ``allow_missing``.
        programs: files and folders of this machine that programs can read and run, too, such as ``/usr/bin``.
        folders: names in the root, such as ``/app``, that lead to a folder of that name in the temporary one; with
            the layer ``namespaces`` only.
        newest_landlock: for tests: ask for no more than a kernel with this version of Landlock has; 0: it has none.

    Raises:
        SandboxRefused: at the first run, where the machine lacks a layer that may not be missing.

    Example:
        >>> with Pool() as pool:
        ...     pool.run("print(input()[::-1])", stdin="abc").stdout
        'cba\\n'
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        allow_missing: Sequence[str] = (),
        packages: bool = True,
        preload: Sequence[str] = (),
        without: Sequence[str] = (),
        programs: Sequence[str] = (),
        folders: Sequence[str] = (),
        newest_landlock: int = NEWEST,
    ):
        if size is not None and size < 1:
            raise ConfigError("must be at least 1", key="sandbox pool size", got=size)
        for folder in folders:
            if not re.fullmatch(r"/\w[\w.-]*", folder):
                raise ConfigError("no name in the root", key="sandbox folders", got=folder, allowed="such as /app")
        if folders and "namespaces" in allow_missing:
            what = "without the layer namespaces there is no root for them"
            raise ConfigError(what, key="sandbox folders", got=folders, fix="Take namespaces out of allow_missing.")
        self.size = size or len(os.sched_getaffinity(0))
        self._options: dict[str, Any] = {
            "allow_missing": check_names(allow_missing), "packages": packages, "preload": tuple(preload),
            "without": check_names(without), "programs": tuple(programs), "folders": tuple(folders),
            "newest_landlock": newest_landlock,
        }  # fmt: skip
        # Callers' threads: a slot for the length of a run; inside it the lock, while a keeper is chosen or started.
        self._lock, self._slots = threading.Lock(), threading.BoundedSemaphore(self.size)
        self._keepers: list[KeeperProcess] = []
        self._finalizer = weakref.finalize(self, _close_all, self._keepers)

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program with this standard input, to its end or to its limit.

        Raises:
            SandboxError: no sandbox could be had; `SandboxRefused` where this machine does not offer one.
        """
        return self.run_cases(program, [StdinCase(stdin)], limits)[0].outcome

    def run_cases(
        self,
        program: str,
        cases: Sequence[StdinCase | CallCase],
        limits: Limits | None = None,
        *,
        compare: Compare | None = None,
        stop_at_failure: bool = False,
    ) -> list[CaseResult]:
        """Run a program on each case and judge its answers, here, where the program cannot see what is expected.

        Each case gets a fresh process and an empty temporary folder, and the limits for itself.

        Args:
            compare: whether an answer (text for a `StdinCase`, a value for a `CallCase`) is the expected one; default:
                `verl.sandbox.verdicts.same_text` and `same_value`.
            stop_at_failure: end at the first case that is not passed; the list then ends with it.

        Raises:
            SandboxError: as `run`.
        """
        results: list[CaseResult] = []

        def take(outcome: Outcome) -> bool:
            results.append(judge(cases[len(results)], outcome, compare))
            return results[-1].passed or not stop_at_failure

        if cases:
            self._run(program, cases, limits or Limits(), take)
        return results

    def prepare(self) -> dict[str, str]:
        """Start what the first run would start. Returns the layers that are missing (and allowed to), with reasons."""
        return dict(self._keeper().missing)

    def open_channel(self, limits: Limits, request: dict[str, Any]) -> Channel:
        """A new run with this request on its way; for sessions."""
        channel = Channel(self._keeper().new_run(), limits)
        channel.send({**request, "limits": limits.to_plain()})
        return channel

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the ``size`` places."""
        with self._slots:
            yield

    @property
    def has_own_files(self) -> bool:
        """Whether programs have a file system of their own, and need no folder of this machine."""
        return "namespaces" not in self._keeper().missing

    def close(self) -> None:
        """End all runs and processes. The pool starts again with the next run."""
        with self._lock:
            _close_all(self._keepers)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, program: str, cases: Sequence[StdinCase | CallCase], limits: Limits, take: Callable[[Outcome], bool]
    ) -> None:
        """Run the cases one after the other until ``take`` has enough; everything is gone when this returns."""
        with self.slot(), temporary_folder(self) as folder:
            request = {"kind": "cases", "code": program, "cases": list(map(_to_plain, cases)), "folder": folder}
            channel = self.open_channel(limits, request)
            try:
                for case in cases:
                    if not take(to_outcome(channel.receive(), limits, case)):
                        break
                channel.finish()
            finally:
                channel.close()

    def _keeper(self) -> KeeperProcess:
        with self._lock:
            if not self._keepers or not self._keepers[-1].alive:
                _close_all(self._keepers)
                self._keepers.append(KeeperProcess(**self._options))
            return self._keepers[-1]


@contextmanager
def temporary_folder(pool: Pool) -> Iterator[str | None]:
    """A folder of this machine for a run that cannot have a file system of its own; None for all others."""
    if pool.has_own_files:
        yield None
        return
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield folder
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)


def _close_all(keepers: list[KeeperProcess]) -> None:
    while keepers:
        keepers.pop().close()


def _to_plain(case: StdinCase | CallCase) -> dict[str, Any]:
    """What the program may know of a case: everything but the expected answer."""
    if isinstance(case, StdinCase):
        return {"stdin": case.stdin}
    return {"function": case.function, "arguments": list(case.arguments), "keywords": case.keywords}
