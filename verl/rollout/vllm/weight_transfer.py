"""The sender's side of weights for workers in other processes: buckets as files in shared memory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from verl.errors import RolloutError
from verl.rollout.vllm.extension import END, POLL_SECONDS, REFUSED
from verl.weight_sync import WeightChunk

SHARED_MEMORY = Path("/dev/shm")
AHEAD = 2
"""Buckets that may be in memory unread: one in use and one being written."""


def open_folder() -> Path:
    """An empty folder, in shared memory where there is some."""
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    return Path(tempfile.mkdtemp(prefix="verl-weights-", dir=place))


def publish(
    folder: Path, chunks: Iterable[WeightChunk], readers: int, seconds: float, is_over: Callable[[], bool]
) -> None:
    """Write chunk after chunk; a bucket is deleted once all readers have used it.

    Args:
        readers: workers that read each bucket.
        seconds: how long the readers may take for a bucket.
        is_over: whether the readers have ended, by an error for instance. Then, or after a refused bucket, nothing is
            waited for.
    """
    number = 0

    def ends() -> bool:
        return is_over() or (folder / REFUSED).exists()

    for chunk in chunks:
        if ends():
            continue  # the export continues: other ranks take part in it
        _wait_for(folder, number - AHEAD, readers, seconds, ends)
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in chunk.tensors}
        _write(folder, number, tensors)
        number += 1
    (folder / f"{number}.{END}").touch()


def _write(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    partial = folder / f"{number}.partial"
    seen: set[int] = set()
    for name, tensor in tensors.items():  # safetensors refuses tensors that share memory
        if tensor.untyped_storage().data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
    save_file(tensors, str(partial))
    partial.rename(folder / f"{number}.safetensors")


def _wait_for(folder: Path, number: int, readers: int, seconds: float, is_over: Callable[[], bool]) -> None:
    if number < 0:
        return
    deadline = time.monotonic() + seconds
    while len(list(folder.glob(f"{number}.read-*"))) < readers:
        if is_over():
            return  # a reader on its way to the end mark may not have opened it yet
        if time.monotonic() > deadline:
            raise RolloutError(f"the sampler's workers did not take the weights within {seconds} s")
        time.sleep(POLL_SECONDS)
    with suppress(FileNotFoundError):
        (folder / f"{number}.safetensors").unlink()


def close_folder(folder: Path) -> None:
    """Free the memory, whatever happened."""
    shutil.rmtree(folder, ignore_errors=True)
