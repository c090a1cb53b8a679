"""When an answer is the expected one, and what init's answers mean."""

from __future__ import annotations

import math

import pytest

from verl.sandbox import CallCase, Limits, Outcome, StdinCase, judge, same_text, same_value
from verl.sandbox.answers import to_outcome
from verl.sandbox.frames import Frames, pack


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2  \n3\n\n\n", "1 2\n3", True),
        ("1\r\n2\r\n", "1\n2", True),
        ("1 2", "1  2", False),
        ("1\n\n2", "1\n2", False),
        ("a", "A", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_text_is_compared_line_by_line(got: str, expected: str, same: bool):
    assert same_text(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        (1, 1, True),
        (1.0, 1, True),
        (True, 1, False),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (1.001, 1.0, False),
        ([1, [2]], (1, (2,)), True),
        ([1], [1, 2], False),
        ({"1": [2]}, {1: (2,)}, True),
        ({"1": 2}, {"1": 2, "2": 3}, False),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (10**400, 1.5, False),
        (10**400, 10**400, True),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
    ],
)
def test_values_are_compared_as_json_knows_them(got, expected, same: bool):
    assert same_value(got, expected) is same


@pytest.mark.parametrize("status", ["error", "timeout", "memory", "output", "crash"])
def test_a_program_that_did_not_end_well_has_its_status_as_verdict(status):
    outcome = Outcome(status, stdout="9")
    assert judge(StdinCase("", "9"), outcome).verdict == status


def answer(**given) -> dict:
    plain = {"stdout": "", "stderr": "", "report": "", "reason": "", "seconds": 0.1, "cpu_seconds": 0.1}
    return {**plain, "exit_code": None, "signal": None, **given}


@pytest.mark.parametrize(
    ("given", "status", "detail"),
    [
        ({"exit_code": 0}, "ok", ""),
        ({"exit_code": 2}, "error", "ended with exit code 2"),
        ({"signal": 11}, "crash", "killed by SIGSEGV"),
        ({"signal": 64}, "crash", "killed by SIGRTMAX"),
        ({"signal": 24}, "timeout", "stopped after its 5 s"),
        ({"signal": 9, "cpu_seconds": 6.1}, "timeout", "stopped after its 5 s"),
        ({"signal": 9}, "crash", "killed by SIGKILL"),
        ({"signal": 9, "reason": "timeout"}, "timeout", "stopped after its 5 s"),
        ({"signal": 9, "reason": "memory"}, "memory", "stopped because it used more than 512 MB of memory"),
        ({"signal": 9, "reason": "processes"}, "error", "stopped because it started more than 16 processes"),
        ({"signal": 9, "reason": "output"}, "output", "stopped because it wrote more than 64 KB"),
        ({"exit_code": 1, "report": '{"memory": true}\n'}, "memory", "it ran out of its 512 MB of memory"),
        ({"exit_code": 1, "report": '[1]\n"x"\n{\n'}, "error", "ended with exit code 1"),
        ({"exit_code": 0, "report": '{"memory": true}\n'}, "ok", ""),
    ],
)
def test_what_the_kernel_says_becomes_a_status_and_a_sentence(given: dict, status: str, detail: str):
    outcome = to_outcome(answer(**given), Limits())
    assert (outcome.status, outcome.detail) == (status, detail)


@pytest.mark.parametrize("report", ["", '{"value": 4}\n', '{"value": "{"}\n', '{"value": "' + "[" * 20_000 + '"}\n'])
def test_a_call_without_a_readable_value_is_an_error(report: str):
    outcome = to_outcome(answer(exit_code=0, report=report), Limits(), CallCase("f"))
    assert (outcome.status, outcome.detail) == ("error", "the program ended before f returned")


def test_what_a_model_is_shown_is_output_errors_and_the_reason():
    assert Outcome("ok", stdout="1\n").describe() == "1"
    assert Outcome(
        "error", stderr="Traceback\nValueError: x\n", exit_code=1, detail="ended with exit code 1"
    ).describe() == ("Traceback\nValueError: x")
    assert Outcome("error", exit_code=3, detail="ended with exit code 3").describe() == "ended with exit code 3"
    assert Outcome("timeout", stdout="1\n", detail="stopped after its 5 s").describe() == "1\nstopped after its 5 s"


def test_messages_arrive_whole_however_they_are_cut():
    data = pack({"a": "ü" * 10}) + pack([1, 2]) + pack(None)
    for size in (1, 3, 7, len(data)):
        frames, found = Frames(), []
        for start in range(0, len(data), size):
            found += frames.feed(data[start : start + size])
        assert found == [{"a": "ü" * 10}, [1, 2], None]


def test_messages_that_are_too_large_or_no_json_are_refused():
    with pytest.raises(ValueError, match="larger than 10"):
        Frames(max_size=10).feed(pack("x" * 20))
    with pytest.raises(ValueError):
        Frames().feed(b"\x00\x00\x00\x02{]")
    with pytest.raises(TypeError):
        pack(object())
