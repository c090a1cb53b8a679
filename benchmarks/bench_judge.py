"""A judge of 256 samples: alone, after sampling, and overlapped with it.

    PYTHONPATH=. python benchmarks/bench_judge.py [--prompts 32] [--samples 8] [--tokens 64] [--at-once 1] [--steps 4]

GRPO steps of a small random model on a CPU. A reward function grades each answer with `verl.rewards.judges`. The judge
is an HTTP server in another process (`verl.serving`) that waits 20 ms before it answers, `--at-once` answers at a
time (``reward.max_concurrent``). Prompts and answers differ, so that no reply comes from the cache.

Two runs with the same samples: ``reward.while_sampling`` false and true. Printed in seconds, medians of the steps
without the first: sampling alone and the judge alone (``timing_s/gen`` and ``timing_s/reward`` of the first run), both
in sequence, and overlapped (the same two of the second run), with its ratio to the longer of the first two.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.serving import HttpRequest, HttpResponse, Server
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.callbacks import Callback

KEY, WAIT = "bench", 0.02
REWARD = """
import functools
from verl.rewards.judges import JudgeClient, rubric_score

judge = functools.cache(JudgeClient)

async def compute_score(data_source, solution_str, ground_truth, extra_info, url, key):
    question = f"question {extra_info['index']}"
    judged = await rubric_score(judge(url, api_key=key), question, solution_str, {"It is good.": 1.0})
    return {**judged, "score": judged["score"] + len(set(solution_str)) / 100}
"""


async def serve() -> None:
    """The judge: prints its port and answers until it is ended."""

    async def grade(request: HttpRequest) -> HttpResponse:
        assert request.json()["messages"]
        await asyncio.sleep(WAIT)
        choice = {"message": {"role": "assistant", "content": "Fine.\nVERDICT: 7"}, "finish_reason": "stop"}
        return HttpResponse({"choices": [choice], "usage": {"total_tokens": 100}})

    server = Server({("POST", "/v1/chat/completions"): grade}, lambda token: token if token == KEY else None)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


class Clock(Callback):
    """The seconds of sampling and scoring in each step, and how many requests the judge got."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.calls: list[float] = []

    def on_step_end(self, trainer: Any, batch: Any) -> None:
        seconds = trainer.ctx.timers.seconds
        self.steps.append((seconds["gen"], seconds["reward"]))
        self.calls.append(sum(batch.non_tensor_batch["judge_calls"]))


def run(arguments: argparse.Namespace, port: int, overlapped: bool) -> tuple[float, float]:
    """(sampling, scoring): medians over the steps without the first."""
    clock = Clock()

    class Runner(TaskRunner):
        def make_trainer(self, config: Any, tokenizer: Any, processor: Any) -> Any:
            trainer = super().make_trainer(config, tokenizer, processor)
            trainer.callbacks.append(clock)
            return trainer

    file = Path(f"reward_{overlapped}.py")  # another file has another client, and an empty cache
    file.write_text(REWARD)
    kwargs = "+reward.custom_reward_function.reward_kwargs"
    words = (
        "algorithm.adv_estimator=grpo",
        "data.train_files=train.parquet",
        f"data.train_batch_size={arguments.prompts}",
        "data.max_prompt_length=64",
        f"data.max_response_length={arguments.tokens}",
        "actor_rollout_ref.model.path=model",
        f"actor_rollout_ref.rollout.n={arguments.samples}",
        f"actor_rollout_ref.rollout.max_num_seqs={arguments.slots}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={arguments.prompts}",
        f"reward.custom_reward_function.path={file}",
        f"{kwargs}.url=http://127.0.0.1:{port}",
        f"{kwargs}.key={KEY}",
        f"reward.while_sampling={str(overlapped).lower()}",
        f"reward.max_concurrent={arguments.at_once}",
        "reward.on_error=raise",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={arguments.steps}",
        f"trainer.default_local_dir=overlapped_{overlapped}",
    )
    run_ppo(load_config("ppo_trainer", list(words)), Runner)
    assert set(clock.calls) == {arguments.prompts * arguments.samples}, f"requests per step: {clock.calls}"
    print(f"(sampling, scoring) of each step: {clock.steps}", flush=True)
    sampling, scoring = zip(*clock.steps[1:], strict=True)
    return statistics.median(sampling), statistics.median(scoring)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prompts", 32), ("samples", 8), ("tokens", 64), ("slots", 32), ("at-once", 1), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--serve", action="store_true", help="be the judge")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as judge, tempfile.TemporaryDirectory() as folder:
        try:
            assert judge.stdout is not None
            port = int(judge.stdout.readline())
            os.chdir(folder)
            tiny_model_dir("model", hidden=128, layers=4)
            write_prompts("train.parquet", arguments.prompts * arguments.steps)
            sampling, scoring = run(arguments, port, overlapped=False)
            overlapped = sum(run(arguments, port, overlapped=True))
        finally:
            judge.kill()
    longer = max(sampling, scoring)
    print(f"\nload {os.getloadavg()[0]:.1f}\n\n| what | s |\n|---|---|")
    print(f"| sampling alone | {sampling:.2f} |\n| judge alone | {scoring:.2f} |")
    print(f"| in sequence | {sampling + scoring:.2f} |\n| overlapped | {overlapped:.2f} |")
    print(f"\noverlapped / the longer of the two: {overlapped / longer:.2f}")


if __name__ == "__main__":
    main()
