"""Schedules beside each other where sampling waits for an environment: wall clock per trained sample.

    python benchmarks/bench_schedules.py [--prompts 64] [--samples 4] [--turns 4] [--tokens 32] [--steps 6] [--rounds 1]
                                         [--slots 512] [--schedules NAME ...]

The quickstart's model samples conversations: every answer of ``--tokens`` tokens is followed by an environment that
takes log-normal seconds (median 0.2, sigma 1, drawn by row and turn, so that each schedule waits equally), without
using a CPU. The sampler's log-probs are the old ones everywhere. One trainer and one sampler, each with its own pool
and one thread, on Ray, ``colocate_async`` too. Every schedule but ``sync`` may sample one step ahead. They run in turn,
each in its own process.

Printed as a Markdown table, for each schedule:

- wall-clock seconds per trained sample in a median step, the first and the last left out: in between as many samples
  are drawn as are trained on, and as many are ahead after a step as before it;
- how many times less than ``sync`` that is, and the same of the complete run, in which nothing is ahead at first and
  nothing is sampled beside the last update;
- idle: seconds per median step in which the trainer waited for samples;
- CPU: seconds per median step of all processes, and which share of the machine's cores that is.

Below it the ideal, from the parts of the median synchronous step: (waiting + computing) / the longer of the two.
Waiting is sampling, with its environment, and scoring; computing is the rest of the step. It bounds ``one_step_off``,
which samples one batch at a time. Queues have up to two batches in flight, whose waits overlap each other too, so they
are bounded by half the waiting, by computing, and by the processor's seconds on the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import ROOT, Figures, add_json

sys.path.insert(0, str(ROOT))
import psutil

from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.batch import NO_VERSION
from verl.config import load_config
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

MEDIAN, SIGMA = 0.2, 1.0
GOALS = {"one_step_off": 1.3, "fully_async": 1.8}
MODE = "trainer.v1.trainer_mode"
FULLY = (
    *(f"{MODE}=fully_async", "async_training.staleness_threshold=1", "async_training.partial_rollout=true"),
    "async_training.trigger_parameter_sync_step={chunks}",
)
SCHEDULES = {
    "sync": (f"{MODE}=sync",),
    "one_step_off": (f"{MODE}=one_step_off",),
    "colocate_async": (f"{MODE}=colocate_async",),
    "separate_async": (f"{MODE}=separate_async", "trainer.v1.separate_async.parameter_sync_step={chunks}"),
    "fully_async": FULLY,
    "fully_async, completion": (*FULLY, "trainer.v1.sampler.order=completion"),
}
"""Name -> words of the command line; a step is trained on in so many chunks."""
COMMON = (
    "algorithm.adv_estimator=grpo",
    "algorithm.rollout_correction.bypass_mode=true",
    "data.train_files=prompts.parquet",
    "data.max_prompt_length=64",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "reward.custom_reward_function.path=reward.py",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "trainer.log_train_generations=0",
    "trainer.val_before_train=false",
)
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 10
"""


class WaitingLoop(AgentLoopBase):
    """Answers of equal length, each followed by an environment that waits and says one token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt, job = await self.prompt_ids(kwargs), kwargs["extra_info"]
        rng = random.Random(f"{kwargs['uid']}:{kwargs['sample_index']}")
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        asked = {**sampling_params, "max_tokens": job["tokens"]}
        for _ in range(job["turns"]):
            answer = await self.server_manager.generate(
                kwargs["uid"], prompt_ids=[*prompt, *ids], sampling_params=asked
            )
            await asyncio.sleep(rng.lognormvariate(0.0, SIGMA) * MEDIAN)
            ids += [*answer.token_ids, prompt[-1]]
            mask += [*[1] * len(answer.token_ids), 0]
            log_probs += [*answer.log_probs, 0.0]
            versions += [*answer.token_versions, NO_VERSION]
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=ids,
            response_mask=mask,
            response_logprobs=log_probs,
            token_versions=versions,
            num_turns=2 * job["turns"],
            metrics=AgentLoopMetrics(),
        )


class Clock(Callback):
    """When each step ended, what all processes had computed by then, and what a step says of its own parts."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        self.parts: list[dict[str, float]] = []

    def on_fit_begin(self, trainer: Any) -> None:
        self._mark()

    def on_step_end(self, trainer: Any, batch: Any) -> None:
        self._mark()
        self.parts.append(dict(trainer.ctx.timers.seconds))

    def _mark(self) -> None:
        own = psutil.Process()
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        self.marks.append((time.perf_counter(), sum(one.user + one.system for one in times)))


def run_one(words: list[str]) -> None:
    """A run in this process; prints its clock as the last line."""
    clock = Clock()

    class Runner(TaskRunner):
        def make_trainer(self, config: Any, tokenizer: Any, processor: Any) -> Any:
            trainer = super().make_trainer(config, tokenizer, processor)
            trainer.callbacks.append(clock)
            return trainer

    run_ppo(load_config("ppo_trainer", words), Runner)
    print("CLOCK " + json.dumps({"marks": clock.marks, "parts": clock.parts}))


def make_inputs(folder: Path, asked: argparse.Namespace) -> None:
    """The quickstart's model, untrained, and prompts that say how long a conversation is."""
    import pandas

    examples = ROOT / "examples"
    call([str(examples / "quickstart" / "model.py"), "model"], folder)
    data = [str(examples / "data_preprocess" / "arithmetic.py"), "--local_save_dir", "data"]
    call([*data, "--train_size", str(2 * asked.prompts), "--val_size", "1", "--sft_size", "1"], folder)
    rows = pandas.read_parquet(folder / "data" / "train.parquet")
    rows["extra_info"] = [{**row, "turns": asked.turns, "tokens": asked.tokens} for row in rows["extra_info"]]
    rows.to_parquet(folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)


def call(words: list[str], folder: Path) -> str:
    """What a Python program prints.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def words_of(schedule: str, asked: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    mini = max(1, asked.prompts // 4)
    is_queue = "async" in schedule
    return [
        *COMMON,
        *(word.format(chunks=asked.prompts // mini) for word in SCHEDULES[schedule]),
        *([f"async_training.concurrent_samples_per_replica={2 * asked.prompts}"] if is_queue else []),
        f"data.train_batch_size={asked.prompts}",
        f"actor_rollout_ref.rollout.n={asked.samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
        f"data.max_response_length={asked.turns * (asked.tokens + 1)}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={Path(__file__).stem}:WaitingLoop",
        f"actor_rollout_ref.rollout.max_num_seqs={asked.slots or 2 * asked.prompts * asked.samples}",
        f"trainer.total_training_steps={asked.steps}",
        f"trainer.default_local_dir={schedule.replace(', ', '-')}",
    ]


def measure(folder: Path, schedule: str, asked: argparse.Namespace) -> dict[str, Any]:
    printed = call([__file__, "--one", *words_of(schedule, asked)], folder)
    return json.loads(next(line for line in printed.splitlines() if line.startswith("CLOCK "))[len("CLOCK ") :])


def figures_of(clocks: list[dict[str, Any]], samples: int) -> dict[str, float]:
    """Of the runs of a schedule: medians of a step and its parts, and the mean step of the complete runs."""
    walls, cpus, parts, complete = list[float](), list[float](), list[dict[str, float]](), list[float]()
    for clock in clocks:
        steps = [(end - start, after - before) for (start, before), (end, after) in pairwise(clock["marks"])]
        complete.append(statistics.mean(wall for wall, _ in steps))
        walls += [wall for wall, _ in steps[1:-1]]
        cpus += [cpu for _, cpu in steps[1:-1]]
        parts += clock["parts"][1:-1]
    step, cpu = statistics.median(walls), statistics.median(cpus)
    sampling = statistics.median(part.get("gen", 0.0) + part.get("reward", 0.0) for part in parts)
    waits = statistics.median(part.get("wait_for_samples", 0.0) for part in parts)
    return {
        "ms per sample": step / samples * 1e3,
        "step, s": step,
        "sampling, s": sampling,
        "trainer idle, s": waits if waits else sampling,
        "CPU, s": cpu,
        "share of the cores": cpu / (os.cpu_count() or 1) / step,
        "complete run, ms per sample": statistics.mean(complete) / samples * 1e3,
    }


def compared(runs: dict[str, list[dict[str, Any]]], samples: int) -> dict[str, dict[str, float]]:
    """Figures by schedule, each beside ``sync``, and what would be ideal."""
    rows = {name: figures_of(clocks, samples) for name, clocks in runs.items()}
    base, complete = rows["sync"], "complete run, ms per sample"
    for own in rows.values():
        own["times less than sync"] = base["ms per sample"] / own["ms per sample"]
        own["times less, complete run"] = base[complete] / own[complete]
    waiting = base["sampling, s"]
    computing = base["step, s"] - waiting
    ideal, queues = max(waiting, computing), max(waiting / 2, computing, base["CPU, s"] / (os.cpu_count() or 1))
    rows["ideal"] = {"step, s": ideal, "times less than sync": base["step, s"] / ideal}
    rows["ideal of two batches in flight"] = {"step, s": queues, "times less than sync": base["step, s"] / queues}
    rows["ideal"] |= {"waiting, s": waiting, "computing, s": computing}
    return rows


COLUMNS = {
    "ms per sample": ".1f", "times less than sync": ".2f", "times less, complete run": ".2f", "step, s": ".2f",
    "trainer idle, s": ".2f", "CPU, s": ".2f", "share of the cores": ".0%",
}  # fmt: skip


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, row in rows.items():
        cells = [format(row[key], shape) if key in row else "" for key, shape in COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = {"prompts": 64, "samples": 4, "turns": 4, "tokens": 32, "steps": 6, "rounds": 1}
    for name, number in usual.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument(
        "--slots", type=int, help="conversations that a sampler computes at once; two steps' if left out"
    )
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    add_json(parser)
    asked = parser.parse_args()
    if asked.steps < 3:
        parser.error("--steps must be at least 3: the first and the last one are left out of the medians")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in dict.fromkeys(["sync", *asked.schedules])}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), asked)
        for _ in range(asked.rounds):
            for schedule, clocks in runs.items():
                clocks.append(measure(Path(name), schedule, asked))
    figures, rows = Figures(), compared(runs, asked.prompts * asked.samples)
    for schedule, row in rows.items():
        figures.add(schedule, row)
    print(table(rows))
    parts = "In the median synchronous step waiting takes {waiting, s:.2f} s, computing {computing, s:.2f} s."
    print(f"\n{parts.format_map(rows['ideal'])}")
    for schedule, goal in GOALS.items():
        if schedule in rows:
            value = rows[schedule]["times less than sync"]
            print(f"{schedule}: goal {goal} x, {'met' if value >= goal else 'missed'} ({value:.2f} x)")
    print(f"{os.cpu_count()} cores; load over the last minute, these runs among it: {os.getloadavg()[0]:.1f}; "
          f"{time.monotonic() - begun:.0f} s in all")  # fmt: skip
    figures.write(asked.json)


if __name__ == "__main__":
    run_one(sys.argv[2:]) if sys.argv[1:2] == ["--one"] else main()
