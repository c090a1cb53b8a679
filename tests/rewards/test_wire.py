"""Values travel to another process and come back as what they were, as JSON and never as code."""

from __future__ import annotations

import numpy as np
import pytest

from verl.rewards import RewardResult, RewardSample, wire
from verl.rewards.invoke import raised
from verl.sandbox.frames import HEADER, Frames, pack


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1.5,
        "text \ud800 \x00 ü",
        [1, [2, {"a": None}]],
        (1, ("x",)),
        {"a": 1, "b": {"c": b"\x00\xff"}},
        {1: "int key", (1, 2): "tuple key"},
        {"__verl__": "a key of ours"},
        float("inf"),
    ],
)
def test_a_value_comes_back_as_it_was(value):
    assert [wire.from_plain(plain) for plain in Frames().feed(pack(wire.to_plain(value)))] == [value]


def test_arrays_come_back_as_arrays():
    back = wire.from_plain(wire.to_plain({"f": np.array([[1.0, 2.0]], dtype=np.float32), "s": np.int64(3)}))
    assert back["f"].dtype == np.float32 and back["f"].tolist() == [[1.0, 2.0]] and back["s"] == 3
    texts = wire.from_plain(wire.to_plain(np.array(["a", ["b"]], dtype=object)))
    assert texts.dtype == object and texts.tolist() == ["a", ["b"]]


def test_what_json_cannot_carry_is_refused_on_the_way_in_and_shown_as_text_on_the_way_out():
    with pytest.raises(wire.NotPlainError, match="function"):
        wire.pack_samples([RewardSample("d", "a", "t", {"f": print and (lambda: 0)})])
    (back,) = wire.unpack_results(wire.pack_results([RewardResult(1.0, {"set": {1}})]))
    assert back.extra == {"set": "{1}"}


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad"), ValueError), (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), Exception)]
)
def test_an_exception_comes_back_under_its_name_where_python_has_it(error, kind):
    failure = wire.unpack_failure(wire.pack_failure(raised(error)))
    assert isinstance(failure.exception, kind) and failure.message == raised(error).message


def test_messages_before_a_bad_one_are_read_and_an_incomplete_one_waits():
    good, collector = pack(["x" * 10]), Frames()
    collector.add(good[:-1])
    assert list(collector.messages()) == [] and not collector.is_empty
    collector.add(good[-1:] + good + HEADER.pack(1) + b"{" + good)
    messages = collector.messages()
    assert [next(messages), next(messages)] == [["x" * 10]] * 2
    with pytest.raises(ValueError):
        next(messages)
    assert list(collector.messages()) == [["x" * 10]] and collector.is_empty
