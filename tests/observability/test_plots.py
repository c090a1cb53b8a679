"""A metrics file becomes a picture; what is wrong with a file is said."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from verl.errors import DataError
from verl.observability.plots import default_keys, main, plot_run, read_metrics, series


@pytest.fixture
def run(tmp_path):
    """Three steps of an RL run; accuracy at steps 0 and 2, one value lost to NaN."""
    steps = [
        {"step": 0, "data": {"val-core/add/acc/mean@1": 0.5, "val-aux/add/reward/mean@1": 0.5}},
        {"step": 1, "data": {"critic/score/mean": 0.25, "actor/pg_loss": None}},
        {"step": 2, "data": {"critic/score/mean": 0.75, "actor/pg_loss": 0.1, "val-core/add/acc/mean@1": 1.0}},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in steps))
    return path


def test_series_hold_the_steps_at_which_a_metric_was_logged(run):
    rows = read_metrics(run)
    assert series(rows, "critic/score/mean").values == (0.25, 0.75)
    assert series(rows, "val-core/add/acc/mean@1").steps == (0, 2)
    assert series(rows, "actor/pg_loss").steps == (2,)


def test_reward_and_held_out_accuracy_are_drawn_by_default(run):
    assert default_keys(read_metrics(run)) == ["critic/score/mean", "val-core/add/acc/mean@1"]
    assert default_keys([(1, {"train/loss": 2.0, "val/loss": 3.0, "train/lr": 0.1})]) == ["train/loss", "val/loss"]


def test_a_line_cut_off_at_the_end_is_left_out_and_one_in_the_middle_is_an_error(run):
    whole = run.read_text()
    run.write_text(whole + '{"step": 3, "da')
    assert [step for step, _ in read_metrics(run)] == [0, 1, 2]
    run.write_text("nonsense\n" + whole)
    with pytest.raises(DataError, match="line 1 is not a metrics line"):
        read_metrics(run)


def test_a_metric_that_was_never_logged_suggests_the_nearest(run):
    with pytest.raises(DataError, match="Did you mean 'critic/score/mean'"):
        series(read_metrics(run), "critic/scores/mean")


def test_the_picture_is_a_png(run, tmp_path):
    out = plot_run(run, tmp_path / "deep" / "curve.png", title="a run")
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and out.stat().st_size > 5000


def test_several_runs_are_drawn_into_one_picture_named_where_they_differ(run, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other" / "deep" / run.name
    other.parent.mkdir(parents=True)
    other.write_text(run.read_text())
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda axis, *values, label, **_: drawn.append(label))
    assert main([str(run), str(other), "-k", "critic/score/mean"]) == 0
    here = run.relative_to(tmp_path).with_suffix("")
    assert drawn == [f"{here}: critic/score/mean", f"other/deep/{run.stem}: critic/score/mean"]
    assert capsys.readouterr().out.strip() == str(run.with_name(f"{run.stem}-compared.png"))


def test_metrics_of_one_kind_share_an_axis_and_seconds_or_tokens_may_be_across(tmp_path, monkeypatch):
    steps = [
        {"step": 0, "data": {"val-core/a/acc/mean@1": 0.5}},
        {
            "step": 1,
            "data": {"actor/entropy": 2.0, "actor/lr": 0.1, "timing_s/step": 4.0, "perf/total_num_tokens": 100},
        },
        {"step": 2, "data": {"actor/entropy": 1.0, "timing_s/step": 2.0, "val-core/a/acc/mean@1": 1.0}},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in steps))
    drawn = {}

    def plot(axis, across, values, label, **_):
        drawn[label] = (id(axis), list(across), list(values))
        return [SimpleNamespace(get_color=lambda: "red")]

    monkeypatch.setattr("matplotlib.axes.Axes.plot", plot)
    keys = ["actor/entropy", "actor/lr", "val-core/a/acc/mean@1"]
    plot_run(path, tmp_path / "a.png", keys, x="seconds")
    assert drawn["actor/entropy"][1:] == ([4.0, 6.0], [2.0, 1.0])
    assert drawn["val-core/a/acc/mean@1"][1:] == ([0.0, 6.0], [0.5, 1.0])
    assert len({axis for axis, _, _ in drawn.values()}) == 3
    plot_run(path, tmp_path / "a.png", keys, x="tokens", smooth=0.5)
    assert drawn["actor/entropy"][1] == [100.0, 100.0]
    assert drawn["actor/entropy"][2] == [2.0, pytest.approx(4 / 3)]  # (0.25 x 2 + 0.5 x 1) / 0.75
    path.write_text(json.dumps({"step": 1, "data": {"x": 1.0}}) + "\n")
    with pytest.raises(DataError, match="the run logged no tokens"):
        plot_run(path, tmp_path / "a.png", ["x"], x="tokens")


@pytest.mark.parametrize("weight", ["1", "-0.1", "much"])
def test_a_weight_that_is_none_is_refused(run, capsys, weight):
    with pytest.raises(SystemExit) as left:
        main([str(run), "--smooth", weight])
    assert left.value.code == 2 and "--smooth" in capsys.readouterr().err


def test_a_picture_in_the_place_of_a_second_run_is_told_how_to_be_named(run, capsys):
    assert main([str(run), "curve.png"]) == 2
    assert "this is no metrics file. Got 'curve.png'. Write -o curve.png" in capsys.readouterr().err


def test_the_command_writes_beside_the_run_and_reports_a_missing_file(run, capsys):
    assert main([str(run)]) == 0
    assert run.with_suffix(".png").exists()
    assert main([str(run.with_name("other.jsonl"))]) == 2
    assert "no such metrics file" in capsys.readouterr().err
