"""Conversations with images in the tokens of a reward model that has another template, tokenizer and processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from verl.data.rewriting import Rewriter
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import load_processor
from verl.errors import ModelError
from verl.protocol import DataProto

RED = Image.new("RGB", (56, 56), "red")


def sampled(tokenizer: Any, answers: list[str], media: list[Any], prompts: list[Any]) -> DataProto:
    """What the policy answered; of its prompts only the messages are read."""
    ids = [tokenizer(answer + "<|im_end|>")["input_ids"] for answer in answers]
    width = max(map(len, ids))
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    columns = {name: np.empty(len(ids), dtype=object) for name in ("raw_prompt", "multi_modal_data")}
    columns["raw_prompt"][:], columns["multi_modal_data"][:] = prompts, media
    return DataProto.from_dict(tensors={"responses": responses, "attention_mask": attention}, non_tensors=columns)


@pytest.fixture
def data(seeing_tokenizer: Any) -> DataProto:
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    text = [{"role": "user", "content": "What?"}]
    media = [{"images": [RED], "videos": []}, {"images": [], "videos": []}, {"images": [RED, RED], "videos": []}]
    return sampled(seeing_tokenizer, ["red", "blue", "red"], media, [shown, text, shown])


def test_images_become_the_tokens_and_pixels_of_the_other_model(seeing_model, seeing_tokenizer, data):
    folder = seeing_model("gemma3")
    target = hf_tokenizer(folder)
    processor = load_processor(folder, target)
    made = Rewriter(seeing_tokenizer, target, None, processor).rewrite(data)
    expected, pieces = processor.process([RED])
    for row, said in ((0, "red"), (1, "blue")):
        messages = [*data.non_tensor_batch["raw_prompt"][row], {"role": "assistant", "content": said}]
        ids = target.apply_chat_template(messages, tokenize=True, return_dict=False)
        ids = processor.expand(ids, pieces if row == 0 else {})
        written = made.batch.batch["input_ids"][row, : int(made.batch.batch["attention_mask"][row].sum())].tolist()
        assert ids[: len(written)] == written and target.decode(written).endswith(f"{said}<|im_end|>\n")
    inputs = made.batch.non_tensor_batch["multi_modal_inputs"]
    assert torch.equal(inputs[0]["pixel_values"], expected["pixel_values"]) and inputs[1] == {}
    assert list(made.refused) == [2] and "later turns" in str(made.refused[2])


def test_what_would_lose_a_part_of_an_image_is_refused_by_its_row(seeing_model, seeing_tokenizer, data):
    folder = seeing_model("gemma3")
    target = hf_tokenizer(folder)
    made = Rewriter(seeing_tokenizer, target, 6, load_processor(folder, target)).rewrite(data)
    assert sorted(made.refused) == [0, 2] and made.cut[1] and "with its images it has" in str(made.refused[0])


def test_a_reward_model_of_text_is_told_of_images(seeing_tokenizer, tokenizer, data):
    with pytest.raises(ModelError, match=r"reward.reward_model.model_path: .*the reward model reads only text"):
        Rewriter(seeing_tokenizer, tokenizer).rewrite(data)
