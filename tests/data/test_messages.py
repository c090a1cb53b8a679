"""Conversations from whatever a file held."""

from __future__ import annotations

import json

import numpy as np
import pytest

from verl.data.messages import as_messages, as_tools, prune
from verl.errors import DataError, NotBuiltError
from verl.metrics import notices


def where():
    return "a.parquet, row 3"


ASKED = [{"role": "user", "content": "hi"}]


def test_lists_arrays_and_json_text_give_the_same_messages():
    for value in (ASKED, np.array(ASKED, dtype=object), json.dumps(ASKED)):
        assert as_messages(value, where) == ASKED
    assert not notices()


def test_a_plain_string_is_one_user_message_with_a_notice():
    assert as_messages("hi", where) == ASKED
    assert "data.prompt_key" in notices()


def test_a_string_that_only_looks_like_json_is_a_prompt():
    assert as_messages("[{what is this?", where) == [{"role": "user", "content": "[{what is this?"}]


def test_nulls_that_parquet_filled_in_are_dropped():
    filled = [{"role": "user", "content": "hi", "tool_calls": None, "name": None}]
    assert as_messages(filled, where) == ASKED


def test_a_message_with_only_tool_calls_has_an_empty_content():
    call = {"function": {"name": "add", "arguments": '{"a":  1.50}'}, "id": None}
    found = as_messages([*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], where)[1]
    assert found == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a":  1.50}'}}],
    }


def test_a_null_of_json_text_stays_and_one_that_fills_a_column_goes():
    call = {"function": {"name": "add", "arguments": {"a": None, "b": [{"c": None}]}}}
    said = [*ASKED, {"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]
    assert as_messages(json.dumps(said), where)[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert as_messages(said, where, padded=False)[1]["tool_calls"] == [call]
    assert as_messages(said, where)[1]["tool_calls"] == [{"function": {"name": "add", "arguments": {"b": [{}]}}}]


def test_arguments_that_are_no_json_object_stay_as_they_are():
    call = {"name": "say", "arguments": "hello"}
    found = as_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], where)
    assert found[0]["tool_calls"] == [call]


def test_text_parts_are_joined_and_other_parts_are_refused_by_name():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_messages([{"role": "user", "content": parts}], where)[0]["content"] == "ab"
    with pytest.raises(NotBuiltError, match=r"row 3: message 0 has parts of type image"):
        as_messages([{"role": "user", "content": [*parts, {"type": "image"}]}], where)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "not a conversation"),
        (7, r"not a conversation\. Got 7"),
        ([], "the conversation is empty"),
        ("  ", "the prompt is an empty string"),
        (["hi"], "message 0 is not a"),
        ([{"content": "hi"}], "message 0 has no role"),
        ([{"role": "user"}], r"the content of message 0 \(user\) is not text"),
        ([{"role": "user", "content": 7}], "is not text"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_row(value, message):
    with pytest.raises(DataError, match=message) as caught:
        as_messages(value, where)
    assert caught.value.key == "a.parquet, row 3"


def test_tools_as_a_list_lose_the_nulls_of_other_rows_and_as_json_none():
    tool = {"name": "add", "parameters": {"a": {"type": "int", "default": None}, "b": None}}
    clean = [{"name": "add", "parameters": {"a": {"type": "int"}}}]
    assert as_tools([tool], where) == as_tools(np.array([tool]), where) == clean
    assert as_tools(json.dumps([tool]), where) == as_tools([tool], where, padded=False) == [tool]
    assert as_tools(None, where) is as_tools([], where) is as_tools("", where) is None


@pytest.mark.parametrize("value", ["{not json", '"add"', [7]])
def test_tools_that_are_no_schemas_are_refused(value):
    with pytest.raises(DataError, match="the tools are not"):
        as_tools(value, where)


def test_pruning_reaches_every_depth():
    assert prune({"a": None, "b": [{"c": None, "d": 0}], "e": ""}) == {"b": [{"d": 0}], "e": ""}


def test_the_text_of_a_python_list_is_told_to_be_no_json():
    text = str([{"role": "user", "content": "it's 2"}])
    with pytest.raises(DataError, match=r"row 3: the messages are the text of a Python list, not JSON.*json\.dumps"):
        as_messages(text, lambda: "row 3")
    assert as_messages("[{x}] is a set", lambda: "row 3")[0]["content"] == "[{x}] is a set"
