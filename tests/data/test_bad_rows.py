"""Whatever is wrong with a row, the three datasets say file, row and column, or leave it out and say how many."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.rows import turns, write_prompts
from verl.config import DataConfig, SFTDataConfig
from verl.config.schema.sft import PreferenceDataConfig
from verl.data import RLHFDataset, chat_template
from verl.data.preference import PreferenceDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
from verl.errors import DataError, ModelError
from verl.metrics import notices

USER, ASSISTANT = turns("1+1=", "2")
GOOD: dict[str, dict[str, Any]] = {
    "sft": {"messages": [USER, ASSISTANT]},
    "pairs": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "rl": {"prompt": [USER], "reward_model": {"ground_truth": "2"}, "data_source": "d"},
}
COLUMN = {"sft": "messages", "pairs": "chosen", "rl": "prompt"}


def make(kind: str, file: Path, tokenizer: Any, **settings: Any) -> Any:
    if kind == "sft":
        return MultiTurnSFTDataset(str(file), tokenizer, SFTDataConfig(max_length=64, **settings))
    if kind == "pairs":
        return PreferenceDataset(str(file), tokenizer, PreferenceDataConfig(max_length=64, **settings))
    return RLHFDataset(str(file), tokenizer, DataConfig(max_prompt_length=64, **settings))


def jsonl(folder: Path, *rows: dict) -> Path:
    return write_prompts(folder / "rows.jsonl", rows)


def refused(kind: str, file: Path, tokenizer: Any, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        data = make(kind, file, tokenizer, **settings)
        for number in range(len(data)):
            data[number]
    assert file.name in str(caught.value)
    return str(caught.value)


CONVERSATIONS = [
    ("hello", "no assistant message"),
    ([5], ""),
    ([{"content": "1+1="}], "role"),
    ([{"role": 3, "content": "1+1="}], "role"),
    ([USER, {"role": "assistant", "content": 2}], "content"),
    ([], "empty"),
    ({"role": "user"}, ""),
]


@pytest.mark.parametrize(("value", "words"), CONVERSATIONS)
def test_a_conversation_of_the_wrong_type_is_named_in_sft(tmp_path, tokenizer, value, words):
    table = pa.table({"messages": [json.dumps(value)]}) if isinstance(value, (str, dict)) else None
    file = tmp_path / "rows.parquet"
    if table is None:
        file = jsonl(tmp_path, {"messages": value})
    else:
        pq.write_table(table, file)
    said = refused("sft", file, tokenizer)
    assert ("row 0" in said or "line 1" in said) and "messages" in said and words in said


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("value", [5, {"a": 1}, [5], [{"role": "user"}]])
def test_an_answer_of_the_wrong_type_is_named_in_pairs(tmp_path, tokenizer, column, value):
    said = refused("pairs", jsonl(tmp_path, {**GOOD["pairs"], column: value}), tokenizer)
    assert "row 0" in said and column in said


@pytest.mark.parametrize("value", [5, [5], [{"role": "user"}], [{"role": "user", "content": 3}], [], "", None])
def test_a_prompt_of_the_wrong_type_is_named_in_rl(tmp_path, tokenizer, value):
    said = refused("rl", jsonl(tmp_path, {**GOOD["rl"], "prompt": value}), tokenizer)
    assert "column 'prompt'" in said and ("row 0" in said or "holds int64" in said or "holds null" in said)


@pytest.mark.parametrize("kind", GOOD)
def test_values_of_two_types_in_one_column_are_named_with_the_line(tmp_path, tokenizer, kind):
    said = refused(kind, jsonl(tmp_path, GOOD[kind], {**GOOD[kind], COLUMN[kind]: 7}), tokenizer)
    assert f"column {COLUMN[kind]!r}" in said and "line 2" in said


@pytest.mark.parametrize("kind", GOOD)
def test_broken_characters_are_named_with_the_line(tmp_path, tokenizer, kind):
    bad = json.dumps(GOOD[kind]).replace("1+1=", "\\ud800")
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(GOOD[kind])}\n{bad}\n")
    said = refused(kind, file, tokenizer)
    assert "holds characters that are no text" in said and "line 2" in said and "column" in said
    file.write_bytes(json.dumps(GOOD[kind]).encode() + b'\n{"a": "\xff\xfe"}\n')
    assert "line 2 is not UTF-8" in refused(kind, file, tokenizer)


@pytest.mark.parametrize("kind", GOOD)
def test_broken_characters_in_parquet_are_named_with_the_column(tmp_path, tokenizer, kind):
    row = dict.fromkeys(GOOD[kind], "x")
    table = pa.table(
        {name: pa.array([value.encode() + b"\xff"], pa.binary()).view(pa.string()) for name, value in row.items()}
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    assert "is damaged" in refused(kind, tmp_path / "rows.parquet", tokenizer)


@pytest.mark.parametrize("kind", GOOD)
def test_an_empty_file_is_named(tmp_path, tokenizer, kind):
    (tmp_path / "rows.jsonl").touch()
    assert "the file has no rows" in refused(kind, tmp_path / "rows.jsonl", tokenizer)
    pq.write_table(pa.Table.from_pylist([GOOD[kind]]).slice(0, 0), tmp_path / "rows.parquet")
    assert "the file has no rows" in refused(kind, tmp_path / "rows.parquet", tokenizer)


@pytest.mark.parametrize("kind", GOOD)
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, tokenizer, kind):
    said = refused(kind, jsonl(tmp_path, {"text": "a", "label": 1}), tokenizer)
    assert "no column" in said and "text, label" in said


LONG = "9" * 100
TOO_LONG = {
    "sft": {"messages": [USER, {**ASSISTANT, "content": LONG}]},
    "pairs": {**GOOD["pairs"], "chosen": LONG},
    "rl": {**GOOD["rl"], "prompt": [{**USER, "content": LONG}]},
}
LEAVE_OUT = {"sft": "filter_invalid", "pairs": "filter_invalid", "rl": "filter_overlong_prompts"}


@pytest.mark.parametrize("kind", GOOD)
def test_a_row_that_is_too_long_is_named_with_its_length_or_left_out_and_counted(tmp_path, tokenizer, kind):
    file = jsonl(tmp_path, GOOD[kind], TOO_LONG[kind])
    said = refused(kind, file, tokenizer)
    assert "row 1" in said and "64" in said
    data = make(kind, file, tokenizer, **{LEAVE_OUT[kind]: True})
    assert len(data) == 1 and data[0] is not None
    assert any("1 of 2" in text for text in notices().values())


def test_rows_of_sft_that_teach_nothing_are_left_out_and_counted_when_asked(tmp_path, tokenizer):
    answers = [{"messages": [USER, {**ASSISTANT, "content": text}]} for text in "abc"]
    rows = [{"messages": [USER]}, answers[0], {"messages": []}, TOO_LONG["sft"], answers[1], answers[2]]
    data = make("sft", jsonl(tmp_path, *rows), tokenizer, filter_invalid=True)
    said = notices()["data.filter_invalid"]
    assert "3 of 6 rows are left out" in said and "row 0, column 'messages': the conversation has no assistant" in said
    learned = [tokenizer.decode(row["input_ids"][row["loss_mask"] == 1])[0] for row in (data[0], data[1], data[2])]
    assert learned == ["a", "b", "c"] and [data.describe(i)[-5:] for i in range(3)] == ["row 1", "row 4", "row 5"]
    with pytest.raises(DataError, match="no row is left to learn from"):
        make("sft", jsonl(tmp_path, {"messages": [USER]}), tokenizer, filter_invalid=True)


def test_a_pair_that_the_template_refuses_is_left_out_too(tmp_path, family):
    twice = [USER, USER]
    rows = [GOOD["pairs"], {**GOOD["pairs"], "prompt": twice}]
    rows = [{**row, "prompt": row["prompt"] if isinstance(row["prompt"], list) else [USER]} for row in rows]
    said = refused("pairs", jsonl(tmp_path, *rows), family("gemma"))
    assert "row 1, column 'chosen': the chat template refuses" in said
    assert len(make("pairs", jsonl(tmp_path, *rows), family("gemma"), filter_invalid=True)) == 1


@pytest.mark.parametrize("kind", GOOD)
def test_a_template_without_generation_prompt_is_refused_before_a_row_is_read(tmp_path, tokenizer, kind):
    """Where it writes a header before an answer, the model would learn to write that, or never see it."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ModelError, match=r"no generation prompt.*'assistant: '"):
        make(kind, jsonl(tmp_path, GOOD[kind]), bare)


@pytest.mark.parametrize("kind", GOOD)
def test_a_template_that_fails_or_reaches_into_python_is_an_error_in_its_own_words(tmp_path, tokenizer, kind):
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception('no') }}",
        "{{ 1 // 0 }}",
    ):
        bad = copy.deepcopy(tokenizer)
        bad.chat_template = template
        with pytest.raises((DataError, ModelError)):
            make(kind, jsonl(tmp_path, GOOD[kind]), bad)


ON_A_WORD = (
    "{% for m in messages %}{{ m.content }}{% if 'again' in m.content %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ENDLESS, "did not end within 0.5 s"),
        ("{{ 'x' * 2000000 }}", r"writes 2000000 characters, more than 100\d{4}"),
        ("{{ '%*d' % (1000000000, 1) }}", "needs over 512 MB for a few words"),
    ],
)
def test_a_template_that_never_ends_is_stopped_and_refused(tmp_path, tokenizer, monkeypatch, kind, template, words):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.5 if template == ENDLESS else 60)
    bad = copy.deepcopy(tokenizer)
    bad.chat_template = template
    with pytest.raises(ModelError, match=words):
        make(kind, jsonl(tmp_path, GOOD[kind]), bad)


def test_a_template_that_loops_on_a_word_of_the_data_refuses_that_row(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    bad = copy.deepcopy(tokenizer)
    bad.chat_template = ON_A_WORD
    template = chat_template.ChatTemplate(bad)
    good = [{"role": "user", "content": "once"}]
    assert template.render(good) == "once"
    with pytest.raises(DataError, match=r"did not end within 0\.3 s"):
        template.render([{"role": "user", "content": "again"}])
    assert template.render(good) == "once", "the thread goes on"
    bad.chat_template = "{{ messages[0].content * (messages[0].content | int) }}"
    template = chat_template.ChatTemplate(bad)
    with pytest.raises(DataError, match=r"writes \d+ characters, more than"):
        template.render([{"role": "user", "content": "9000000"}])
    assert len(template.render([{"role": "user", "content": "90000"}])) == 450_000
