"""Learning curves of recipes and of GRPO, on one small task and with as many answers per step.

    PYTHONPATH=. python scripts/recipe_curves.py vapo [spo ...] [--seeds 0 1 2] [--steps 40]

The task: a new model of 16 hidden units learns to write lower-case letters, six tokens of them. Every run has the rate
1e-2, two mini-batches and 32 answers per step, and is started by the ``main`` of its recipe in this one process. Prints
a table in Markdown for the recipe's README: the mean score over three steps around, over the seeds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

A, R, ALG = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
GRPO = "verl.trainer.main_ppo"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    share = sum(c.islower() for c in solution_str) / max(len(solution_str), 1)
    return {"score": share, "acc": float(share > 0.8)}
"""
COMMON = [
    "data.train_files=train.jsonl",
    "data.train_batch_size=8",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    f"{R}.n=4",
    f"{A}.ppo_mini_batch_size=4",
    f"{A}.optim.lr=1e-2",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.project_name=curves",
]
BY_RULE = ["reward.custom_reward_function.path=scorer.py"]
CRITIC = ["critic.optim.lr=1e-2"]
TEACHER = "distillation.teacher_models.teacher_model.model_path"
JUDGE = "+reward.custom_reward_function.reward_kwargs"
Run = tuple[str, list[str]]
"""A module with a ``main``, and its words."""
PLAIN: Run = (GRPO, [f"{ALG}.adv_estimator=grpo", *BY_RULE])


def runs(recipe: str, steps: int, judge: str) -> dict[str, Run]:
    """Name of a run -> what it starts; GRPO is the first, and saves its model where another learns from it.

    Args:
        judge: address of the server that grades by the rule of `SCORER`.
    """
    compared: dict[str, dict[str, Run]] = {
        "vapo": {
            "VAPO": (
                "recipe.vapo.main_vapo",
                [*BY_RULE, *CRITIC, f"{ALG}.vapo_length_alpha=0.5", "trainer.critic_warmup=6"],
            ),
        },
        "flowrl": {
            "FlowRL": ("recipe.flowrl.main_flowrl", BY_RULE),
            "FlowRL, learned log Z": (
                "recipe.flowrl.main_flowrl",
                [
                    *BY_RULE,
                    *CRITIC,
                    "critic.cliprange_value=20",
                    f"{ALG}.adv_estimator=recipe.flowrl.core:learned_partition",
                ],
            ),
        },
        "spo": {
            "SPO": (
                "recipe.spo.main_spo",
                [*BY_RULE, f"{R}.n=1", "data.train_batch_size=32", f"{A}.ppo_mini_batch_size=16"],
            ),
        },
        "gkd": {
            "GKD": (
                "recipe.gkd.main_gkd",
                [*BY_RULE, f"{R}.n=4", f"{TEACHER}=teacher/global_step_{steps}/actor/huggingface"],
            ),
        },
        "genrm_remote": {
            "GRPO by a judge": (
                "recipe.genrm_remote.main_genrm_remote",
                [f"{A}.use_kl_loss=false", f"{JUDGE}.address={judge}"],
            ),
        },
        "pf_ppo": {
            "PPO": (GRPO, [f"{ALG}.adv_estimator=gae", *BY_RULE, *CRITIC]),
            "PF-PPO": ("recipe.pf_ppo.main_pf_ppo", [*BY_RULE, *CRITIC, f"{ALG}.use_kl_in_reward=false"]),
        },
    }
    first = PLAIN
    if recipe == "gkd":
        saves = [f"trainer.save_freq={steps}", "trainer.default_local_dir=teacher"]
        first = (GRPO, [*PLAIN[1], *saves])
    return {"GRPO": first, **compared[recipe]}


RECIPES = ("vapo", "flowrl", "spo", "gkd", "genrm_remote", "pf_ppo")


@contextmanager
def judging() -> Iterator[str]:
    """The address of a judge that grades by rule, in a thread of this process."""
    from recipe.genrm_remote.rule_judge import server

    with server() as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()
        thread.join()


def learn(name: str, run: Run, steps: int, seed: int) -> list[float]:
    """The mean score of every step of one run.

    Raises:
        SystemExit: the run failed.
    """
    module, words = run
    label = f"{name.lower().replace(' ', '_').replace(',', '')}_{seed}"
    more = [f"trainer.total_training_steps={steps}", f"trainer.experiment_name={label}", f"trainer.seed={seed}"]
    start: Callable[[list[str]], int] = importlib.import_module(module).main
    if status := start([*COMMON, *words, *more, f"data.seed={seed}"]):
        sys.exit(status)
    lines = Path("logs/curves", f"{label}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"]["critic/score/mean"] for line in lines]


def curves(recipe: str, steps: int, seeds: list[int]) -> dict[str, list[list[float]]]:
    """Name of a run -> the mean score of every step, for each seed; in a folder that is removed afterwards."""
    from tests.harness.models import tiny_model_dir
    from tests.harness.rows import addition_rows, write_prompts

    made: dict[str, list[list[float]]] = {}
    rows = addition_rows(64)
    for row in rows:
        row["extra_info"]["question"] = row["prompt"][0]["content"]
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, judging() as judge:
            os.chdir(folder)
            os.environ["VERL_FILE_LOGGER_ROOT"] = str(Path(folder) / "logs")
            tiny_model_dir("model", hidden=16, heads=2, kv_heads=1, layers=1, seed=seed)
            write_prompts("train.jsonl", rows)
            Path("scorer.py").write_text(SCORER, encoding="utf-8")
            for name, run in runs(recipe, steps, judge).items():
                made.setdefault(name, []).append(learn(name, run, steps, seed))
            os.chdir(ROOT)
    return made


def around(values: list[float], step: int) -> float:
    """The mean over the steps before, at and after ``step``, which counts from 1."""
    return fmean(values[max(step - 2, 0) : step + 1])


def table(made: dict[str, list[list[float]]], steps: int) -> str:
    """Markdown: a row for each run, a column for each tenth step; of several seeds also smallest and largest."""
    columns = [1, *range(10, steps + 1, 10)] if steps >= 10 else [1, steps]
    lines = ["| step | " + " | ".join(map(str, columns)) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, of_seeds in made.items():
        cells = []
        for step in columns:
            means = [around(values, step) for values in of_seeds]
            spread = f" ({min(means):.2f} to {max(means):.2f})" if len(means) > 1 else ""
            cells.append(f"{fmean(means):.2f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Learning curves of recipes and of GRPO.")
    parser.add_argument("recipes", nargs="+", choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    for recipe in arguments.recipes:
        made = curves(recipe, arguments.steps, arguments.seeds)
        print(f"{recipe}, seeds {', '.join(map(str, arguments.seeds))}\n\n{table(made, arguments.steps)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
