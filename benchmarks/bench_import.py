"""What ``import verl`` costs: best and median of fresh processes, beside an empty interpreter in the same run.

Run ``python benchmarks/bench_import.py [--repeats 10]``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 0.3
PROGRAMS = {
    "nothing": "pass",
    "import verl": "import verl",
    "import numpy": "import numpy",
    "from verl import DataProto": "from verl import DataProto",
    "import torch": "import torch",
}
SLOW = ("from verl import DataProto", "import torch")  # shown for scale
HEAVY = ("torch", "ray", "numpy", "transformers", "tensordict")


def seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    return time.perf_counter() - start


def loaded_by_import() -> list[str]:
    """Which heavy packages ``import verl`` pulls in; there must be none."""
    program = f"import sys, verl; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return run.stdout.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(repeats):
        for name, program in PROGRAMS.items():
            if number < 3 or name not in SLOW:
                found[name].append(seconds(program))
    base = min(found["nothing"])
    print(f"{'program':<30}{'best ms':>10}{'median ms':>11}{'over empty':>12}{'ratio to limit':>16}")
    for name, times in found.items():
        extra = min(times) - base
        ratio = statistics.median(times) / LIMIT_SECONDS
        print(
            f"{name:<30}{min(times) * 1e3:10.1f}{statistics.median(times) * 1e3:11.1f}{extra * 1e3:12.1f}{ratio:16.2f}"
        )
    held = statistics.median(found["import verl"]) <= LIMIT_SECONDS
    heavy = loaded_by_import()
    print(
        f"import verl <= {LIMIT_SECONDS} s: {'holds' if held else 'MISSED'}; heavy packages loaded: {heavy or 'none'}"
    )
    return 0 if held and not heavy else 1


if __name__ == "__main__":
    raise SystemExit(main())
