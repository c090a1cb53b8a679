"""Rows with images as prompts, conversations and pairs: where images stand, what is trained, and what is refused."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.harness.models import tiny_tokenizer
from tests.harness.rows import turns, write_prompts
from verl.config import DataConfig
from verl.config.schema.data import CustomClassConfig
from verl.config.schema.sft import PreferenceDataConfig, SFTDataConfig
from verl.data.build import create_rl_dataset
from verl.data.collate import collate_fn
from verl.data.preference import PreferenceDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError, NotBuiltError
from verl.metrics import notices
from verl.protocol import DataProto
from verl.trainer.pairs import split_at_answers
from verl.trainer.supervised import supervised_batch

RED, BLUE = (255, 0, 0), (0, 0, 255)
PAD = "<|image_pad|>"
SEEN = "<|vision_start|>" + PAD * 4 + "<|vision_end|>"


def image(colour: tuple[int, int, int] = RED, size: tuple[int, int] = (56, 56)) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, format="PNG")
    return {"bytes": out.getvalue(), "path": None}


def asked(text: Any, images: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "images": images or [], **more}


def prompts(tmp_path: Any, tokenizer: Any, processor: Any, rows: list[dict[str, Any]], **settings: Any) -> RLHFDataset:
    file = write_prompts(tmp_path / "rows.parquet", rows)
    return RLHFDataset(str(file), tokenizer, DataConfig(**settings), processor)


def text_of(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids)


def test_images_stand_where_their_markers_do_and_take_as_many_tokens_as_they_have(
    tmp_path, seeing_tokenizer, processor
):
    rows = [
        asked("<image>What colour is the disc?", [image()]),
        asked("Look at it."),
        asked("a <image> b <image>", [image(RED), image(BLUE, (112, 84))]),
    ]
    data = prompts(tmp_path, seeing_tokenizer, processor, rows)
    first, text, both = data[0], data[1], data[2]
    said = f"<|im_start|>user\n{SEEN}What colour is the disc?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(seeing_tokenizer, first["raw_prompt_ids"]) == said
    assert first["raw_prompt"][0]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "What colour is the disc?"},
    ]
    assert first["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert "images" not in first and [i.getpixel((0, 0)) for i in first["multi_modal_data"]["images"]] == [RED]
    assert text["multi_modal_inputs"] == {} and text["multi_modal_data"] == {"images": [], "videos": []}
    assert [i.getpixel((0, 0)) for i in both["multi_modal_data"]["images"]] == [RED, BLUE]
    assert text_of(seeing_tokenizer, both["raw_prompt_ids"]).count(PAD) == 4 + 12
    assert both["multi_modal_inputs"]["pixel_values"].shape == (16 + 48, 3 * 2 * 14 * 14)


def test_parts_as_clients_of_openai_write_them_are_the_same_as_markers(tmp_path, seeing_tokenizer, processor):
    import base64

    url = "data:image/png;base64," + base64.b64encode(image()["bytes"]).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    placed = [{"type": "image"}, {"type": "text", "text": "What?"}]
    write_prompts(tmp_path / "parts.jsonl", [{"prompt": [{"role": "user", "content": parts}]}])
    ours = RLHFDataset(str(tmp_path / "parts.jsonl"), seeing_tokenizer, DataConfig(), processor)[0]
    rows = [asked(placed, [image()]), asked("<image>What?", [image()])]
    for row in (prompts(tmp_path, seeing_tokenizer, processor, [row])[0] for row in rows):
        assert row["raw_prompt_ids"] == ours["raw_prompt_ids"] and row["raw_prompt"] == ours["raw_prompt"]
        assert torch.equal(row["multi_modal_inputs"]["pixel_values"], ours["multi_modal_inputs"]["pixel_values"])


@pytest.mark.parametrize(
    ("text", "images"), [("What?", [image()]), ("<image><image>What?", [image()]), ("<image>What?", [])]
)
def test_markers_and_images_that_do_not_match_in_number_name_file_and_row(
    tmp_path, seeing_tokenizer, processor, text, images
):
    rows = [asked("<image>What?", [image()]), asked(text, images)]
    words = rf"rows\.parquet, row 1: the messages have {text.count('<image>')} places for images, and the row has"
    with pytest.raises(DataError, match=words):
        prompts(tmp_path, seeing_tokenizer, processor, rows)


def test_in_data_without_a_column_of_images_a_marker_is_text(tmp_path, seeing_tokenizer, processor):
    rows = [{"prompt": [{"role": "user", "content": "What does <image> mean in HTML?"}]}]
    row = prompts(tmp_path, seeing_tokenizer, processor, rows)[0]
    assert "What does <image> mean" in text_of(seeing_tokenizer, row["raw_prompt_ids"])
    assert row["multi_modal_inputs"] == {}


def test_a_placeholder_that_a_person_writes_is_text(tmp_path, seeing_tokenizer, processor):
    row = prompts(tmp_path, seeing_tokenizer, processor, [asked(f"<image>Is this {PAD}?", [image()])])[0]
    assert row["raw_prompt_ids"].count(processor.placeholder_id) == 4
    assert text_of(seeing_tokenizer, row["raw_prompt_ids"]).count(PAD) == 5


def test_long_prompts_are_told_by_their_true_length(tmp_path, seeing_tokenizer, processor):
    rows = [asked("<image>What?", [image()]), asked("<image>What?", [image(RED, (224, 224))])]
    short = len(prompts(tmp_path, seeing_tokenizer, processor, rows[:1])[0]["raw_prompt_ids"])
    with pytest.raises(DataError, match=rf"row 1: 1 of 2 prompts are longer .* this, the first, has {short + 60} tok"):
        prompts(tmp_path, seeing_tokenizer, processor, rows, max_prompt_length=short)
    kept = prompts(tmp_path, seeing_tokenizer, processor, rows, max_prompt_length=short, filter_overlong_prompts=True)
    assert len(kept) == 1
    smaller = {"max_prompt_length": short, "mm_processor_kwargs": {"max_pixels": 56 * 56}}
    assert len(prompts(tmp_path, seeing_tokenizer, processor, rows, **smaller)) == 2


def test_truncation_never_cuts_through_an_image(tmp_path, seeing_tokenizer, processor):
    rows = [asked("Look at it. Look at it. <image>", [image()])]
    whole = prompts(tmp_path, seeing_tokenizer, processor, rows)[0]["raw_prompt_ids"]
    settings = {"max_prompt_length": len(whole) - 3, "truncation": "left"}
    assert prompts(tmp_path, seeing_tokenizer, processor, rows, **settings)[0]["raw_prompt_ids"] == whole[3:]
    data = prompts(tmp_path, seeing_tokenizer, processor, rows, max_prompt_length=8, truncation="right")
    with pytest.raises(DataError, match=r"rows\.parquet, row 0: truncation would cut through an image"):
        data[0]


def test_a_broken_image_names_file_and_row(tmp_path, seeing_tokenizer, processor):
    broken = image()["bytes"][:-30]
    rows = [asked("<image>What?", [image()]), asked("<image>What?", [{"bytes": broken, "path": None}])]
    data = prompts(tmp_path, seeing_tokenizer, processor, rows)
    with pytest.raises(DataError, match=r"rows\.parquet, row 1, image 0: the image is damaged"):
        data[1]


def test_what_cannot_be_used_is_refused_by_name(tmp_path, seeing_tokenizer, processor, tokenizer):
    sounds = [{"prompt": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "a.wav"}]}]}]
    with pytest.raises(NotBuiltError, match=r"message 0 has parts of type input_audio"):
        prompts(tmp_path, seeing_tokenizer, processor, sounds)
    seen = [{"prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}]
    with pytest.raises(DataError, match=r"row 0: the row has images, and the model reads only text"):
        prompts(tmp_path, tokenizer, None, seen)


def test_a_template_without_image_parts_is_told(tmp_path, processor, seeing_folder):
    from verl.data.tokenizer import hf_tokenizer

    plain = hf_tokenizer(seeing_folder, custom_chat_template=tiny_tokenizer().chat_template)
    with pytest.raises(DataError, match=r"the chat template writes 0 placeholders"):
        prompts(tmp_path, plain, processor, [asked("<image>What?", [image()])])[0]


def test_the_samples_of_a_prompt_share_one_object(tmp_path, seeing_tokenizer, processor):
    rows = [asked("<image>What?", [image(RED)]), asked("<image>What?", [image(BLUE)])]
    data = prompts(tmp_path, seeing_tokenizer, processor, rows)
    batch = DataProto.from_single_dict(collate_fn([data[0], data[1]])).repeat(4, interleave=True)
    for name in ("multi_modal_inputs", "multi_modal_data"):
        column = batch.non_tensor_batch[name]
        assert [column[i] is column[4 * (i // 4)] for i in range(8)] == [True] * 8 and column[0] is not column[4]


def test_inputs_are_left_out_on_demand(tmp_path, seeing_tokenizer, processor):
    rows = [asked("<image>What?", [image()])]
    row = prompts(tmp_path, seeing_tokenizer, processor, rows, return_multi_modal_inputs=False)[0]
    assert "multi_modal_inputs" not in row and len(row["multi_modal_data"]["images"]) == 1


def test_columns_as_the_hub_stores_them_are_read_as_they_are(tmp_path, seeing_tokenizer, processor):
    from datasets import Dataset, Features, List, Value
    from datasets import Image as HubImage

    kinds = Features({"prompt": [{"role": Value("string"), "content": Value("string")}], "images": List(HubImage())})
    rows = {"prompt": [asked("<image>What?")["prompt"]], "images": [[Image.new("RGB", (56, 56), RED)]]}
    Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / "hub.parquet")
    row = RLHFDataset(str(tmp_path / "hub.parquet"), seeing_tokenizer, DataConfig(), processor)[0]
    assert row["multi_modal_data"]["images"][0].getpixel((3, 3)) == RED


USERS = """
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.vision_utils import process_image

class Mine(RLHFDataset):
    def __getitem__(self, item):
        row = dict(self.dataframe[item])
        seen = process_image(row.pop("picture"))
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.pop("question")}]}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        made = self.processor(text=[text], images=[seen], return_tensors="pt")
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask")
        return {"raw_prompt": messages, "raw_prompt_ids": ids, "multi_modal_data": {"images": [seen]},
                "multi_modal_inputs": dict(made), "index": item}

    def _load(self):
        from datasets import load_dataset
        self.dataframe = load_dataset("parquet", data_files=self.data_files, split="train", cache_dir=self.cache)

    cache = {cache!r}

    def _settle_lengths(self):
        pass
"""


def test_a_dataset_class_with_images_as_users_of_upstream_write_it_works(tmp_path, seeing_tokenizer, processor):
    (tmp_path / "mine.py").write_text(USERS.replace("{cache!r}", repr(str(tmp_path / "cache"))))
    table = pa.Table.from_pylist([{"picture": image(BLUE), "question": "What?"}])
    pq.write_table(table, tmp_path / "own.parquet")
    config = DataConfig(custom_cls=CustomClassConfig(str(tmp_path / "mine.py"), "Mine"))
    row = create_rl_dataset([str(tmp_path / "own.parquet")], config, seeing_tokenizer, processor)[0]
    assert row["raw_prompt_ids"].count(processor.placeholder_id) == 4
    assert row["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 4]]


def chat(question: str, answer: str, images: list[Any]) -> dict[str, Any]:
    return {"messages": turns(question, answer), "images": images}


def conversations(tmp_path: Any, tokenizer: Any, processor: Any, rows: list[Any], **settings: Any) -> Any:
    file = write_prompts(tmp_path / "chats.parquet", rows)
    return MultiTurnSFTDataset(str(file), tokenizer, SFTDataConfig(**settings), processor)


def test_of_a_conversation_with_images_only_the_answers_are_trained(tmp_path, seeing_tokenizer, processor):
    rows = [chat("<image>What colour is the disc?", "red", [image()]), chat("Look at it.", "blue", [])]
    data = conversations(tmp_path, seeing_tokenizer, processor, rows)
    row = data[0]
    trained = row["input_ids"][row["loss_mask"].bool()]
    assert text_of(seeing_tokenizer, trained) == "red<|im_end|>"
    assert int((row["input_ids"] == processor.placeholder_id).sum()) == 4
    batch = data.collate([data[0], data[1]])
    assert batch["multi_modal_inputs"][1] == {} and batch["multi_modal_inputs"][0] is data[0]["multi_modal_inputs"]
    made = supervised_batch(batch)
    assert made.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"].shape == (16, 1176)


def test_a_conversation_is_too_long_by_its_images(tmp_path, seeing_tokenizer, processor):
    rows = [chat("<image>What?", "red", [image(RED, (224, 224))])]
    length = len(conversations(tmp_path, seeing_tokenizer, processor, rows)[0]["input_ids"])
    assert length > 64
    with pytest.raises(DataError, match=rf"row 0: the conversation has {length} tokens, more than data.max_length=64"):
        conversations(tmp_path, seeing_tokenizer, processor, rows, max_length=64)
    with pytest.raises(DataError, match=r"row 0.*truncation would cut through an image"):
        conversations(tmp_path, seeing_tokenizer, processor, rows, max_length=64, truncation="right")


def test_rows_that_are_wrong_are_left_out_on_demand(tmp_path, seeing_tokenizer, processor):
    good, broken = image(), {"bytes": image()["bytes"][:-30], "path": None}
    rows = [chat("<image>What?", "red", [good]), chat("<image>What?", "red", [broken])]
    data = conversations(tmp_path, seeing_tokenizer, processor, rows, filter_invalid=True)
    assert len(data) == 1 and "1 of 2 rows are left out" in notices()["data.filter_invalid"]


def test_both_answers_of_a_pair_share_the_images_of_its_prompt(tmp_path, seeing_tokenizer, processor):
    answers = {"chosen": "red", "rejected": "blue"}
    rows = [{**asked("<image>What?", [image()]), **answers}, {**asked("What?"), **answers}]
    file = write_prompts(tmp_path / "pairs.parquet", rows)
    data = PreferenceDataset(str(file), seeing_tokenizer, PreferenceDataConfig(), processor)
    pair = data[0]
    assert pair["chosen"]["multi_modal_inputs"] is pair["rejected"]["multi_modal_inputs"]
    batch = split_at_answers(data.collate([pair, data[1]]))
    column = batch.non_tensor_batch["multi_modal_inputs"]
    assert column[0] is column[1] and list(column[2:]) == [{}, {}]
    responses = batch.tensors["responses"][:, :2].tolist()
    assert [text_of(seeing_tokenizer, ids) for ids in responses[:2]] == ["red<|im_end|>", "blue<|im_end|>"]


def test_a_namespace_is_enough_of_a_configuration(tmp_path, seeing_tokenizer, processor):
    file = write_prompts(tmp_path / "rows.parquet", [asked("<image>What?", [image()])])
    row = RLHFDataset(str(file), seeing_tokenizer, SimpleNamespace(max_prompt_length=64), processor.wrapped)[0]
    assert isinstance(row["multi_modal_inputs"]["pixel_values"], torch.Tensor)
    assert np.asarray(row["multi_modal_data"]["images"][0]).shape == (56, 56, 3)
