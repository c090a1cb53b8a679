"""A supervised run on four processes, one of which is killed at a chosen write of a save, or has no more room there.

A write is a file that is opened, a tensor that goes into one, a rename, a deletion, and the moment at which a rank
has its files on the disk and has not told the first rank of them. ``python -m tests.faults.sharded_kills`` hits a run
at every write of every rank, starts it again in the folder that is left, and prints which checkpoint is there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.models import tiny_model_dir
from tests.harness.ranks import run_cells
from tests.harness.rows import turns, write_prompts
from tests.megatron.cells import SHIM
from verl.checkpoint import find_checkpoint
from verl.models.hf_folder import read_weights

RANKS, EXACT = 4, 1e-5
ROOM = 64
"""Bytes of a file on a full disk."""
BYTES, TRACKER = "bytes", "open .latest_checkpointed_iteration.txt.new"
MEGATRON = ("engine=megatron", f"model.external_lib={SHIM}", "trainer.resume_changed=accept")
"""Its optimizer is sharded over the data-parallel ranks."""
AFTERWARDS = (("plain", 1, ()), ("fsdp2", 2, ()), ("fsdp2", 3, ()), ("fsdp2", RANKS, ()), ("megatron", 2, MEGATRON))
"""Engine, ranks and settings with which what is left goes on."""
RECORDS = "records"
"""The write after which a rank's part is on the disk and nobody knows of it."""


def prepare(folder: Path) -> Path:
    """Model and rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model_dir(folder / "model", "qwen3", hidden=16, layers=1, heads=2, kv_heads=1, tie_word_embeddings=True)
    rows = [{"messages": turns(f"{n}+1=", str(n + 1) * (1 + n % 3))} for n in range(8)]
    write_prompts(folder / "train.parquet", rows)
    return folder


@dataclass(frozen=True)
class Hit:
    """What happens to one rank.

    Args:
        rank: which one.
        number: of its write, counted from 1; 0: none.
        action: ``KILL``, or ``FULL``: no file of this rank may grow any more from there on.
        name: only writes whose name begins so are counted.
    """

    rank: int = 0
    number: int = 0
    action: str = "KILL"
    name: str = ""


@dataclass(frozen=True)
class Run:
    """A run to its second step, as a cell of a group; it returns the names of the rank's writes in the last save."""

    inputs: Path
    root: Path
    hit: Hit = Hit()
    engine: tuple[str, ...] = ()

    @property
    def __name__(self) -> str:
        return "run"

    def __call__(self, ranks: Any, folder: Path) -> list[str]:
        from verl import env
        from verl.config import load_config
        from verl.trainer.sft_trainer import run_sft

        env.set_value("VERL_FILE_LOGGER_PATH", str(self.root.with_suffix(".jsonl")))
        arguments = [
            f"data.train_files={self.inputs}/train.parquet",
            "data.train_batch_size=4",
            f"model.path={self.inputs}/model",
            "optim.lr=1e-2",
            "trainer.save_freq=1",
            "trainer.total_training_steps=2",
            "trainer.logger=[file]",
            f"trainer.default_local_dir={self.root}",
            *self.engine,
        ]
        hit = self.hit if ranks.rank == self.hit.rank else Hit()
        with written_in_saves(self.root, hit) as writes:
            run_sft(load_config("sft_trainer", arguments), ranks)
        return writes


@contextmanager
def written_in_saves(root: Path, hit: Hit) -> Iterator[list[str]]:
    """Within the block this process is hit at its write; gives the names of the last save's."""
    from verl.checkpoint.stream import FileStream
    from verl.trainer import supervised

    writes: list[str] = []
    saving, limits = [False], resource.getrlimit(resource.RLIMIT_FSIZE)

    def reach(name: str) -> None:
        if not saving[0]:
            return
        writes.append(name)
        if not name.startswith(hit.name) or sum(known.startswith(hit.name) for known in writes) != hit.number:
            return
        if hit.action == "FULL":
            resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limits[1]))
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, values: tuple[Any, ...]) -> None:
        writes = event in ("os.rename", "os.remove", "os.mkdir") or (event == "open" and values[2] & os.O_WRONLY)
        if writes and str(values[0]).startswith(f"{root}/"):
            reach(f"{event} {Path(str(values[0])).relative_to(root)}")

    def stream(self: Any, data: Any) -> None:
        reach(BYTES)
        original_stream(self, data)

    def save_part(*given: Any, **named: Any) -> Any:
        records = original_part(*given, **named)
        reach(RECORDS)
        return records

    def save(self: Any) -> None:
        writes.clear()
        saving[0] = True
        try:
            original_save(self)
        finally:
            saving[0] = False
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    original_stream, original_part = FileStream.write, supervised.save_part
    original_save = supervised.SupervisedTrainer.save_checkpoint
    sys.addaudithook(audit)  # it stays, as the process ends with the run
    FileStream.write, supervised.save_part = stream, save_part  # type: ignore[method-assign]
    supervised.SupervisedTrainer.save_checkpoint = save  # type: ignore[method-assign]
    yield writes


class Runs:
    """An undisturbed run of two steps, and runs that continue from its first checkpoint and are hit.

    Args:
        folder: for everything.
    """

    def __init__(self, folder: Path):
        self.folder, self.inputs = folder, prepare(folder / "inputs")
        self.straight = folder / "straight"
        self.launch(self.straight)

    def launch(self, root: Path, hit: Hit = Hit(), size: int = RANKS, engine: tuple[str, ...] = ()) -> list[list[str]]:
        """Run to the second step; per rank the writes of its last save.

        Args:
            engine: settings of another engine than fsdp2 on several ranks and plain on one.

        Raises:
            AssertionError: a rank ended before; the message has what each of them said.
        """
        return run_cells(size, [Run(self.inputs, root, hit, engine)], root.with_suffix(".notes"))["run"]

    def begun(self, name: str) -> Path:
        """A copy of the run at its first checkpoint."""
        root = self.folder / name
        shutil.copytree(self.straight / "global_step_1", root / "global_step_1")
        return root

    def hit(self, root: Path, hit: Hit) -> str:
        """Continue from what is in the folder, and be hit; what the ranks said."""
        shutil.rmtree(root / "global_step_2", ignore_errors=True)
        root.with_suffix(".jsonl").unlink(missing_ok=True)
        try:
            self.launch(root, hit)
        except AssertionError as error:
            return str(error)
        raise AssertionError(f"{hit}: nothing happened")

    def loss(self, root: Path) -> float:
        """Of the second step."""
        lines = root.with_suffix(".jsonl").read_text().splitlines()
        return {record["step"]: record["data"] for record in map(json.loads, lines)}[2]["train/loss"]

    def step(self, root: Path) -> int:
        """Of the newest intact checkpoint, whose state must be the undisturbed run's, byte for byte."""
        newest = find_checkpoint(root)
        assert newest is not None, f"no complete checkpoint is in {root}"
        expected = self.straight / newest.name
        for file in sorted(expected.rglob("*")):
            name = file.relative_to(expected)
            if file.is_file() and name.parts[0] in ("model", "trainer.json"):
                assert (newest / name).read_bytes() == file.read_bytes(), f"{name} of {newest} is another one"
        return int(newest.name.rpartition("_")[2])

    def error(self, root: Path) -> float:
        """Largest relative difference of the final weights and of the loss from the undisturbed run's."""
        folders = (root, self.straight)
        ours, expected = (read_weights(f / "global_step_2" / "model" / "huggingface") for f in folders)
        assert sorted(ours) == sorted(expected)
        errors = [float((ours[n] - w).norm() / w.norm().clamp_min(1e-9)) for n, w in expected.items()]
        return max(*errors, abs(self.loss(root) / self.loss(self.straight) - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="hit at every n-th write only")
    parser.add_argument("--action", default="KILL", choices=["KILL", "FULL"])
    options = parser.parse_args()
    started, left = time.monotonic(), {1: 0, 2: 0}
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name))
        dry = runs.begun("dry")
        writes = runs.launch(dry)
        assert runs.step(dry) == 2 and runs.loss(dry) == runs.loss(runs.straight)
        print("writes of one save, by rank:", [len(own) for own in writes], flush=True)
        root = runs.begun("hit")
        for rank, own in enumerate(writes):
            for number in range(1, len(own) + 1, options.every):
                runs.hit(root, Hit(rank, number, options.action))
                assert runs.loss(root) == runs.loss(runs.straight), "the run did not continue with the same bits"
                step = runs.step(root)
                left[step] += 1
                print(f"rank {rank}, write {number:>3} ({own[number - 1]}): step {step}", flush=True)
        last(runs, root)
    print(f"{sum(left.values())} hits: {left[1]} left the checkpoint before, {left[2]} the new one, none neither;")
    print(f"{time.monotonic() - started:.0f} seconds")
    return 0


def last(runs: Runs, root: Path, report: Callable[[str], None] = print) -> None:
    """What is left goes on: with the same bits on as many ranks, with equal numbers on others and in other engines."""
    shutil.rmtree(root / "global_step_2", ignore_errors=True)
    for name, size, engine in AFTERWARDS:
        again = root.with_name(f"again-{name}-{size}")
        shutil.copytree(root, again)
        runs.launch(again, size=size, engine=engine)
        error = runs.error(again)
        report(f"{name} on {size} ranks: {error:.1e}")
        assert error == 0 if (name, size) == ("fsdp2", RANKS) else error < EXACT
        assert not list(again.glob(".writing-*")), "leftovers are removed"


if __name__ == "__main__":
    sys.exit(main())
