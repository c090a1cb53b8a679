"""The page over a long run: seconds for a first page, for filters and further pages, and the server's peak memory.

    PYTHONPATH=. python benchmarks/bench_viewer.py [--samples 1000000] [--tokens 64] [--folder RUN]
    PYTHONPATH=. python benchmarks/bench_viewer.py --dump [--steps 12]

A run of 1,000 samples per step is written as a trainer writes it (metrics, journal, parquet files with tokens), unless
``--folder`` has one. Then ``python -m verl.viewer`` serves it, and each request is timed from outside: "cold" is a
server that has read nothing, "indexed" says after how many seconds and requests all files were in its index.
Goals for a million samples: 2 s for a first page, 1 s for any filter or page, 500 MB.

``--dump`` measures what a run pays for its files of samples with all tokens: the step of `bench_grpo_step.py` with 10M
parameters (16 prompts x 8 samples x 32 tokens) in one process, timed from inside, by the CPU's time and by the clock.
The goal for what the step waits for is 2 % of it; "thread" is the CPU time of what is written behind its back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlencode

import numpy as np
import psutil
import pyarrow as pa
from bench_grpo_step import WARMUP, make_inputs

from verl.config import load_config
from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.observability.token_dump import Pieces, TokenDump, table_of, write_table
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo import callbacks
from verl.trainer.ppo.callbacks import DumpRollouts

PER_STEP, EACH, METRICS = 1000, 8, 60
SENTENCE = "let us add the two numbers first and then carry one digit of what is left over"
WORDS = [f"{word} " for word in SENTENCE.split(" ")]
FILTERS = {
    "score from 0.9": {"min_score": 0.9},
    "length, dropped": {"max_length": 40, "state": "dropped"},
    "reason": {"reason": "unscorable"},
    "finish, by score": {"finish": "length", "sort": "score", "descending": 1},
    "clipped, by length": {"min_clipped": 0.02, "sort": "length"},
    "by group": {"sort": "uid"},
    "a late page": {"sort": "score", "page": 1900, "size": 50},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=64, help="mean number of tokens of a response")
    parser.add_argument(
        "--folder", type=Path, default=None, help="of a run that is written here, or read if it is there"
    )
    parser.add_argument("--dump", action="store_true", help="measure the share of a step instead")
    parser.add_argument("--steps", type=int, default=12, help=f"with --dump; the first {WARMUP} are not counted")
    args = parser.parse_args()
    if args.dump:
        return measure_dump(args.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "metrics.jsonl").exists():
            began = time.perf_counter()
            write_run(folder, args.samples, args.tokens)
            size = sum(place.stat().st_size for place in folder.rglob("*") if place.is_file())
            print(f"written: {args.samples} samples, {size / 1e9:.2f} GB, {time.perf_counter() - began:.0f} s")
        measure(folder)


def write_run(folder: Path, samples: int, tokens: int) -> None:
    """What a run of this size leaves behind."""
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("trainer: {rollout_data_dir: samples, total_training_steps: 1000}\n")
    rng, journal = np.random.default_rng(1), Journal(folder)
    ledger, pieces = Ledger(journal), Pieces(lambda ids: "".join(WORDS[i] for i in ids))
    journal.begin([ledger])
    with (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(1, max(1, samples // PER_STEP) + 1):
            write_step(folder, step, tokens, rng, ledger, pieces)
            values = {"critic/score/mean": rng.random(), "timing_s/step": 1.0}
            values |= {f"part{number % 8}/metric{number}": rng.random() for number in range(METRICS)}
            metrics.write(json.dumps({"step": step, "data": values}) + "\n")
    journal.close()


def write_step(folder: Path, step: int, tokens: int, rng: Any, ledger: Ledger, pieces: Pieces) -> None:
    """A file of samples, and the ledger's entries about them and about a group that was dropped before."""
    prompts = PER_STEP // EACH
    uids = [random.Random(step * prompts + prompt).randbytes(8).hex() for prompt in range(prompts)]
    keys = [(uid, sample) for uid in uids for sample in range(EACH)]
    lengths = rng.integers(2, 2 * tokens, PER_STEP)
    scores = rng.random(PER_STEP).round(4).tolist()
    dropped = [(f"dropped-{step}", sample) for sample in range(EACH)]
    masked = [key for key, draw in zip(keys, rng.random(PER_STEP)) if draw < 0.01]
    ledger.requested(step, 0, keys, [row // EACH for row in range(PER_STEP)])
    ledger.requested(step, 0, dropped)
    finishes = np.where(rng.random(PER_STEP) < 0.1, "length", "stop").tolist()
    ledger.noted("sampled", step, keys, tokens=lengths.tolist(), finish=finishes, turns=[1] * PER_STEP)
    ledger.noted("scored", step, keys, score=scores)
    ledger.dropped(step, "filtered_group", dropped)
    ledger.noted("batch", step, keys)
    ledger.trained(step, [key for key in keys if key not in set(masked)], {"unscorable": masked})
    ledger.end(step)
    total = int(lengths.sum())
    ids = rng.integers(0, len(WORDS), total)
    texts = np.array(WORDS, dtype=object)[ids]
    ends = np.cumsum(lengths)
    columns: dict[str, list[Any]] = {
        "step": [step] * PER_STEP, "uid": [uid for uid, _ in keys], "sample": [sample for _, sample in keys],
        "row": [row // EACH for row in range(PER_STEP)], "score": scores, "length": lengths.tolist(),
        "prompt_length": [12] * PER_STEP, "finish_reason": finishes, "oldest_version": [step - 1] * PER_STEP,
        "newest_version": [step - 1] * PER_STEP, "clipped": (rng.random(PER_STEP) * 0.04).tolist(),
        "reason": ["unscorable" if key in set(masked) else "" for key in keys],
        "input": [f"What is {row} plus {step}? Think step by step." for row in range(PER_STEP)],
        "output": ["".join(texts[end - length : end]) for end, length in zip(ends, lengths)],
        "gts": [str(row + step) for row in range(PER_STEP)],
    }  # fmt: skip
    log_probs = rng.normal(-1, 1, total).astype(np.float32)
    values = {
        "token_id": ids, "token_text": pieces.of(ids, ends), "mask": np.ones(total, np.int8),
        "version": np.full(total, step - 1), "sampler_log_prob": log_probs, "advantage": np.repeat(scores, lengths),
        "trainer_log_prob": log_probs + rng.normal(0, 0.01, total).astype(np.float32),
        "entropy": rng.random(total).astype(np.float32),
    }  # fmt: skip
    table = table_of(columns, {}, values, lengths, np.ones(PER_STEP, dtype=bool))
    write_table(table, folder / "samples" / f"{step}.parquet")


class Served:
    """A server of the run in another process."""

    def __init__(self, folder: Path):
        began = time.perf_counter()
        command = [sys.executable, "-m", "verl.viewer", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        link = self.process.stdout.readline().strip()
        self.start = time.perf_counter() - began
        self.base, _, self.token = link.partition("/?token=")

    def get(self, name: str, **parameters: Any) -> tuple[float, dict[str, Any]]:
        """(seconds, answer)."""
        url = f"{self.base}/api/{name}?{urlencode(parameters)}"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {self.token}"})
        began = time.perf_counter()
        with urllib.request.urlopen(request) as reply:
            body = reply.read()
        return time.perf_counter() - began, json.loads(body)

    def peak(self) -> float:
        """MB that the process had at most."""
        if sys.platform == "linux":
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) / 1e3
        return psutil.Process(self.process.pid).memory_info().rss / 1e6


def measure(folder: Path) -> None:
    """Print seconds and megabytes."""
    served = Served(folder)
    rows: list[tuple[str, float, str]] = [("start, to the link", served.start, "")]
    began = time.perf_counter()
    rows.append(("list of runs, cold", served.get("runs")[0], ""))
    seconds, page = served.get("samples", size=50)
    rows.append(("first page, cold", seconds, f"{page['total']} samples by then"))
    requests = 0
    while page["indexed"]["files"] < page["indexed"]["of"]:
        _, page = served.get("samples", size=1)
        requests += 1
    rows.append(("indexed", time.perf_counter() - began, f"{page['total']} samples, {requests} further requests"))
    for name, parameters in [("the same page", {"size": 50}), *FILTERS.items()]:
        seconds, page = served.get("samples", **parameters)
        rows.append((f"samples: {name}", seconds, f"{page['total']} samples"))
    identity = page["rows"][0]["id"]
    rows.append(("a sample with tokens", served.get("sample", id=identity)[0], identity))
    rows.append(("the same prompt over steps", served.get("prompt", id=identity)[0], ""))
    seconds, page = served.get("samples", text="digit of what is left over let")
    rows.append(("text, first answer", seconds, f"{page['searched']['files']} of {page['searched']['of']} files"))
    began, requests = time.perf_counter(), 0
    while page["searched"]["files"] < page["searched"]["of"]:
        _, page = served.get("samples", text="digit of what is left over let")
        requests += 1
    rows.append(("text, all files", time.perf_counter() - began, f"{page['total']} samples, {requests} requests"))
    rows.append(("steps", served.get("steps")[0], ""))
    rows.append(("groups of a step", served.get("groups", step=1)[0], ""))
    rows.append(("curves", served.get("curves", metric="critic/score/mean")[0], ""))
    rows.append(("gantt", served.get("gantt")[0], ""))
    for name, seconds, more in rows:
        print(f"{name:<32}{seconds:>8.3f} s  {more}")
    print(f"peak memory of the server {served.peak():.0f} MB")
    served.process.terminate()
    served.process.wait()


Seconds = tuple[float, float]
"""By the CPU, and by the clock."""


class TimedDump(TokenDump):
    """Counts the CPU seconds of its thread."""

    seconds: ClassVar[list[float]] = []

    def _write(self, step: int, make: Callable[[], pa.Table]) -> None:
        began = time.thread_time()
        super()._write(step, make)
        self.seconds.append(time.thread_time() - began)


class TimedRollouts(DumpRollouts):
    """The callback of a run, with what its steps wait for; and each step's length up to the end of the dump."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Seconds] = []
        self.ends: list[Seconds] = []

    def on_step_end(self, trainer: Any, batch: Any) -> None:
        began = time.thread_time(), time.perf_counter()
        super().on_step_end(trainer, batch)
        self.waits.append((time.thread_time() - began[0], time.perf_counter() - began[1]))
        self.ends.append((time.process_time(), time.perf_counter()))


def measure_dump(steps: int) -> None:
    """Print the share of a step that the dump takes."""
    timed, home = TimedRollouts(), Path.cwd()

    class Runner(TaskRunner):
        def make_trainer(self, config: Any, tokenizer: Any, processor: Any) -> Any:
            trainer = super().make_trainer(config, tokenizer, processor)
            trainer.callbacks = [timed if type(one) is DumpRollouts else one for one in trainer.callbacks]
            return trainer

    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        callbacks.TokenDump = TimedDump  # type: ignore[misc]  # the callback makes it by this name
        model, prompts, _ = make_inputs(Path(temporary), "10M")
        words = [
            "algorithm.adv_estimator=grpo", f"data.train_files={prompts}", "data.train_batch_size=16",
            "data.max_prompt_length=64", "data.max_response_length=32", f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.ignore_eos=true",
            "actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.skip_old_log_prob=false",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16", "reward.custom_reward_function.path=reward.py",
            f"trainer.total_training_steps={steps}", "trainer.logger=[file]", "trainer.runtime=local",
            "trainer.default_local_dir=run", "trainer.rollout_data_dir=run/samples", "trainer.device=cpu",
        ]  # fmt: skip
        run_ppo(load_config("ppo_trainer", words), Runner)
        os.chdir(home)
    for kind, name in enumerate(("CPU", "clock")):
        step = statistics.median(after[kind] - before[kind] for before, after in pairwise(timed.ends[WARMUP:]))
        wait = statistics.median(seconds[kind] for seconds in timed.waits[WARMUP:])
        print(
            f"by the {name}: the step takes {step:.3f} s, and waits {wait * 1e3:.2f} ms for the dump: {wait / step:.2%}"
        )
    print(f"thread: {statistics.median(TimedDump.seconds[WARMUP:]) * 1e3:.1f} ms of CPU time per step")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
