"""Runs the tests of this folder on machines without pytest: ``python -m tests.gpu``."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from pathlib import Path

import torch


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was run")
        return 2
    failed = 0
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.gpu.{path.stem}")
        for name, test in vars(module).items():
            if not name.startswith("test_"):
                continue
            start = time.perf_counter()
            try:
                test()
                torch.cuda.synchronize()
                outcome = "passed"
            except Exception:  # the boundary between a test and its report
                traceback.print_exc()
                failed, outcome = failed + 1, "FAILED"
            print(f"{outcome} {path.stem}::{name} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
