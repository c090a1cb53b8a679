"""The console line is an interface (people parse it); the table is for eyes."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from verl.observability.backends.console import ConsoleTracker, step_line, step_table
from verl.observability.tracker import Sample


def rendered(table) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_line_has_five_digits_of_a_number_and_all_of_a_count():
    metrics = {"actor/pg_loss": 1 / 3, "actor/lr": 1e-6, "perf/total_num_tokens": 1234567}
    assert step_line(metrics, 7) == "step:7 - actor/pg_loss:0.33333 - actor/lr:1e-06 - perf/total_num_tokens:1234567"


@pytest.mark.parametrize(
    "console, terminal, table, line",
    [
        ("auto", True, True, False),
        ("auto", False, False, True),
        ("both", False, True, True),
        ("table", False, True, False),
        ("line", True, False, True),
    ],
)
def test_a_terminal_shows_a_table_and_a_pipe_a_line_unless_one_is_named(
    capsys, monkeypatch, console, terminal, table, line
):
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: terminal))
    ConsoleTracker("p", "e", {"trainer": {"console": console}}).log({"critic/score/mean": 0.5}, 3)
    out = capsys.readouterr().out
    assert ("reward" in out and "│" in out) == table and ("step:3 - critic/score/mean:0.5" in out) == line


def test_a_word_of_the_data_in_a_metrics_name_is_neither_markup_nor_a_control_character():
    name = "val-core/a[/bold]\x1b[2J\nstep:9 - b/acc"
    assert step_line({name: 0.5}, 3) == r"step:3 - val-core/a[/bold]\x1b[2J\nstep:9 - b/acc:0.5"
    text = rendered(step_table({name: 0.5}, "step 3"))
    assert r"a[/bold]\x1b[2J\nstep:9" in text


def test_the_line_is_printed_whole_even_where_it_is_longer_than_the_terminal(capsys):
    tracker = ConsoleTracker("p", "e")
    data = {f"area/some_metric_{i}": i / 7 for i in range(60)}
    tracker.log(data, 3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step:3 - ")]
    assert len(lines) == 1
    pairs = dict(re.findall(r"- ([^ :]+):([^ ]+)", lines[0]))
    assert {key: float(value) for key, value in pairs.items()} == pytest.approx(data, rel=1e-4)


def test_the_table_shows_reward_and_held_out_accuracy():
    text = rendered(step_table({"critic/score/mean": 0.51234, "val-core/add/acc/mean@1": 0.9, "x/y": 1.0}, "step 3/10"))
    assert "step 3/10" in text and "mean 0.5123" in text
    assert re.search(r"validation\s+│ add/acc/mean@1 0\.9 ", text)
    assert "x/y" not in text


def test_metrics_of_another_program_still_make_a_table():
    assert "test_score/add" in rendered(step_table({"test_score/add": 0.25}, "step 0"))


def test_the_title_tells_progress_and_time_left(capsys):
    tracker = ConsoleTracker("p", "e", {"trainer": {"console": "table"}})
    tracker.start(total_steps=12, first_step=2)
    tracker.log({"critic/score/mean": 0.5, "training/epoch": 1}, 3)
    tracker.finish()
    assert re.search(r"step 3/12 · epoch 1 · \d+:\d\d:\d\d left", capsys.readouterr().out)


def test_samples_are_shown_with_their_score(capsys):
    ConsoleTracker("p", "e").log_samples("validation", [Sample("1+1=", "2", 1.0, "2")], 5)
    out = capsys.readouterr().out
    assert "validation · step 5" in out and "1+1=  →  2   score 1   expected 2" in out
