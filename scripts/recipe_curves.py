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
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from recipe.collabllm.loop import Conversation

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
SCORE = "critic/score/mean"
BY_RULE = ["reward.custom_reward_function.path=scorer.py"]
CRITIC = ["critic.optim.lr=1e-2"]
TEACHER = "distillation.teacher_models.teacher_model.model_path"
LOSS = f"{A}.policy_loss"
UNFILTERED = [f"{ALG}.filter_groups.enable=false"]
"""Dynamic sampling draws more answers per step than are trained on."""
PAIRS = [f"{R}.n=2", "data.train_batch_size=16", f"{A}.ppo_mini_batch_size=8"]
JUDGE = "+reward.custom_reward_function.reward_kwargs"
FAPO = [
    f"{JUDGE}.address={{judge}}",
    f"{JUDGE}.outcome=scripts.recipe_curves:last_letter",
    "data.val_files=train.jsonl",
    "trainer.val_before_train=false",
    "trainer.test_freq=1",
    f"{R}.val_kwargs.do_sample=true",
    f"{R}.val_kwargs.temperature=1",
]
"""An answer is right by its last letter, and flawed where another character is none; validation counts both."""
KINDS = ("letters", "digits")
OF_KIND = ["reward.custom_reward_function.path=kinds.py"]
KIND_SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    test = str.islower if data_source == "letters" else str.isdigit
    return sum(map(test, solution_str)) / max(len(solution_str), 1)
"""
CHECKPOINT = "global_step_{steps}/actor/huggingface"
DISTILLED = [
    "data.train_files=both.jsonl",
    "distillation.enabled=true",
    "distillation.distillation_loss.loss_mode=forward_kl_topk",
    "distillation.distillation_loss.topk=259",
    "distillation.distillation_loss.use_task_rewards=false",
]


def save_words(folder: str) -> list[str]:
    """The words of a run whose model is a teacher."""
    return ["trainer.save_freq={steps}", f"trainer.default_local_dir={folder}"]


LOOPS = """
- name: collabllm
  _target_: recipe.collabllm.loop.CollaborativeLoop
  futures: 2
  max_tokens_per_turn: 6
  reward: scripts.recipe_curves:lower_case
"""
USERS = """
interaction:
  - name: user
    class_name: tests.harness.conversations.ScriptedUser
    config: {texts: [Go on., Go on.]}
"""
Run = tuple[str, list[str]]
"""A module with a ``main``, and its words."""
PLAIN: Run = (GRPO, [f"{ALG}.adv_estimator=grpo", *BY_RULE])


COMPARED: dict[str, dict[str, Run]] = {
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
            [*BY_RULE, f"{R}.n=4", f"{TEACHER}=teacher/global_step_{{steps}}/actor/huggingface"],
        ),
    },
    "genrm_remote": {
        "GRPO by a judge": (
            "recipe.genrm_remote.main_genrm_remote",
            [f"{A}.use_kl_loss=false", f"{JUDGE}.address={{judge}}"],
        ),
    },
    "fapo": {
        "GRPO": ("recipe.fapo.main_fapo", [*FAPO, f"{JUDGE}.penalty=0"]),
        "FAPO": ("recipe.fapo.main_fapo", FAPO),
    },
    "pf_ppo": {
        "PPO": (GRPO, [f"{ALG}.adv_estimator=gae", *BY_RULE, *CRITIC]),
        "PF-PPO": ("recipe.pf_ppo.main_pf_ppo", [*BY_RULE, *CRITIC, f"{ALG}.use_kl_in_reward=false"]),
    },
    "entropy": {
        "KL-Cov": ("recipe.entropy.main_entropy", [*BY_RULE, *UNFILTERED, f"{LOSS}.kl_cov_ratio=0.02"]),
        "Clip-Cov": (
            "recipe.entropy.main_entropy",
            [
                *BY_RULE,
                *UNFILTERED,
                f"{LOSS}.loss_mode=clip_cov",
                f"{LOSS}.clip_cov_ratio=0.02",
                f"{A}.clip_ratio_low=1",
                f"{A}.clip_ratio_high=1",
            ],
        ),
    },
    "dapo": {"DAPO": ("recipe.dapo.main_dapo", [*BY_RULE, *UNFILTERED])},
    "sppo": {"SPPO": ("recipe.sppo.main_sppo", BY_RULE)},
    "spin": {"SPIN": ("recipe.spin.main_spin", [*BY_RULE, *PAIRS])},
    "online_dpo": {
        "online DPO": ("recipe.online_dpo.main_online_dpo", [*BY_RULE, *PAIRS]),
        "XPO": ("recipe.online_dpo.main_online_dpo", ["algorithm=xpo", *BY_RULE, *PAIRS]),
        "Nash-MD": (
            "recipe.online_dpo.main_online_dpo",
            ["algorithm=nash_md", *BY_RULE, f"{ALG}.nash_scale=0.1", f"{ALG}.kl_ctrl.kl_coef=0.005"],
        ),
        "Nash-MD, ten times the KL": (
            "recipe.online_dpo.main_online_dpo",
            ["algorithm=nash_md", *BY_RULE, f"{ALG}.nash_scale=0.1", f"{ALG}.kl_ctrl.kl_coef=0.05"],
        ),
    },
    "prime": {
        "PRIME": (
            "recipe.prime.main_prime",
            [
                "reward.custom_reward_function.path=shares.py",
                "reward.reward_model.model_path=model",
                "reward.reward_model.implicit.optim.lr=1e-2",
                "data.oversample_factor=1",
                "data.filter_accuracy=false",
                "data.filter_truncate=false",
            ],
        ),
    },
    "rep_exp": {
        f"rep_exp, `rep_exp_beta={beta}`": (
            "recipe.rep_exp.main_rep_exp",
            [*BY_RULE, f"{ALG}.rep_exp_beta={beta}"],
        )
        for beta in (0.01, 0.1, 1)
    },
    "ladder": {
        **{
            f"`{rung}`": ("recipe.ladder.main_ladder", [rung, *BY_RULE])
            for rung in ("grpo", "token_mean", "clip_higher", "dr_grpo", "gspo")
        },
        "`gspo`, clip 0.05": (
            "recipe.ladder.main_ladder",
            ["gspo", *BY_RULE, f"{A}.clip_ratio_low=0.05", f"{A}.clip_ratio_high=0.05"],
        ),
    },
    "collabllm": {
        "CollabLLM": (
            "recipe.collabllm.main_collabllm",
            [
                f"{R}.agent.agent_loop_config_path=loops.yaml",
                f"{R}.multi_turn.interaction_config_path=users.yaml",
                f"{A}.use_kl_loss=false",
                "data.max_response_length=96",
            ],
        ),
    },
    "langgraph_agent": {
        "LangGraph agent": ("recipe.langgraph_agent.main_langgraph_agent", BY_RULE),
    },
    "distillation": {
        name: (GRPO, [f"{ALG}.adv_estimator=grpo", *words])
        for name, words in {
            "GRPO, both kinds": [*OF_KIND, "data.train_files=both.jsonl", *save_words("both")],
            "teacher of letters": [*OF_KIND, "data.train_files=letters.jsonl", *save_words("letters")],
            "teacher of digits": [*OF_KIND, "data.train_files=digits.jsonl", *save_words("digits")],
            "one teacher": [
                *OF_KIND,
                *DISTILLED,
                "distillation.teacher_models.teacher_model.model_path=both/" + CHECKPOINT,
            ],
            "two teachers": [
                *OF_KIND,
                *DISTILLED,
                "distillation.teacher_key=data_source",
                *(f"distillation.teacher_models.{kind}.model_path={kind}/{CHECKPOINT}" for kind in KINDS),
                *(f"distillation.teacher_models.{kind}.key={kind}" for kind in KINDS),
            ],
        }.items()
    },
    "one_step_off_policy": {
        "one step off": ("recipe.one_step_off_policy.main_ppo", PLAIN[1]),
    },
    "fully_async_policy": {
        "fully asynchronous": (
            "recipe.fully_async_policy.fully_async_main",
            [*PLAIN[1], "async_training.trigger_parameter_sync_step=2"],
        ),
    },
}
"""Recipe -> name of a run -> what it starts; ``steps`` and ``judge`` in braces are filled in."""


def runs(recipe: str, steps: int, judge: str) -> dict[str, Run]:
    """Name of a run -> what it starts; GRPO is the first, and saves its model where another learns from it.

    Args:
        judge: address of the server that grades by the rule of `SCORER`.
    """
    first = (GRPO, [*PLAIN[1], *save_words("teacher")]) if recipe == "gkd" else PLAIN
    all_runs = {**({} if recipe == "distillation" else {"GRPO": first}), **COMPARED[recipe]}
    return {
        name: (module, [word.format(steps=steps, judge=judge) for word in words])
        for name, (module, words) in all_runs.items()
    }


def ask(kind: str) -> list[dict[str, str]]:
    """The prompt of a row that is for one of the `KINDS`."""
    return [{"role": "user", "content": {"letters": "aaaaaa", "digits": "111111"}[kind]}]


def lower_case(conversation: Conversation) -> float:
    """The mean of `SCORER` over the answers of a conversation, for CollabLLM."""
    return fmean(sum(c.islower() for c in text) / max(len(text), 1) for text in conversation.answers())


def last_letter(data_source: str, solution_str: str, ground_truth: str) -> dict[str, float]:
    """Whether the last character is a lower-case letter, for FAPO."""
    is_right = solution_str[-1:].islower()
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


def judged(prompt: str) -> str:
    """The reply of the judge of all recipes: a grade, or for FAPO's prompt whether a step has another character."""
    from recipe.genrm_remote.rule_judge import reply_to

    solution = re.search(r"<solution (\w+)>\nStep 0:\n(.*)\n</solution \1>", prompt, re.DOTALL)
    if not solution:
        return reply_to(prompt)
    return rf"\boxed{{{-1 if solution[2].islower() and solution[2].isalpha() else 0}}}"


@contextmanager
def judging() -> Iterator[str]:
    """The address of a judge that grades by rule, in a thread of this process."""
    from recipe.genrm_remote.rule_judge import server

    with server(rule=judged) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def learn(name: str, run: Run, steps: int, seed: int) -> list[dict[str, float]]:
    """The metrics of every step of one run.

    Raises:
        SystemExit: the run failed.
    """
    module, words = run
    label = re.sub(r"\W+", "_", f"{name}_{seed}")
    more = [f"trainer.total_training_steps={steps}", f"trainer.experiment_name={label}", f"trainer.seed={seed}"]
    start: Callable[[list[str]], int] = importlib.import_module(module).main
    if status := start([*COMMON, *words, *more, f"data.seed={seed}"]):
        sys.exit(status)
    lines = Path("logs/curves", f"{label}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["data"] for line in lines]


def curves(
    recipe: str, steps: int, seeds: list[int], metrics: Sequence[str] = (SCORE,)
) -> dict[str, list[list[float]]]:
    """Name of a run -> the mean score of every step, for each seed; in a folder that is removed afterwards.

    Args:
        metrics: what is read instead of the score; a name has those other than the score.
    """
    from tests.harness.models import tiny_model_dir
    from tests.harness.rows import addition_rows, write_prompts
    from verl import env

    scores: dict[str, list[list[float]]] = {}
    rows = addition_rows(64)
    for row in rows:
        row["extra_info"] |= {"question": row["prompt"][0]["content"], "interaction_kwargs": {"name": "user"}}
    for seed in seeds:
        with (
            tempfile.TemporaryDirectory() as folder,
            judging() as judge,
            chdir(folder),
            env.within({"VERL_FILE_LOGGER_ROOT": str(Path(folder) / "logs")}),
        ):
            tiny_model_dir("model", hidden=16, heads=2, kv_heads=1, layers=1, seed=seed)
            write_prompts("train.jsonl", rows)
            Path("scorer.py").write_text(SCORER, encoding="utf-8")
            Path("shares.py").write_text(f"{SCORER.partition('return')[0]}return share\n", encoding="utf-8")
            Path("loops.yaml").write_text(LOOPS, encoding="utf-8")
            Path("users.yaml").write_text(USERS, encoding="utf-8")
            Path("kinds.py").write_text(KIND_SCORER, encoding="utf-8")
            of_kinds = {
                kind: [{**row, "prompt": ask(kind), "data_source": kind} for row in rows[:32]] for kind in KINDS
            }
            for kind, part in of_kinds.items():
                write_prompts(f"{kind}.jsonl", part)
            write_prompts("both.jsonl", [row for part in of_kinds.values() for row in part])
            for name, run in runs(recipe, steps, judge).items():
                steps_of_run = learn(name, run, steps, seed)
                for metric in (metric for metric in metrics if metric in steps_of_run[0]):
                    label = name if metric == SCORE else f"{name}, `{metric}`"
                    scores.setdefault(label, []).append([step[metric] for step in steps_of_run])
    return scores


def around(values: list[float], step: int) -> float:
    """The mean over the steps before, at and after ``step``, which counts from 1."""
    return fmean(values[max(step - 2, 0) : step + 1])


def table(scores: dict[str, list[list[float]]], steps: int) -> str:
    """Markdown: a row for each run, a column for each tenth step; of several seeds also smallest and largest."""
    columns = [1, *range(10, steps + 1, 10)] if steps >= 10 else [1, steps]
    lines = ["| step | " + " | ".join(map(str, columns)) + " |", "| --- " * (len(columns) + 1) + "|"]
    for name, of_seeds in scores.items():
        cells = []
        for step in columns:
            means = [around(values, step) for values in of_seeds]
            spread = f" ({min(means):.2f} to {max(means):.2f})" if len(means) > 1 else ""
            cells.append(f"{fmean(means):.2f}{spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Learning curves of recipes and of GRPO.")
    parser.add_argument("recipes", nargs="+", choices=COMPARED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--metrics", nargs="+", default=[SCORE], help="rows of the table for each run")
    arguments = parser.parse_args()
    for recipe in arguments.recipes:
        scores = curves(recipe, arguments.steps, arguments.seeds, arguments.metrics)
        print(
            f"{recipe}, seeds {', '.join(map(str, arguments.seeds))}\n\n{table(scores, arguments.steps)}\n", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
