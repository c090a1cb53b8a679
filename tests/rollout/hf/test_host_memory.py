"""What the allocator of a process keeps: freed blocks serve the next tensors, and go back when they are asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")

SCRIPT = """
import json, resource, sys
import torch
from verl.device import give_memory_back, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if "keep" in sys.argv:
    keep_freed_memory()

def work():
    parts = [torch.ones(1 << 20) for _ in range(8)]  # 4 MB each
    return sum(float(part[0]) for part in parts)

for _ in range(5):  # until the heap has its shape
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = resident()
give_memory_back("cpu")
print(json.dumps([faults, kept - resident()]))
"""


def run(*words: str, **environment: str) -> tuple[int, int]:
    """Page faults of the same work done ten more times, and the bytes that went back at the end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], env=clean | environment, capture_output=True, text=True, check=True
    )
    faults, returned = json.loads(done.stdout)
    return faults, returned


def test_tensors_meet_no_fresh_pages_once_freed_memory_is_kept_and_it_goes_back_when_asked_for():
    faults, _ = run(MALLOC_MMAP_THRESHOLD_="65536")  # by itself glibc returns blocks or not, as its heap happens to lie
    kept_faults, returned = run("keep")
    assert kept_faults < faults / 10
    assert returned > 0.9 * 8 * (4 << 20)


def test_what_the_shell_says_of_its_allocator_stays():
    assert run("keep", MALLOC_MMAP_THRESHOLD_="65536")[0] > run("keep")[0] * 10
