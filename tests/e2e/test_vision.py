"""A tiny model that sees learns to name the colour of a disc: from conversations first, then from rewards alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.harness.programs import PROJECT, curve, fine_tuned, run, trained
from tests.harness.vision import TILED, tiled_dir

pytestmark = pytest.mark.slow
EXAMPLE = PROJECT / "examples/vision"
WARM_UP, STEPS = 28, 80
ACCURACY = "val-core/vision/colour/reward/mean@1"


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a model that has seen some of them with their answers."""
    folder = tmp_path_factory.mktemp("vision")
    run([sys.executable, f"{EXAMPLE}/make_model.py", "base"], cwd=folder)
    return warmed_up(folder)


def warmed_up(folder: Path, *options: str, steps: int = WARM_UP, pairs: int = 8) -> Path:
    """The folder, with data and what its model ``base`` became of conversations.

    Args:
        options: of ``make_data.py``.
    """
    sizes = ["--train_size", "256", "--test_size", "64", "--sft_size", "512", "--pairs_size", str(pairs), *options]
    run([sys.executable, f"{EXAMPLE}/make_data.py", "--save_dir", ".", *sizes], cwd=folder)
    words = ("data.train_files=sft.parquet", "data.train_batch_size=32", "optim.lr=1e-3", "trainer.total_epochs=10")
    fine_tuned(folder, steps, *words)
    return folder


def learn(folder: Path, name: str, *arguments: str, metric: str = ACCURACY, steps: int = STEPS) -> list[float]:
    """Accuracy on pictures that no step has seen, before the first step and on the way."""
    return curve(steps_of(folder, name, *arguments, steps=steps), metric)


def steps_of(folder: Path, name: str, *arguments: str, steps: int = STEPS, warm_up: int = WARM_UP) -> list[dict]:
    """The metrics of GRPO from the model that conversations made."""
    return trained(
        folder,
        name,
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path=sft/global_step_{warm_up}/model/huggingface",
        "actor_rollout_ref.rollout.enable_vision=true",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "actor_rollout_ref.actor.optim.lr=5e-4",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={EXAMPLE}/reward.py",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=10",
        "trainer.val_before_train=true",
        f"trainer.test_freq={steps // 2}",
        "trainer.save_freq=-1",
        *arguments,
    )


def test_rewards_alone_teach_it_the_rest(warm: Path):
    accuracy = learn(warm, "grpo")
    assert accuracy[0] < 0.6 and accuracy[-1] >= 0.9, accuracy


CAMERA = """tools:
  - class_name: examples.vision.camera.Camera
    config: {covered: COVERED}
"""


@pytest.fixture(scope="module")
def seen_by_camera(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `warm`, of conversations of which one in two uses the camera, and the others guess."""
    folder = tmp_path_factory.mktemp("camera")
    run([sys.executable, f"{EXAMPLE}/make_model.py", "base", "--camera"], cwd=folder)
    return warmed_up(folder, "--camera", "--sft_size", "1024", steps=2 * WARM_UP, pairs=0)


@pytest.mark.parametrize("covered", [False, True], ids=["looks", "cannot look"])
def test_it_learns_to_look_through_a_tool_and_to_answer_by_what_it_sees(seen_by_camera: Path, covered: bool):
    """No row has a picture: the tool's answer shows it. Behind a cover there are four colours to guess from."""
    (seen_by_camera / "camera.yaml").write_text(CAMERA.replace("COVERED", str(covered).lower()))
    steps = steps_of(
        seen_by_camera,
        f"covered_{covered}",
        "data.max_response_length=24",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=camera.yaml",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        f"reward.custom_reward_function.path={EXAMPLE}/camera.py",
        steps=40,
        warm_up=2 * WARM_UP,
    )
    accuracy, looked = (curve(steps, name) for name in (ACCURACY, "val-aux/vision/colour/looked/mean@1"))
    assert 0.3 < looked[0] < 0.8
    if covered:
        assert accuracy[-1] < 0.5, accuracy
    else:
        assert accuracy[0] < 0.7 and accuracy[-1] >= 0.9 and looked[-1] >= 0.9, (accuracy, looked)


def test_of_a_video_it_learns_the_colour_of_the_last_frames(tmp_path: Path):
    """Two colours are shown, and only their order in time tells which is right."""
    run([sys.executable, f"{EXAMPLE}/make_model.py", "base"], cwd=tmp_path)
    accuracy = learn(warmed_up(tmp_path, "--task", "last"), "grpo", metric="val-core/vision/last/reward/mean@1")
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.8, accuracy


TARGETS = "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head]"


@pytest.mark.parametrize("runtime", [(), ("trainer.runtime=ray", "trainer.device=cpu")], ids=["here", "on ray"])
def test_an_adapter_learns_it_with_a_frozen_tower_and_an_untied_head(tmp_path: Path, runtime: tuple[str, ...]):
    """A head that shares the embedding's weights has no place for an adapter, and this base is hardly trained."""
    run([sys.executable, f"{EXAMPLE}/make_model.py", "base", "--untied"], cwd=tmp_path)
    adapter = (
        "actor_rollout_ref.model.lora_rank=16",
        "actor_rollout_ref.model.lora_alpha=32",
        f"actor_rollout_ref.model.target_modules={TARGETS}",
        "actor_rollout_ref.model.exclude_modules=.*visual.*",
        "actor_rollout_ref.actor.optim.lr=5e-4",
    )
    accuracy = learn(warmed_up(tmp_path), "lora", *adapter, *runtime)
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.85, accuracy


@pytest.mark.parametrize("family", TILED)
def test_a_family_whose_images_come_in_tiles_learns_it_too(tmp_path: Path, family: str):
    tiled_dir(tmp_path / "base", family, hidden=128, layers=4)
    accuracy = learn(warmed_up(tmp_path), "grpo", "data.max_prompt_length=128")  # Idefics3 writes 101 tokens
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.75, accuracy


RAY = ("trainer.runtime=ray", "trainer.device=cpu", "trainer.n_gpus_per_node=2")
WAYS = {
    "two_workers": RAY,
    "a_shared_sequence": (
        *RAY,
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_workers_learn_it_too_and_may_share_a_sequence(warm: Path, way: str):
    accuracy = learn(warm, way, *WAYS[way])
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.8, accuracy


DISCS = """import random
import sys

sys.path.insert(0, "EXAMPLE")
from make_data import draw_colour


class Discs:
    def __init__(self, shows):
        self.shows = shows

    def reset(self, *, seed=None, options=None):
        picture, self.colour = draw_colour(random.Random(seed), 56)
        question = "What colour is the disc?"
        return ({"text": question, "image": picture} if self.shows else question), {}

    def step(self, action):
        return None, float(action.strip() == self.colour), True, False, {}
"""


@pytest.mark.parametrize("shows", [True, False], ids=["shown", "not shown"])
def test_an_environment_teaches_what_only_its_pictures_tell(warm: Path, shows: bool):
    """The rows are the same and have no image; each is a new picture, by the seed of its prompt."""
    (warm / "discs.py").write_text(DISCS.replace("EXAMPLE", str(EXAMPLE)))
    loop = {"name": "discs", "_target_": "verl.agent_loop.envs.loop.EnvironmentAgentLoop", "max_turns": 1}
    loop |= {"environment": "discs.py:Discs", "environment_kwargs": {"shows": shows}}
    (warm / "loops.yaml").write_text(json.dumps([loop]))
    for name, size in (("plain_train", 256), ("plain_test", 64)):
        rows = [{"data_source": "discs", "prompt": [{"role": "user", "content": ""}]}] * size
        (warm / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    accuracy = learn(
        warm,
        f"discs_{shows}",
        "data.train_files=plain_train.jsonl",
        "data.val_files=plain_test.jsonl",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=discs",
        metric="val-core/discs/reward/mean@1",
    )
    assert accuracy[0] < 0.65 and (accuracy[-1] >= 0.8 if shows else accuracy[-1] < 0.6), accuracy
