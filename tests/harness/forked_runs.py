"""Runs of the tiny model that are hit and started again, each in a process of its own.

A server process has imported the library; every run is a fork of it, which saves the seconds of the imports. What a
run is, is the command line of `verl.trainer.main_ppo`, so that the same cases hold in any runtime.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.scorers import LETTERS
from tests.harness.waiting import HANGS, wait_until
from verl.journal.file import Entry, entries_in

ROOT = Path(__file__).resolve().parents[2]
TIMINGS = ("timing", "perf/", "memory", "rollout_data/")
STEPS = 6
STOPPING = "a second signal ends it at once"
"""What a run says once it has heard the first signal."""


def grpo(steps: int = STEPS) -> list[str]:
    """A run with every kind of state: dropout of rows by shuffling, two epochs, a schedule, KL in the reward."""
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "data.train_files=train.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=64",
        "data.max_response_length=5",
        "actor_rollout_ref.model.path=model",
        "actor_rollout_ref.model.external_lib=tests.faults.points",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
        "reward.custom_reward_function.path=scorer.py",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.default_local_dir=run",
        "trainer.rollout_data_dir=samples",
        "trainer.logger=[file]",
        "trainer.device=cpu",
        f"trainer.total_training_steps={steps}",
    ]


def prepare(folder: Path) -> Path:
    """Model, prompts and scoring file."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_model_dir(folder / "model", hidden=16, layers=1, heads=2, kv_heads=1)
    write_prompts(folder / "train.parquet", 6)
    (folder / "scorer.py").write_text(LETTERS)
    return folder


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit status (negative: killed by that signal), and what it printed."""

    status: int
    output: str


class Server:
    """The process that has imported everything and forks a run per request, with these variables and the shell's.

    Args:
        root: of the code that it imports.
    """

    def __init__(self, root: Path = ROOT, **variables: str) -> None:
        path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def start(self, folder: Path, arguments: list[str], fault: str = "", program: str = "main_ppo") -> Run:
        """Fork a run that works in ``folder``."""
        (folder / "paused").unlink(missing_ok=True)
        request = {"folder": str(folder), "arguments": arguments, "fault": fault, "program": program}
        return Run(self, folder, int(self.ask(request)))

    def ask(self, request: dict) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


@dataclass(frozen=True)
class Run:
    """A forked run."""

    server: Server
    folder: Path
    pid: int

    def wait(self, timeout: float = HANGS) -> Ended:
        """How it ended; a run that does not end is an error."""
        answer = self.server.ask({"wait": self.pid, "timeout": timeout})
        if not answer:
            raise AssertionError(f"the run did not end within {timeout} s\n{self._output()[-3000:]}")
        return Ended(int(answer), self._output())

    def until_paused(self) -> int:
        """Wait until a process of the run has reached its point; returns that process's number."""
        self._until("the point was not reached", (self.folder / "paused").exists)
        return int((self.folder / "paused").read_text())

    def until_said(self, words: str) -> None:
        """Wait until the run has printed these words."""
        self._until(f"it did not say {words!r}", lambda: words in self._output())

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def lives(self) -> bool:
        """It has not ended yet; a run that has is there until `wait`."""
        return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, at most this long; returns whether it has ended."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([process], [], [], seconds)[0])
        finally:
            os.close(process)

    def _until(self, otherwise: str, condition: Callable[[], bool]) -> None:
        def described() -> str:
            return f"{otherwise}\n{self._output()[-3000:]}"

        wait_until(lambda: condition() or not self.lives(), described)
        assert condition(), described()

    def _output(self) -> str:
        place = self.folder / "output.txt"  # of a run that has just been forked it is not there
        return place.read_text(errors="replace") if place.exists() else ""


def processes_of(folder: Path) -> dict[int, str]:
    """Every living process that a run in ``folder`` started, by number."""
    mark, found = f"VERL_TEST_RUN={folder}\0".encode(), {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (place / "environ").read_bytes() + b"\0" and "(zombie)" not in (place / "status").read_text():
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        except OSError:
            continue  # it has ended meanwhile, or is another user's
    return found


def assert_no_process_left(folder: Path, besides: tuple[str, ...] = ()) -> None:
    """Everything that a run started ends, but for processes with one of these words."""

    def left() -> dict[int, str]:
        return {pid: words for pid, words in processes_of(folder).items() if not any(b in words for b in besides)}

    wait_until(lambda: not left(), lambda: f"orphans: {left()}")


def seconds_since_kill(folder: Path) -> float:
    """Since a process of a run in ``folder`` was killed at its point."""
    return time.time() - (folder / "hits").stat().st_mtime


def finish(server: Server, folder: Path, arguments: list[str]) -> Ended:
    """Start (again) without a fault and see it through."""
    ended = server.start(folder, arguments).wait()
    assert ended.status == 0, ended.output[-3000:]
    return ended


def weights(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """All tensors of a checkpoint by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {(str(f.relative_to(folder)), name): t for f in files for name, t in load_file(f).items()}


def metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics file without what depends on the clock."""
    file = newest([p for p in (folder / "logs").rglob("*.jsonl") if ".replaced" not in p.name])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {"step": line["step"], **{k: v for k, v in line["data"].items() if not k.startswith(TIMINGS)}} for line in lines
    ]


def samples(folder: Path) -> dict[str, str]:
    """What was sampled, by step."""
    return {p.name: p.read_text() for p in sorted(newest(list(folder.glob("samples*"))).glob("*.jsonl"))}


def ledgers(folder: Path) -> list[Path]:
    """The journals of the runs in a folder, each by its first segment."""
    return [place for place in (folder / "run").glob("journal*.jsonl") if "." not in place.stem]


def ledger(folder: Path) -> list[Entry]:
    """The entries that hold about samples and steps: neither decisions nor times."""
    held = entries_in(newest(ledgers(folder)))
    return [entry for entry in held if entry["event"] not in ("run", "span") and "t" not in entry]


def newest(places: list[Path]) -> Path:
    """Of the run that began last: names are numbered."""
    return max(places, key=lambda place: int(place.stem.partition("-")[2] or 1))


def assert_same_end(whole: Path, hit: Path, steps: int = STEPS) -> None:
    """Weights, optimizer, controller, metrics of every step and samples of every step are equal to the last bit.

    So are the ledgers: no sample is lost, and a step that was repeated has replaced what the journal said of it.
    """
    one, other = weights(whole / f"run/global_step_{steps}"), weights(hit / f"run/global_step_{steps}")
    assert one.keys() == other.keys() and len(one) > 20
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    state = [(folder / f"run/global_step_{steps}/trainer.json").read_text() for folder in (whole, hit)]
    assert state[0] == state[1]
    assert metrics(whole) == metrics(hit)
    assert samples(whole) == samples(hit)
    assert ledger(whole) == ledger(hit) != []
