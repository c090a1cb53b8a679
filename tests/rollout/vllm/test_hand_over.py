"""Buckets in shared memory: what a tensor-parallel worker reads of them."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.rollout.vllm.extension import buckets
from verl.rollout.vllm.hand_over import close_folder, open_folder, publish
from verl.weight_sync import WeightChunk

ROWS, WIDTH = 4096, 1024


def resident(file: Path) -> int:
    """Bytes of a mapped file that this process has read, as Linux counts them."""
    lines, inside, found = Path("/proc/self/smaps").read_text().splitlines(), False, 0
    for line in lines:
        if "-" in line.split()[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


def test_a_worker_that_cuts_its_rows_out_of_a_bucket_reads_those_only():
    """Engines hand whole tensors to their loaders; here they are mapped, and nobody copies them."""
    folder, whole = open_folder(), torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    try:
        publish(folder, [WeightChunk(1, [("w", whole)], last=True)], readers=1, seconds=5, is_over=lambda: False)
        ((name, mapped),) = [next(buckets(folder, 0, seconds=5))]
        own = mapped.narrow(0, ROWS // 2, ROWS // 4).clone()
        read = resident(folder / "0.safetensors")
        assert name == "w" and torch.equal(own, whole[ROWS // 2 : 3 * ROWS // 4])
        assert own.nbytes <= read < 0.4 * whole.nbytes
    finally:
        close_folder(folder)
