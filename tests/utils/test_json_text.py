"""JSON from outside has a limit on its nesting: what can be read can be copied, rendered and written too."""

from __future__ import annotations

import json

import pytest

from verl.json_text import MAX_DEPTH, MESSAGE_DEPTH, leading_json, read_json


def nested(depth: int, opened: str = "[", closed: str = "]") -> str:
    return opened * depth + "1" + closed * depth


@pytest.mark.parametrize("opened, closed", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_a_text_that_is_nested_too_deeply_is_an_ordinary_mistake(opened, closed):
    per_piece = opened.count("[") + opened.count("{")
    for depth in (MAX_DEPTH // per_piece + 1, 500, 990, 3000, 200_000):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            read_json(nested(depth, opened, closed))
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            leading_json(nested(depth, opened, closed))
    text = nested(MAX_DEPTH // per_piece, opened, closed)
    assert read_json(text) == json.loads(text) == leading_json(text)[0]


def test_width_is_no_depth_and_brackets_in_texts_are_none():
    wide = json.dumps([[[number]] for number in range(1000)] + ["[" * 5000])
    assert read_json(wide) == json.loads(wide)
    assert read_json(wide.encode("utf-16")) == json.loads(wide)


def test_messages_between_our_own_processes_may_hold_such_values_inside_others():
    assert read_json(nested(MESSAGE_DEPTH), depth=MESSAGE_DEPTH) == json.loads(nested(MESSAGE_DEPTH))
    with pytest.raises(ValueError, match="nested more than 256 deep"):
        read_json(nested(MESSAGE_DEPTH + 1), depth=MESSAGE_DEPTH)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "-Infinity", "1e400", "-1e999"])
def test_strictly_there_are_no_numbers_but_finite_ones(text):
    with pytest.raises(ValueError, match=r"not JSON|too large"):
        read_json(text, strict=True)
    assert isinstance(read_json(f"[{text}]"), list)
    with pytest.raises(ValueError, match=r"not JSON|too large"):
        leading_json(text)


def test_an_integer_of_too_many_digits_is_an_ordinary_mistake():
    with pytest.raises(ValueError, match="digits"):
        read_json("9" * 5000)


def test_json_may_be_followed_by_anything_and_says_where_it_breaks():
    assert leading_json('  {"a": [1, 2.5]} and more', 1) == ({"a": [1, 2.5]}, 17)
    with pytest.raises(ValueError, match="after 6 characters"):
        leading_json('x {"a": }', 1)
