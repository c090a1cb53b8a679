"""A reward file or a configuration check must not pay for torch, and a loss must not pay for Ray."""

from __future__ import annotations

import json

import pytest

from tests.harness.configs import describe
from tests.harness.programs import python

HEAVY = ("torch", "ray", "transformers", "tensordict", "vllm", "sglang", "wandb", "numpy", "pandas", "matplotlib")


def loaded_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys, json; print(json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    return set(json.loads(python("-c", code).stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module", ["verl", "verl.errors", "verl.env", "verl.registry", "verl.metrics", "verl.observability"]
)
def test_base_modules_load_nothing_heavy(module):
    assert not loaded_after(f"import {module}") & set(HEAVY)


@pytest.mark.parametrize("module", ["verl.config", "verl.viewer.api"])
def test_settings_and_the_page_over_runs_load_neither_torch_nor_ray(module):
    assert not loaded_after(f"import {module}") & {"torch", "ray", "transformers"}


@pytest.mark.parametrize("module", ["verl.protocol", "verl.algorithms", "verl.trainer.ppo.core_algos"])
def test_algorithms_and_batches_load_neither_ray_nor_transformers(module):
    assert not loaded_after(f"import {module}") & {"ray", "transformers", "vllm"}


def test_the_top_level_names_work():
    assert "torch" in loaded_after("from verl import DataProto, __version__; assert DataProto and __version__")


CHECKED = """
from verl.config import load_config
words = "data.train_files=rows.parquet actor_rollout_ref.model.path=model algorithm.adv_estimator=grpo"
load_config("ppo_trainer", [*words.split(), "actor_rollout_ref.rollout.n=8", "trainer.device=cpu"])
import sys
print(sum(name.split(".")[:2] == ["verl", "config"] for name in sys.modules))
"""
MODULES_OF_SETTINGS = 35
"""Held: lower it when there are fewer."""


def test_checking_a_configuration_runs_few_modules_of_its_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    describe()
    assert int(python("-c", CHECKED).stdout.splitlines()[-1]) <= MODULES_OF_SETTINGS
