"""Completions as people and scripts read them."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from tests.harness.programs import python
from tests.harness.runs import records
from tests.observability.spies import SpyTracker
from verl.data.sample_texts import turns_of
from verl.errors import DataError, printable
from verl.json_text import read_json
from verl.metrics import notice
from verl.observability.samples import Sample, dump_generations, sample_panel, shorten
from verl.observability.tracking import Tracking
from verl.utils.tracking import ValidationGenerationsLogger

SPY = "tests.observability.spies:SpyTracker"


def test_a_dump_has_one_line_per_sample_with_every_extra_key(tmp_path):
    path = dump_generations(
        tmp_path / "new" / "folder", 7, ["1+1=", "2+2="], ["2", "5"], ["2", "4"], [1.0, 0.0],
        {"acc": [True, False], "length": np.array([1, 1])},
    )  # fmt: skip
    assert path == tmp_path / "new" / "folder" / "7.jsonl"
    rows = records(path)
    assert rows[1] == {
        "input": "2+2=", "output": "5", "gts": "4", "score": 0.0, "step": 7, "acc": False, "length": 1,
    }  # fmt: skip
    assert [p.name for p in path.parent.iterdir()] == ["7.jsonl"]


def test_numbers_that_json_does_not_have_are_null_in_a_dump(tmp_path):
    extra = {"loss": [math.inf, {"a": [math.nan, 1]}], "norm": [np.float32("nan"), np.array([math.nan, 2])]}
    path = dump_generations(tmp_path, 1, ["a", "b"], ["c", "d"], [None, None], [math.nan, 1.0], extra)
    first, second = (read_json(line, strict=True) for line in path.read_text().splitlines())
    assert (first["score"], first["loss"], first["norm"]) == (None, None, None)
    assert (second["loss"], second["norm"]) == ({"a": [None, 1]}, [None, 2.0])


def test_a_dump_refuses_columns_of_different_length(tmp_path):
    with pytest.raises(DataError, match=r"one length.*'acc': 1"):
        dump_generations(tmp_path, 1, ["a", "b"], ["c", "d"], [None, None], [0.0, 1.0], {"acc": [1]})
    assert not list(tmp_path.glob("*.jsonl"))


def test_the_panel_shows_score_and_expected_answer_and_takes_brackets_literally():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(sample_panel([Sample("12+30=", "[bold]42[/]", 1.0, "42")], "validation"))
    text = console.export_text()
    assert "12+30=  →  [bold]42[/]   score 1   expected 42" in text and "validation" in text
    console.print(sample_panel([Sample("system\nuser\n1+1=\nassistant", "2", question="1+1=")], "validation"))
    text = console.export_text()
    assert "1+1=  →  2" in text and "user" not in text


def test_the_panel_says_who_speaks_where_several_do():
    console = Console(width=100, record=True, file=io.StringIO())
    record = [
        {"role": "user", "text": "What is 2 * 21?", "tokens": 9, "mask": 0},
        {"role": "assistant", "text": "I ask [calc].", "tokens": 4, "mask": 1},
        {"role": "tool", "calls": [{"name": "calc", "answer": "42"}, {"name": "date", "answer": "today"}]},
        {"role": "assistant", "text": "42", "tokens": 1, "mask": 1},
    ]
    turns = turns_of(record)
    assert turns == [("assistant", "I ask [calc]."), ("tool", "calc: 42\ndate: today"), ("assistant", "42")]
    console.print(sample_panel([Sample("What is 2 * 21?", "I ask [calc].4242", 1.0, "42", turns=turns)], "validation"))
    lines = [line.strip("│ ") for line in console.export_text().splitlines()]
    assert lines[1:-1] == [
        "What is 2 * 21?",
        "assistant  I ask [calc].",
        "tool  calc: 42",
        "date: today",
        "assistant  42   score 1   expected 42",
    ]


def test_a_row_of_one_answer_has_no_turns():
    assert turns_of(None) == turns_of([]) == turns_of([{"role": "assistant", "text": "42"}]) == []


def test_a_long_text_keeps_its_beginning_and_its_end():
    short = shorten("a" * 500 + "b" * 500, limit=100)
    assert short.startswith("a" * 50) and short.endswith("b" * 50) and "900 characters" in short
    assert shorten("abc") == "abc"


HOSTILE = "a\x1b[2J\x9b31m\r\x08\x07\x00\u202eb\u2028\ud800\n\tc"
SHOWN = r"a\x1b[2J\x9b31m\r\x08\x07\x00\u202eb\u2028\ud800" + "\n\tc"


def test_what_a_model_says_cannot_steer_the_terminal(capsys):
    assert printable(HOSTILE) == SHOWN and printable("Grüße 北京 🙂\n") == "Grüße 北京 🙂\n"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(sample_panel([Sample(HOSTILE, HOSTILE, 1.0, HOSTILE)], "validation"))
    text = console.export_text()
    assert text.count(r"\x1b[2J") == 3 and not set(text) & set("\x1b\x9b\r\x08\x07\x00\u202e\ud800")
    assert str(DataError(HOSTILE, key="row\x1b")) == f"row\\x1b: {SHOWN}"


def test_notices_and_logs_of_any_package_are_escaped(caplog, capfd):
    notice("tool x", HOSTILE)
    assert caplog.records[-1].getMessage() == f"tool x: {SHOWN}"
    code = "import logging; from verl.metrics import start_logging; start_logging(); "
    code += r"logging.getLogger('other').warning('%s of %d', 'a\x1b[2Jb', 3)"
    assert python("-c", code).stderr == r"a\x1b[2Jb of 3" + "\n"


def test_half_a_letter_in_a_call_does_not_stop_the_dump(tmp_path):
    columns = {"trajectory": [[{"arguments": {"text": "a\ud800"}}]]}
    path = dump_generations(tmp_path, 1, ["q"], ["a\ud800"], [None], [0.0], columns)
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["output"] == "a\ud800" and row["trajectory"][0]["arguments"] == {"text": "a\ud800"}


def test_the_generations_logger_reaches_the_open_tracking():
    SpyTracker.calls.clear()
    with Tracking("p", "e", [SPY]) as tracking:
        ValidationGenerationsLogger("p", "e").log([SPY], [("q", "a", 0.5)], 4)
        ValidationGenerationsLogger().log(tracking, [("q", "b", 1)], 5)
    sent = [call[2][0] for call in SpyTracker.calls if call[0] == "samples"]
    assert sent == [Sample("q", "a", 0.5), Sample("q", "b", 1.0)]
