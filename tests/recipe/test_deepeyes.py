"""DeepEyes: boxes in pixels, images that the tool shows in a conversation, the reward, a run of a model that sees."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from recipe.deepeyes import reward
from recipe.deepeyes.main_deepeyes import DEEPEYES, HERE, main
from recipe.deepeyes.zoom import NAME, ZoomTool, box_within
from tests.harness import judges
from tests.harness.configs import changed
from tests.harness.conversations import Script, manager, rollout, rows
from tests.harness.runs import logged
from tests.harness.servers import serving
from tests.harness.vision import vision_dir, vision_example
from verl.config import load_config
from verl.errors import DataError
from verl.rewards.judges import shared_client
from verl.tools.loading import load_tools

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def quarters() -> Image.Image:
    """56 x 56 pixels: red and green above, blue and black below."""
    picture = Image.new("RGB", (56, 56))
    for colour, place in (("red", (0, 0)), ("green", (28, 0)), ("blue", (0, 28))):
        picture.paste(Image.new("RGB", (28, 28), colour), place)
    return picture


def zoomed(tool: ZoomTool, **parameters: Any):
    data = SimpleNamespace(seen=SimpleNamespace(images=[quarters(), Image.new("RGB", (8, 8), "white")]))
    return asyncio.run(tool.execute("i", parameters, agent_data=data))


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ([0, 0, 28, 28], (0, 0, 28, 28)),
        ([10.4, 3.6, 20, 30], (10, 4, 20, 30)),
        ([-5, 30, 99, 99], (0, 30, 56, 40)),
    ],
)
def test_a_box_is_cut_at_the_edges_of_the_image(box, inside):
    assert box_within(box, (56, 40)) == inside


@pytest.mark.parametrize(
    ("box", "says"),
    [
        (None, "got None"),
        ([0, 0, 5], "got [0, 0, 5]"),
        ([0, 0, "a", 5], "four numbers"),
        ([0, 0, True, 5], "four numbers"),
        ([0, 0, float("nan"), 5], "four numbers"),
        ([0, 0, 1e9, 5], "four numbers"),
        ([9, 0, 9, 5], "inside an image of 300 x 200 pixels"),
        ([400, 0, 500, 5], "inside an image of 300 x 200 pixels"),
        ([0, 0, 300, 2], "factor of 100"),
    ],
)
def test_a_box_that_is_none_is_explained_to_the_model(box, says):
    report = box_within(box, (300, 200))
    assert isinstance(report, str) and says in report and len(report) < 250


def test_a_part_is_enlarged_to_the_least_edge():
    tool = ZoomTool({"min_side": 28}, None)
    answer, step_reward, _ = zoomed(tool, bbox_2d=[28, 0, 42, 28])
    assert answer.image[0].size == (28, 56) and answer.image[0].getpixel((5, 5)) == (0, 128, 0) and step_reward == 1.0
    small, _, _ = zoomed(tool, bbox_2d=[0, 30, 2, 34])
    assert small.image[0].size == (28, 56)
    other, _, _ = zoomed(tool, bbox_2d=[0, 0, 8, 8], image=1)
    assert other.image[0].getpixel((0, 0)) == (255, 255, 255)


def test_without_an_image_the_tool_says_that_there_is_none():
    data = SimpleNamespace(seen=SimpleNamespace(images=[]))
    answer, step_reward, _ = asyncio.run(ZoomTool({}, None).execute("i", {"bbox_2d": [0, 0, 9, 9]}, agent_data=data))
    assert answer.text == "There is no image 0: the conversation has none." and step_reward is None


def test_an_original_takes_the_place_of_the_image_that_was_shown():
    tool, original = ZoomTool({"min_side": 1}, None), Image.new("RGB", (560, 560), "yellow")

    async def look(instance: str):
        data = SimpleNamespace(seen=SimpleNamespace(images=[quarters()]))
        return await tool.execute(instance, {"bbox_2d": [0, 0, 400, 300]}, agent_data=data)

    async def play():
        name, _ = await tool.create(image=original)
        other, _ = await tool.create()
        answers = await look(name), await look(other)
        await tool.release(name)
        return *answers, tool.originals

    first, second, left = asyncio.run(play())
    assert first[0].image[0].size == (400, 300) and first[0].image[0].getpixel((9, 9)) == (255, 255, 0)
    assert second[0].image[0].size == (56, 56) and left == {}


@pytest.mark.parametrize("number", [2, -1, True, "0", 0.0])
def test_an_image_that_there_is_not_is_no_reward(number):
    answer, step_reward, _ = zoomed(ZoomTool({}, None), bbox_2d=[0, 0, 8, 8], image=number)
    assert "numbered from 0 to 1" in answer.text and answer.image is None and step_reward is None


def call(*box: float) -> str:
    return f"<tool_call>\n{json.dumps({'name': NAME, 'arguments': {'bbox_2d': box}})}\n</tool_call><|im_end|>"


def test_the_model_sees_the_part_that_it_names(seeing_tokenizer, processor):
    ask = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    inputs, pieces = processor.process([quarters()])
    text = seeing_tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=False)
    ids = processor.expand(seeing_tokenizer(text)["input_ids"], pieces)
    table = rows(ask, raw_prompt_ids=[ids], multi_modal_inputs=[inputs],
                 multi_modal_data=[{"images": [quarters()], "videos": []}])  # fmt: skip
    script = Script([seeing_tokenizer(text)["input_ids"]
                     for text in (call(0, 28, 28, 56), call(5, 5), "blue<|im_end|>")])  # fmt: skip
    settings = rollout(multi_turn__enable=True, multi_turn__tool_config_path=str(HERE / "tools.yaml"),
                       multi_turn__max_tool_response_length=400, response_length=1500, prompt_length=1500)  # fmt: skip
    batch = manager(settings, script, seeing_tokenizer, processor=processor).generate_sequences(table)
    second = script.requests[1]
    assert [image.size for image in second.images] == [(56, 56), (28, 28)]
    assert second.images[1].getpixel((9, 9)) == (0, 0, 255)
    assert batch.non_tensor_batch["tool_rewards"][0] == [1.0], "the second call showed nothing"
    assert "x1 < x2" in seeing_tokenizer.decode(batch.batch["responses"][0])


def scored(text: str, **more: Any) -> dict[str, float]:
    info = {"question": "Which colour?", "tool_rewards": more.pop("tool_rewards", [])}
    return asyncio.run(reward.compute_score("v", text, "Blue", info, **more))


@pytest.mark.parametrize(
    ("text", "looks", "score", "acc"),
    [
        ("It is <answer> blue </answer>", [], 0.8, 1.0),
        (call(0, 0, 9, 9) + "tool\nuser\n<answer>blue</answer>", [1.0], 2.0, 1.0),
        ("<answer>red</answer>", [1.0], 0.0, 0.0),
        ("blue", [1.0], -0.2, 0.0),
        ("<answer>blue</answer> <answer>red</answer>", [], -0.2, 0.0),
        ("<answer>" + "blue " * 200 + "</answer>", [], -0.2, 0.0),
        ("<answer>blue</answer>" + call(0, 0, 9, 9) + "I do not know.", [1.0], -0.2, 0.0),
        ("<|vision_start|><|image_pad|><|vision_end|><answer>blue</answer>", [], 0.8, 1.0),
    ],
)
def test_the_reward_is_the_sum_of_the_paper(text, looks, score, acc):
    """Image tokens that the model writes itself are no look, and an answer before the last call is none."""
    result = scored(text, tool_rewards=looks)
    assert result["score"] == pytest.approx(score) and result["acc"] == acc


def test_a_judge_decides_where_the_texts_differ():
    def reply(payload: dict) -> tuple[int, dict]:
        assert "which is: Blue" in judges.prompt(payload) and judges.shown(payload, "question") == "Which colour?"
        return judges.reply(f"VERDICT: {10 if judges.shown(payload, 'answer') == 'azure' else 0}")

    with serving({judges.PATH: reply}) as server:
        right, wrong, same = (
            scored(f"<answer>{text}</answer>", address=server.url) for text in ("azure", "red", "blue")
        )
        assert (right["acc"], wrong["acc"], same["acc"], server.count(judges.PATH)) == (1.0, 0.0, 1.0, 2)
        with pytest.raises(DataError, match="question"):
            asyncio.run(reward.compute_score("v", "<answer>sky</answer>", "Blue", {}, address=server.url))
    shared_client.cache_clear()


def test_the_tool_file_of_the_recipe_loads():
    (tool,) = load_tools(str(HERE / "tools.yaml")).values()
    assert tool.name == NAME


@pytest.mark.slow
def test_a_model_that_sees_trains_by_the_command(workplace: Path):
    vision_dir(Path("model"), "qwen2_5_vl")
    made = vision_example("make_data").rows("colour", {"train": 4}, 56, 0)["train"]
    pd.DataFrame(made).to_parquet("train.parquet")
    words = ["data.train_files=train.parquet", "data.train_batch_size=4", "data.max_prompt_length=900",
             "data.max_response_length=8", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
             f"{R}.n=2", "trainer.logger=[file]", "trainer.total_training_steps=2", "trainer.resume_mode=disable",
             "trainer.total_epochs=2", "trainer.experiment_name=eyes"]  # fmt: skip
    config = load_config("ppo_trainer", changed(DEEPEYES, *words))
    assert config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns == 5
    assert main(words) == 0
    steps = logged("logs/verl-deepeyes", "eyes")
    assert len(steps) == 2 and all(np.isfinite(step["actor/grad_norm"]) for step in steps)
    assert [step["critic/score/mean"] for step in steps] == pytest.approx([-0.2] * 2), "a new model forms no answer"
