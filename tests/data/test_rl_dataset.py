"""Prompts for reinforcement learning: the row's form, lengths, and what is wrong with a file said at once."""

from __future__ import annotations

import json
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.rows import addition_rows, write_prompts
from verl.config import DataConfig
from verl.config.schema.data import PromptFilterConfig
from verl.data.collate import collate_fn
from verl.data.loader import StatefulLoader
from verl.data.rl_dataset import RLHFDataset
from verl.errors import ConfigError, DataError, ModelError
from verl.metrics import notices


def dataset(tmp_path, tokenizer, rows, max_samples=-1, suffix="parquet", **config):
    path = write_prompts(tmp_path / f"train.{suffix}", rows)
    return RLHFDataset(path, tokenizer, DataConfig(**config), max_samples=max_samples)


def asking(*contents):
    return [{"prompt": [{"role": "user", "content": content}]} for content in contents]


def test_a_row_has_the_templated_ids_and_everything_a_reward_needs(tmp_path, tokenizer):
    row = dataset(tmp_path, tokenizer, 3)[2]
    text = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    assert row == {
        "raw_prompt": [{"role": "user", "content": "2+2="}],
        "raw_prompt_ids": tokenizer(text)["input_ids"],
        "data_source": "test/addition",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 2, "split": "train"},
        "index": 2,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "need_tools_kwargs": False,
        "__row__": 2,
    }


def test_two_columns_are_enough(tmp_path, tokenizer):
    rows = [{**row, "reward_model": {"ground_truth": "42"}} for row in asking("a", "b")]
    row = dataset(tmp_path, tokenizer, rows)[1]
    assert row["data_source"] is None and row["extra_info"] == {} and row["index"] == 1
    assert row["reward_model"] == {"ground_truth": "42"}


def test_the_prompt_alone_is_enough_for_a_reward_that_needs_no_answer(tmp_path, tokenizer):
    assert dataset(tmp_path, tokenizer, asking("a"))[0]["reward_model"] == {}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_files_give_the_same_rows_as_parquet(tmp_path, tokenizer, suffix):
    assert dataset(tmp_path, tokenizer, 3, suffix=suffix)[1] == dataset(tmp_path, tokenizer, 3)[1]


def test_numpy_messages_strings_and_json_text_are_prompts(tmp_path, tokenizer):
    texts = [{"prompt": "2+2="}, {"prompt": json.dumps([{"role": "user", "content": "2+2="}])}]
    found = dataset(tmp_path, tokenizer, texts)
    expected = dataset(tmp_path, tokenizer, 3)[2]["raw_prompt_ids"]
    assert found[0]["raw_prompt_ids"] == found[1]["raw_prompt_ids"] == expected
    assert "data.prompt_key" in notices()
    messages = np.array([{"role": "user", "content": "2+2="}], dtype=object)
    assert found.build_messages({"prompt": messages}, 0) == [{"role": "user", "content": "2+2="}]


def test_a_mapping_and_a_namespace_carry_settings_too(tmp_path, tokenizer):
    path = write_prompts(tmp_path / "a.parquet", [{"question": "hi"}])
    for config in ({"prompt_key": "question"}, SimpleNamespace(prompt_key="question")):
        assert RLHFDataset(path, tokenizer, config)[0]["raw_prompt"] == [{"role": "user", "content": "hi"}]


def test_raw_chat_full_prompt_and_raw_ids_follow_their_settings(tmp_path, tokenizer):
    row = dataset(tmp_path, tokenizer, 3, return_raw_chat=False, return_full_prompt=True, return_raw_input_ids=True)[2]
    assert "raw_prompt" not in row
    assert row["full_prompts"] == "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    assert row["raw_input_ids"] == tokenizer("2+2=")["input_ids"]


def test_template_arguments_reach_the_template(tmp_path, family):
    kwargs = {"enable_thinking": False}
    row = dataset(tmp_path, family("qwen3"), 1, apply_chat_template_kwargs=kwargs, return_full_prompt=True)[0]
    assert row["full_prompts"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_arguments_of_tools_lose_the_nulls_of_other_rows(tmp_path, tokenizer):
    rows = asking("a", "b")
    rows[0]["extra_info"] = {"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}, "need_tools_kwargs": True}
    rows[1]["extra_info"] = {"tools_kwargs": {"search": {"create_kwargs": {"y": 2}}}, "index": 7}
    found = dataset(tmp_path, tokenizer, rows)
    assert found[0]["tools_kwargs"] == {"calc": {"create_kwargs": {"x": 1}}} and found[0]["need_tools_kwargs"] is True
    assert found[1]["tools_kwargs"] == {"search": {"create_kwargs": {"y": 2}}} and found[1]["index"] == 7


# By hand: three special tokens, "user", "assistant" and three newlines stand around a content, so n characters are
# n + 19 tokens of the byte-level tokenizer.
OVERHEAD = len("user\n") + len("\n") + len("assistant\n") + 3


def test_prompts_that_are_too_long_are_dropped_with_a_count(tmp_path, tokenizer):
    found = dataset(
        tmp_path,
        tokenizer,
        asking("a" * 5, "b" * 11, "c" * 10, "d" * 12),
        max_prompt_length=OVERHEAD + 10,
        filter_overlong_prompts=True,
    )
    assert [row["raw_prompt"][0]["content"][0] for row in found] == ["a", "c"]
    assert [len(row["raw_prompt_ids"]) for row in found] == [OVERHEAD + 5, OVERHEAD + 10]
    assert [row["__row__"] for row in found] == [0, 2] and found.describe(1).endswith("train.parquet, row 2")
    assert any("2 of 4 prompts are longer than 29 tokens" in text for text in notices().values())


FILTERS = """
def keep_prompt(row):
    return row["extra_info"]["level"] > 2

def none(row):
    return False

def odd(row):
    return 1

def breaks(row):
    return row["missing"]
"""


def filtered(tmp_path, tokenizer, name, **config):
    (tmp_path / "mine.py").write_text(FILTERS)
    levels = [{**row, "extra_info": {"level": n}} for n, row in enumerate(asking("a", "b", "c", "d" * 9, "e"), 1)]
    mine = PromptFilterConfig(path=f"{tmp_path}/mine.py", name=name)
    return dataset(tmp_path, tokenizer, levels, filter_function=mine, **config)


def test_a_function_of_the_users_drops_prompts_before_lengths_do_and_both_are_counted(tmp_path, tokenizer):
    found = filtered(tmp_path, tokenizer, "keep_prompt", max_prompt_length=OVERHEAD + 5, filter_overlong_prompts=True)
    assert [(row["raw_prompt"][0]["content"], row["__row__"]) for row in found] == [("c", 2), ("e", 4)]
    said = {key.partition(" ")[0]: text for key, text in notices().items()}
    assert said["data.filter_function"] == "2 of 5 prompts were dropped"
    assert said["data.filter_overlong_prompts"].startswith("1 of 3 prompts are longer than 24 tokens")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "keeps none of the 5 prompts"),
        ("odd", r"row 0: odd in .*mine\.py must return true \(keep the prompt\) or false\. Got 1"),
        ("breaks", r"row 0: breaks in .*mine\.py failed on this row: KeyError: 'missing'"),
        ("other", r"data\.filter_function\.name: .* has no such function\. Got 'other'"),
    ],
)
def test_a_filter_that_gives_no_answer_is_an_error_with_its_place(tmp_path, tokenizer, name, said):
    with pytest.raises((DataError, ConfigError), match=said):
        filtered(tmp_path, tokenizer, name)


def test_if_all_prompts_are_too_long_nothing_is_left_and_that_is_an_error(tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r"all 2 prompts are longer than data\.max_prompt_length=5; the shortest has 22"
    ):
        dataset(tmp_path, tokenizer, asking("abc", "abcd"), max_prompt_length=5, filter_overlong_prompts=True)


def test_a_prompt_longer_than_allowed_is_refused_with_file_row_and_lengths(tmp_path, tokenizer):
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, tokenizer, asking("a", "b" * 30, "c" * 40), max_prompt_length=32)
    message = str(caught.value)
    assert f"{tmp_path}/train.parquet, row 1: 2 of 3 prompts" in message
    assert f"has {OVERHEAD + 30} tokens" in message and f"data.max_prompt_length={OVERHEAD + 40}" in message
    assert "data.truncation" in message and "data.filter_overlong_prompts=true" in message


@pytest.mark.parametrize(
    ("how", "expected"),
    [("left", "ant\n"), ("right", "<|im_start|>use"), ("middle", "<|im_start|>ut\n")],
)
def test_a_prompt_is_cut_where_it_is_told(tmp_path, tokenizer, how, expected):
    row = dataset(tmp_path, tokenizer, asking("hello"), max_prompt_length=4, truncation=how)[0]
    assert len(row["raw_prompt_ids"]) == 4 and tokenizer.decode(row["raw_prompt_ids"]) == expected


def test_an_odd_length_cut_in_the_middle_keeps_more_of_the_end(tmp_path, tokenizer):
    row = dataset(tmp_path, tokenizer, asking("hello"), max_prompt_length=3, truncation="middle")[0]
    assert tokenizer.decode(row["raw_prompt_ids"]) == "<|im_start|>t\n"


def test_several_processes_measure_the_same_lengths(tmp_path, tokenizer):
    rows = asking(*("x" * (i % 40) for i in range(1, 1300)))
    options = {"max_prompt_length": OVERHEAD + 20, "filter_overlong_prompts": True}
    one = dataset(tmp_path, tokenizer, rows, **options)
    two = dataset(tmp_path, tokenizer, rows, filter_overlong_prompts_workers=2, **options)
    assert len(one) == len(two) < 1299
    assert [one[i]["__row__"] for i in range(0, len(one), 97)] == [two[i]["__row__"] for i in range(0, len(two), 97)]


def test_a_number_of_samples_is_drawn_by_the_seed(tmp_path, tokenizer):
    found = dataset(tmp_path, tokenizer, 50, max_samples=5, shuffle=True, seed=3)
    again = dataset(tmp_path, tokenizer, 50, max_samples=5, shuffle=True, seed=3)
    first = dataset(tmp_path, tokenizer, 50, max_samples=5, shuffle=False)
    rows = [row["__row__"] for row in found]
    assert rows == [row["__row__"] for row in again] != [0, 1, 2, 3, 4] and len(set(rows)) == 5
    assert [row["__row__"] for row in first] == [0, 1, 2, 3, 4]
    assert found[1]["index"] == rows[1] and found.describe(1).endswith(f"row {rows[1]}")


def test_rows_of_several_files_are_numbered_through_and_traced_back(tmp_path, tokenizer):
    one, two = write_prompts(tmp_path / "a.parquet", 2), write_prompts(tmp_path / "b.jsonl", 2)
    found = RLHFDataset([one, two], tokenizer, DataConfig())
    assert [row["__row__"] for row in found] == [0, 1, 2, 3] and found[3]["index"] == 1
    assert found.source_of(3) == (str(two), 1)


def test_a_missing_prompt_column_lists_the_columns_and_the_near_one(tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r"no column 'prompt'; the file has: prompts, answer.*Set data\.prompt_key=prompts"
    ):
        dataset(tmp_path, tokenizer, [{"prompts": "a", "answer": "b"}])


def test_a_column_for_the_scorer_that_is_not_there_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"no column 'source'.*data\.reward_fn_key"):
        dataset(tmp_path, tokenizer, 1, reward_fn_key="source")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, {"prompt": None}, {"prompt": " "}], r"row 1: column 'prompt' is null \(2 such rows\)"),
        ([{"prompt": "a"}, {"prompt": " "}], "row 1: column 'prompt' is empty"),
        ([*asking("a"), {"prompt": []}], "row 1: column 'prompt' is empty"),
        ([*asking("a"), {"prompt": None}], "row 1: column 'prompt' is null"),
        ([{"prompt": 7}], "column 'prompt' holds int64.*Allowed: a list of"),
        (asking("a", None), r"row 1, column 'prompt': the content of message 0 \(user\) is not text"),
        ([{"prompt": [{"content": "a"}]}], "row 0, column 'prompt': message 0 has no role"),
    ],
)
def test_a_bad_prompt_is_named_with_its_row_before_anything_runs(tmp_path, tokenizer, rows, message):
    with pytest.raises(DataError, match=message):
        dataset(tmp_path, tokenizer, rows)


def test_a_reward_model_that_is_no_object_is_named_with_its_row(tmp_path, tokenizer):
    found = dataset(tmp_path, tokenizer, [{**asking("a")[0], "reward_model": "42"}])
    with pytest.raises(DataError, match=r"row 0, column 'reward_model': not an object\. Got '42'.*ground_truth"):
        found[0]


def test_what_the_template_refuses_is_named_with_its_row(tmp_path, family):
    rows = [asking("a")[0], {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}]
    with pytest.raises(DataError, match=r"train\.parquet, row 1: the chat template refuses.*must alternate"):
        dataset(tmp_path, family("gemma"), rows)


def test_images_are_refused_by_name_and_an_empty_column_is_not(tmp_path, tokenizer):
    rows = [{**row, "images": []} for row in asking("a", "b")]
    path = tmp_path / "a.parquet"
    kind = pa.list_(pa.struct([("bytes", pa.binary())]))
    empty = pa.table({"prompt": ["a", "b"], "images": pa.array([[], None], kind)})
    pq.write_table(empty, path)
    assert len(RLHFDataset(path, tokenizer, DataConfig())) == 2
    rows[1]["images"] = [{"bytes": "x"}]
    with pytest.raises(DataError, match=r"row 1: column 'images' has images, and the model reads only text"):
        dataset(tmp_path, tokenizer, rows)


def test_a_tokenizer_without_chat_template_says_what_to_set(tmp_path, tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ModelError, match="custom_chat_template"):
        dataset(tmp_path, bare, 1)


def test_an_unknown_truncation_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"data\.truncation: unknown truncation\. Got 'centre'"):
        RLHFDataset(write_prompts(tmp_path / "a.parquet", 1), tokenizer, {"truncation": "centre"})


def test_a_subclass_makes_prompts_from_other_columns(tmp_path, tokenizer):
    class Asking(RLHFDataset):
        def build_messages(self, row, item):
            return [{"role": "user", "content": f"What is {row['prompt']} in {row['unit']}?"}]

    path = write_prompts(tmp_path / "a.parquet", [{"prompt": "2", "unit": "cm"}])
    found = Asking(path, tokenizer, DataConfig(filter_overlong_prompts=True))
    assert found[0]["raw_prompt"][0]["content"] == "What is 2 in cm?" and found[0]["unit"] == "cm"


def test_a_subclass_may_choose_rows_of_the_table(tmp_path, tokenizer):
    class Even(RLHFDataset):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.dataframe = self.dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 0)

    found = Even(write_prompts(tmp_path / "a.parquet", 5), tokenizer, DataConfig())
    assert [row["index"] for row in found] == [0, 2, 4]


def test_loader_processes_give_the_rows_that_this_process_gives(tmp_path, tokenizer):
    found = dataset(tmp_path, tokenizer, 6)
    here, there = (StatefulLoader(found, 2, seed=1, num_workers=n) for n in (0, 1))
    for one, other in zip(here, there, strict=True):
        assert one["raw_prompt_ids"].tolist() == other["raw_prompt_ids"].tolist()


def test_rows_collate_and_the_dataset_travels_to_loader_processes(tmp_path, tokenizer):
    found = dataset(tmp_path, tokenizer, addition_rows(4))
    assert ForkingPickler.dumps(found)
    batch = collate_fn([found[i] for i in range(4)])
    assert batch["raw_prompt_ids"].shape == (4,) and batch["reward_model"][3] == {"style": "rule", "ground_truth": "6"}


def test_prompts_are_measured_with_the_schemas_of_the_tools_and_kept_without_them(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{class_name: examples.calculator.tool.CalculatorTool}]")
    plain = dataset(tmp_path, tokenizer, asking("abc"), max_prompt_length=OVERHEAD + 20)
    with pytest.raises(DataError, match=r"longer than data\.max_prompt_length"):
        dataset(tmp_path, tokenizer, asking("abc"), max_prompt_length=OVERHEAD + 20, tool_config_path=str(tools))
    with_tools = dataset(tmp_path, tokenizer, asking("abc"), max_prompt_length=2000, tool_config_path=str(tools))
    assert with_tools[0]["raw_prompt_ids"] == plain[0]["raw_prompt_ids"]


def test_a_null_in_json_text_reaches_the_tools_and_one_of_a_column_does_not(tmp_path, tokenizer):
    kwargs = {"calc": {"create_kwargs": {"x": None, "y": 1}}}
    base = {"prompt": [{"role": "user", "content": "hi"}], "data_source": "d", "reward_model": {"ground_truth": "1"}}
    for number, extra in enumerate((json.dumps({"tools_kwargs": kwargs}), {"tools_kwargs": json.dumps(kwargs)})):
        path = write_prompts(tmp_path / f"{number}.parquet", [{**base, "extra_info": extra}])
        given = RLHFDataset(path, tokenizer, {"max_prompt_length": 64, "cache_dir": str(tmp_path)})[0]["tools_kwargs"]
        assert given == kwargs
    path = write_prompts(tmp_path / "columns.parquet", [{**base, "extra_info": {"tools_kwargs": kwargs}}])
    data = RLHFDataset(path, tokenizer, {"max_prompt_length": 64, "cache_dir": str(tmp_path)})
    assert data[0]["tools_kwargs"] == {"calc": {"create_kwargs": {"y": 1}}}
