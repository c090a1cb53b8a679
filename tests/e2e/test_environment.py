"""A model learns to play a small text environment through ``environment_agent``."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from tests.harness import programs
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from tests.harness.waiting import wait_until
from tests.sanity.source_tree import ROOT

GAME = '''
"""Two turns; each action that begins with a letter earns a half."""


class Letters:
    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "Say a letter.", {}

    def step(self, action):
        self.turns += 1
        good = action[:1].isascii() and action[:1].isalpha()
        return "Another one.", 0.5 * good, self.turns == 2, False, {}
'''
LOOPS = """
- name: letters
  _target_: verl.agent_loop.envs.loop.EnvironmentAgentLoop
  environment: game.py:Letters
  max_tokens_per_turn: 1
"""
SETTINGS = [
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=64",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.agent.default_agent_loop=letters",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.optim.lr=0.03",
    "trainer.logger=[file]",
    "trainer.project_name=games",
    "trainer.experiment_name=e",
    "trainer.total_training_steps=12",
    "trainer.total_epochs=9",
    "trainer.resume_mode=disable",
]


@pytest.mark.slow
def test_a_model_learns_to_play_and_its_steps_are_rewarded(tmp_path):
    tiny_model_dir(tmp_path / "model")
    write_prompts(tmp_path / "train.parquet", 8)
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "loops.yaml").write_text(LOOPS)
    programs.command("verl.trainer.main_ppo", *SETTINGS, cwd=tmp_path)
    steps = programs.metrics(tmp_path, "games", "e")
    rewards = programs.curve(steps, "critic/rewards/mean")
    assert rewards[0] < 0.5 and max(rewards[-3:]) > 0.9, rewards
    for step in steps:
        assert step["rollout/environment/steps"] == 2 and step["rollout/environment/terminated"] == 1
        assert step["training/rollout_probs_diff_max"] < 1e-4


PLACES = {
    "threads": (),
    "processes": (),
    "agent workers on Ray": ("trainer.runtime=ray", "trainer.device=cpu",
                             "actor_rollout_ref.rollout.agent.num_workers=2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="episodes are processes on Linux alone")
def test_episodes_in_threads_in_processes_and_on_ray_are_the_same(tmp_path):
    rewards = {}
    for place, words in PLACES.items():
        folder = tmp_path / place
        folder.mkdir()
        tiny_model_dir(folder / "model")
        write_prompts(folder / "train.parquet", 8)
        (folder / "game.py").write_text(GAME)
        (folder / "loops.yaml").write_text(LOOPS + "  process: false\n" * (place == "threads"))
        programs.command("verl.trainer.main_ppo", *SETTINGS, *words, "trainer.total_training_steps=3", cwd=folder)
        steps = programs.metrics(folder, "games", "e")
        assert all(step["rollout/environment/terminated"] == 1 for step in steps)
        rewards[place] = programs.curve(steps, "critic/rewards/mean")
        wait_until(lambda folder=folder: not working_in(folder))
    assert len(rewards["threads"]) == 3
    assert rewards["threads"] == rewards["processes"] == rewards["agent workers on Ray"]


def working_in(folder: Path) -> list[str]:
    """Commands of the processes whose working folder this is."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").resolve(strict=True) == folder:
                commands.append((process / "cmdline").read_text())
    return commands


@pytest.mark.slow
def test_the_page_on_environments_learns_as_it_says(tmp_path):
    """Its files and its commands as they are printed; only the project's name is added, to read the metrics by."""
    page = (ROOT / "docs/howto/environments.md").read_text(encoding="utf-8")
    game, loops, commands = (
        re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "yaml", "bash")
    )
    for text in (game, loops):
        (tmp_path / text.split()[1]).write_text(text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = commands.replace("python ", f"{sys.executable} ").rstrip()
    commands += " trainer.project_name=games trainer.experiment_name=e 'trainer.logger=[file]'"
    programs.run(["bash", "-e", "-c", commands], tmp_path)
    rewards = programs.curve(programs.metrics(tmp_path, "games", "e"), "critic/score/mean")
    assert len(rewards) == 6 and rewards[0] < 0.3 and rewards[-1] > 0.9, rewards


LOCK = '''
"""A dial per position: the right digit opens the next one, a wrong one changes nothing."""


class Lock:
    def reset(self, *, seed=None, options=None):
        self.place = self.turns = 0
        return "0=", {}

    def step(self, action):
        self.turns += 1
        self.place += action.strip() == "385"[self.place]
        return f"{self.place}=", float(self.place == 3), self.place == 3, self.turns == 8, {}
'''


@pytest.mark.slow
def test_gigpo_opens_a_lock_in_the_fewest_turns(tmp_path):
    """All samples open it in the end, which teaches grpo no more; the discounted turns still differ."""
    programs.run([sys.executable, str(ROOT / "examples/quickstart/model.py"), "base"], tmp_path)
    (tmp_path / "game.py").write_text(LOCK)
    (tmp_path / "loops.yaml").write_text(LOOPS.replace("letters", "lock").replace("Letters", "Lock"))
    prompt = '{"prompt": [{"role": "user", "content": "0+9="}]}\n'
    (tmp_path / "train.jsonl").write_text(64 * prompt)
    words = [
        *SETTINGS, "algorithm.adv_estimator=gigpo", "algorithm.gamma=0.9", "data.train_files=train.jsonl",
        "data.train_batch_size=16", "actor_rollout_ref.model.path=base",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_epochs=1",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.agent.default_agent_loop=lock", "trainer.total_training_steps=20",
    ]  # fmt: skip
    programs.command("verl.trainer.main_ppo", *words, cwd=tmp_path)
    steps = programs.metrics(tmp_path, "games", "e")
    scores, turns = (programs.curve(steps, name) for name in ("critic/score/mean", "rollout/environment/steps"))
    assert scores[0] < 0.1 and min(scores[-3:]) > 0.95, scores
    assert turns[0] > 7 and max(turns[-3:]) < 3.3, turns
