"""Messages that docs/howto/troubleshooting.md shows are the library's, word for word (lines are cut at ``...``)."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

from tests.harness.rows import addition_rows, write_prompts
from tests.sanity.source_tree import ROOT
from verl import device
from verl.checkpoint import RunLock
from verl.config import load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.trainer import main_ppo

PAGE = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
SHOWN = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ERRORS = {
    "trainer.n_gpus_per_node=8": "trainer.n_gpus_per_node: 8 GPUs",
    f"{R}.temperatur=0.7": f"{R}.temperatur: unknown",
    f"{A}.qat.enable=true": f"{A}.qat.enable: not built",
    "data.train_files=trian.parquet": "data.train_files: no such file",
    "actor_rollout_ref.model.path=.": "actor_rollout_ref.model.path: this folder",
}
WHILE_RUNNING = {
    "data.train_batch_size=4096 mine.name=good": "data.train_batch_size: the dataset has",
    "data.max_prompt_length=4": "train.parquet, row 0:",
    "data.train_files=bare.parquet": "data_source: the data has no column",
    "data.train_batch_size=32 mine.name=nothing": "all 64 samples of a batch failed",
    "trainer.default_local_dir=busy trainer.save_freq=1 mine.name=good": "trainer.default_local_dir: another run",
}
REWARDS = """
def nothing(data_source, solution_str, ground_truth, extra_info=None):
    return None

def good(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""
NOTICES = {
    "algorithm.kl_ctrl.kl_coef=0.001": "algorithm.kl_ctrl.kl_coef",
}


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """A machine without a GPU and without optional packages; a prompt file and a model folder are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "accelerator", lambda: None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, p=None: None if name == "wandb" else found(name, p))
    write_prompts("train.parquet", 4)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    reset_notices()
    yield


def shown(start: str) -> str:
    """The error on the page that begins so, with the lines of its list."""
    (first,) = [number for number, line in enumerate(SHOWN) if line.startswith(f"error: {start}")]
    items = itertools.takewhile(lambda line: line.startswith("  - "), SHOWN[first + 1 :])
    return "\n".join([SHOWN[first], *items])


def is_shown(line: str, said: str) -> bool:
    """Whether the page's line is the message, where it was not cut."""
    parts = [re.escape(part.strip()) for part in line.split("...")]
    return re.fullmatch(".*".join(parts), said, re.DOTALL) is not None


@pytest.mark.parametrize("words", ERRORS)
def test_an_error_is_shown_as_it_is(laptop, words):
    line = shown(ERRORS[words])
    given = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [*given, *words.split()])
    assert is_shown(line, f"error: {caught.value}"), f"the page says\n{line}\nthe library says\nerror: {caught.value}"


@pytest.mark.parametrize("words", NOTICES)
def test_a_notice_is_shown_as_it_is(laptop, words):
    key = NOTICES[words]
    load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", *words.split()])
    assert f"{key}: {notices()[key]}" in SHOWN


@pytest.mark.parametrize("words", WHILE_RUNNING)
def test_an_error_of_a_run_is_shown_as_it_is(laptop, qwen2, capsys, words):
    write_prompts("train.parquet", 1600)
    write_prompts("bare.parquet", [{"prompt": row["prompt"]} for row in addition_rows(64)])
    Path("rewards.py").write_text(REWARDS)
    given = [
        "algorithm.adv_estimator=grpo data.train_files=train.parquet data.train_batch_size=2",
        f"data.max_response_length=4 actor_rollout_ref.model.path={qwen2} {R}.n=2 {A}.ppo_mini_batch_size=2",
        "trainer.total_training_steps=1 trainer.logger=[file]",
        words.replace("mine.", "reward.custom_reward_function.path=rewards.py reward.custom_reward_function."),
    ]
    Path("busy").mkdir()
    with RunLock("busy"):
        status = main_ppo.main(" ".join(given).split())
    said = capsys.readouterr().err.strip()
    assert status == 2 and is_shown(shown(WHILE_RUNNING[words]), said), said


def test_every_error_on_the_page_is_met_above():
    errors = [line.removeprefix("error: ") for line in SHOWN if line.startswith("error: ")]
    known = (*ERRORS.values(), *WHILE_RUNNING.values())
    assert [line for line in errors if not line.startswith(known)] == []
