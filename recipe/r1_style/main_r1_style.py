"""``python -m recipe.r1_style.main_r1_style --out FOLDER``: DeepSeek-R1's ladder by five programs of the library.

1. cold start: supervised fine-tuning of a base model on a few demonstrations
2. GRPO from there
3. rejection sampling: answers of that policy to the training prompts, of which the right ones become conversations
4. supervised fine-tuning of the base model on these
5. GRPO from there

Without further arguments the task is that of ``examples/quickstart``: sums, and demonstrations that mostly ramble on
after the answer. Every stage is a command, printed before it runs; a stage that fails ends the ladder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from verl.errors import ConfigError, DataError
from verl.observability.plots import read_metrics, series
from verl.trainer.command import run_program

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
PROJECT = "r1_style"


@dataclass(frozen=True)
class Ladder:
    """What the stages need.

    Args:
        out: folder of everything that is written.
        model: the base model; None: the quickstart's, which is made.
        data: folder with ``sft.parquet`` (column ``messages``), ``train.parquet`` and ``test.parquet``; None: as above.
        reward: file with the reward function.
        sft_steps, grpo_steps: of each of the two stages.
        answers: per prompt, in rejection sampling.
        above: an answer is right if the reward function's ``acc``, else its score, is larger.
        sft, grpo, generation: more settings of these programs, which come last.
    """

    out: Path
    seed: int = 0
    model: str | None = None
    data: Path | None = None
    reward: Path = EXAMPLES / "quickstart" / "reward.py"
    sft_steps: int = 240
    grpo_steps: int = 25
    answers: int = 4
    above: float = 0.0
    sft: list[str] = field(default_factory=list)
    grpo: list[str] = field(default_factory=list)
    generation: list[str] = field(default_factory=list)

    @property
    def base(self) -> str:
        return self.model or str(self.out / "base")

    @property
    def rows(self) -> Path:
        return self.data or self.out / "data"

    def after_sft(self, name: str) -> str:
        """The model of a supervised stage."""
        return str(self.out / name / f"global_step_{self.sft_steps}" / "model" / "huggingface")

    def after_grpo(self, name: str) -> str:
        """The model of a stage of reinforcement learning."""
        return str(self.out / name / f"global_step_{self.grpo_steps}" / "actor" / "huggingface")


def stages(ladder: Ladder) -> list[tuple[str, list[str]]]:
    """What each stage is for, and its command behind ``python``."""
    answers, right = ladder.out / "answers.parquet", ladder.out / "right.parquet"
    reject = [f"{HERE / 'rejection.py'}", f"{answers}", f"{right}", "--reward", f"{ladder.reward}"]
    reject += ["--above", f"{ladder.above}"]
    return [
        *_preparation(ladder),
        ("cold start: imitate the demonstrations", _sft(ladder, "cold", f"{_demonstrations(ladder)}")),
        ("reinforcement learning", _grpo(ladder, "rl_1", ladder.after_sft("cold"))),
        ("rejection sampling: answers of the policy", _answers(ladder, ladder.after_grpo("rl_1"), answers)),
        ("rejection sampling: the right answers", reject),
        ("fine-tune the base model on them", _sft(ladder, "sft", f"{right}")),
        ("reinforcement learning", _grpo(ladder, "rl_2", ladder.after_sft("sft"))),
    ]


def _demonstrations(ladder: Ladder) -> Path:
    return ladder.rows / ("sft.parquet" if ladder.data else "demonstrations.parquet")


def _preparation(ladder: Ladder) -> list[tuple[str, list[str]]]:
    """The quickstart's model and data where none are named."""
    made = []
    if ladder.data is None:
        arithmetic, rows = EXAMPLES / "data_preprocess" / "arithmetic.py", ladder.rows
        sizes = f"--local_save_dir {rows} --train_size 3072 --sft_size 4096 --seed {ladder.seed}"
        spoil = [f"{EXAMPLES / 'quickstart' / 'demonstrations.py'}", f"{rows / 'sft.parquet'}"]
        made += [("write sums", [f"{arithmetic}", *shlex.split(sizes)])]
        made += [("let most demonstrations ramble on", [*spoil, f"{_demonstrations(ladder)}"])]
    if ladder.model is None:
        made += [("make a base model", [f"{EXAMPLES / 'quickstart' / 'model.py'}", ladder.base])]
    return made


def _run(ladder: Ladder, name: str, steps: int) -> list[str]:
    """Settings of both trainers."""
    return [
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.default_local_dir={ladder.out / name}",
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={name}",
        f"trainer.seed={ladder.seed}",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
    ]


def _sft(ladder: Ladder, name: str, file: str) -> list[str]:
    words = [
        f"data.train_files={file}",
        "data.train_batch_size=128",
        "data.max_length=32",
        f"model.path={ladder.base}",
        "optim.lr=3e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        "checkpoint.save_contents=[model]",
    ]
    return ["-m", "verl.trainer.sft_trainer", *words, *_run(ladder, name, ladder.sft_steps), *ladder.sft]


def _grpo(ladder: Ladder, name: str, model: str) -> list[str]:
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={ladder.rows / 'train.parquet'}",
        f"data.val_files={ladder.rows / 'test.parquet'}",
        "data.train_batch_size=64",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"data.seed={ladder.seed}",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={ladder.seed}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=5",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        f"reward.custom_reward_function.path={ladder.reward}",
        "trainer.val_before_train=true",
        f"trainer.test_freq={ladder.grpo_steps}",
    ]
    return ["-m", "verl.trainer.main_ppo", *words, *_run(ladder, name, ladder.grpo_steps), *ladder.grpo]


def _answers(ladder: Ladder, model: str, file: Path) -> list[str]:
    words = [
        f"data.path={ladder.rows / 'train.parquet'}",
        f"data.output_path={file}",
        f"data.n_samples={ladder.answers}",
        f"model.path={model}",
        f"rollout.seed={ladder.seed}",
        f"trainer.seed={ladder.seed}",
        "rollout.temperature=1.0",
        "rollout.top_k=-1",
        "rollout.top_p=1.0",
        "rollout.prompt_length=32",
        "rollout.response_length=8",
    ]
    return ["-m", "verl.trainer.main_generation", *words, *ladder.generation]


def accuracies(metrics: Path) -> tuple[str, float, float]:
    """What was measured on held-out prompts, before the first and after the last step of a stage.

    Returns:
        ``acc``, or ``reward`` where the reward function returns no ``acc``; its two means over the data sources, each
        of which counts alike.

    Raises:
        DataError: the stage logged none, or ``acc`` of one data source and ``reward`` of another.
    """
    rows = read_metrics(metrics)
    keys = sorted({key for _, data in rows for key in data if key.startswith("val-core/") and key.endswith("/mean@1")})
    if not keys:
        raise DataError("the run logged no held-out accuracy", got=str(metrics))
    measures = {key.split("/")[-2] for key in keys}
    if len(measures) > 1:
        fix = "Let the reward function return acc for every data source, or for none."
        raise DataError("data sources are measured differently", key=str(metrics), got=keys, fix=fix)
    curves = [series(rows, key).values for key in keys]
    return measures.pop(), fmean(curve[0] for curve in curves), fmean(curve[-1] for curve in curves)


def refuse_traces(out: Path) -> None:
    """A second run would be taken for the first: its logs get other names.

    Raises:
        ConfigError: the folder has a summary or logs.
    """
    for trace in (out / "summary.json", out / "logs" / PROJECT):
        if trace.exists():
            fix = "Name another folder, or remove this one."
            raise ConfigError("the folder has another run", key="--out", got=str(trace), fix=fix)


def climb(ladder: Ladder) -> dict[str, dict[str, float]]:
    """Run all stages; returns ``acc`` or ``reward`` on held-out prompts after each of the four that train."""
    refuse_traces(ladder.out)
    logs = ladder.out / "logs"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "VERL_FILE_LOGGER_ROOT": str(logs)}
    environment.pop("VERL_FILE_LOGGER_PATH", None)
    for number, (title, command) in enumerate(stages(ladder), start=1):
        print(f"== {number}. {title}\n$ {shlex.join(['python', *command])}", flush=True)
        status = subprocess.run([sys.executable, *command], env=environment, check=False).returncode
        if status:
            print(f"stage {number} ended with status {status}; its message stands above", file=sys.stderr)
            sys.exit(max(status, 1))
    (measure, *first), (_, *second) = (accuracies(logs / PROJECT / f"{name}.jsonl") for name in ("rl_1", "rl_2"))
    names = ("cold start", "GRPO", "SFT on right answers", "GRPO again")
    return {measure: dict(zip(names, (*first, *second), strict=True))}


def main(argv: list[str] | None = None) -> int:
    """Command line; writes ``summary.json`` and prints it. An error of the settings is one message and status 2."""
    parser = argparse.ArgumentParser(description="Cold start, GRPO, rejection sampling, SFT, GRPO.")
    parser.add_argument("--out", type=Path, default=Path("outputs/r1_style"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="base model; by default the quickstart's")
    parser.add_argument("--data", type=Path, help="folder with sft.parquet, train.parquet and test.parquet")
    parser.add_argument("--reward", type=Path, default=Ladder.reward, help="file with the reward function")
    parser.add_argument("--sft_steps", type=int, default=Ladder.sft_steps)
    parser.add_argument("--grpo_steps", type=int, default=Ladder.grpo_steps)
    parser.add_argument("--answers", type=int, default=Ladder.answers, help="per prompt, in rejection sampling")
    parser.add_argument("--above", type=float, default=Ladder.above, help="right is an acc, else score, above this")
    for program in ("sft", "grpo", "generation"):
        parser.add_argument(f"--{program}", nargs="*", default=[], metavar="KEY=VALUE", help="more settings")
    parser.add_argument("--show", action="store_true", help="print the commands, and run nothing")
    options = vars(parser.parse_args(argv))
    show, ladder = options.pop("show"), Ladder(**options)
    if show:
        print("\n".join(shlex.join(["python", *command]) for _, command in stages(ladder)))
        return 0
    return run_program(lambda: summarise(ladder))


def summarise(ladder: Ladder) -> None:
    """Run all stages, write what they reached, and print it."""
    reached = climb(ladder)
    (ladder.out / "summary.json").write_text(json.dumps(reached, indent=2) + "\n", encoding="utf-8")
    for measure, stages_reached in reached.items():
        print(f"held-out {measure}")
        print("\n".join(f"{stage:<22}{value:.3f}" for stage, value in stages_reached.items()))


if __name__ == "__main__":
    sys.exit(main())
