"""Samples as text: an image is named where it stands, and dumps say which it was."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from tests.harness.vision import tiny_vision_dir
from verl.data.sample_texts import SampleTexts
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import load_processor
from verl.protocol import DataProto


def padded(rows: list[list[int]], pad: int, left: bool) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[pad] * (width - len(r)) + r if left else r + [pad] * (width - len(r)) for r in rows])


def test_an_image_is_named_once_where_it_stands(tmp_path):
    tokenizer = hf_tokenizer(tiny_vision_dir(tmp_path))
    processor = load_processor(tmp_path, tokenizer)
    red, blue = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (84, 56), "blue")
    start, end, pad = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"

    def ids(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    prompts = [ids(f"What {start}{pad * 4}{end}{start}{pad * 6}{end} is this?"), ids("Look at it.")]
    responses = [ids(f"red{start}{pad * 4}{end} blue<|im_end|>"), ids("red<|im_end|>")]
    seen = np.empty(2, dtype=object)
    seen[:] = [{"images": [red, blue, red], "videos": []}, {"images": [], "videos": []}]
    tensors = {
        "prompts": padded(prompts, tokenizer.pad_token_id, left=True),
        "responses": padded(responses, tokenizer.pad_token_id, left=False),
    }
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"multi_modal_data": seen})
    shown, said = SampleTexts(tokenizer, processor).of(batch)
    assert shown == ["What [image 56x56][image 84x56] is this?", "Look at it."]
    assert said == ["red[image 56x56] blue", "red"]
    named = SampleTexts(tokenizer, processor).columns(batch)["images"]
    assert [name.split()[1] for name in named[0]] == ["56x56", "84x56", "56x56"] and named[1] == []
    assert named[0][0] == named[0][2] != named[0][1]
    first, second = SampleTexts(tokenizer, processor).pictures(batch, 2)
    strip = Image.open(io.BytesIO(first))
    assert (strip.size, second) == ((56 + 84 + 56, 56), None) and red.size == (56, 56)
    assert [strip.getpixel((x, 5)) for x in (0, 60, 190)] == [(255, 0, 0), (0, 0, 255), (255, 0, 0)]
    assert SampleTexts(tokenizer, processor).pictures(batch, 0) == [None, None]
    again = batch.select_idxs([0, 0, 1, 0])
    made = SampleTexts(tokenizer, processor).picture_maker(again, np.array([True, True, True, False]))()
    assert made[0] == first and made[0] is made[1] and made[2:] == [None, None]
    text = batch.select(non_tensor_batch_keys=[])
    assert SampleTexts(tokenizer).of(text)[1] == ["red blue", "red"] and SampleTexts(tokenizer).columns(text) == {}


def test_of_a_prompt_a_person_is_shown_the_question_and_what_is_behind_it():
    """The system line, roles and earlier turns of a template are not; an observation that an environment adds is."""
    words = "system\nYou are helpful.\nuser\nearlier\nassistant\nno\nuser\n{}\nassistant\n"
    messages = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "no"}]
    cases = [
        ([*messages, {"role": "user", "content": "What is 2+2? "}], words.format("What is 2+2?"), "What is 2+2?"),
        (
            [{"role": "user", "content": "hi"}],
            words.format("hi\n\nGuess a digit."),
            "hi\n\nGuess a digit.\nassistant\n",
        ),
        ([{"role": "user", "content": "two  spaces"}], words.format("two spaces"), None),
        ([{"role": "user", "content": [{"type": "text", "text": "parts"}]}], words.format("parts"), None),
        ([{"role": "system", "content": "alone"}], words.format("alone"), None),
    ]
    rows = np.empty(len(cases), dtype=object)
    rows[:] = [messages for messages, _, _ in cases]
    batch = DataProto(non_tensor_batch={"raw_prompt": rows})
    prompts = [prompt for _, prompt, _ in cases]
    assert SampleTexts(None).questions(batch, prompts) == [question for _, _, question in cases]
    assert SampleTexts(None).questions(DataProto(non_tensor_batch={}), ["a", "b"]) == [None, None]
