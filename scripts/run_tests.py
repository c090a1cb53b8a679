"""Run the whole suite in three passes, two of them at once, and say at the end what each came to.

    python scripts/run_tests.py [pytest's options]

Beside each other: two workers, of which only one at a time runs a test of several processes. Meanwhile a third pytest
runs, one after another, what mostly waits (`WAITING` in tests/conftest.py); its output is shown when it has ended. Then
alone: what a clock or another test may fail (`ALONE`). However this process ends, nothing that it started outlives it.

Failed tests that start processes or depend on a clock (marker `timed`) run once more, by themselves. One that passes
then does not fail the suite: the last lines say `flaky: NAME`, and .pytest_cache/flaky.txt lists it.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from verl.lifeline import guarded

ROOT = Path(__file__).resolve().parent.parent
# tests/conftest.py says what stays with one worker, and puts the longest first.
BESIDE = ("-n", "2", "--no-loadscope-reorder", "-m", "not alone and not waiting")
WAITING = ("-m", "waiting")
ALONE = ("-m", "alone")
TIMED = ("--last-failed", "--last-failed-no-failures", "none", "-m", "timed")
FAILED = 1  # pytest's status after failed tests
INTERRUPTED = 2  # pytest's status after Ctrl-C
FLAKY_FILE = ROOT / ".pytest_cache" / "flaky.txt"


def main(options: list[str]) -> int:
    """All passes, the last also after a failure of the others, but not after Ctrl-C; 0 if all passed."""
    # The terminal interrupts pytest as well, which then says how far it came.
    signal.signal(signal.SIGINT, lambda *_: None)
    ends: dict[str, tuple[int, str]] = {}
    flaky: list[str] = []
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryFile() as kept:
        folders = {name: Path(caches, name) for name in ("beside each other", "waiting", "alone")}
        cached = {name: ["-o", f"cache_dir={folder}", *options] for name, folder in folders.items()}
        waiting = start([*WAITING, *cached["waiting"]], kept.fileno())
        ends["beside each other"] = run([*BESIDE, *cached["beside each other"]])
        status = waiting.wait()
        kept.seek(0)
        ends["waiting"] = (abs(status), show(kept.fileno()))
        if INTERRUPTED not in (code for code, _ in ends.values()):
            ends["alone"] = run([*ALONE, *cached["alone"]])
            for name in [name for name, (code, _) in ends.items() if code == FAILED]:
                flaky += run_failed_again(folders[name], cached[name])
                if not last_failed(folders[name]):
                    ends[name] = (0, f"{ends[name][1]}; all that failed passed by themselves")
    report_flaky(flaky)
    print("\n".join(f"tests {name}: {summary}" for name, (_, summary) in ends.items()), flush=True)
    return max(code for code, _ in ends.values())


def run_failed_again(cache: Path, options: list[str]) -> list[str]:
    """Run the failed `timed` tests of a pass by themselves; returns those that pass now."""
    failed = last_failed(cache)
    run([*TIMED, *options])
    return sorted(failed - last_failed(cache))


def last_failed(cache: Path) -> set[str]:
    """What failed last, by pytest's own record; tests that were left out keep their entry."""
    record = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(record.read_text())) if record.is_file() else set()


def report_flaky(names: list[str]) -> None:
    """Print them, and put them into the file for whoever looks later."""
    FLAKY_FILE.parent.mkdir(exist_ok=True)
    FLAKY_FILE.write_text("".join(f"{name}\n" for name in names))
    for name in names:
        print(f"flaky: {name}")


def run(words: list[str]) -> tuple[int, str]:
    """pytest's status and its last line, while its output is shown as it comes."""
    process = start(words, subprocess.PIPE)
    assert process.stdout is not None
    last = show(process.stdout.fileno())
    return abs(process.wait()), last


def start(words: list[str], output: int) -> subprocess.Popen[bytes]:
    """A pytest that ends with this process."""
    pytest = [sys.executable, "-m", "pytest", f"--color={'yes' if sys.stdout.isatty() else 'no'}", *words]
    return subprocess.Popen(guarded(pytest), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output)


def show(output: int) -> str:
    """The last line of what a pytest prints, which is shown as it is read."""
    decode, tail = codecs.getincrementaldecoder("utf-8")("replace").decode, ""
    while piece := os.read(output, 1 << 16):
        text = decode(piece)
        print(text, end="", flush=True)
        tail = (tail + text)[-1000:]
    last = re.sub(r"\x1b\[\d*m", "", tail.strip().rpartition("\n")[2]).strip("= ")
    return last or "nothing was said"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
