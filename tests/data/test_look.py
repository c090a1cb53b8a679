"""What a suffix, the columns or the first row tell is told before torch is loaded, by every program that reads rows."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.programs import python
from tests.harness.rows import turns, write_prompts
from verl.config import DataConfig, SFTDataConfig
from verl.config.schema.sft import PreferenceDataConfig
from verl.data.look import look_at_conversations, look_at_pairs, look_at_prompts
from verl.data.preference import PreferenceDataset
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError, VerlError

SAID = turns("1+1=", "2")
SHAREGPT = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
PROMPT, CHAT = {"prompt": SAID[:1]}, {"messages": SAID}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
IMAGE = {"bytes": b"x", "path": None}
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "prompts": (look_at_prompts, RLHFDataset, DataConfig),
    "conversations": (look_at_conversations, MultiTurnSFTDataset, SFTDataConfig),
    "pairs": (look_at_pairs, PreferenceDataset, PreferenceDataConfig),
}

PROGRAMS = """
import contextlib, io, json, sys
from importlib import import_module
for program, words in json.loads(sys.argv[1]):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        status = import_module("verl.trainer." + program).main(words)
    print(json.dumps([status, error.getvalue(), "torch" in sys.modules]))
"""


def test_every_program_says_what_is_wrong_with_its_files_before_it_loads_torch(tmp_path):
    (tmp_path / "rows.txt").touch()
    write_prompts(tmp_path / "bare.parquet", [{"question": "1+1=", "label": 1}])
    write_prompts(tmp_path / "chats.parquet", [{"conversations": SHAREGPT}])
    write_prompts(tmp_path / "empty.jsonl", [{"prompt": "", "chosen": "", "rejected": ""}])
    wanted = [
        ("main_ppo", "data.train_files=rows.txt", "unknown kind of file"),
        ("main_ppo", "data.train_files=bare.parquet", "Set data.prompt_key=question"),
        ("main_ppo", "data.train_files=chats.parquet data.prompt_key=conversations", "messages of ShareGPT"),
        ("main_ppo", "data.train_files=empty.jsonl", "row 0: column 'prompt' is empty"),
        ("main_ppo", "data.train_files=openai/gsm8k", "load_dataset('openai/gsm8k'"),
        ("main_generation", "data.path=bare.parquet", "Set data.prompt_key=question"),
        ("sft_trainer", "data.train_files=chats.parquet", "Set data.messages_key=conversations"),
        ("dpo_trainer", "data.train_files=empty.jsonl", "row 0, column 'chosen': the answer is empty"),
        ("rm_trainer", "data.train_files=rows.txt", "unknown kind of file"),
    ]
    cases = json.dumps([(program, words.split()) for program, words, _ in wanted])
    done = python("-c", PROGRAMS, cases, cwd=tmp_path)
    for (program, words, said), line in zip(wanted, done.stdout.splitlines(), strict=True):
        status, error, loaded = json.loads(line)
        assert (status, loaded) == (2, False) and said in error, f"{program} {words}: {error}"


def both(kind: str, file: Any, tokenizer: Any, **settings: Any) -> str:
    """What the first look and the data set say against a file: the same."""
    look, dataset, config = KINDS[kind]
    section = config(train_files=str(file), **settings)
    with pytest.raises(VerlError) as first:
        look(SimpleNamespace(data=section))
    with pytest.raises(VerlError) as later:
        dataset(str(file), tokenizer, section)
    assert str(first.value) == str(later.value) and type(first.value) is type(later.value)
    return str(first.value)


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        ("prompts", [{"promt": "a"}], "no column 'prompt'; the file has: promt. Set data.prompt_key=promt"),
        ("prompts", [{"messages": SAID}], "Set data.prompt_key to the column"),
        ("prompts", [{"prompt": None}], "column 'prompt' holds null"),
        ("prompts", [{"prompt": SAID[0]}], "Put each message into a list"),
        ("prompts", [{"prompt": 7}], "column 'prompt' holds int64"),
        ("prompts", [{"prompt": SHAREGPT}], "{'human': 'user', 'gpt': 'assistant'}"),
        ("conversations", [{"text": "a"}], "no column 'messages'; the file has: text"),
        ("conversations", [{"messages": SHAREGPT}], "column 'messages' holds messages of ShareGPT"),
        ("conversations", [{"messages": SAID[:1]}], "row 0, column 'messages': the conversation has no assistant"),
        ("conversations", [{"prompt": "a", "response": 3}], "row 0: the response is not text"),
        ("pairs", [{"prompt": "a", "accepted": "b", "reject": "c"}], "Set data.chosen_key=accepted"),
        ("pairs", [{**PAIR, "margin": float("nan")}], "row 0, column 'margin': not a finite number"),
        ("pairs", [{**PAIR, "margin": "high"}], "row 0, column 'margin': not a finite number. Got 'high'"),
        ("pairs", [{"chosen": SHAREGPT, "rejected": SHAREGPT}], "column 'chosen' holds messages of ShareGPT"),
    ],
)
def test_the_first_look_says_what_the_data_set_would_say(tmp_path, tokenizer, kind, rows, words):
    said = both(kind, write_prompts(tmp_path / "rows.parquet", rows), tokenizer)
    assert words in said and "rows.parquet" in said


@pytest.mark.parametrize(("kind", "row"), [("prompts", PROMPT), ("conversations", CHAT), ("pairs", PAIR)])
@pytest.mark.parametrize(
    "media",
    [
        {"video": ["a.mp4"]},
        {"image": IMAGE},
        {"audio": "a.wav"},
        {"seen": IMAGE},
    ],
)
def test_media_that_nobody_reads_are_refused_by_name(tmp_path, tokenizer, kind, row, media):
    (name,) = media
    file = write_prompts(tmp_path / "rows.parquet", [{**row, **media}])
    said = both(kind, file, tokenizer)
    if name == "audio":
        assert "row 0: rows with audio" in said and "Drop the column 'audio'" in said
    else:
        read_as = "video" if name == "video" else "image"
        assert f"row 0: column '{name}' has {read_as}s and is not read. Set data.{read_as}_key={name}" in said


@pytest.mark.parametrize(("kind", "row"), [("prompts", PROMPT), ("conversations", CHAT), ("pairs", PAIR)])
def test_only_the_data_set_knows_whether_the_model_sees(tmp_path, tokenizer, kind, row):
    look, dataset, config = KINDS[kind]
    file = write_prompts(tmp_path / "rows.parquet", [{**row, "images": [IMAGE]}])
    look(SimpleNamespace(data=config(train_files=str(file))))
    with pytest.raises(DataError, match=r"row 0: column 'images' has images, and the model reads only text"):
        dataset(str(file), tokenizer, config())
    file = write_prompts(tmp_path / "videos.parquet", [{**row, "videos": ["a.mp4"]}])
    with pytest.raises(DataError, match=r"row 0: column 'videos' has videos, and the model reads only text"):
        dataset(str(file), tokenizer, config())


@pytest.mark.parametrize(("kind", "row"), [("prompts", PROMPT), ("conversations", CHAT), ("pairs", PAIR)])
def test_a_row_further_down_with_an_image_is_found_and_empty_columns_are_none(tmp_path, tokenizer, kind, row):
    _, dataset, config = KINDS[kind]
    kind_of = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    for images, good in (([[], None], True), ([[], [IMAGE]], False)):
        table = pa.Table.from_pylist([row, row]).append_column("images", pa.array(images, kind_of))
        pq.write_table(table, tmp_path / "rows.parquet")
        if good:
            assert len(dataset(str(tmp_path / "rows.parquet"), tokenizer, config())) == 2
            continue
        with pytest.raises(DataError, match="row 1: column 'images' has images"):
            dataset(str(tmp_path / "rows.parquet"), tokenizer, config())


def test_what_a_data_set_class_of_the_user_reads_is_not_looked_at(tmp_path):
    (tmp_path / "rows.txt").touch()
    mine = {"custom_cls": SimpleNamespace(path="mine.py")}
    look_at_prompts(SimpleNamespace(data=SimpleNamespace(train_files=str(tmp_path / "rows.txt"), **mine)))


def test_a_bad_first_row_that_is_to_be_left_out_does_not_end_the_run(tmp_path, tokenizer):
    bad = {**PAIR, "rejected": "2"}
    for kind, rows in (("conversations", [{"messages": SAID[:1]}, CHAT]), ("pairs", [bad, PAIR])):
        look, dataset, config = KINDS[kind]
        file = write_prompts(tmp_path / f"{kind}.parquet", rows)
        section = config(train_files=str(file), filter_invalid=True)
        look(SimpleNamespace(data=section))
        assert len(dataset(str(file), tokenizer, section)) == 1


def test_a_missing_file_is_left_to_the_check_of_the_settings(tmp_path):
    look_at_prompts(SimpleNamespace(data=DataConfig(train_files=str(tmp_path / "gone.parquet"))))


@pytest.mark.parametrize(("value", "flag"), [(True, True), (0, False), ("true", True), ("False", False), (None, None)])
def test_thinking_is_true_false_or_absent_and_nothing_else(tmp_path, tokenizer, value, flag):
    row = {**CHAT, "enable_thinking": value}
    file = write_prompts(tmp_path / "rows.jsonl", [row])
    data = MultiTurnSFTDataset(str(file), tokenizer, SFTDataConfig())
    assert data._arguments(data.dataframe[0], 0).get("enable_thinking") is flag
    for wrong in ("no", float("nan"), 2):
        write_prompts(file, [{**row, "enable_thinking": wrong}])
        with pytest.raises(DataError, match=r"row 0, column 'enable_thinking': neither true nor false"):
            MultiTurnSFTDataset(str(file), tokenizer, SFTDataConfig())


@pytest.mark.parametrize("name", ["tools_kwargs", "interaction_kwargs", "need_tools_kwargs"])
def test_fields_of_extra_info_of_another_type_are_named_with_their_row(tmp_path, tokenizer, name):
    file = write_prompts(tmp_path / "rows.jsonl", [{**PROMPT, "extra_info": {name: "perhaps"}}])
    with pytest.raises(DataError, match=rf"row 0, extra_info\.{name}: (not an object|neither true nor false)"):
        RLHFDataset(str(file), tokenizer, DataConfig())[0]
