"""Environments of other libraries, unmodified, train a model to a higher return."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.agent_loop.adapters.test_verifiers import needs_verifiers
from tests.e2e.test_environment import SETTINGS
from tests.harness import programs
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts

WORDS = '''
"""Two turns; an answer that begins with a letter earns a half."""
import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Another one."}]


def letters(completion):
    texts = [message.content or "" for message in completion if message.role == "assistant"]
    return sum(0.5 * (text[:1].isascii() and text[:1].isalpha()) for text in texts)


def load_environment():
    rows = [{"prompt": [{"role": "user", "content": f"Say a letter {number}."}]} for number in range(8)]
    rubric = vf.Rubric(funcs=[letters])
    return Twice(max_turns=2, dataset=Dataset.from_list(rows), rubric=rubric, sampling_args={"max_tokens": 1})
'''
VERIFIERS = """
- name: letters
  _target_: verl.agent_loop.adapters.verifiers_env.VerifiersAgentLoop
  environment: words-env
"""
WRITE = "import verifiers as vf; vf.load_environment('words-env').get_dataset().to_parquet('train.parquet')"
GAME = '''
"""Two turns; an action that begins with a letter earns a half."""
import gymnasium


class Letters(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(20, min_length=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns = 0
        return "Say a letter.", {}

    def step(self, action):
        self.turns += 1
        good = action[:1].isascii() and action[:1].isalpha()
        return "Another one.", 0.5 * good, self.turns == 2, False, {}


gymnasium.register("Letters-v0", entry_point=Letters)
'''
GYMNASIUM = """
- name: letters
  _target_: verl.agent_loop.envs.loop.EnvironmentAgentLoop
  environment: gymnasium:make
  environment_kwargs: {id: "letters_game:Letters-v0"}
  max_tokens_per_turn: 1
"""


def learns(folder, loops: str) -> list[dict]:
    tiny_model_dir(folder / "model")
    (folder / "loops.yaml").write_text(loops)
    programs.command("verl.trainer.main_ppo", *SETTINGS, cwd=folder)
    steps = programs.metrics(folder, "games", "e")
    rewards = programs.curve(steps, "critic/rewards/mean")
    assert rewards[0] < 0.5 and max(rewards[-3:]) > 0.9, rewards
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-4, "trained on are the tokens that were sampled"
        assert step["rollout/agent/failed"] == 0
    return steps


@needs_verifiers
@pytest.mark.slow
def test_an_environment_of_verifiers_is_learned(tmp_path):
    (tmp_path / "words_env.py").write_text(WORDS)
    programs.run([sys.executable, "-c", WRITE], tmp_path)
    steps = learns(tmp_path, VERIFIERS)
    for step in steps:  # an empty answer ends its rollout: a half for each call at most
        assert step["critic/rewards/mean"] <= step["rollout/agent/calls"] / 2 <= 1


@pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed")
@pytest.mark.slow
def test_an_environment_registered_with_gymnasium_is_learned(tmp_path):
    (tmp_path / "letters_game.py").write_text(GAME)
    write_prompts(tmp_path / "train.parquet", 8)
    steps = learns(tmp_path, GYMNASIUM)
    assert all(step["rollout/environment/steps"] == 2 for step in steps)
