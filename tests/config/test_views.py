"""The committed YAML files show the tree as it is: what they say, a run without them has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from ray.runtime_env import RuntimeEnv

import verl
from verl.config.loading import configuration
from verl.config.loading.configuration import config_from, read_config
from verl.config.loading.groups import PPO
from verl.config.schema.node import schema_of, to_dict
from verl.metrics import notices

FOLDER = Path(verl.__file__).parent / "trainer" / "config"


def read(folder: Path, name: str):
    return read_config("ppo_trainer", ["--config-path", str(folder), "--config-name", name])


ENGINES = ("actor_rollout_ref.actor.strategy", "critic.strategy")


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_a_run_with_the_file_is_the_run_without_it(name):
    assert read(FOLDER, name) == read_config(name, [])


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_the_composed_tree_has_upstreams_name_for_the_engine(name):
    named = [f"{key}=fsdp" for key in ENGINES] if name == "ppo_trainer" else []
    assert read(FOLDER, f"_generated_{name}") == read_config(name, named)


def composed(*overrides: str) -> Any:
    """What `hydra.main` hands to the main of a recipe that builds on ppo_trainer."""
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose("ppo_trainer", list(overrides))


def test_a_recipe_hands_the_section_of_ray_to_ray_init_as_it_is():
    given = OmegaConf.to_container(composed("ray_kwargs.ray_init.num_cpus=3").ray_kwargs.ray_init)
    bound = inspect.signature(ray.init).bind(**given)
    assert bound.arguments["num_cpus"] == 3 and "kwargs" not in bound.arguments
    assert not RuntimeEnv(**given["runtime_env"])


@pytest.fixture
def unchecked(monkeypatch):
    """Configurations are not held against this machine."""
    monkeypatch.setattr(configuration, "_check_whole", lambda *_, **__: None)


def test_what_a_recipe_composes_means_the_defaults(unchecked):
    tree = composed("trainer.n_gpus_per_node=1")
    assert [OmegaConf.select(tree, key) for key in ENGINES] == ["fsdp", "fsdp"]
    assert config_from("ppo_trainer", tree) == read_config("ppo_trainer", ["trainer.n_gpus_per_node=1"])


@pytest.mark.parametrize(
    ("key", "newer", "older", "value"),
    [
        ("reward.reward_manager.name", "dapo", "reward_model.reward_manager", "prime"),
        ("actor_rollout_ref.actor.optim.lr", "0.5", "actor_rollout_ref.actor.lr", "0.25"),
    ],
)
def test_of_two_spellings_in_a_composed_tree_the_older_counts(unchecked, key, newer, older, value):
    config = config_from("ppo_trainer", composed(f"{key}={newer}", f"++{older}={value}"))
    assert to_dict(config) == to_dict(read_config("ppo_trainer", [f"{key}={value}"]))
    assert f"{older}={value} counts, and not {newer}" in notices()[key]


def test_the_file_to_copy_from_has_every_setting_that_works_once_its_lines_count(tmp_path):
    text = (FOLDER / "every_setting.yaml").read_text(encoding="utf-8")
    setting = re.compile(r"^( *)# (\w+: )", re.MULTILINE)
    assert len(setting.findall(text)) == sum(leaf.planned is None for leaf in schema_of(PPO.root).leaves.values())
    (tmp_path / "all.yaml").write_text(setting.sub(r"\1\2", text), encoding="utf-8")
    assert read(tmp_path, "all") == read_config("ppo_trainer", [])
    assert not [line for line in text.splitlines() if re.search(r"\bnot built\b", line)]


def test_a_line_that_is_uncommented_and_changed_counts(tmp_path):
    text = (FOLDER / "every_setting.yaml").read_text(encoding="utf-8")
    changed, count = re.subn(r"# rollout_is_level: token\b", "rollout_is_level: sequence", text)
    (tmp_path / "mine.yaml").write_text(changed, encoding="utf-8")
    assert count == 1 and read(tmp_path, "mine").algorithm.rollout_is_level == "sequence"
