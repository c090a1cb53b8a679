"""What the sandbox guarantees, tried on one kernel after the other: the table of docs/howto/sandbox.md is made of this.

A kernel is one that this machine can be taken for: with an older Landlock, or without a layer. It is asked for no more
than that kernel has; what a smaller one does not give has to be made up by the other walls.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.sandbox.attacks import Box, wait_until_quiet
from tests.sandbox.test_attacks_memory import BESIDE, HIDDEN, LOOPS, THREADS
from tests.sandbox.test_attacks_signals import FLAGS, LOCKS, SHARED_FILE, SIGIO
from verl.errors import SandboxError
from verl.sandbox import Limits, Outcome, Pool, SandboxRefused, check, process

MASKED = (
    "from verl.sandbox.inside import root; root.mount_processes = lambda: (_ for _ in ()).throw(OSError(1, 'no')); "
)
UNLISTED = ("memfd_create=319", "io_uring_setup=425", "userfaultfd=323", "shmget=29", "bpf=321", "pidfd_open=434")


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what of it the sandbox may use."""

    name: str
    landlock: int
    without: tuple[str, ...] = ()
    masked: bool = False
    """/proc cannot be mounted, as in most containers."""

    @contextmanager
    def box(self, size: int = 1) -> Iterator[Box]:
        """A sandbox there. Raises SandboxRefused where nothing is run, whatever is accepted."""
        arguments: dict[str, Any] = {
            "allow_missing": self.without,
            "without": self.without,
            "newest_landlock": self.landlock,
        }
        boot = process.BOOT.replace("main()", MASKED + "main()")
        with (
            mock.patch.object(process, "BOOT", boot) if self.masked else nullcontext(),
            Pool(size, **arguments) as pool,
        ):
            pool.prepare()
            yield Box(pool, self.without, arguments)


KERNELS = (
    *(Kernel(f"Landlock {version}", version) for version in range(7, 0, -1)),
    Kernel("no Landlock", 0, ("landlock",)),
    Kernel("`/proc` masked", 7, masked=True),
    Kernel("no namespaces, Landlock 6", 6, ("namespaces",)),
    Kernel("no namespaces, Landlock 4", 4, ("namespaces",)),
    Kernel("no namespaces, Landlock 2", 2, ("namespaces",)),
    Kernel("no seccomp, Landlock 4", 4, ("seccomp",)),
)


@dataclass
class Outside:
    """Things of this machine that a program must not reach."""

    file: Path
    listener: socket.socket
    victim: subprocess.Popen[bytes]

    def visited(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@contextmanager
def outside() -> Iterator[Outside]:
    folder = Path(tempfile.mkdtemp(prefix="outside-"))
    folder.chmod(0o777)
    file = folder / "secret"
    file.write_text("secret")
    file.chmod(0o666)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    victim = subprocess.Popen([shutil.which("sleep") or "sleep", "600"], start_new_session=True)
    try:
        yield Outside(file, listener, victim)
    finally:
        victim.kill()
        victim.wait()
        listener.close()
        shutil.rmtree(folder)


def _stopped(box: Box, tries: dict[str, str]) -> bool:
    return not any(said.startswith("through") for said in box.attempts(tries, seconds=20).values())


def _judges(box: Box, _: Outside) -> bool:
    try:
        check(box.pool.run)
    except SandboxError:
        return False
    return True


def _reads_nothing(box: Box, out: Outside) -> bool:
    paths = (str(out.file), "/etc/passwd", f"/proc/{os.getpid()}/environ", __file__)
    return _stopped(box, {path: f"got = open({path!r}, 'rb').read(9)" for path in paths})


def _sees_no_names(box: Box, out: Outside) -> bool:
    paths = (str(out.file), "/etc/passwd")
    return _stopped(box, {path: f"import os; got = os.stat({path!r})" for path in paths})


def _writes_nothing(box: Box, out: Outside) -> bool:
    path = str(out.file)
    tries = {
        "write": f"open({path!r}, 'w')",
        "append": f"open({path!r}, 'a').write('x')",
        "cut off": f"import os; os.truncate({path!r}, 0)",
        "cut off by opening": f"import os; os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        "remove": f"import os; os.remove({path!r})",
        "mode": f"import os; os.chmod({path!r}, 0)",
    }
    return _stopped(box, tries) and out.file.read_text() == "secret"


def _connects_to_nothing(box: Box, out: Outside) -> bool:
    code = f"import socket; socket.create_connection({out.listener.getsockname()!r}, 0.3)"
    return _stopped(box, {"loopback": code}) and not out.visited()


def _signals_nobody(box: Box, out: Outside) -> bool:
    pid = out.victim.pid
    code = SIGIO.format(own=f"fcntl.fcntl(r, 8, {pid})", watch=FLAGS)
    box.attempts({"descriptor": code, "kill": f"import os; os.kill({pid}, 9)"})
    return out.victim.poll() is None


def _leaves_init_alone(box: Box, _: Outside) -> bool:
    code = f"""
        import os
        for number in range(1, {signal.NSIG}):
            for pid in (1, os.getppid()):
                try: os.kill(pid, number)
                except OSError: pass
        print("after")
        """
    try:
        return box.run(code).stdout == "after\n"
    except SandboxError:
        return False


def _locks_nothing(box: Box, _: Outside) -> bool:
    start = f"import fcntl, os; file = open({SHARED_FILE!r}, 'rb'); got = "
    return _stopped(box, {name: start + call for name, call in LOCKS.items()})


def _calls_only_what_is_listed(box: Box, _: Outside) -> bool:
    entries = (entry.split("=") for entry in UNLISTED)
    call = "import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\nl.syscall({}, 0, 0, 0, 0)\nassert {}"
    return _stopped(box, {name: call.format(number, "ctypes.get_errno() != 1") for name, number in entries})


def _bounds_memory(box: Box, _: Outside) -> bool:
    code = """
        import os, time
        forked = 0
        try:
            while forked < 6 and os.fork(): forked += 1
        except OSError: pass
        x = bytearray(80 << 20 if forked else 1 << 30)
        time.sleep(60)
        """
    return box.run(code, seconds=20, memory_mb=256).status == "memory"


def _hides_no_memory(box: Box, _: Outside) -> bool:
    return _stopped(box, HIDDEN)


def _bounds_files(box: Box, _: Outside) -> bool:
    code = """
        for number in range(40):
            with open(f"f{number}", "wb") as file: file.write(bytes(1 << 20))
        """
    return box.run(code, seconds=20, disk_mb=16).status == "error"


def _leaves_nothing(box: Box, _: Outside) -> bool:
    box.run("import os, time\ntry:\n    if os.fork() == 0: time.sleep(60)\nexcept OSError: pass")
    return len(wait_until_quiet(box.pool, seconds=0.0)) == 2


def _has_one_core(box: Box, _: Outside) -> bool:
    outcomes = [box.run(code, seconds=1.2, memory_mb=1024) for code in (LOOPS, THREADS)]
    return all(outcome.cpu_seconds < 1.4 * max(outcome.seconds, 1.2) for outcome in outcomes)


def _leaves_others_their_share(box: Box, _: Outside) -> bool:
    """On one core, beside a program with sixteen loops or threads."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with Pool(2, **box.arguments) as pool:
            pool.prepare()
            hostile: list[Outcome] = []
            thread = threading.Thread(target=lambda: hostile.append(pool.run(LOOPS, limits=Limits(seconds=2.0))))
            thread.start()
            time.sleep(0.3)
            other = pool.run(BESIDE, limits=Limits(seconds=20))
            thread.join()
    finally:
        os.sched_setaffinity(0, before)
    return float(other.stdout) / 1.2 > 0.6 * hostile[0].cpu_seconds / hostile[0].seconds


def _starts_processes(box: Box, _: Outside) -> bool:
    code = "import os\npid = os.fork()\nif pid: print(os.waitpid(pid, 0)[1])"
    return box.run(code).stdout == "0\n"


GUARANTEES: dict[str, Callable[[Box, Outside], bool]] = {
    "a right program passes, a wrong one does not": _judges,
    "no file of the machine is read": _reads_nothing,
    "not even names of files are seen": _sees_no_names,
    "nothing of the machine is written, cut off or removed": _writes_nothing,
    "no connection": _connects_to_nothing,
    "no process outside is signalled": _signals_nobody,
    "its init cannot be ended": _leaves_init_alone,
    "no lock on a shared library": _locks_nothing,
    "calls that are not listed are refused": _calls_only_what_is_listed,
    "memory of all its processes is bounded": _bounds_memory,
    "no memory escapes the count": _hides_no_memory,
    "the sum of its files is bounded": _bounds_files,
    "nothing of it is left afterwards": _leaves_nothing,
    "time of one core for all of it": _has_one_core,
    "other programs keep their share of a core": _leaves_others_their_share,
    "(it can start processes)": _starts_processes,
}
SLOW = ("time of one core for all of it", "other programs keep their share of a core")


def measure(kernel: Kernel, names: tuple[str, ...] = tuple(GUARANTEES)) -> dict[str, str]:
    """``yes``, ``no``, or ``refused`` where that kernel runs nothing, by guarantee."""
    with outside() as out:
        try:
            with kernel.box() as box:
                return {name: "yes" if GUARANTEES[name](box, out) else "no" for name in names}
        except SandboxRefused:
            return dict.fromkeys(names, "refused")
