"""A row without a ground truth is refused where the function names one; a number that no text can equal is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rewards.files import Letters, batch, reward_file
from verl.config import PPOTrainerConfig, replace
from verl.errors import ConfigError, DataError
from verl.metrics import notices
from verl.rewards import RewardFunction, check_reward_data, default_compute_score, load_reward_manager
from verl.rewards.truths import needs_truth

NAMES_IT = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
BATCH_FORM = "def compute_reward(responses, ground_truths):\n    return [1.0] * len(responses)\n"
LEAVES_IT_OUT = "def compute_score(solution_str, extra_info):\n    return 1.0\n"
HAS_A_DEFAULT = "def compute_score(solution_str, ground_truth=None):\n    return 1.0\n"
TAKES_ALL = "def compute_score(**row):\n    return 1.0\n"
HOLDERS = [{"style": "rule", "ground_truth": "1"}, {"ground_truth": None}]


def config(tmp_path, code, **changes):
    path = reward_file(tmp_path, code, f"reward_{abs(hash(code))}.py")
    return replace(PPOTrainerConfig(), **{"reward.custom_reward_function.path": path, **changes})


@pytest.mark.parametrize("code", [NAMES_IT.format(1.0), BATCH_FORM])
@pytest.mark.parametrize("holder", [None, {}, {"ground_truth": None}, {"ground_truth": float("nan")}])
def test_a_function_that_names_the_truth_is_not_run_on_rows_without_one(tmp_path, code, holder):
    holders = [{"ground_truth": "1"}, {"ground_truth": ""}, holder]
    told = r"reward_model\.ground_truth: train\.parquet, row 2 has .*names one.*reward\.ground_truth=none"
    with pytest.raises(DataError, match=told):
        check_reward_data(config(tmp_path, code), None, holders, "train.parquet, row {}".format)
    check_reward_data(config(tmp_path, code), None, holders[:2])
    check_reward_data(config(tmp_path, code, **{"reward.ground_truth": "none"}), None, holders)


@pytest.mark.parametrize("code", [LEAVES_IT_OUT, HAS_A_DEFAULT, TAKES_ALL])
def test_other_functions_need_none(tmp_path, code):
    check_reward_data(config(tmp_path, code), None, HOLDERS)


def test_the_built_in_scorers_need_one_whatever_the_setting_says():
    plain = PPOTrainerConfig()
    check_reward_data(plain, ["openai/gsm8k"], HOLDERS[:1])
    with pytest.raises(DataError, match=r"row 1 has no ground truth.*built-in scorers need"):
        check_reward_data(plain, ["openai/gsm8k"] * 2, HOLDERS)
    with pytest.raises(DataError, match=r"row 0 has no ground truth"):
        check_reward_data(plain, ["searchR1_nq"], [{"ground_truth": {"target": None}}])
    with pytest.raises(ConfigError, match=r"reward\.ground_truth.*built-in scorers compare.*custom_reward_function"):
        check_reward_data(replace(plain, **{"reward.ground_truth": "none"}), ["openai/gsm8k"], HOLDERS)
    enabled = replace(plain, **{"reward.reward_model.enable": True, "reward.reward_model.model_path": "x"})
    check_reward_data(enabled, None, HOLDERS)


def test_a_truth_that_is_given_for_all_rows_is_none_of_the_rows():
    function = RewardFunction.of(lambda solution_str, ground_truth: 1.0)
    assert needs_truth(function) and needs_truth(RewardFunction.of(default_compute_score))


def test_a_row_without_one_stops_a_batch_too(tmp_path):
    data = batch(["a", "b"], ["x", None])
    manager = load_reward_manager(config(tmp_path, NAMES_IT.format(1.0)), Letters())
    with pytest.raises(DataError, match=r"row 1 of the batch has no ground truth"):
        manager(data)
    manager.close()
    code, settings = NAMES_IT.format("1.0 if ground_truth is None else 0.5"), {"reward.ground_truth": "none"}
    free = load_reward_manager(config(tmp_path, code, **settings), Letters())
    assert free(data)["reward_tensor"].sum(-1).tolist() == [0.5, 1.0]
    free.close()


def test_rows_that_their_loop_scored_need_none(tmp_path):
    manager = load_reward_manager(config(tmp_path, NAMES_IT.format(1.0)), Letters())
    data = batch(["a", "b"], ["x", None], reward_score=[None, 0.25])
    assert manager(data)["reward_tensor"].sum(-1).tolist() == [1.0, 0.25]
    manager.close()


@pytest.mark.parametrize("truth", [20, 20.0, np.int64(20)])
def test_a_number_that_is_compared_with_text_is_told_once_all_scores_are_the_same(tmp_path, truth):
    compared = load_reward_manager(config(tmp_path, NAMES_IT.format("float(solution_str == ground_truth)")), Letters())
    assert compared(batch(["20", "21"], [truth, truth]))["reward_tensor"].sum() == 0.0
    said = notices()["reward_model.ground_truth"]
    for part in ("row 0 of the batch", "20", "compute_score in", "the score 0.0", "str(ground_truth)"):
        assert part in said
    compared.close()


@pytest.mark.parametrize(
    ("body", "truth"),
    [("float(float(solution_str) == float(ground_truth))", 20), ("float(solution_str == ground_truth)", "22")],
)
def test_numbers_that_are_read_as_such_and_texts_are_no_cause_for_a_notice(tmp_path, body, truth):
    manager = load_reward_manager(config(tmp_path, NAMES_IT.format(body)), Letters())
    manager(batch(["20", "21"], [truth, truth]))
    assert "reward_model.ground_truth" not in notices()
    manager.close()
