"""Hostile programs and memory or processor time that no resident set and no single process shows."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.harness.sandboxes import HERE, OFFERED, arguments, open_pool
from tests.sandbox.attacks import Box
from verl.sandbox import Limits, Outcome, Pool, process

MAP = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    got = libc.mmap(None, 1 << 20, 3, {flags}, {file}, 0)
    if got == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    """
CALL = """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall({}) < 0:
        raise OSError(ctypes.get_errno(), "no")
    """
ADVISE = """
    import ctypes, mmap
    area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.write(bytes(1 << 20))
    area.madvise({})
    """
HIDDEN = {
    "shared and anonymous": MAP.format(flags="0x21", file=-1),
    "shared, anonymous, validated": MAP.format(flags="0x23", file=-1),
    "as Python makes it": "import mmap; got = mmap.mmap(-1, 1 << 20)",
    "a file of zeros": MAP.format(flags="0x01", file="os.open('/dev/zero', os.O_RDWR)"),
    "huge pages": MAP.format(flags="0x40022", file=-1),
    "a file in memory": "import os; got = os.memfd_create('x')",
    "a segment": "import ctypes; got = ctypes.CDLL(None).shmget(0, 4096, 0o1600); assert got >= 0",
    "by name": "from multiprocessing.shared_memory import SharedMemory; got = SharedMemory(create=True, size=4096)",
    "a larger pipe": "import fcntl, os; got = fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "paging out": ADVISE.format(21),
    "cold pages": ADVISE.format(20),
    "merged pages": ADVISE.format(12),
    "descriptors under way": """
        import os, socket
        a, b = socket.socketpair()
        socket.send_fds(a, [b'x'], [os.open('.', os.O_RDONLY)])
        """,
}


def test_no_memory_can_be_had_that_no_limit_counts(box: Box):
    if "seccomp" in box.missing:
        return
    box.none_gets_through(HIDDEN)


def test_memory_of_ones_own_and_of_files_can_be_mapped(box: Box):
    code = """
        import mmap
        own = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        own.write(b"own"); own.madvise(mmap.MADV_DONTNEED)
        with open("f", "wb+") as file:
            file.truncate(1 << 20)
            shared = mmap.mmap(file.fileno(), 1 << 20)
            shared.write(b"shared"); shared.flush()
        print(own[:3], open("f", "rb").read(6))
        """
    assert box.run(code).stdout == "b'\\x00\\x00\\x00' b'shared'\n"


@pytest.mark.needs_layers("namespaces", "seccomp")
def test_what_was_shared_and_dropped_does_not_stay_allocated(pool: Pool):
    """Sixteen processes, each with as much as one may have, mapped, touched, and dropped from the resident set."""
    code = """if True:
        import mmap, os, time
        kept = 0
        for _ in range(14):
            if os.fork() == 0:
                try:
                    area = mmap.mmap(-1, 100 << 20)
                    for place in range(0, 100 << 20, 1 << 20):
                        area[place : place + (1 << 20)] = bytes(1 << 20)
                        area.madvise(mmap.MADV_DONTNEED, place, 1 << 20)
                except OSError:
                    os._exit(1)
                time.sleep(60)
        while True:
            pid, status = os.wait()
            kept += 1
            if kept == 14:
                print("nobody has any")
                break
        """
    outcome = pool.run(code, limits=Limits(seconds=6, memory_mb=192))
    assert outcome.stdout == "nobody has any\n", outcome


@pytest.mark.needs_layers("namespaces")
def test_memory_of_processes_whose_first_thread_has_ended_counts(pool: Pool):
    """The kernel shows nothing of it under the process's own number."""
    code = """if True:
        import ctypes, os, threading, time
        def keep():
            kept = bytearray(40 << 20)
            time.sleep(60)
        for _ in range(6):
            if os.fork() == 0:
                threading.Thread(target=keep).start()
                ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
        time.sleep(60)
        """
    outcome = pool.run(code, limits=Limits(seconds=10, memory_mb=192))
    assert outcome.status == "memory" and outcome.seconds < 8, outcome


@pytest.mark.needs_layers("namespaces")
def test_processes_that_end_by_the_dozen_are_no_offence(pool: Pool):
    code = "import os\nfor _ in range(200):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\nprint('done')"
    assert pool.run(code, limits=Limits(seconds=20, memory_mb=64)).stdout == "done\n"
    code = "import os, time\nfor _ in range(14):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.2)\nprint('done')"
    assert pool.run(code, limits=Limits(seconds=20, memory_mb=64)).stdout == "done\n"


FILL = """if True:
    import os, socket, time
    def fill():
        pairs = []
        try:
            while True:
                pairs.append(socket.socketpair())
                for end in pairs[-1]:
                    end.setblocking(False)
                    try:
                        while True:
                            end.send(bytes(1 << 16))
                    except BlockingIOError:
                        pass
        except OSError:
            time.sleep(60)
    for _ in range({others}):
        if os.fork() == 0:
            fill()
    fill()
    """


@pytest.mark.needs_layers("namespaces")
def test_what_lies_in_the_buffers_of_sockets_counts(pool: Pool):
    """Each of 120 sockets holds some 250 KB of the kernel's memory: 14 processes have 400 MB, and 10 MB resident."""
    outcome = pool.run(FILL.format(others=13), limits=Limits(seconds=20, memory_mb=192))
    assert outcome.status == "memory" and outcome.seconds < 15, outcome


def test_a_few_full_sockets_are_no_offence(pool: Pool):
    code = """if True:
        import socket
        pairs = [socket.socketpair() for _ in range(40)]
        for a, b in pairs:
            a.setblocking(False)
            try:
                while True: a.send(bytes(1 << 16))
            except BlockingIOError: pass
        import time; time.sleep(0.2); print("kept")
        """
    assert pool.run(code, limits=Limits(seconds=20, memory_mb=192)).stdout == "kept\n"


def test_many_open_files_are_no_offence(pool: Pool):
    code = "import time\nx = [open('/dev/null') for _ in range(110)]\ntime.sleep(0.1)\nprint('kept')"
    assert pool.run(code, limits=Limits(seconds=20, memory_mb=24)).stdout == "kept\n"


LOOPS = """if True:
    import os
    for _ in range(15):
        try:
            if os.fork() == 0:
                try:
                    os.setsid()
                except OSError:
                    pass
                break
        except OSError:
            break
    while True: pass
    """
BESIDE = "import time\nend = time.time() + 1.2\nwhile time.time() < end: pass\nprint(time.process_time())"


@pytest.fixture
def one_core():
    """This process, and the pools that it starts, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.needs_layers("seccomp")
def test_sixteen_loops_in_sessions_of_their_own_leave_another_its_share(one_core):
    """One core, two programs: the one with sixteen loops gets no more than about what the one with one loop gets."""
    if "whole" not in OFFERED:
        return
    with Pool(2, **HERE) as pool:
        pool.prepare()
        hostile: list[Outcome] = []
        thread = threading.Thread(target=lambda: hostile.append(pool.run(LOOPS, limits=Limits(seconds=2.0))))
        thread.start()
        time.sleep(0.3)
        other = pool.run(BESIDE, limits=Limits(seconds=20))
        thread.join()
    share = float(other.stdout) / 1.2
    taken = hostile[0].cpu_seconds / hostile[0].seconds
    assert share > 0.6 * taken, f"the other had {share:.0%} of the core, and sixteen loops {taken:.0%}"


THREADS = """if True:
    import hashlib, threading
    data = bytes(1 << 24)
    def work():
        while True: hashlib.sha256(data).digest()
    for _ in range(3): threading.Thread(target=work, daemon=True).start()
    work()
    """


def has_the_time_of_one_core(outcome: Outcome) -> bool:
    return outcome.status == "timeout" and outcome.cpu_seconds < 1.4 * outcome.seconds


def test_all_processes_of_a_program_have_the_time_of_one_core(pool: Pool):
    outcome = pool.run(LOOPS, limits=Limits(seconds=1.2))
    assert has_the_time_of_one_core(outcome), outcome


@pytest.mark.parametrize("mode", [mode for mode in ("whole", "without namespaces") if mode in OFFERED])
def test_all_threads_of_a_program_have_the_time_of_one_core(mode: str, pools: dict[str, Pool]):
    pool = pools[mode] if mode in pools else pools.setdefault(mode, open_pool(mode))
    outcome = pool.run(THREADS, limits=Limits(seconds=1.2, memory_mb=1024))
    assert has_the_time_of_one_core(outcome), outcome


@pytest.mark.needs_layers("seccomp")
def test_threads_have_the_time_of_one_core_where_proc_cannot_be_mounted(monkeypatch: pytest.MonkeyPatch):
    spoil = (
        "from verl.sandbox.inside import root; root.mount_processes = lambda: (_ for _ in ()).throw(OSError(1, 'no')); "
    )
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", spoil + "main()"))
    if "whole" not in OFFERED:
        return
    with Pool(1, **arguments("whole")) as pool:
        outcome = pool.run(THREADS, limits=Limits(seconds=1.2, memory_mb=1024))
        assert has_the_time_of_one_core(outcome), outcome
        assert pool.run("print('still served')").stdout == "still served\n"
