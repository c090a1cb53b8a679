"""How fast the sandbox runs programs, and how soon hostile ones end.

Run ``python benchmarks/bench_sandbox.py [--programs 200] [--calls 100]``. Every line names what was found and what was
asked for; the exit code is 1 where something asked for was not reached.

Each program is a fresh process behind all walls. The clock of a hostile program runs from the call to its outcome, when
everything that it started is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from verl.sandbox import CallCase, Limits, Pool, StdinCase
from verl.tools.python_interpreter import PythonInterpreterTool

PROGRAMS_PER_SECOND, ROUND_TRIP_MS, OVER_LIMIT_SECONDS = 40.0, 30.0, 1.0
FORKS = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: pass"
DAEMONS = "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid(); time.sleep(99)\ntime.sleep(99)"
DEAF = "import signal\nfor number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\nwhile True: pass"
THREADS = """if True:
    import threading, time
    while True:
        try: threading.Thread(target=time.sleep, args=(99,)).start()
        except RuntimeError: pass
"""
HOSTILE = {
    "fork bomb": FORKS,
    "allocation of 10 GB": "x = bytearray(10 << 30)",
    "growth to 10 GB": "x = []\nwhile len(x) < 10_000: x.append(bytearray(1 << 20))",
    "endless loop": "while True: pass",
    "endless loop that ignores signals": DEAF,
    "flood of output": "while True: print('x' * 10_000)",
    "file of 10 GB": "f = open('f', 'wb')\nfor _ in range(10_000): f.write(bytes(1 << 20))",
    "thread bomb": THREADS,
    "daemons": DAEMONS,
}


def programs_per_second(pool: Pool, number: int) -> float:
    """Trivial programs, as many callers as places."""
    each = number // pool.size
    threads = [threading.Thread(target=lambda: [pool.run("print(1)") for _ in range(each)]) for _ in range(pool.size)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return each * pool.size / (time.perf_counter() - begin)


def cases_per_second(pool: Pool, number: int) -> dict[str, float]:
    """Tests of one program, one after the other in one sandbox."""
    kinds = {
        "stdin cases": ("print(int(input()) * 2)", [StdinCase(f"{i}", f"{2 * i}") for i in range(number)]),
        "call cases": ("def f(x): return x * 2", [CallCase("f", (i,), 2 * i) for i in range(number)]),
    }
    found = {}
    for name, (program, cases) in kinds.items():
        begin = time.perf_counter()
        results = pool.run_cases(program, cases)
        found[name] = number / (time.perf_counter() - begin)
        assert all(result.passed for result in results)
    return found


def round_trips(number: int, stateful: bool) -> list[float]:
    """Milliseconds of calls of the Python tool, one after the other, sorted."""

    async def measure() -> list[float]:
        tool = PythonInterpreterTool({"stateful": stateful})
        name, _ = await tool.create()
        spent = []
        for index in range(number + 5):
            begin = time.perf_counter()
            answer, _, _ = await tool.execute(name, {"code": f"print({index} + 1)"})
            spent.append((time.perf_counter() - begin) * 1e3)
            assert answer.text == str(index + 1)
        await tool.release(name)
        await tool.close()
        return sorted(spent[5:])

    return asyncio.run(measure())


def processes_below(pid: int) -> int:
    """How many processes descend from this one."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    below, waiting = 0, [pid]
    while waiting:
        children = [child for child, parent in parents.items() if parent == waiting[-1]]
        waiting.pop()
        below, waiting = below + len(children), waiting + children
    return below


def timed(function: Callable[[], object]) -> tuple[float, object]:
    begin = time.perf_counter()
    found = function()
    return time.perf_counter() - begin, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--calls", type=int, default=100)
    options = parser.parse_args()
    good = True

    def tell(name: str, found: str, asked: str = "", reached: bool = True) -> None:
        nonlocal good
        good = good and reached
        print(
            f"{name:<36} {found:<34} {asked:<22} {'' if not asked else 'ok' if reached else 'NOT REACHED'}", flush=True
        )

    load = os.getloadavg()[0]
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before the start")
    with Pool() as pool:
        seconds, missing = timed(pool.prepare)
        tell("start of a pool", f"{seconds * 1e3:.0f} ms, missing layers: {missing or 'none'}")
        programs_per_second(pool, 20)
        rate = programs_per_second(pool, options.programs)
        tell(
            "trivial programs",
            f"{rate:.0f} a second, {pool.size} at once",
            ">= 40 a second",
            rate >= PROGRAMS_PER_SECOND,
        )
        for name, rate in cases_per_second(pool, options.calls).items():
            tell(name, f"{rate:.0f} a second, one by one")
        for stateful in (False, True):
            spent = round_trips(options.calls, stateful)
            median, late = statistics.median(spent), spent[int(0.95 * len(spent))]
            name = "python tool, " + ("stateful" if stateful else "anew each call")
            tell(name, f"{median:.1f} ms median, {late:.1f} ms 95 %", "<= 30 ms median", median <= ROUND_TRIP_MS)
        before = processes_below(os.getpid())
        for name, program in HOSTILE.items():
            limits = Limits(seconds=2.0, memory_mb=256)
            seconds, outcome = timed(lambda program=program, limits=limits: pool.run(program, limits=limits))
            left = processes_below(os.getpid()) - before
            reached = seconds <= limits.seconds + OVER_LIMIT_SECONDS and left == 0
            found = f"{seconds:.2f} s, {outcome.status}, {left} processes left"  # type: ignore[attr-defined]
            tell(name, found, "<= 2 s + 1 s, 0 left", reached)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
