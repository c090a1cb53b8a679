"""Messages that docs/troubleshooting.md shows are the library's, word for word (lines are cut at ``...``)."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.sanity.source_tree import ROOT
from tests.support import write_prompts
from verl import device
from verl.config import load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SHOWN = [line for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ERRORS = {
    "trainer.n_gpus_per_node=8": "trainer.n_gpus_per_node: 8 GPUs",
    f"data.train_batch_size=60 {A}.ppo_mini_batch_size=16": f"{A}.ppo_mini_batch_size: data.train_batch_size=60",
    f"{R}.log_prob_micro_batch_size=4 {R}.log_prob_micro_batch_size_per_gpu=8": f"{R}.log_prob_micro",
    "actor_rollout_ref.rolout.n=4": "actor_rollout_ref.rolout.n: unknown",
    f"{R}.temperatur=0.7": f"{R}.temperatur: unknown",
    f"{A}.lr=1e-6 {A}.optim.lr=2e-6": f"{A}.optim.lr: two values",
    f"{A}.tis_imp_ratio_cap=2.0": f"{A}.tis_imp_ratio_cap: no longer",
    f"algorithm.adv_estimator=grpo {R}.n=1": f"{R}.n: the estimator",
    f"algorithm.rollout_is_threshold=2.0 {R}.calculate_log_probs=false": f"{R}.calculate_log_probs: algorithm",
    f"{R}.enable_vision=true": f"{R}.enable_vision: not built",
    "trainer.device=npu": "trainer.device: this machine",
    "trainer.logger=[console,mlflow]": "trainer.logger: 'mlflow'",
}
NOTICES = {
    f"{R}.gpu_memory_utilization=0.4": f"{R}.gpu_memory_utilization",
    f"{A}.lr=1e-6": f"{A}.lr",
    "algorithm.kl_ctrl.kl_coef=0.001": "algorithm.kl_ctrl.kl_coef",
    f"{A}.kl_loss_coef=0.01": f"{A}.kl_loss_coef",
}


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """A machine without a GPU and without optional packages; a prompt file and a model folder are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "accelerator", lambda: None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, p=None: None if name == "mlflow" else found(name, p))
    write_prompts("train.parquet", 4)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    reset_notices()
    yield
    reset_notices()


def is_shown(line: str, said: str) -> bool:
    """Whether the page's line is the message, where it was not cut."""
    parts = [re.escape(part.strip()) for part in line.split("...")]
    return re.fullmatch(".*".join(parts), said, re.DOTALL) is not None


@pytest.mark.parametrize("words", ERRORS)
def test_an_error_is_shown_as_it_is(laptop, words):
    (line,) = [line for line in SHOWN if line.startswith(f"error: {ERRORS[words]}")]
    given = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [*given, *words.split()])
    assert is_shown(line, f"error: {caught.value}"), f"the page says\n{line}\nthe library says\nerror: {caught.value}"


@pytest.mark.parametrize("words", NOTICES)
def test_a_notice_is_shown_as_it_is(laptop, words):
    key = NOTICES[words]
    load_config("ppo_trainer", ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", words])
    assert f"{key}: {notices()[key]}" in SHOWN
