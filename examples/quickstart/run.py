"""From nothing to a model that learned by reinforcement, with the commands that you would type yourself.

    python examples/quickstart/run.py            # or: make quickstart

Writes everything below ``outputs/quickstart``: data, the untrained, the warmed-up and the trained model, metrics, a
plot and ``summary.json``. Ends with an error if the held-out accuracy stays below 90 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from verl.errors import DataError
from verl.observability.plots import plot_run, read_metrics, series

HERE = Path(__file__).resolve().parent
PROJECT = "quickstart"
ACCURACY_WANTED = 0.9
SFT_STEPS, GRPO_STEPS = 360, 50
console = Console()


def command_lines(out: Path, seed: int) -> list[tuple[str, list[str]]]:
    """The stages of the quickstart: what each is for, and its command."""
    data, warm = out / "data", out / "sft" / f"global_step_{SFT_STEPS}" / "model" / "huggingface"
    arithmetic = HERE.parent / "data_preprocess" / "arithmetic.py"
    prepare = f"{arithmetic} --local_save_dir {data} --train_size 3072 --sft_size 4096 --seed {seed}"
    demonstrate = f"{HERE}/demonstrations.py {data}/sft.parquet {data}/demonstrations.parquet"
    sft = [
        f"data.train_files={data}/demonstrations.parquet",
        "data.train_batch_size=128",
        "data.max_length=32",
        f"model.path={out}/base",
        "optim.lr=3e-3",
        "optim.lr_warmup_steps=20",
        "optim.lr_scheduler_type=cosine",
        f"trainer.total_training_steps={SFT_STEPS}",
        f"trainer.save_freq={SFT_STEPS}",
        f"trainer.default_local_dir={out}/sft",
        "checkpoint.save_contents=[model]",
        *run_keys("sft", seed),
    ]
    grpo = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
        "data.train_batch_size=64",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={warm}",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=10",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
        f"reward.custom_reward_function.path={HERE}/reward.py",
        f"trainer.total_training_steps={GRPO_STEPS}",
        f"trainer.save_freq={GRPO_STEPS}",
        "trainer.test_freq=10",
        f"trainer.default_local_dir={out}/grpo",
        *run_keys("grpo", seed),
    ]
    return [
        ("write additions: training prompts, held-out prompts, solved examples", shlex.split(prepare)),
        ("spoil the solved examples: most ramble on after the answer", shlex.split(demonstrate)),
        ("build a Qwen2 of one million parameters and train its tokenizer", [f"{HERE}/model.py", f"{out}/base"]),
        ("warm up: imitate the spoilt examples (supervised)", ["-m", "verl.trainer.sft_trainer", *sft]),
        ("learn from reward alone (GRPO)", ["-m", "verl.trainer.main_ppo", *grpo]),
    ]


def run_keys(experiment: str, seed: int) -> list[str]:
    """Keys that both trainers have."""
    return [
        f"trainer.project_name={PROJECT}",
        f"trainer.experiment_name={experiment}",
        "trainer.logger=[console,file]",
        f"trainer.seed={seed}",
        "trainer.resume_mode=disable",
    ]


def run(number: int, title: str, arguments: list[str], environment: dict[str, str]) -> None:
    """Run one command with its output on this terminal; a failure ends the quickstart with its status."""
    console.rule(f"[bold]{number}. {title}")
    console.print(
        "$ " + shlex.join(["python", *arguments]), style="cyan", soft_wrap=True, highlight=False, markup=False
    )
    status = subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    if status:
        how = f"ended with status {status}" if status > 0 else f"was stopped by signal {-status}"
        console.print(f"[bold red]Step {number} {how}; its message stands above.")
        sys.exit(max(status, 1))


def accuracies(metrics: Path) -> tuple[float, float]:
    """Held-out greedy accuracy before the first and after the last step."""
    rows = read_metrics(metrics)
    keys = sorted({k for _, data in rows for k in data if k.startswith("val-core/") and k.endswith("/mean@1")})
    if not keys:
        raise DataError("the run logged no held-out accuracy", got=str(metrics))
    values = series(rows, keys[0]).values
    return values[0], values[-1]


def report(summary: dict[str, float | str], path: Path) -> None:
    table = Table(show_header=False, box=None)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("held-out accuracy before", f"[bold]{summary['accuracy_before']:.1%}[/]")
    table.add_row("held-out accuracy after", f"[bold green]{summary['accuracy_after']:.1%}[/]")
    table.add_row("time", f"{summary['seconds_total']:.0f} s")
    table.add_row("checkpoint (Hugging Face folder)", str(summary["checkpoint"]))
    table.add_row("learning curve", str(summary["plot"]))
    table.add_row("this summary", str(path))
    console.print(Panel(table, title="quickstart", title_align="left", expand=False))


def main() -> int:
    parser = argparse.ArgumentParser(description="Warm up a tiny model, then train it by GRPO on additions.")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder to (over)write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out, began = arguments.out, time.monotonic()
    for name in ("data", "base", "sft", "grpo", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    # A model of this size gains nothing from a second thread.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "VERL_FILE_LOGGER_ROOT": str(out / "logs")}
    environment.pop("VERL_FILE_LOGGER_PATH", None)
    for number, (title, command) in enumerate(command_lines(out, arguments.seed), start=1):
        run(number, title, command, environment)

    metrics = out / "logs" / PROJECT / "grpo.jsonl"
    before, after = accuracies(metrics)
    plot = plot_run(metrics, out / "curve.png", title="GRPO on two-digit additions, 1M parameters, CPU")
    summary: dict[str, float | str] = {
        "accuracy_before": before,
        "accuracy_after": after,
        "seconds_total": round(time.monotonic() - began, 1),
        "checkpoint": str(out / "grpo" / f"global_step_{GRPO_STEPS}" / "actor" / "huggingface"),
        "plot": str(plot),
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.rule("[bold]done")
    report(summary, out / "summary.json")
    if after < ACCURACY_WANTED:
        console.print(f"[bold red]The accuracy after training, {after:.1%}, is below {ACCURACY_WANTED:.0%}.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
