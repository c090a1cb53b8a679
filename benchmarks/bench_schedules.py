"""Schedules beside each other where sampling waits for an environment: wall clock per trained sample.

    PYTHONPATH=. python benchmarks/bench_schedules.py [--prompts 64] [--samples 4] [--turns 4] [--steps 6] [--rounds 1]

Every answer of a conversation is followed by an environment that takes log-normal seconds (median 0.2, sigma 1, drawn
by row and turn, so that each schedule waits equally), without using a CPU. One trainer and one sampler, each with its
own pool, on Ray, ``colocate_async`` too. Every schedule but ``sync`` may sample one step ahead. They run in turn, each
in its own process. Printed, for each: wall-clock seconds per trained sample over the complete run, how many times less
than ``sync`` that is, and the seconds per step in which the trainer waited for samples. The first step is in it, since
what is sampled ahead there would be free otherwise.

Beside them the ideal, from the parts of the synchronous steps: (waiting + computing) / the longer of the two. Waiting
is sampling, with its environment, and scoring; computing is the rest of the step. Then the same for so many steps,
whose first sampling and last update have nothing beside them. It bounds
``one_step_off``, which samples one batch at a time. Queues have up to two batches in flight, whose waits overlap each
other too, so that they can be faster where waiting is the longer part.
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
from pathlib import Path
from typing import Any

from figures import Figures, add_json

from tests.support import tiny_model_dir, write_prompts
from verl.agent_loop.base import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.agent_loop.batch import NO_VERSION
from verl.config import load_config
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

MEDIAN, SIGMA, TOKENS = 0.2, 1.0, 8
MODE, BYPASS = "trainer.v1.trainer_mode", "algorithm.rollout_correction.bypass_mode=true"
SCHEDULES = {
    "sync": (f"{MODE}=sync",),
    "one_step_off": (f"{MODE}=one_step_off", BYPASS),
    "colocate_async": (f"{MODE}=colocate_async", BYPASS),
    "separate_async": (f"{MODE}=separate_async", BYPASS, "trainer.v1.separate_async.parameter_sync_step={chunks}"),
    "fully_async": (
        *(f"{MODE}=fully_async", BYPASS, "async_training.staleness_threshold=1", "async_training.partial_rollout=true"),
        "async_training.trigger_parameter_sync_step={chunks}",
    ),
}
"""Name -> words of the command line; a step is trained on in so many chunks."""
QUEUES = ("colocate_async", "separate_async", "fully_async")
COMMON = (
    "algorithm.adv_estimator=grpo",
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
    """Answers of a few tokens, each followed by an environment that waits and says one token."""

    turns = 4

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.prompt_ids(kwargs)
        rng = random.Random(f"{kwargs['uid']}:{kwargs['sample_index']}")
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        asked = {**sampling_params, "max_tokens": TOKENS}
        for _ in range(self.turns):
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
            num_turns=2 * self.turns,
            metrics=AgentLoopMetrics(),
        )


class Clock(Callback):
    """When each step ended, and what it says of its own parts."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.parts: list[dict[str, float]] = []

    def on_fit_begin(self, trainer: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_step_end(self, trainer: Any, batch: Any) -> None:
        self.marks.append(time.perf_counter())
        self.parts.append(dict(trainer.ctx.timers.seconds))


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


def measure(folder: Path, schedule: str, asked: argparse.Namespace) -> dict[str, Any]:
    mini = max(1, asked.prompts // 4)
    at_once = [f"async_training.concurrent_samples_per_replica={2 * asked.prompts}"] if schedule in QUEUES else []
    words = [
        *COMMON,
        *(word.format(chunks=asked.prompts // mini) for word in SCHEDULES[schedule]),
        *at_once,
        f"data.train_batch_size={asked.prompts}",
        f"actor_rollout_ref.rollout.n={asked.samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
        f"data.max_response_length={asked.turns * (TOKENS + 1)}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={Path(__file__).stem}:WaitingLoop",
        f"actor_rollout_ref.rollout.max_num_seqs={2 * asked.prompts * asked.samples}",
        f"trainer.total_training_steps={asked.steps}",
        f"trainer.default_local_dir={schedule}",
    ]
    command = [sys.executable, __file__, "--one", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("CLOCK ")]
    if done.returncode or not lines:
        raise SystemExit(f"{schedule} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("CLOCK "))


def figures_of(clock: dict[str, Any], samples: int) -> dict[str, float]:
    """Of a run: seconds per trained sample, and per step those of the step, of its sampling, and of its waiting."""
    marks, parts = clock["marks"], clock["parts"]
    steps = len(marks) - 1
    waits = [part.get("wait_for_samples", 0.0) for part in parts]
    sampled = [part.get("gen", 0.0) + part.get("reward", 0.0) for part in parts]
    return {
        "seconds per sample": (marks[-1] - marks[0]) / (samples * steps),
        "step": (marks[-1] - marks[0]) / steps,
        "sampling": sum(sampled) / steps,
        "waits": sum(waits if any(waits) else sampled) / steps,
    }


def table(runs: dict[str, list[dict[str, float]]], steps: int) -> dict[str, dict[str, float]]:
    """Means over the rounds, beside ``sync``, and what would be ideal."""
    means = {
        name: {key: statistics.mean(one[key] for one in rounds) for key in rounds[0]} for name, rounds in runs.items()
    }
    base = means["sync"]
    waiting, computing = base["sampling"], base["step"] - base["sampling"]
    rows = {
        name: {
            "seconds per sample": own["seconds per sample"],
            "times less than sync": base["seconds per sample"] / own["seconds per sample"],
            "trainer waits, s per step": own["waits"],
        }
        for name, own in means.items()
    }
    longer, whole = max(waiting, computing), waiting + computing
    rows["ideal"] = {"times less than sync": whole / longer, "waiting, s": waiting, "computing, s": computing}
    rows[f"ideal of {steps} steps"] = {"times less than sync": steps * whole / (whole + (steps - 1) * longer)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("prompts", 64), ("samples", 4), ("turns", 4), ("steps", 6), ("rounds", 1), ("hidden", 64)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    add_json(parser)
    asked = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in dict.fromkeys(["sync", *asked.schedules])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model_dir(folder / "model", hidden=asked.hidden, layers=2)
        write_prompts(folder / "prompts.parquet", asked.prompts * 2)
        (folder / "reward.py").write_text(REWARD)
        for _ in range(asked.rounds):
            for schedule, measured in runs.items():
                measured.append(figures_of(measure(folder, schedule, asked), asked.prompts * asked.samples))
    figures = Figures()
    for schedule, row in table(runs, asked.steps).items():
        figures.add(schedule, row)
        print(schedule.ljust(16), "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    print(f"{os.cpu_count()} cores; load over the last minute, these runs among it: {os.getloadavg()[0]:.1f}")
    figures.write(asked.json)


if __name__ == "__main__":
    run_one(sys.argv[2:]) if sys.argv[1:2] == ["--one"] else main()
