"""The tasks of `run.py` in a few lines of Python each, on sums of two numbers; `run.py` has what they come to.

python examples/smollm2/model.py outputs/smollm2/model
python examples/smollm2/from_python.py grpo|lora|sft|dpo|reward_model [--model outputs/smollm2/model] [--steps 56]
"""

from __future__ import annotations

import argparse
import random
import re

import torch

import verl

DTYPE = "bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "float32"
SAMPLING = {"temperature": 0.7, "prompt_length": 96, "response_length": 24, "dtype": DTYPE}


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Different sums of two numbers of two digits."""
    pairs = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    return [{"prompt": f"What is {a} plus {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]


def right(solution_str: str, ground_truth: str) -> float:
    """Is the last number the sum?"""
    return float(re.findall(r"-?\d+", solution_str.replace(",", ""))[-1:] == [ground_truth])


ROWS = sums(512, seed=0)
TRAIN, TEST = ROWS[128:], ROWS[:128]


def grpo(model: str, steps: int, **settings: object) -> verl.Run:
    return verl.train(
        "grpo", model=model, data=TRAIN, val=TEST, reward=right,
        **{"data.max_prompt_length": 96, "data.max_response_length": 24, "data.train_batch_size": 32,
           "actor_rollout_ref.actor.ppo_mini_batch_size": 32, "actor_rollout_ref.rollout.n": 8,
           "actor_rollout_ref.actor.optim.lr": 4e-5, "actor_rollout_ref.actor.fsdp_config.dtype": DTYPE,
           "actor_rollout_ref.rollout.dtype": DTYPE, "trainer.total_training_steps": steps,
           "trainer.total_epochs": steps, "trainer.test_freq": max(1, steps // 4), **settings},
    )  # fmt: skip


def lora(model: str, steps: int) -> verl.Run:
    adapter = {"actor_rollout_ref.model.lora_rank": 32, "actor_rollout_ref.model.lora_alpha": 32}
    return grpo(model, steps, **adapter, **{"actor_rollout_ref.actor.optim.lr": 4e-4})


def sft(model: str, steps: int) -> verl.Run:
    train, test = ([{"prompt": row["prompt"], "response": row["answer"]} for row in rows] for rows in (TRAIN, TEST))
    return verl.sft(model=model, data=train, val=test, optim={"lr": 1e-5}, **ends(steps))


def pairs(model: str, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A right and a wrong answer of the model to each prompt; the sum where it has no right one."""
    made = []
    for row in verl.generate(model, rows, n=8, rollout=SAMPLING).to_dict("records"):
        truth = row["reward_model"]["ground_truth"]
        good, wrong = ([text for text in row["responses"] if right(text, truth) == score] for score in (1, 0))
        if wrong:
            made.append({"prompt": row["prompt"], "chosen": [*good, truth][0], "rejected": wrong[0]})
    return made


def dpo(model: str, steps: int) -> verl.Run:
    train, test = pairs(model, TRAIN), pairs(model, TEST)
    run = verl.dpo(model=model, data=train, val=test, dpo={"beta": 0.1}, optim={"lr": 5e-6}, **ends(steps))
    for path in (model, run.model_path):
        answers = verl.generate(path, TEST, n=8, rollout=SAMPLING)
        print(path, verl.evaluate(answers, right))
    return run


def reward_model(model: str, steps: int) -> verl.Run:
    train, test = pairs(model, TRAIN), pairs(model, TEST)
    return verl.reward_model(model=model, data=train, val=test, optim={"lr": 1e-5}, **ends(steps))


def ends(steps: int) -> dict[str, object]:
    return {"trainer": {"total_training_steps": steps, "total_epochs": steps, "test_freq": max(1, steps // 4)}}


TASKS = {task.__name__: task for task in (grpo, lora, sft, dpo, reward_model)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M-Instruct on this machine.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", default="outputs/smollm2/model")
    parser.add_argument("--steps", type=int, default=56)
    a = parser.parse_args()
    run = TASKS[a.task](a.model, a.steps)
    print(run.metrics.filter(regex="score/mean|reward/mean|val/").dropna(how="all"), run.model_path, sep="\n")


if __name__ == "__main__":
    main()
