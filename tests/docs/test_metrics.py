"""The page of metrics has every metric that runs write, and every one whose name stands in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import verl
from tests.harness.models import tiny_model_dir
from tests.sanity.source_tree import ROOT

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
NO_METRICS = re.compile(r"val/generations|tokens/s|training/off_policy")
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "ee", "rejected": "f"}]
TWO_STEPS = {"trainer.total_training_steps": 2}
BY_REWARD = {**TWO_STEPS, "data.max_prompt_length": 64, "data.max_response_length": 4}
QUEUE = {
    "trainer.v1.trainer_mode": "fully_async",
    "data.train_batch_size": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "async_training.require_batches": 1,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "algorithm.rollout_is_threshold": 2.0,
}


@cache
def rows() -> list[re.Pattern[str]]:
    """The page's keys; ``*`` is the rest of a key, ``<x>`` one part of it."""
    keys = [
        key
        for line in PAGE.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    return [re.compile(re.sub(r"<[^>]*>", "[^/]+", re.escape(key).replace(r"\*", ".+"))) for key in keys]


def left_out(keys: set[str]) -> list[str]:
    return sorted(key for key in keys if not any(row.fullmatch(key) for row in rows()))


def in_code() -> set[str]:
    """Texts in the code with the form of a metric's key and a first word of the page; ``x`` is what varies."""
    begins = {re.split(r"[/\\\[]", row.pattern)[0] for row in rows()} - {""}
    keys = set()
    for file in (ROOT / "verl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if re.fullmatch(r"[a-z_-]+(/[\w@().-]*[\w)])+", text) and text.partition("/")[0] in begins:
                keys.add(text)
    return {key for key in keys if not NO_METRICS.fullmatch(key)}


def score(solution_str, ground_truth):
    return len(solution_str) + float(ground_truth in solution_str)


@pytest.mark.slow
def test_every_metric_that_runs_write_is_on_the_page(workplace: Path):
    tiny_model_dir("model")
    supervised = {**TWO_STEPS, "data.max_length": 64}
    runs = [
        verl.train("ppo", model="model", data=ROWS, val=ROWS, reward=score, **BY_REWARD),
        verl.train("grpo", model="model", data=ROWS * 4, reward=score, **BY_REWARD, **QUEUE),
        verl.sft(model="model", data=[{"prompt": "a", "response": "b"}] * 4, **supervised),
        verl.dpo(model="model", data=PAIRS, **supervised),
        verl.reward_model(model="model", data=PAIRS, **supervised),
    ]
    assert all(run.steps == 2 for run in runs)
    keys = {key for run in runs for key in run.metrics.columns}
    assert len(keys) > 150 and left_out(keys - {"step"}) == []


def test_every_metric_whose_name_stands_in_the_code_is_on_the_page():
    keys = in_code()
    assert len(keys) > 100 and left_out(keys) == []
