"""From the configuration to the function and the manager, with the real configuration classes and with plain ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.rewards.files import Letters, batch, reward_file
from verl.config import PPOTrainerConfig, replace
from verl.errors import ConfigError, RewardError
from verl.metrics import notices
from verl.registry import REWARD_MANAGERS
from verl.rewards import (
    check_reward_data,
    get_custom_reward_fn,
    load_reward_function,
    load_reward_manager,
    resolve_reward_manager_cls,
)
from verl.rewards.managers.dapo import DAPORewardManager
from verl.rewards.managers.limited import RateLimitedRewardManager
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.prime import PrimeRewardManager

HALF = "def compute_score(solution_str, scale=0.5): return scale\n"
LEGACY = """
    import torch
    from verl.workers.reward_manager import AbstractRewardManager

    class MyManager(AbstractRewardManager):
        def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=1.0):
            self.bonus = bonus

        def __call__(self, data, return_dict=False):
            scores = torch.zeros(data.batch["responses"].shape)
            scores[:, 0] = self.bonus
            scores[-1, 0] = float("nan")
            return {"reward_tensor": scores, "reward_extra_info": {"acc": [1] * len(data)}} if return_dict else scores
"""
LOOP = """
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

    class Looping(RewardManagerBase):
        async def run_single(self, data):
            return {"reward_score": self.config.data.max_response_length, "reward_extra_info": {}}
"""


def config(**changes):
    return replace(PPOTrainerConfig(), **changes)


def test_no_file_means_no_function():
    assert get_custom_reward_fn(config()) is None
    assert get_custom_reward_fn(SimpleNamespace(reward=SimpleNamespace())) is None


def test_the_function_and_its_arguments_come_from_the_configuration(tmp_path):
    path = reward_file(tmp_path, HALF)
    section = {"path": path, "name": "compute_score", "reward_kwargs": {"scale": 0.25}}
    real = config(**{f"reward.custom_reward_function.{key}": value for key, value in section.items()})
    for cfg in (real, {"reward": {"custom_reward_function": section}}, {"custom_reward_function": section}):
        assert get_custom_reward_fn(cfg)(solution_str="a") == 0.25


def test_upstreams_default_name_does_not_hide_compute_reward(tmp_path):
    path = reward_file(tmp_path, "def compute_reward(responses, ground_truths): return [1.0] * len(responses)\n")
    section = {"path": path, "name": "compute_score"}
    assert get_custom_reward_fn({"reward": {"custom_reward_function": section}}).name == "compute_reward"


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("naive", NaiveRewardManager),
        ("dapo", DAPORewardManager),
        ("prime", PrimeRewardManager),
        ("remote", PrimeRewardManager),
        ("rate_limited", RateLimitedRewardManager),
    ],
)
def test_a_built_in_manager_is_found_by_its_name(name, cls):
    assert resolve_reward_manager_cls(config(**{"reward.reward_manager.name": name})) is cls


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'naive'"):
        resolve_reward_manager_cls(config(**{"reward.reward_manager.name": "naiv"}))


def test_a_registered_and_a_dotted_manager_work():
    @REWARD_MANAGERS.register("mine_for_this_test")
    class Mine(NaiveRewardManager):
        pass

    assert resolve_reward_manager_cls(config(**{"reward.reward_manager.name": "mine_for_this_test"})) is Mine
    dotted = "verl.rewards.managers.dapo:DAPORewardManager"
    assert resolve_reward_manager_cls(config(**{"reward.reward_manager.name": dotted})) is DAPORewardManager


def test_settings_reach_the_manager(tmp_path):
    manager = load_reward_manager(
        config(
            **{
                "reward.custom_reward_function.path": reward_file(tmp_path, HALF),
                "reward.timeout": 7.0,
                "reward.on_error": "raise",
                "data.reward_fn_key": "kind",
                "reward.reward_kwargs": {"isolation": "thread", "num_workers": 3},
            }
        ),
        Letters(),
        num_examine=2,
    )
    assert (manager.limits.timeout, manager.limits.on_error) == (7.0, "raise")
    assert (manager.limits.isolation, manager.limits.num_workers) == ("thread", 3)
    assert (manager.reward_fn_key, manager.num_examine) == ("kind", 2)
    assert manager(batch(["ab"], ["x"], source=None))["reward_tensor"].tolist() == [[0, 0, 0.5]]


def test_the_longest_response_comes_from_the_data_section():
    cfg = config(
        **{
            "reward.reward_manager.name": "dapo",
            "data.max_response_length": 20,
            "reward.reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 4}},
        }
    )
    assert load_reward_manager(cfg, Letters()).overlong_buffer.max_resp_len == 20
    assert load_reward_manager(cfg, Letters(), max_resp_len=30).overlong_buffer.max_resp_len == 30


def test_a_setting_of_another_manager_gives_a_notice_and_an_unknown_one_an_error():
    load_reward_manager(config(**{"reward.reward_kwargs": {"max_resp_len": 8}}), Letters())
    assert "reward.reward_manager.name=dapo" in notices()["reward.reward_kwargs.max_resp_len"]
    with pytest.raises(ConfigError, match=r"reward\.reward_kwargs\.compute_score_timeot.*compute_score_timeout"):
        load_reward_manager(config(**{"reward.reward_kwargs": {"compute_score_timeot": 8}}), Letters())


def test_the_batch_manager_gets_its_keyword_arguments(tmp_path):
    code = "def compute_score(solution_strs, scale): return [scale] * len(solution_strs)\n"
    cfg = config(
        **{
            "reward.reward_manager.name": "batch",
            "reward.custom_reward_function.path": reward_file(tmp_path, code),
            "reward.custom_reward_function.reward_kwargs": {"scale": 0.5},
        }
    )
    assert load_reward_manager(cfg, Letters())(batch(["a"], ["x"]))["reward_tensor"].sum() == 0.5
    louder = replace(cfg, **{"reward.reward_kwargs": {"scale": 2.0}})
    assert load_reward_manager(louder, Letters())(batch(["a"], ["x"]))["reward_tensor"].sum() == 2.0


def test_rows_without_a_scorer_are_refused_before_a_run(tmp_path):
    check_reward_data(config(), ["openai/gsm8k", "aime24"])
    for missing in (None, [None, None]):
        with pytest.raises(RewardError, match=r"no column 'data_source'.*custom_reward_function\.path"):
            check_reward_data(config(), missing)
    with pytest.raises(RewardError, match="Did you mean 'openai/gsm8k'"):
        check_reward_data(config(), ["gsm8k"])
    own = reward_file(tmp_path, HALF)
    check_reward_data(config(**{"reward.custom_reward_function.path": own}), None)
    check_reward_data(config(**{"reward.reward_manager.name": "my_pkg.rewards:Manager"}), None)
    with pytest.raises(RewardError, match="no such Python file"):
        check_reward_data(config(**{"reward.custom_reward_function.path": f"{own}x.py"}), None)


def importlib_config(path, name="MyManager", **changes):
    return config(
        **{
            "reward.reward_manager.source": "importlib",
            "reward.reward_manager.module.path": path,
            "reward.reward_manager.name": name,
            **changes,
        }
    )


@pytest.mark.parametrize("name", ["MyManager", "naive"])
def test_a_users_manager_of_the_older_contract_is_loaded_from_its_file(tmp_path, name):
    cfg = importlib_config(reward_file(tmp_path, LEGACY), name, **{"reward.reward_kwargs": {"bonus": 3.0}})
    found = load_reward_manager(cfg, Letters())(batch(["a", "b", "c"], ["x"] * 3))
    assert found["reward_tensor"][:, 0].tolist() == [3.0, 3.0, 0.0]
    assert found["unscorable"] == [False, False, True] and found["reward_extra_info"] == {"acc": [1, 1, 1]}
    assert found["metrics"]["reward/unscorable"].value == 1


def test_a_users_manager_that_returns_something_else_is_refused(tmp_path):
    code = "class MyManager:\n    def __init__(self, tokenizer): pass\n    def __call__(self, data): return [1]\n"
    manager = load_reward_manager(importlib_config(reward_file(tmp_path, code)), Letters())
    with pytest.raises(RewardError, match=r"MyManager.*a tensor of shape \(1, 2\)"):
        manager(batch(["a"], ["x"]))
    given = batch(["a"], ["x"])
    given.batch["rm_scores"] = torch.tensor([[0.0, 1.0]])
    assert manager(given, return_dict=False).tolist() == [[0.0, 1.0]]


def test_a_users_loop_manager_gets_the_configuration(tmp_path):
    cfg = importlib_config(reward_file(tmp_path, LOOP), "Looping", **{"reward.timeout": 5.0})
    manager = load_reward_manager(cfg, Letters())
    assert manager.limits.timeout == 5.0
    assert manager(batch(["a"], ["x"]))["reward_tensor"].tolist() == [[0.0, float(cfg.data.max_response_length)]]


def test_a_manager_file_without_a_path_or_class_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.reward_manager\.module\.path"):
        resolve_reward_manager_cls(config(**{"reward.reward_manager.source": "importlib"}))
    with pytest.raises(ConfigError, match="no class of this name"):
        resolve_reward_manager_cls(importlib_config(reward_file(tmp_path, "x = 1\n")))
    with pytest.raises(RewardError, match="no such Python file"):
        resolve_reward_manager_cls(importlib_config(str(tmp_path / "none.py")))


@pytest.mark.parametrize("end", ["start()", "sys.exit(start())", "try:\n    start()\nexcept SystemExit:\n    pass"])
def test_a_file_that_starts_a_run_while_the_run_loads_it_is_refused_with_the_guard(tmp_path, end):
    file = tmp_path / "train.py"
    code = (
        "import sys\nfrom verl.trainer import runtime\ndef compute_score(solution_str):\n    return 1.0\n"
        "def start():\n    runtime.prepare_process(1)\n"
    )
    file.write_text(code + end)
    for _ in range(2):  # the file is not taken for loaded the next time
        with pytest.raises(RewardError, match="starts a run as soon as it is loaded") as caught:
            load_reward_function(str(file))
        assert 'if __name__ == "__main__":' in str(caught.value) and "train.py" in str(caught.value)
    file.write_text(f"{code}if __name__ == '__main__':\n    start()\n")
    assert load_reward_function(str(file)).name == "compute_score"


def test_a_relative_import_of_a_reward_file_is_told_what_to_write(tmp_path):
    file = reward_file(tmp_path, "from .helper import f\n\ndef compute_score(solution_str):\n    return f()")
    with pytest.raises(RewardError, match="import without the dots") as caught:
        load_reward_function(file)
    assert str(tmp_path) in str(caught.value)
