"""Buckets in shared memory: what a tensor-parallel worker reads of them."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from verl.rollout.vllm import extension
from verl.rollout.vllm.extension import WeightReceiver, buckets
from verl.rollout.vllm.weight_transfer import close_folder, open_folder, publish
from verl.weight_sync import WeightChunk

ROWS, WIDTH = 4096, 1024
SENDER = """
import multiprocessing, time
from verl.rollout.vllm.extension import buckets
from verl.rollout.vllm.weight_transfer import open_folder
folder = open_folder()
reader = multiprocessing.get_context("fork").Process(target=lambda: list(buckets(folder, 0, 60.0)))
reader.start()
print(reader.pid, folder, flush=True)
time.sleep(60)
"""


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


@pytest.mark.slow
def test_a_worker_whose_sender_was_killed_in_an_update_ends_and_leaves_no_memory_behind():
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    try:
        reader, folder = sender.stdout.readline().split()
        watched = psutil.Process(int(reader))
        assert Path(folder).is_dir()
    finally:
        sender.kill()
        sender.wait()
    watched.wait(30)
    assert not Path(folder).exists()


def test_one_worker_that_refuses_a_bucket_is_heard_while_the_others_wait_for_the_next(monkeypatch):
    def reload(worker, weights):
        for _ in weights:
            if worker.rank == 0:
                raise ValueError("no room")

    def chunks():
        for number in range(6):
            exported.append(number)
            yield WeightChunk(1, [("w", torch.full((2,), float(number)))], last=number == 5)

    monkeypatch.setattr(extension, "reload_weights", reload)
    folder, exported, workers = open_folder(), [], [WeightReceiver(), WeightReceiver()]
    for rank, worker in enumerate(workers):
        worker.rank = rank
    try:
        with ThreadPoolExecutor(2) as pool:
            reading = [pool.submit(worker.verl_load_files, str(folder), 20) for worker in workers]
            publish(folder, chunks(), readers=2, seconds=20, is_over=lambda: all(said.done() for said in reading))
            assert [said.result() for said in reading] == ["ValueError: no room", ""]
        assert exported == list(range(6)), "other ranks take part in the export"
    finally:
        close_folder(folder)
