"""The list of runs below a folder, and the comparison of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.journal.ending import recorded_end
from verl.metrics import notices, reset_notices
from verl.runs import main

METRIC = "val-core/letters/mean@4"


def write(folder, rate, *scores):
    with recorded_end(folder, 3):
        (folder / "config.yaml").write_text(f"optim: {{lr: {rate}}}\nseed: 1\n")
        lines = [
            {"step": step, "data": {METRIC: score, "actor/lr": rate}} for step, score in enumerate(scores, start=1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def runs(tmp_path):
    write(tmp_path / "first", 0.5, 0.1, 0.7, 0.3)
    write(tmp_path / "deeper" / "second", 0.25, 0.2, None)
    (tmp_path / "first" / "global_step_3").mkdir()
    return tmp_path


def test_runs_are_listed_with_their_best_validation(runs, capsys):
    assert main([str(runs)]) == 0
    head, second, first = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [cell.strip() for cell in first if cell] == ["first", "complete", "3/3", f"{METRIC} 0.7 at step 2"]
    assert [cell.strip() for cell in second if cell] == ["deeper/second", "complete", "2/3", f"{METRIC} 0.2 at step 1"]
    assert head[0] == "run"


def test_two_runs_are_compared_by_settings_and_last_metrics(runs, capsys):
    assert main(["compare", str(runs / "first"), str(runs / "deeper" / "second")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["optim.lr", "0.5", "0.25"] in lines and ["actor/lr", "0.5", "0.25"] in lines
    assert [METRIC, "0.3", "0.2"] in lines and not any("seed" in line for line in lines)


def test_a_run_that_cannot_be_read_is_a_notice_and_the_others_are_listed(runs, capsys, monkeypatch):
    bad, locked = runs / "bad", runs / "locked"
    (bad / "metrics.jsonl").mkdir(parents=True)
    (bad / "config.yaml").write_text("seed: 1\n")
    locked.mkdir()
    listed = Path.iterdir

    def iterdir(folder):
        if folder == locked:  # root reads every folder: no mode refuses it here
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    reset_notices()
    assert main([str(runs)]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["run", "bad", "deeper/second", "first"]
    assert set(notices()) == {str(bad), str(locked)} and "metrics.jsonl" in notices()[str(bad)]


def test_a_folder_without_runs_is_an_empty_list_and_a_missing_one_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err
