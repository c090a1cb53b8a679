"""The trace of a run and its Gantt chart: two halves that overlap are seen as such, and idle seconds are right."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from verl.errors import DataError
from verl.journal import gantt
from verl.journal.file import NAME, Journal
from verl.journal.spans import Span, Spans, read_spans
from verl.json_text import read_json

OVERLAPPING = [
    Span("step", 1, "main", 0, 10), Span("gen", 1, "main", 0, 4), Span("reward", 1, "main", 4, 5),
    Span("gen", 2, "ahead", 5, 9), Span("wait_for_batch", 2, "main", 8, 9), Span("update_actor", 1, "main", 6, 8),
    Span("old_log_prob", 1, "main", 5, 6), Span("ref", 1, "main", 5.5, 6), Span("adv", 1, "main", 6, 6),
    Span("step", 2, "main", 10, 14), Span("gen", 3, "ahead", 9, 12), Span("update_actor", 2, "main", 10, 13),
]  # fmt: skip


def recorded(folder: Path, *of_before) -> tuple[Spans, Journal]:
    spans, journal = Spans(), Journal(folder, *of_before)
    journal.begin()
    spans.record_in(journal)
    return spans, journal


def test_idle_seconds_are_those_that_no_span_of_the_role_covers():
    rows = gantt.by_role(OVERLAPPING)
    assert list(rows) == ["sampling", "scoring", "log-probs", "training", "controller"], "waiting is no work"
    assert {role: gantt.busy_seconds(work) for role, work in rows.items()} == {
        "sampling": 11, "scoring": 1, "log-probs": 1, "training": 5, "controller": 0
    }  # fmt: skip
    lines = [line.split() for line in gantt.idle_table(OVERLAPPING).splitlines()]
    assert lines[1] == ["sampling", "11.000", "3.000", "21.4%"] and lines[4] == ["training", "5.000", "9.000", "64.3%"]
    second = gantt.of_steps(OVERLAPPING, 2, 2)
    assert gantt.busy_seconds(gantt.by_role(second)["sampling"]) == 2, "of step 3's sampling what is inside of step 2"


def test_nobody_is_idle_between_two_processes_of_a_resumed_run(tmp_path, capsys):
    """Each process has a step of 10 s, of which 8 are sampled; 100 s pass between the first and the second."""
    journal = Journal(tmp_path)
    journal.begin()
    for step, at in (1, 1000.0), (2, 1110.0):
        for stage, end in ("gen", 8.0), ("step", 10.0):
            journal.write({"event": "span", "step": step, "stage": stage, "thread": "main", "begin": at,
                           "end": at + end})  # fmt: skip
        journal = Journal(tmp_path, 1, journal.path.name, journal.position())
        journal.begin()
    spans = read_spans(tmp_path)
    assert [one.process for one in spans] == [0, 0, 1, 1]
    assert gantt.work_of_roles(spans) == {"sampling": pytest.approx((16, 4))}
    assert gantt.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[-3:] == ["all", "20.000", "seconds"]
    assert gantt.work_of_roles(gantt.of_steps(spans, 2, 2)) == {"sampling": pytest.approx((8, 2))}


def test_trace_events_have_a_row_per_thread_and_no_row_with_a_partial_overlap(tmp_path):
    lanes = [Span("gen", 3, "ahead", 11, 13), Span("gen", 3, "main", 20, 21, process=1)]
    trace = gantt.trace_events([*OVERLAPPING, *lanes])
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"}
    assert sorted(names.values()) == ["ahead", "ahead (2)", "main", "main"]
    bars = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    (trained,) = [one for one in bars if (one["name"], one["args"]["step"]) == ("update_actor", 2)]
    assert (trained["ts"], trained["dur"], trained["cat"], names[0, trained["tid"]]) == (10e6, 3e6, "training", "main")
    assert len(bars) == len(OVERLAPPING) + 2
    for one in bars:
        for other in (bar for bar in bars if (bar["pid"], bar["tid"]) == (one["pid"], one["tid"])):
            ends = one["ts"] + one["dur"], other["ts"] + other["dur"]
            assert not one["ts"] < other["ts"] < ends[0] < ends[1], "Perfetto would move the end of one of them"


def test_a_picture_shows_the_sampling_of_the_next_step_beside_the_training_of_this_one():
    picture = ElementTree.fromstring(gantt.draw_gantt(OVERLAPPING, "one step & off"))
    bars = {}
    for bar in picture.iter("{http://www.w3.org/2000/svg}rect"):
        title = bar.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            x = float(bar.get("x"))
            bars[title.text.partition(",")[0]] = (x, x + float(bar.get("width")), float(bar.get("y")))
    trained, sampled = bars["step 1: update_actor"], bars["step 2: gen"]
    assert sampled[0] < trained[0] < trained[1] < sampled[1] and sampled[2] < trained[2]
    assert len(bars) == 9 and not any(name.endswith("step") for name in bars)


def test_spans_of_two_threads_are_kept_apart_and_written_at_once(tmp_path, capsys):
    spans, met = recorded(tmp_path)[0], threading.Barrier(2, timeout=60)  # two threads of this test

    def ahead() -> None:
        with spans.span("gen", 2):
            met.wait()
            met.wait()

    other = threading.Thread(target=ahead, name="ahead")
    other.start()
    with spans.span("step", 1), spans.span("update_actor", 1):
        met.wait()
        assert sorted([one.stage for one in activity.stages] for activity in spans.open()) == [
            ["gen"], ["step", "update_actor"]
        ]  # fmt: skip
        met.wait()
    other.join()
    spans.flush()
    with (tmp_path / NAME).open("a") as file:
        file.write('{"step": 2, "sta')  # a kill amid a line
    assert {(one.stage, one.step, one.thread) for one in read_spans(tmp_path)} == {
        ("gen", 2, "ahead"), ("step", 1, "MainThread"), ("update_actor", 1, "MainThread")
    }  # fmt: skip
    assert spans.open() == []
    assert (
        gantt.main([str(tmp_path), "--steps", "1", "-o", str(tmp_path / "g.svg"), "--chrome", str(tmp_path / "g.json")])
        == 0
    )
    events = read_json((tmp_path / "g.json").read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"step", "update_actor", "thread_name"}
    assert "training" in capsys.readouterr().out and "<svg" in (tmp_path / "g.svg").read_text()
    nowhere = str(tmp_path / "no" / "g.svg")
    for words, said in (["--steps", "5"], "1 to 1"), (["--steps", "x"], "2-5"), (["-o", nowhere], nowhere):
        assert gantt.main([str(tmp_path), *words]) == 2
        assert said in capsys.readouterr().err


def test_groups_that_one_thread_samples_at_once_are_lanes_and_no_stages_of_that_thread(tmp_path):
    spans, _ = recorded(tmp_path)
    first, second = spans.on_lane("gen", 1, "group 0"), spans.on_lane("gen", 2, "group 1")
    first.__enter__()
    time.sleep(1e-4)  # times are written in microseconds
    second.__enter__()
    assert spans.open() == []
    first.__exit__(None, None, None)  # ends before the one that began later
    second.__exit__(None, None, None)
    spans.flush()
    one, other = read_spans(tmp_path)
    assert (one.thread, one.step, other.thread, other.step) == ("group 0", 1, "group 1", 2)
    assert one.begin <= other.begin <= one.end <= other.end


def test_a_trace_that_cannot_be_written_is_given_up_and_the_run_goes_on(tmp_path, caplog):
    spans, journal = recorded(tmp_path)
    with Path("/dev/full").open("wb", buffering=0) as full:
        journal._file = full
        for step in (1, 2):
            with spans.span("gen", step):
                pass
            spans.flush()
    assert caplog.text.count("cannot be written: No space left on device") == 1


def test_each_run_has_a_journal_of_its_own_and_the_newest_is_read(tmp_path):
    def run(step: int, *of_before) -> str:
        spans, journal = recorded(tmp_path, *of_before)
        with spans.span("gen", step):
            pass
        spans.flush()
        return journal.path.name

    assert [run(1), run(2), run(3, 2, "journal-2.jsonl")] == [NAME, "journal-2.jsonl", "journal-2.jsonl"]
    assert [one.step for one in read_spans(tmp_path)] == [2, 3], "also of a process whose steps were repeated"
    assert [one.step for one in read_spans(tmp_path / NAME)] == [1]


def test_a_trace_of_an_earlier_release_is_refused_by_its_kind(tmp_path):
    trace = tmp_path / "trace-2.jsonl"
    trace.write_text('{"stage": "gen", "step": 1, "thread": "main", "begin": 0.0, "end": 1.0}\n')
    with pytest.raises(DataError, match=r"a trace of an earlier release.*trace-2.jsonl.*journal.jsonl"):
        read_spans(trace)
