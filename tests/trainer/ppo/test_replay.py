"""Samples from files instead of the sampler (`skip.rollout`): the same run, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.harness.rows import write_prompts
from tests.harness.runs import COMMON, train
from tests.trainer.ppo.test_dynamic_sampling import greedy
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.trainer.ppo.replay import RolloutReplay

REPLAY = ("skip.rollout.enable=true", "skip.rollout.dump_dir=dumps", "skip.rollout.steps=[1]", "data.shuffle=false",
          "trainer.experiment_name=a run", "trainer.ledger=true")  # fmt: skip
FILE = Path("dumps/verl_examples_a_run/step_1_1.safetensors")


@pytest.fixture(scope="module", autouse=True)
def first(shared_here):
    """A run of two steps that writes the samples of its first; its folder holds model and data."""
    return train(*REPLAY, "trainer.total_training_steps=2", "trainer.default_local_dir=first")


def test_a_replayed_step_is_the_sampled_one_and_is_scored_anew(first):
    again = train(*REPLAY, "trainer.total_training_steps=2", "trainer.default_local_dir=second")
    assert [m["rollout/replayed"] for m in first.metrics + again.metrics] == [0, 0, 1, 0]
    assert "rollout/sampled_tokens" not in again.metrics[0] and "rollout/sampled_tokens" in again.metrics[1]
    for name in ("responses", "rollout_log_probs", "token_level_scores", "advantages"):
        for one, other in zip(first.batches, again.batches, strict=True):
            assert torch.equal(one.tensors[name], other.tensors[name]), name
    Path("other.py").write_text("def compute_score(data_source, solution_str, ground_truth):\n    return 0.25\n")
    scored = train(*REPLAY, "trainer.default_local_dir=third", "reward.custom_reward_function.path=other.py")
    assert scored.batches[0].tensors["token_level_scores"].sum(-1).tolist() == [0.25] * 16


def test_repeated_steps_take_the_samples_of_those_with_a_file_as_groups_of_their_own(first):
    seen = train(*REPLAY, "skip.rollout.action=repeat", "trainer.total_training_steps=3",
                 "trainer.default_local_dir=repeated")  # fmt: skip
    assert [m["rollout/replayed"] for m in seen.metrics] == [1, 1, 1]
    one, two, three = seen.batches
    assert torch.equal(one.tensors["responses"], two.tensors["responses"])
    assert torch.equal(one.tensors["responses"], three.tensors["responses"])
    uids = [set(batch.non_tensor_batch["uid"]) for batch in seen.batches]
    assert [len(names) for names in uids] == [4, 4, 4] and len(set.union(*uids)) == 12


def test_repeated_samples_have_the_baselines_of_their_prompts(first):
    Path("distinct.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    return float(len(set(solution_str)))\n"
    )
    still = ("algorithm.adv_estimator=remax", "actor_rollout_ref.actor.optim.lr=0", "trainer.total_training_steps=2",
             "reward.custom_reward_function.path=distinct.py")  # fmt: skip
    seen = train(*REPLAY, "skip.rollout.action=repeat", *still, "trainer.default_local_dir=compared")
    one, two = seen.batches
    assert torch.equal(one.tensors["responses"], two.tensors["responses"])
    expected = np.repeat(greedy(seen.trainer, two), 4)
    assert one.tensors["reward_baselines"].tolist() == two.tensors["reward_baselines"].tolist() == expected.tolist()
    assert len(set(expected)) > 1, "answers to other prompts have other scores"


def replay(*changes):
    """A configuration, and how it replays."""
    config = load_config("ppo_trainer", [*COMMON, *REPLAY, *changes])
    return config, RolloutReplay.of(config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("actor_rollout_ref.rollout.temperature=0.5", r"rollout\.temperature: .* were made with .*=1\.0\. Got 0\.5"),
        ("data.min_response_length=2", r"data\.min_response_length: .*min_response_length=0\. Got 2"),
        ("actor_rollout_ref.model.path=other", r"actor_rollout_ref\.model\.path: the samples in"),
    ],
)
def test_samples_that_were_made_with_other_settings_or_another_model_are_refused_by_name(first, change, said):
    if not Path("other").exists():
        shutil.copytree("model", "other")
    with pytest.raises(ConfigError, match=said):
        replay(change)[1]._read(FILE)
    assert replay()[1]._read(FILE).tensors["responses"].shape[0] == 16


def test_samples_of_other_prompts_or_a_file_that_is_cut_off_are_errors(first):
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"ground_truth": "a"}} for i in range(8)]
    write_prompts("other.parquet", rows)
    with pytest.raises(DataError, match=r"step_1_1\.safetensors: .* raw_prompt_ids of row 0 differs.*Did the data"):
        train(*REPLAY, "data.train_files=other.parquet")
    content = FILE.read_bytes()
    FILE.write_bytes(content[:-100])
    with pytest.raises(DataError, match="not a whole batch file"):
        replay()[1]._read(FILE)
    FILE.write_bytes(content)
