"""What vLLM mixes into its workers (``worker_extension_cls``): new weights arrive without anything being unpickled.

In one process the tensors are passed as they are. Workers in separate processes read them from safetensors
files in shared memory, one bucket at a time, while the sender writes the next one.
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from verl.errors import RolloutError
from verl.rollout.vllm.versions import reload_weights

PATH = "verl.rollout.vllm.extension.WeightReceiver"
END = "end"
REFUSED = "refused"
POLL_SECONDS = 0.002


class WeightReceiver:
    """Methods by which a worker is updated, called by name."""

    rank: int

    def verl_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors of this process."""
        reload_weights(self, iter(weights))

    def verl_load_files(self, folder: str, seconds: float) -> str:
        """Take the buckets that appear in a folder, see `publish`; why they could not be taken, empty if they were.

        Nothing is raised: of several workers that fail vLLM hears the first, and would take what the next one said for
        its answer to the next call. A mark in the folder tells the sender at once; vLLM answers it when all have ended.
        """
        try:
            reload_weights(self, buckets(Path(folder), self.rank, seconds))
        except Exception as error:  # boundary: the engine's process raises it
            with suppress(FileNotFoundError):  # the sender has given up
                (Path(folder) / REFUSED).touch()
            return f"{type(error).__name__}: {error}"
        return ""

    def verl_load_folder(self, folder: str) -> None:
        """Take the safetensors files of a folder."""
        files = sorted(Path(folder).glob("*.safetensors"))
        reload_weights(self, (named for file in files for named in load_file(str(file)).items()))

    def verl_ready(self) -> None:
        """Shows that this class is there."""

    def verl_reload_last(self) -> None:
        """Reload the weights of the model's folder."""
        reload_weights(self)


def buckets(folder: Path, rank: int, seconds: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of bucket 0, 1, ... until the end mark; each bucket is acknowledged once it was used."""
    number = 0
    while (file := _next(folder, number, seconds)) is not None:
        yield from load_file(str(file)).items()
        (folder / f"{number}.read-{rank}").touch()
        number += 1


def _next(folder: Path, number: int, seconds: float) -> Path | None:
    """The file of a bucket, or None at the end of the stream."""
    file, last = folder / f"{number}.safetensors", folder / f"{number}.{END}"
    deadline = time.monotonic() + seconds
    while not file.exists():
        if last.exists():
            return None
        if not folder.is_dir():
            raise RolloutError("the sender has given up", key=f"bucket {number}")
        if _sender_has_ended():
            shutil.rmtree(folder, ignore_errors=True)  # no other process is left to do it
            raise RolloutError("the process that sends the weights has ended", key=f"bucket {number}")
        if time.monotonic() > deadline:
            raise RolloutError(f"the next weights did not come within {seconds} s", key=f"bucket {number}")
        time.sleep(POLL_SECONDS)
    return file


def _sender_has_ended() -> bool:
    """Whether the engine's process, which starts the workers and sends their weights, has ended."""
    sender = multiprocessing.parent_process()
    return sender is not None and not sender.is_alive()
