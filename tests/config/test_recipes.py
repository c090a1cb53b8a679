"""Settings of a recipe in a folder of the user's own: known, checked, printed and saved as the library's are."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest

from tests.harness.configs import describe
from verl.config import PPOTrainerConfig, load_config, replace, to_dict
from verl.config.loading.configuration import read_config, to_yaml
from verl.config.loading.groups import PPO
from verl.config.loading.recipes import Recipe, extended, with_recipes
from verl.config.schema.node import schema_of
from verl.errors import ConfigError
from verl.metrics import notices

MINE = '''
from dataclasses import dataclass

from verl.config import ConfigNode, Recipe, setting
from verl.config.loading.aliases import Aliases, to
from verl.config.rules.checks import in_range
from verl.metrics import notice
from verl.registry import EstimatorFacts


@dataclass(frozen=True)
class StyleConfig(ConfigNode):
    """How style is paid."""

    weight: float = setting(0.5, "weight of the style in the reward")
    kind: str = setting("plain", "what counts as style", choices=("plain", "ornate"))
    table: dict = setting({}, "words and what each is worth")


@dataclass(frozen=True)
class Bonus(ConfigNode):
    bonus: float = setting(0.0, "what every answer gets on top", follows="my_style.weight")


def problems(cfg):
    return in_range("my_style.weight", cfg.my_style.weight, "0 or more", cfg.my_style.weight >= 0)


def tell(cfg):
    if cfg.my_style.kind == "ornate":
        notice("my_style.kind", "has no effect on plain text")


FACTS = {"styled": EstimatorFacts(groups=True)}
RECIPE = Recipe(
    "my_recipe", {"my_style": StyleConfig, "algorithm": Bonus}, problems, tell,
    Aliases({"style_weight": to("my_style.weight")}, {"style": "write my_style.kind"}, {}),
)


def styled(token_level_rewards, response_mask, index, config):
    advantages = (token_level_rewards + config.bonus) * response_mask
    return advantages, advantages
'''
STYLED, R = "algorithm.adv_estimator=my_recipe:styled", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(workplace)
    Path("my_recipe.py").write_text(MINE)
    Path("scorer.py").touch()
    describe()
    yield workplace
    sys.modules.pop("my_recipe", None)


def read(*words: str):
    return read_config("ppo_trainer", [STYLED, *words])


def load(*words: str):
    usual = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=model",
             "reward.custom_reward_function.path=scorer.py"]  # fmt: skip
    return load_config("ppo_trainer", [STYLED, *usual, *words])


def test_the_settings_of_a_recipe_are_there_where_a_run_names_it():
    config = read("my_style.weight=1e-1", "my_style.table.well=3")
    assert isinstance(config, PPOTrainerConfig)
    assert config.my_style.weight == 0.1 and config.my_style.table == {"well": 3}
    assert config.algorithm.bonus == 0.1, "it follows the other"
    assert "my_style" not in read_config("ppo_trainer", [])
    with pytest.raises(ConfigError, match=r"my_style.weight: unknown setting"):
        read_config("ppo_trainer", ["my_style.weight=1"])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("my_style.wight=1", "Did you mean 'my_style.weight'"),
        ("algorithm.bonuss=1", "Did you mean 'algorithm.bonus'"),
        ("my_style.weight=heavy", "my_style.weight: wrong type. Got 'heavy'. Allowed: a number"),
        ("my_style.kind=baroque", "Allowed: plain, ornate"),
        ("style=ornate", "Write my_style.kind."),
        ("my_style=1", "is a section, not a setting"),
    ],
)
def test_what_is_wrong_is_said_as_of_any_setting(word, says):
    with pytest.raises(ConfigError) as error:
        read(word)
    assert says in str(error.value)


@pytest.mark.parametrize("word", ["trainer={v1: 5}", "actor_rollout_ref={actor: {policy_loss: [x]}}"])
def test_a_value_in_the_place_of_a_section_that_may_name_a_recipe_is_refused_by_its_key(word):
    with pytest.raises(ConfigError, match=r"(trainer\.v1|policy_loss): is a section, not a setting"):
        read(word)


def test_rules_notices_and_facts_of_a_recipe_are_held_against_the_settings():
    with pytest.raises(ConfigError, match=r"my_style.weight: out of range. Got -1.0"):
        load("my_style.weight=-1", f"{R}.n=2")
    with pytest.raises(ConfigError, match=r"compares the samples of one prompt"):
        load(f"{R}.n=1")
    load("my_style.kind=ornate", "style_weight=2", f"{R}.n=2")
    assert notices()["my_style.kind"] == "has no effect on plain text"
    assert notices()["style_weight"] == "is now called my_style.weight"


def test_a_printed_configuration_loads_to_the_same(capsys):
    with pytest.raises(SystemExit):
        load("my_style.weight=0.3", "my_style.table={a: {b: 1}}", f"{R}.n=2", "--cfg", "job")
    printed = capsys.readouterr().out
    assert "my_style:\n  weight: 0.3\n" in printed
    Path("saved.yaml").write_text(printed)
    again = read_config("ppo_trainer", ["--config-path", ".", "--config-name", "saved"])
    assert again.my_style.table == {"a": {"b": 1}} and again.algorithm.bonus == 0.3
    assert printed.startswith(to_yaml(again))  # the topology follows


def test_a_configuration_with_a_recipe_travels_is_copied_and_is_changed():
    config = read("my_style.weight=0.3", "algorithm.bonus=2")
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert other == config and type(other) is type(config) and other.algorithm.bonus == 2
    alone = pickle.loads(pickle.dumps(config.algorithm))
    assert type(alone) is type(config.algorithm) and to_dict(alone) == to_dict(config.algorithm)
    assert replace(config, **{"my_style.weight": 7.0}).my_style.weight == 7.0


def test_a_recipe_cannot_redeclare_what_is_there_nor_stand_below_a_setting():
    read()
    mine = sys.modules["my_recipe"]
    for cls, additions, says in (
        (mine.StyleConfig, (("", mine.StyleConfig),), "kind: a recipe brings a setting that exists"),
        (PPO.root, (("trainer.seed", mine.Bonus),), "seed: a recipe's settings cannot stand below a setting"),
    ):
        with pytest.raises(ConfigError, match=says):
            extended(cls, additions)
    places = ("actor_rollout_ref.actor.policy_loss.mine", "a.b")
    deep = with_recipes(PPO, [Recipe("deep", dict.fromkeys(places, mine.Bonus))])
    assert {f"{place}.bonus" for place in places} <= schema_of(deep.root).leaves.keys()
    Path("my_recipe.py").write_text("RECIPE = 3")
    del sys.modules["my_recipe"]
    with pytest.raises(ConfigError, match="its RECIPE is of another class"):
        read()


@pytest.mark.parametrize(
    "word", ["reward_model.reward_manager=prime", "reward.reward_manager.name=prime", "--config-name=mine"]
)
def test_what_is_said_by_any_spelling_wins_over_a_recipes_default(tmp_path, monkeypatch, word):
    (tmp_path / "mine.yaml").write_text("reward_model:\n  reward_manager: prime\n")
    monkeypatch.chdir(tmp_path)
    config = read_config("ppo_trainer", [word], ["reward.reward_manager.name=dapo", "actor_rollout_ref.rollout.n=16"])
    assert (config.reward.reward_manager.name, config.actor_rollout_ref.rollout.n) == ("prime", 16)
