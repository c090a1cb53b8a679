"""Run the whole suite in two passes, and say at the end what each came to.

    python scripts/run_tests.py [pytest's options]

Beside each other: two workers, of which only one at a time runs a test of several processes. Alone: what a clock or
another test may fail (`ALONE` in tests/conftest.py). However this process ends, nothing that it started outlives it.
"""

from __future__ import annotations

import codecs
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from verl.lifeline import guarded

ROOT = Path(__file__).resolve().parent.parent
# tests/conftest.py says what stays with one worker, and puts the longest first.
BESIDE = ("-n", "2", "--no-loadscope-reorder", "-m", "not alone")
PASSES = {"beside each other": BESIDE, "alone": ("-m", "alone")}
INTERRUPTED = 2  # pytest's status after Ctrl-C


def main(options: list[str]) -> int:
    """Both passes, the second also after a failure of the first, but not after Ctrl-C; 0 if both passed."""
    # The terminal interrupts pytest as well, which then says how far it came.
    signal.signal(signal.SIGINT, lambda *_: None)
    ends: dict[str, tuple[int, str]] = {}
    for name, words in PASSES.items():
        ends[name] = run([*words, *options])
        if ends[name][0] == INTERRUPTED:
            break
    print("\n".join(f"tests {name}: {summary}" for name, (_, summary) in ends.items()), flush=True)
    return max(code for code, _ in ends.values())


def run(words: list[str]) -> tuple[int, str]:
    """pytest's status and its last line, while its output is shown as it comes."""
    pytest = [sys.executable, "-m", "pytest", f"--color={'yes' if sys.stdout.isatty() else 'no'}", *words]
    process = subprocess.Popen(guarded(pytest), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    decode, tail = codecs.getincrementaldecoder("utf-8")("replace").decode, ""
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        text = decode(piece)
        print(text, end="", flush=True)
        tail = (tail + text)[-1000:]
    last = re.sub(r"\x1b\[\d*m", "", tail.strip().rpartition("\n")[2]).strip("= ")
    return abs(process.wait()), last or "nothing was said"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
