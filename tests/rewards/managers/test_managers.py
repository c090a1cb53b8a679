"""A batch in, token-level scores out: where they stand, what is reported beside them, and what a failure does."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.rewards.files import Letters, batch, reward_file
from verl.config import PPOTrainerConfig, replace
from verl.errors import ConfigError, DataError, RewardError
from verl.metrics import notices, reset_notices
from verl.registry import REWARD_MANAGERS
from verl.rewards import ScoringLimits, load_reward_function
from verl.rewards.failures import NothingScored
from verl.rewards.managers.base import RewardManager
from verl.rewards.managers.batch import BatchRewardManager
from verl.rewards.managers.dapo import DAPORewardManager
from verl.rewards.managers.gdpo import GDPORewardManager
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.prime import PrimeRewardManager


def half(solution_str, ground_truth):
    return 0.5


def test_the_score_stands_on_the_last_sampled_token():
    data = batch(["#### 4", "#### 12"], ["4", "13"])
    found = NaiveRewardManager(Letters(), 0)(data)
    expected = torch.zeros(2, 8)
    expected[0, 6] = 1.0  # six characters and the end token
    assert torch.equal(found["reward_tensor"], expected) and found["reward_tensor"].dtype == torch.float32
    assert found["unscorable"] == [False, False] and found["reward_extra_info"] == {}
    assert torch.equal(NaiveRewardManager(Letters(), 0)(data, return_dict=False), expected)


def test_a_trailing_observation_does_not_take_the_score():
    data = batch(["abcd", "abcd"], ["x", "x"], masks=[[1, 1, 0, 0, 0], [1, 0, 0, 1, 0]])
    assert NaiveRewardManager(Letters(), 0, half)(data)["reward_tensor"].tolist() == [
        [0, 0.5, 0, 0, 0],
        [0, 0, 0, 0.5, 0],
    ]


def test_an_empty_response_is_scored_but_gets_no_token():
    found = NaiveRewardManager(Letters(), 0, half)(batch(["", "ab"], ["x", "x"]))
    assert found["reward_tensor"].tolist() == [[0, 0, 0], [0, 0, 0.5]] and found["unscorable"] == [False, False]


def test_the_function_sees_text_without_padding_and_what_the_row_holds():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 1

    info = {"index": 7}
    data = batch(["ab</s>", "c"], [[1], None], extra_info=[info, None], __num_turns__=[2, 3], reward_scores=[[0.1], []])
    NaiveRewardManager(Letters(), 0, compute_score, limits=ScoringLimits(isolation="none"))(data)
    assert seen == [
        ("openai/gsm8k", "ab", [1], {"index": 7, "num_turns": 2, "rollout_reward_scores": [0.1]}),
        ("openai/gsm8k", "c", None, {"num_turns": 3, "rollout_reward_scores": []}),
    ]
    assert info == {"index": 7}


def test_a_batch_without_data_source_works_with_a_function_and_not_without():
    data = batch(["#### 4"], ["4"], source=None)
    assert NaiveRewardManager(Letters(), 0, half)(data)["reward_tensor"].sum() == 0.5
    with pytest.raises(RewardError, match=r"reward\.custom_reward_function\.path.*add a column 'data_source'"):
        NaiveRewardManager(Letters(), 0)(data)
    named = batch(["#### 4"], ["4"], source=None, kind=["openai/gsm8k"])
    assert NaiveRewardManager(Letters(), 0, reward_fn_key="kind")(named)["reward_tensor"].sum() == 1.0


def test_unknown_sources_and_missing_truths_stop_the_run_instead_of_being_masked():
    with pytest.raises(RewardError, match="Did you mean 'openai/gsm8k'"):
        NaiveRewardManager(Letters(), 0)(batch(["a", "b"], ["1", "2"], source="openai/gsm8"))
    with pytest.raises(RewardError, match="no built-in scorer"):
        NaiveRewardManager(Letters(), 0)(batch(["a"], ["1"], source="haiku"))
    with pytest.raises(DataError, match=r"reward_model\.ground_truth.*row 1"):
        NaiveRewardManager(Letters(), 0)(batch(["a", "b"], ["1", None]))
    with pytest.raises(DataError, match="no such column"):
        NaiveRewardManager(Letters(), 0)(batch(["a"]))


def test_details_are_filled_with_none_and_scores_of_plain_rows():
    def compute_score(solution_str):
        return {"a": {"score": 0.5, "acc": True}, "b": {"score": 0.25, "pred": "7"}, "c": 1.0}.get(solution_str)

    found = NaiveRewardManager(Letters(), 0, compute_score)(batch(["a", "b", "c", "d"], ["x"] * 4))
    assert found["reward_extra_info"] == {
        "score": [0.5, 0.25, 1.0, None],
        "acc": [True, None, None, None],
        "pred": [None, "7", None, None],
    }
    assert found["unscorable"] == [False, False, False, True]


def test_a_failing_sample_is_masked_counted_and_the_first_shown_once(caplog):
    reset_notices()

    def compute_score(solution_str):
        return 1 / (solution_str != "bad")

    manager = NaiveRewardManager(Letters(), 0, compute_score)
    data = batch(["ok", "bad", "bad", "ok"], ["x"] * 4, extra_info=[{"index": 70 + i} for i in range(4)])
    with caplog.at_level(logging.WARNING, "verl"):
        found = manager(data)
        manager(data)
    assert found["unscorable"] == [False, True, True, False] and found["reward_tensor"].sum() == 2.0
    assert found["metrics"]["reward/unscorable"].value == 2.0
    assert found["metrics"]["reward/unscorable_fraction"].value == 0.5
    (shown,) = [text for key, text in notices().items() if "compute_score" in key]
    assert len(caplog.records) == 1
    for part in ("compute_score in", "test_managers.py", "row 1 of the batch", "index 71", "ZeroDivisionError"):
        assert part in shown
    assert "return 1 / (solution_str" in shown and "2 of 4 samples" in shown


def test_on_error_raise_stops_with_the_users_exception():
    def compute_score(solution_str):
        return {"ok": 1}[solution_str]

    manager = NaiveRewardManager(Letters(), 0, compute_score, limits=ScoringLimits(on_error="raise"))
    with pytest.raises(RewardError, match=r"row 1 of the batch.*KeyError: 'bad'") as caught:
        manager(batch(["ok", "bad"], ["x", "x"]))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_batch_in_which_all_failed_stops_the_run():
    with pytest.raises(RewardError, match=r"all 2 samples of a batch failed.*returned None"):
        NaiveRewardManager(Letters(), 0, lambda solution_str: None)(batch(["a", "b"], ["x", "x"]))


ENDS_FOR_GOOD = """
    import os, pathlib

    gone = pathlib.Path(__file__).with_name("gone")
    if gone.exists():
        os.kill(os.getpid(), 9)

    def compute_score(solution_str):
        if solution_str == "end":
            gone.touch()
            os._exit(3)
        return 1.0
"""


@pytest.mark.parametrize("texts, counted", [(["ok", "end", "ok"], "2 of 3 samples"), (["end", "ok"], "all 2 samples")])
def test_a_process_that_no_longer_starts_ends_the_run_and_masks_nothing(tmp_path, texts, counted):
    function = load_reward_function(reward_file(tmp_path, ENDS_FOR_GOOD))
    manager = NaiveRewardManager(Letters(), 0, function, limits=ScoringLimits(num_workers=1))
    with pytest.raises(RewardError, match=rf"{counted} of a batch failed.*did not start.*signal 9, SIGKILL") as caught:
        manager(batch(texts, ["x"] * len(texts)))
    assert not isinstance(caught.value, NothingScored)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1.0"])
def test_values_that_are_no_score_mask_their_row(value):
    manager = NaiveRewardManager(Letters(), 0, lambda solution_str: 1.0 if solution_str == "ok" else value)
    found = manager(batch(["ok", "bad"], ["x", "x"]))
    assert found["unscorable"] == [False, True] and found["reward_tensor"].isfinite().all()


def test_compute_score_timeout_limits_one_answer():
    import time

    def compute_score(solution_str):
        end = time.monotonic() + 60
        while solution_str != "ok" and time.monotonic() < end:
            time.sleep(0.01)
        return 1

    manager = NaiveRewardManager(Letters(), 0, compute_score, "data_source", 2.0)
    assert manager(batch(["ok", "slow"], ["x", "x"]))["unscorable"] == [False, True]


@pytest.mark.parametrize("cls", [NaiveRewardManager, BatchRewardManager, DAPORewardManager])
def test_every_manager_takes_every_form(cls):
    forms = [
        lambda data_source, solution_str, ground_truth, extra_info=None: float(solution_str == ground_truth),
        lambda data_sources, solution_strs, ground_truths, extra_infos: [
            float(s == t) for s, t in zip(solution_strs, ground_truths, strict=True)
        ],
        lambda responses, ground_truths: [float(s == t) for s, t in zip(responses, ground_truths, strict=True)],
    ]
    for fn in forms:
        assert cls(Letters(), 0, fn)(batch(["a", "b"], ["a", "x"]))["reward_tensor"].sum(-1).tolist() == [1.0, 0.0]


def test_the_batch_manager_passes_its_further_arguments_on():
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale):
        return [scale] * len(solution_strs)

    found = BatchRewardManager(Letters(), 0, compute_score, "data_source", scale=0.25)(batch(["a", "b"], ["x", "x"]))
    assert found["reward_tensor"].sum(-1).tolist() == [0.25, 0.25]
    everything = BatchRewardManager(Letters(), 0, lambda **kwargs: [1.0] * len(kwargs["solution_strs"]))
    assert everything(batch(["a", "b"], ["x", "x"]))["reward_tensor"].sum() == 2.0


@pytest.mark.parametrize(("length", "penalty"), [(15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0)])
def test_the_overlong_penalty_follows_the_worked_example(length, penalty):
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
    manager = DAPORewardManager(Letters(), 0, half, max_resp_len=20, overlong_buffer_cfg=buffer)
    found = manager(batch(["x" * (length - 1)], ["x"]))  # the end token counts
    assert found["reward_tensor"].sum().item() == pytest.approx(0.5 + penalty)
    assert found["reward_extra_info"] == {"acc": [0.5], "overlong_reward": [penalty], "overlong": [penalty < 0]}


def test_accuracy_excludes_the_penalty_for_dict_scores_too():
    buffer = {"enable": True, "len": 4, "penalty_factor": 2.0, "log": False}
    manager = DAPORewardManager(Letters(), 0, max_resp_len=12, overlong_buffer_cfg=buffer)
    found = manager(batch(["Answer: 42", "Answer: 43"], ["42", "42"], source="math_dapo"))
    assert found["reward_extra_info"]["acc"] == [True, False] and found["reward_extra_info"]["score"] == [1.0, -1.0]
    assert found["reward_tensor"].sum(-1).tolist() == [-0.5, -2.5]  # 11 tokens: 3 of 4 used, times 2
    assert "overlong" not in found["reward_extra_info"]


def test_a_buffer_that_is_not_enabled_costs_nothing():
    manager = DAPORewardManager(Letters(), 0, half, overlong_buffer_cfg={"enable": False, "len": 4})
    assert manager(batch(["x" * 50], ["x"]))["reward_tensor"].sum() == 0.5


@pytest.mark.parametrize(
    ("cfg", "limit", "part"),
    [
        ({"enable": True, "len": 0}, 20, "overlong_buffer_cfg.len"),
        ({"enable": True}, 20, "overlong_buffer_cfg.len"),
        ({"enable": True, "len": 30}, 20, "max_resp_len"),
        ({"enable": True, "len": 4}, None, "max_resp_len"),
        ({"enable": True, "len": 4, "penalty_factor": -1.0}, 20, "penalty_factor"),
        ({"enabled": True, "len": 4}, 20, "overlong_buffer_cfg.enabled"),
    ],
)
def test_a_buffer_that_makes_no_sense_is_refused(cfg, limit, part):
    with pytest.raises(ConfigError, match=part):
        DAPORewardManager(Letters(), 0, half, max_resp_len=limit, overlong_buffer_cfg=cfg)


def test_prime_runs_files_and_built_in_scorers_in_processes(tmp_path):
    import os

    code = """
        import os, time

        def score(solution_str):
            time.sleep(99 if solution_str == "slow" else 0)
            return os.getpid()
    """
    path = reward_file(tmp_path, code)
    manager = PrimeRewardManager(Letters(), 0, load_reward_function(path), limits=ScoringLimits(timeout=2.0))
    found = manager(batch(["a", "slow"], ["x", "x"]))
    assert found["unscorable"] == [False, True]
    assert found["reward_tensor"][0].sum() not in (0, os.getpid())
    manager.close()
    built_in = PrimeRewardManager(Letters(), 0)
    assert built_in(batch(["#### 4", "#### 5"], ["4", "4"]))["reward_tensor"].sum(-1).tolist() == [1.0, 0.0]
    built_in.close()
    with pytest.raises(RewardError, match="top level of a file"):
        PrimeRewardManager(Letters(), 0, lambda solution_str: 1)


def test_given_scores_are_used_as_they_are():
    data = batch(["ab", "c"], ["x", "x"], acc=[True, False])
    data.batch["rm_scores"] = torch.tensor([[0, 0, 0.5], [0, 0.25, 0]])
    data.meta_info["reward_extra_keys"] = ["acc"]
    found = NaiveRewardManager(Letters(), 0, lambda solution_str: 1 / 0)(data)
    assert torch.equal(found["reward_tensor"], data.batch["rm_scores"])
    assert found["reward_extra_info"] == {"acc": [True, False]} and found["unscorable"] == [False, False]


def test_a_few_rows_of_each_source_are_logged(caplog):
    data = batch(["#### 1", "#### 2", "#### 3"], ["1", "1", "1"])
    data.non_tensor_batch["data_source"] = np.array(["openai/gsm8k", "openai/gsm8k", "openai/gsm8k"], dtype=object)
    with caplog.at_level(logging.INFO, "verl.rewards"):
        NaiveRewardManager(Letters(), 2)(data)
        NaiveRewardManager(Letters(), 0)(data)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "[prompt] ask 0" in texts[0] and "[response] #### 1" in texts[0] and "[score] 1.0" in texts[0]


def test_a_sample_can_be_scored_while_others_are_sampled():
    import asyncio

    manager = NaiveRewardManager(Letters(), 0, half)
    assert asyncio.run(manager.result_of_row(batch(["a"]))).score == 0.5


def test_real_answers_are_scored_through_the_manager(shared):
    import json

    lines = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    answers = [json.loads(line)["answer"] for line in lines]
    truths = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    assert NaiveRewardManager(Letters(), 0)(batch(answers, truths))["reward_tensor"].sum().item() == 64


def test_gdpo_wants_rewards_with_names():
    def named(solution_str):
        return {"score": 1.5, "right": 1.0, "form": 0.5}

    data = batch(["ab", "c"], ["x", "x"])
    found = GDPORewardManager(Letters(), 0, named)(data)
    assert found["reward_tensor"].sum().item() == 3.0
    assert found["reward_extra_info"] == {"right": [1.0, 1.0], "form": [0.5, 0.5], "score": [1.5, 1.5]}
    with pytest.raises(RewardError, match="one key for each reward"):
        GDPORewardManager(Letters(), 0, half)(data)


def test_gdpo_names_the_reward_that_an_answer_lacks():
    def named(solution_str):
        if solution_str == "c":
            raise ValueError("not c")
        return {"score": 1.5, "right": 1.0} | ({"form": 0.5} if solution_str != "ab" else {})

    config = replace(PPOTrainerConfig(), **{"algorithm.gdpo_reward_keys": ["right", "form"]})
    zero = ScoringLimits(on_error="zero", isolation="none")
    data = batch(["ab", "c", "d"], ["x"] * 3)
    found = GDPORewardManager(Letters(), 0, named, config=config, limits=zero)(data)
    assert found["unscorable"] == [True, False, False]
    assert found["reward_extra_info"]["form"] == [None, 0.0, 0.5]
    with pytest.raises(RewardError, match=r"no number under 'form', which algorithm.gdpo_reward_keys names. It"):
        GDPORewardManager(Letters(), 0, named, config=config)(batch(["ab"], ["x"]))


@pytest.mark.parametrize("name", ["naive", "batch", "dapo", "gdpo", "prime"])
def test_every_built_in_name_leads_to_a_manager(name):
    assert issubclass(REWARD_MANAGERS.get(name), RewardManager)
