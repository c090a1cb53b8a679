"""Runs every estimator and every policy loss on a small task and writes the page and the plot of their curves.

    python scripts/learning_curves.py docs/images/algorithms.png docs/appendix/algorithm_curves.md [--steps 40]

The task: a random two-layer model of 30 thousand parameters is rewarded with the share of digits among the sixteen
bytes that it writes, 4 % at first. Everything runs through `main_ppo` in this one process, one run after the other; a
run takes seconds on a CPU. Each run has to raise the reward, else the script ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

A, ALG = "actor_rollout_ref.actor", "algorithm"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(c.isdigit() for c in solution_str) / 16
    high = sum(c in "56789" for c in solution_str) / 16
    return {"score": digits, "digits": digits, "high": high}
"""
COMMON = [
    "data.train_files=train.jsonl",
    "data.train_batch_size=16",
    "data.max_prompt_length=48",
    "data.max_response_length=16",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=8",
    f"{A}.ppo_mini_batch_size=8",
    f"{A}.optim.lr=3e-3",
    f"{A}.optim.lr_warmup_steps=2",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.project_name=curves",
]
CRITIC = ["critic.optim.lr=3e-3", "critic.ppo_mini_batch_size=8"]
ESTIMATOR_SETTINGS = {
    "gae": CRITIC,
    "vapo": [*CRITIC, f"{ALG}.vapo_length_alpha=0.2"],
    "gdpo": [f"{ALG}.gdpo_reward_keys=[digits,high]"],
}
LOSS_SETTINGS = {
    "gspo": [f"{A}.clip_ratio_low=0.03", f"{A}.clip_ratio_high=0.04"],
    "dro": [f"{A}.policy_loss.dro_beta=0.05"],
    "geo_mean": [f"{A}.clip_ratio=0.4"],
}
EXTRA = {
    "dr_grpo": [f"{ALG}.norm_adv_by_std_in_grpo=false", f"{A}.loss_agg_mode=seq-mean-token-sum-norm"],
    "pf_ppo": [f"{ALG}.use_pf_ppo=true"],
    "bypass mode with reinforce": [
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        f"{ALG}.rollout_correction.bypass_mode=true",
        f"{ALG}.rollout_correction.loss_type=reinforce",
        f"{ALG}.rollout_correction.rollout_is=token",
    ],
}


def runs() -> dict[str, list[str]]:
    """Name of a run -> its settings."""
    from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

    found = {
        f"{name} + vanilla": [f"{ALG}.adv_estimator={name}", *ESTIMATOR_SETTINGS.get(name, [])]
        for name in ADVANTAGE_ESTIMATORS.builtin_targets()
    }
    for name in POLICY_LOSSES.builtin_targets():
        if name != "vanilla":
            settings = [f"{A}.policy_loss.loss_mode={name}", *LOSS_SETTINGS.get(name, [])]
            found[f"grpo + {name}"] = [f"{ALG}.adv_estimator=grpo", *settings]
    return found | {name: [f"{ALG}.adv_estimator=grpo", *settings] for name, settings in EXTRA.items()}


def learn(name: str, settings: list[str], steps: int) -> tuple[list[float], float]:
    """The mean reward of every step of one run, and the seconds it took."""
    from verl.config import PPOTrainerConfig, load_config
    from verl.trainer import main_ppo

    experiment = name.replace(" + ", "_")
    words = [*COMMON, *settings, f"trainer.total_training_steps={steps}", f"trainer.experiment_name={experiment}"]
    began = time.monotonic()
    main_ppo.run_ppo(cast(PPOTrainerConfig, load_config("ppo_trainer", words)))
    lines = Path("logs/curves", f"{experiment}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"]["critic/score/mean"] for line in lines], time.monotonic() - began


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """One small panel per run, all with the same axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 5
    figure, axes = pyplot.subplots(-(-len(curves) // columns), columns, figsize=(12, 12), sharex=True, sharey=True)
    for axis in axes.flat[len(curves) :]:
        axis.axis("off")
    for axis, (name, values) in zip(axes.flat, curves.items()):
        axis.plot(values, linewidth=1)
        axis.set_title(name, fontsize=7)
        axis.tick_params(labelsize=6)
        axis.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("mean reward")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def ends(values: list[float]) -> tuple[float, float]:
    """The mean reward of the first and of the last three steps."""
    return sum(values[:3]) / 3, sum(values[-3:]) / 3


PAGE = """# Learning curves

Every [estimator and policy loss](../concepts/algorithms.md) on one small task, by configuration alone: a random
two-layer model is rewarded with the share of digits among the sixteen bytes that it writes. {steps} steps of 16
prompts with 8 samples, two mini-batches per step, one seed; the settings are those of `scripts/learning_curves.py`,
which makes this page. The task shows that a method learns, not which one is better: learning rate and clips were not
tuned for any of them.

![mean reward over steps]({plot})

| run | reward, first 3 steps | last 3 steps | seconds |
| --- | --- | --- | --- |
"""


def page(curves: dict[str, list[float]], seconds: dict[str, float], steps: int, plot: str) -> str:
    """The page in Markdown; ``plot`` is the picture as seen from it."""
    lines = [PAGE.format(steps=steps, plot=plot).rstrip()]
    for name, values in curves.items():
        first, last = ends(values)
        lines.append(f"| {name} | {first:.3f} | {last:.3f} | {seconds[name]:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Learning curves of every estimator and policy loss.")
    parser.add_argument("plot", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="*", help="names of runs")
    arguments = parser.parse_args()
    plot, written = arguments.plot.resolve(), arguments.page.resolve()
    from tests.harness.models import tiny_model_dir
    from tests.harness.rows import write_prompts

    curves: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["VERL_FILE_LOGGER_ROOT"] = str(Path(folder) / "logs")
        tiny_model_dir("model", initializer_range=0.1)
        write_prompts("train.jsonl", 64)
        Path("scorer.py").write_text(SCORER, encoding="utf-8")
        for name, settings in runs().items():
            if not arguments.only or name in arguments.only:
                curves[name], seconds[name] = learn(name, settings, arguments.steps)
                first, last = ends(curves[name])
                print(f"{name:32} {first:.3f} -> {last:.3f}   {seconds[name]:.1f} s", flush=True)
        os.chdir(ROOT)
    draw(curves, plot)
    written.write_text(page(curves, seconds, arguments.steps, os.path.relpath(plot, written.parent)), encoding="utf-8")
    flat = [name for name, values in curves.items() if ends(values)[1] <= ends(values)[0]]
    print(f"did not rise: {', '.join(flat)}" if flat else "every run raised its reward")
    return 1 if flat else 0


if __name__ == "__main__":
    sys.exit(main())
