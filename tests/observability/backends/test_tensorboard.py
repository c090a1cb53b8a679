"""TensorBoard can read back what was logged."""

from __future__ import annotations

import sys

import pytest

from verl.errors import MissingDependencyError
from verl.observability.backends.tensorboard import TensorboardTracker
from verl.observability.tracker import Sample


def test_scalars_and_completions_can_be_read_back(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    tracker = TensorboardTracker("p", "e")
    tracker.log({"critic/score/mean": 0.5, "note": "text"}, 1)
    tracker.log({"critic/score/mean": 0.75}, 2)
    tracker.log_samples("validation", [Sample("1+1=", "2", 1.0)], 2)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.5), (2, 0.75)]
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    assert "validation/0/text_summary" in events.Tags()["tensors"]


def test_the_folder_is_named_after_the_run_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    TensorboardTracker("p", "e").finish()
    assert list((tmp_path / "tensorboard_log" / "p" / "e").iterdir())


def test_without_the_package_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match="pip install tensorboard, or leave"):
        TensorboardTracker("p", "e")
