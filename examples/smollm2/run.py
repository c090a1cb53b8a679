"""A published model of 135 million parameters learns on this machine; each task is a few commands, which are printed.

    python examples/smollm2/run.py addition             # GRPO, every weight
    python examples/smollm2/run.py addition --lora      # GRPO, an adapter
    python examples/smollm2/run.py countdown            # GRPO after flawed demonstrations: numbers that make a goal
    python examples/smollm2/run.py tools                # GRPO with a calculator in several turns
    python examples/smollm2/run.py sft                  # fine-tuning on worked solutions of GSM8K
    python examples/smollm2/run.py dpo                  # preferences among the model's own answers
    python examples/smollm2/run.py reward_model         # a reward model from the same pairs

``docs/appendix/baselines.md`` has what was measured before and after.

Everything goes below ``outputs/smollm2``: model, data, metrics, checkpoints, a plot, and a summary of what was measured
before the first step and after the last. ``key=value`` behind a task overrides a setting of its training.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from verl.observability.plots import plot_run, read_metrics

HERE = Path(__file__).resolve().parent
Stage = tuple[str, list[str]]
"""What a command is for, and its words."""
console = Console()
RATE, LORA_RATE = 4e-5, 10
"""The learning rate of GRPO, and an adapter's as a multiple of it."""


@dataclass(frozen=True)
class Run:
    """What the stages of a task need to know."""

    task: str
    out: Path
    model: str
    seed: int
    lora: bool
    gsm8k: str | None
    settings: tuple[str, ...] = ()
    """``key=value``, which override those of the training."""

    @property
    def name(self) -> str:
        return f"{self.task}{'-lora' if self.lora else ''}-{self.seed}"

    @property
    def metrics(self) -> Path:
        return self.out / "logs" / f"{self.name}.jsonl"

    def report(self, when: str) -> Path:
        """The evaluation ``before`` or ``after`` training, where a task has one."""
        return self.metrics.with_suffix(f".{when}.json")

    def prompts(self, task: str) -> Stage:
        words = [f"{HERE}/data.py", task, str(self.out / task)]
        return "write prompts to train on, and others to be measured with", words

    def ends(self, steps: int) -> list[str]:
        """Settings that all trainers have."""
        return [
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps}",
            f"trainer.test_freq={steps // 4}",
            "trainer.val_before_train=true",
            "trainer.project_name=smollm2",
            f"trainer.experiment_name={self.name}",
            "trainer.logger=[console,file]",
            f"trainer.seed={self.seed}",
            f"trainer.default_local_dir={self.out}/{self.name}",
            "trainer.resume_mode=disable",
        ]


def in_bf16(*keys: str) -> list[str]:
    """bfloat16 of matrix products, where the processor has units for it (AMX): there a step takes half the time."""
    return [f"{key}=bfloat16" for key in keys if torch.cpu.get_capabilities().get("amx_bf16")]


def by_reinforcement(
    run: Run, steps: int, prompt: int, response: int, prompts: int = 16, kind: str | None = None
) -> list[Stage]:
    """GRPO: ``prompts`` a step, 8 samples each; ``kind`` of prompts, by default those of the task's name."""
    kind = kind or run.task
    data = run.out / kind
    actor = "actor_rollout_ref.actor.fsdp_config"
    frozen = in_bf16(f"{actor}.model_dtype")  # the base, as the sampler has it: they share one copy
    adapter = ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora_alpha=32", *frozen)
    train = [
        "-m",
        "verl.trainer.main_ppo",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        f"data.seed={run.seed}",
        f"actor_rollout_ref.model.path={run.model}",
        *(adapter if run.lora else ()),
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.optim.lr={RATE * (LORA_RATE if run.lora else 1):g}",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        *in_bf16(f"{actor}.dtype", "actor_rollout_ref.rollout.dtype"),
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        f"reward.custom_reward_function.path={HERE}/reward.py",
        *run.ends(steps),
    ]
    return [run.prompts(kind), ("learn from reward alone (GRPO)", train)]


def addition(run: Run) -> list[Stage]:
    return by_reinforcement(run, steps=56, prompt=64, response=24, prompts=32)


def sft(run: Run) -> list[Stage]:
    data = run.out / "gsm8k"
    script = HERE.parent / "data_preprocess" / "gsm8k.py"
    local = ["--local_dataset_path", run.gsm8k] if run.gsm8k else []
    train = [
        "-m",
        "verl.trainer.sft_trainer",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "data.response_dict_keys=[answer]",
        "data.train_batch_size=16",
        "data.val_max_samples=128",
        "data.max_length=640",
        f"model.path={run.model}",
        "optim.lr=1e-5",
        *in_bf16("engine.dtype"),
        "checkpoint.save_contents=[model]",
        *run.ends(64),
    ]
    made = [str(script), "--local_save_dir", str(data), *local]
    return [("write GSM8K", made), ("imitate its worked solutions (supervised)", train)]


def warmed(run: Run, kind: str, title: str, steps: int, learn: Callable[[Run], list[Stage]]) -> list[Stage]:
    """Imitates flawed demonstrations, so that some samples are right, before it learns from reward."""
    warm = run.out / f"{run.name}-sft"
    imitate = [
        "-m",
        "verl.trainer.sft_trainer",
        f"data.train_files={run.out}/{kind}/sft.parquet",
        "data.train_batch_size=32",
        "data.max_length=128",
        f"model.path={run.model}",
        "optim.lr=2e-5",
        *in_bf16("engine.dtype"),
        "checkpoint.save_contents=[model]",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={warm}",
        "trainer.resume_mode=disable",
    ]
    prompts, train = learn(replace(run, model=f"{warm}/global_step_{steps}/model/huggingface"))
    return [prompts, (title, imitate), train]


def countdown(run: Run) -> list[Stage]:
    """Half of the demonstrations reach the goal; reinforcement finds out which expressions do."""
    title = "imitate expressions of the numbers, every second of which is made to reach the goal"
    return warmed(run, "countdown", title, 48, lambda r: by_reinforcement(r, 64, prompt=64, response=16, prompts=32))


def tools(run: Run) -> list[Stage]:
    """Few demonstrations use a calculator; reinforcement finds out that it pays."""
    title = "imitate demonstrations, one in four of which calls the calculator"

    def learn(started: Run) -> list[Stage]:
        prompts, (what, train) = by_reinforcement(started, steps=16, prompt=64, response=96, kind="products")
        multi_turn = "actor_rollout_ref.rollout.multi_turn"
        turns = [f"{multi_turn}.enable=true", f"{multi_turn}.max_assistant_turns=3"]
        turns.append(f"{multi_turn}.tool_config_path={HERE.parent}/calculator/tools.yaml")
        return [prompts, (what, train + turns)]

    return warmed(run, "products", title, 24, learn)


SAMPLES = 8


def sampled(run: Run, model: str, split: str, output: Path) -> list[str]:
    """Eight answers of a model to each prompt of a split."""
    return [
        "-m",
        "verl.trainer.main_generation",
        f"data.path={run.out}/answers/{split}.parquet",
        f"data.output_path={output}",
        f"data.n_samples={SAMPLES}",
        f"model.path={model}",
        "rollout.temperature=0.7",
        "rollout.top_k=-1",
        "rollout.top_p=1.0",
        "rollout.prompt_length=64",
        "rollout.response_length=24",
        *in_bf16("rollout.dtype"),
        "trainer.device=cpu",
    ]


def own_pairs(run: Run) -> list[Stage]:
    """A right and a wrong answer of the model itself to each prompt; the sum where it has no right one."""
    data = run.out / "answers"
    answers = data / "answers.parquet"
    script = HERE.parent / "end_to_end" / "pairs.py"
    pair = [str(script), str(answers), *(f"{run.out}/pairs/{name}.parquet" for name in ("train", "test"))]
    return [
        ("write prompts", [f"{HERE}/data.py", "addition", str(data), "--train_size", "384"]),
        ("sample eight answers to each", sampled(run, run.model, "train", answers)),
        ("pair right with wrong ones", [*pair, "--scorer", f"{HERE}/reward.py"]),
    ]


PAIR_STEPS = 48


def from_pairs(run: Run, program: str, *settings: str) -> Stage:
    pairs = run.out / "pairs"
    train = [
        "-m",
        f"verl.trainer.{program}",
        f"data.train_files={pairs}/train.parquet",
        f"data.val_files={pairs}/test.parquet",
        "data.train_batch_size=16",
        "data.max_length=128",
        f"model.path={run.model}",
        *settings,
        *in_bf16("engine.dtype"),
        *run.ends(PAIR_STEPS),
    ]
    return "train on the pairs", train


def dpo(run: Run) -> list[Stage]:
    """Trains on pairs, then compares answers to held-out prompts of the model before and after."""
    made = [*own_pairs(run), from_pairs(run, "dpo_trainer", "dpo.beta=0.1", "optim.lr=5e-6")]
    steps = dict(word.split("=", 1) for word in run.settings).get("trainer.total_training_steps", PAIR_STEPS)
    trained = f"{run.out}/{run.name}/global_step_{steps}/model/huggingface"
    for when, model in (("before", run.model), ("after", trained)):
        answers = run.out / "answers" / f"{when}.parquet"
        score = [
            "-m",
            "verl.trainer.main_eval",
            f"data.path={answers}",
            f"custom_reward_function.path={HERE}/reward.py",
            f"report.json={run.report(when)}",
            f"report.markdown={run.report(when).with_suffix('.md')}",
        ]
        made += [(f"sample held-out answers, {when}", sampled(run, model, "test", answers)), (f"score {when}", score)]
    made[-1][1].append(f"report.compare={run.out}/answers/before.parquet")
    return made


def reward_model(run: Run) -> list[Stage]:
    return [*own_pairs(run), from_pairs(run, "rm_trainer", "rm.centering=0.01", "optim.lr=1e-5")]


TASKS: dict[str, tuple[Callable[[Run], list[Stage]], str]] = {
    "addition": (addition, "val-core/addition/reward/mean@1"),
    "countdown": (countdown, "val-core/countdown/reward/mean@1"),
    "tools": (tools, "val-core/products/reward/mean@1"),
    "sft": (sft, "val/loss"),
    "dpo": (dpo, f"mean score of {SAMPLES} samples"),
    "reward_model": (reward_model, "val/accuracy"),
}
"""A task's stages, and by what it is measured: a metric of its training, or for DPO the evaluation after it."""


def stages(run: Run) -> list[Stage]:
    """All commands of a task."""
    made = [("write the model", [f"{HERE}/model.py", run.model])] if run.model == str(run.out / "model") else []
    return made + TASKS[run.task][0](run)


def summary_of(run: Run, seconds: float) -> dict[str, float | str | None]:
    """What a run came to; ``first`` and ``last`` are null where its settings leave validation out."""
    rows = read_metrics(run.metrics)
    key = TASKS[run.task][1]
    plot = plot_run(run.metrics, run.metrics.with_suffix(".png"), title=f"{run.name}, SmolLM2-135M-Instruct")
    if run.task == "dpo":
        first, last = (json.loads(run.report(when).read_text())["test_score/addition"] for when in ("before", "after"))
    else:
        values = [data[key] for _, data in rows if data.get(key) is not None]
        first, last = (values[0], values[-1]) if values else (None, None)
    return {
        "measured": key,
        "first": first if first is None else round(first, 4),
        "last": last if last is None else round(last, 4),
        "steps": rows[-1][0],
        "minutes": round(seconds / 60, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 1),
        "plot": str(plot),
        "checkpoints": str(run.out / run.name),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M-Instruct on this machine.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("settings", nargs="*", help="key=value of the training, which override those here")
    parser.add_argument("--lora", action="store_true", help="of a GRPO task: train an adapter of rank 32")
    parser.add_argument("--model", help="folder or hub name of another model")
    parser.add_argument("--gsm8k", help="folder with train.jsonl and test.jsonl; without it they come from the hub")
    parser.add_argument("--out", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_intermixed_args()
    run = Run(a.task, a.out, a.model or str(a.out / "model"), a.seed, a.lora, a.gsm8k, tuple(a.settings))
    run.metrics.unlink(missing_ok=True)
    shutil.rmtree(run.out / run.name, ignore_errors=True)
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(run.metrics)}
    began = time.monotonic()
    commands = stages(run)
    trains = [words for _, words in commands if f"trainer.experiment_name={run.name}" in words]
    trains[-1].extend(run.settings)
    for title, command in commands:
        console.rule(f"[bold]{title}")
        line = "$ " + shlex.join(["python", *command])
        console.print(line, style="cyan", soft_wrap=True, highlight=False, markup=False)  # [a,b] is a list, no style
        status = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
        if status:
            return status
    summary = summary_of(run, time.monotonic() - began)
    run.metrics.with_suffix(".summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print_json(data=summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
