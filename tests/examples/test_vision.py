"""The small vision-language models and their tasks: folders that load, pictures that show what their row says."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest
from PIL import Image

from tests.harness.vision import tiny_vision_dir, vision_example


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_folder_of_each_family_loads_as_a_model_that_sees(tmp_path, family):
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    folder = tiny_vision_dir(tmp_path, family)
    model, tokenizer = AutoModelForImageTextToText.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == family
    assert tokenizer.convert_ids_to_tokens(model.config.image_token_id) == "<|image_pad|>"
    assert json.loads((folder / "preprocessor_config.json").read_text())["patch_size"] == 14


def test_a_word_of_a_task_is_one_token_and_any_other_text_has_tokens_too():
    tokenizer = vision_example("make_model").train_tokenizer()
    assert [len(tokenizer(word)["input_ids"]) for word in ("red", "green", "blue", "yellow", "7")] == [1] * 5
    assert tokenizer.decode(tokenizer("Größe 3,5 µm")["input_ids"]) == "Größe 3,5 µm"


def test_the_disc_has_the_colour_that_its_row_says():
    data = vision_example("make_data")
    for row in data.rows("colour", {"train": 20}, 56, 0)["train"]:
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0]["bytes"])))
        colour = np.array(data.COLOURS[row["reward_model"]["ground_truth"]], np.uint8)
        grey = pixels[(pixels[..., 0] == pixels[..., 1]) & (pixels[..., 1] == pixels[..., 2])]
        painted = (pixels == colour).all(-1).sum()
        assert painted > 100 and painted + len(grey) == 56 * 56


def test_no_picture_is_in_two_files_and_the_same_arguments_write_the_same_rows():
    data = vision_example("make_data")
    counts = {"test": 10, "train": 10, "sft": 10, "pairs": 10}
    made = data.rows("count", counts, 56, 3)
    pictures = [row["images"][0]["bytes"] for rows in made.values() for row in rows]
    assert len(set(pictures)) == 40 and made == data.rows("count", counts, 56, 3)
    assert all(row["chosen"] != row["rejected"] for row in made["pairs"])


def test_the_reward_is_one_for_exactly_the_answer():
    score = vision_example("reward").compute_score
    assert [score("vision/colour", said, "red") for said in (" red\n", "blue", "red red")] == [1.0, 0.0, 0.0]


def test_with_a_camera_no_row_has_its_picture_and_the_tool_shows_it():
    data, camera = vision_example("make_data"), vision_example("camera")
    made = data.rows("colour", {"train": 8, "sft": 40}, 56, 0, camera=True)
    row = made["train"][0]
    picture = row["extra_info"]["tools_kwargs"]["camera"]["create_kwargs"]["picture"]
    assert "images" not in row and row["prompt"] == [{"role": "user", "content": "What colour is the disc?"}]

    async def answers(**config):
        tool = camera.Camera(config)
        name, _ = await tool.create(picture=picture)
        answer, *_ = await tool.execute(name, {})
        await tool.release(name)
        assert tool.pictures == {}
        return answer

    assert asyncio.run(answers()).image == [picture] and asyncio.run(answers(covered=True)).is_text_only()
    looked = [row for row in made["sft"] if row["images"]]
    assert 10 < len(looked) < 30
    assert all(
        [message["role"] for message in row["messages"]] == ["user", "assistant"]
        for row in made["sft"]
        if row not in looked
    )
    assert [message["content"] for message in looked[0]["messages"]][1:3] == [
        vision_example("make_model").CAMERA,
        "<image>",
    ]


def test_the_last_turn_is_scored_and_whether_the_camera_was_used():
    score, call = vision_example("camera").compute_score, vision_example("make_model").CAMERA
    said = (f"{call}\ntool\n\nassistant\nred", f"{call}\ntool\n?\nassistant\nblue", "red", f"red{call}")
    scores = [score("vision/colour", one, "red") for one in said]
    assert [one["score"] for one in scores] == [1.0, 0.0, 1.0, 0.0]
    assert [one["looked"] for one in scores] == [1.0, 1.0, 0.0, 1.0]
