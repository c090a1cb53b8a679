"""Rewards of a batch through upstream's manager, and registries under upstream's names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.runs import COMMON, prepare
from verl import DataProto
from verl.config import load_config
from verl.experimental.reward_loop import RewardLoopManager, migrate_legacy_reward_impl
from verl.experimental.reward_loop.reward_manager import dapo, gdpo, naive
from verl.registry import ENGINES
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.rollout import get_rollout_class


def test_a_batch_is_scored_by_the_function_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    return {'score': float(solution_str == ground_truth), 'said': solution_str}\n")  # fmt: skip
    config = migrate_legacy_reward_impl(load_config("ppo_trainer", list(COMMON)))
    manager = RewardLoopManager(config)
    ids = [manager.manager.tokenizer.encode(text) for text in ("12", "34")]
    assert Path("scorer.py").is_file() and all(len(one) == 2 for one in ids)
    responses = torch.tensor(ids)
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(2, 1, dtype=torch.long),
            "responses": responses,
            "attention_mask": torch.ones(2, 3, dtype=torch.long),
            "response_mask": torch.ones(2, 2, dtype=torch.long),
        },
        non_tensors={
            "data_source": np.array(["a", "a"], dtype=object),
            "reward_model": np.array([{"ground_truth": "12"}, {"ground_truth": "12"}], dtype=object),
        },
    )
    scored = manager.compute_rm_score(batch)
    assert scored.batch["rm_scores"].tolist() == [[0, 1], [0, 0]]
    assert list(scored.non_tensor_batch["said"]) == ["12", "34"]


ROW = {"data_source": "a", "reward_model": {"ground_truth": "12"}}
PENALTY = {"max_resp_len": 2, "overlong_buffer_cfg": {"enable": True, "len": 2, "penalty_factor": 0.5}}


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (naive.NaiveRewardManager, {"score": 2.0, "exact": 1.0}),
        (dapo.DAPORewardManager, {"score": 1.5, "exact": 1.0, "acc": 1.0}),
        (gdpo.GDPORewardManager, {"score": 2.0, "exact": 1.0}),
    ],
)
def test_a_manager_of_rows_is_changed_by_what_its_subclass_returns(base, expected):
    class Doubled(base):
        async def run_single(self, data):
            one = await super().run_single(data)
            return {**one, "reward_score": one["reward_score"] + 1}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "exact": float(solution_str == ground_truth)}

    config = SimpleNamespace(reward=SimpleNamespace(reward_kwargs=PENALTY))
    tokens = torch.tensor([[1, 2]])
    batch = DataProto.from_dict(
        tensors={"responses": tokens, "response_mask": torch.ones_like(tokens)},
        non_tensors={name: np.array([value], dtype=object) for name, value in ROW.items()},
    )
    scored = Doubled(config, SimpleNamespace(decode=lambda ids, **_: "12"), compute_score)(batch)
    assert scored["reward_tensor"].tolist() == [[0, expected.pop("score")]]
    assert {name: values[0] for name, values in scored["reward_extra_info"].items()} | {"score": 0} == {
        **expected,
        "score": 0,
    }


def test_an_engine_registers_under_several_names():
    class Mine(BaseEngine):
        pass

    try:
        assert EngineRegistry.register("language_model", ["mine", "mine2"], "cuda")(Mine) is Mine
        assert ENGINES.get("mine") is ENGINES.get("mine2") is Mine
    finally:
        for name in ("mine", "mine2"):
            ENGINES._registered.pop(name)


def test_a_sampler_is_found_by_its_name():
    assert get_rollout_class("hf", "async").__name__ == "HFSampler"
