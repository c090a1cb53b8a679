"""TensorBoard can read back what was logged."""

from __future__ import annotations

import sys

import pytest
from PIL import Image

from verl.data.vision.images import thumbnails
from verl.errors import MissingDependencyError
from verl.observability.backends.tensorboard import TensorboardTracker
from verl.observability.tracker import Sample


def test_scalars_and_completions_can_be_read_back(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    tracker = TensorboardTracker("p", "e")
    tracker.log({"critic/score/mean": 0.5, "note": "text"}, 1)
    tracker.log({"critic/score/mean": 0.75}, 2)
    picture = thumbnails([Image.new("RGB", (56, 56), "red"), Image.new("RGB", (28, 56), "blue")])
    tracker.log_samples("validation", [Sample("1+1=", "2", 1.0), Sample("What is it?", "a disc", picture=picture)], 2)
    tracker.finish()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.5), (2, 0.75)]
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    assert "validation/0/text_summary" in events.Tags()["tensors"]
    assert events.Tags()["images"] == ["validation/1/images"]
    (image,) = events.Images("validation/1/images")
    assert (image.step, image.width, image.height) == (2, 84, 56)


def test_the_folder_is_named_after_the_run_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    for name in ("e", "e-2"):  # a second run that begins has a folder of its own
        tracker = TensorboardTracker("p", "e")
        tracker.start(10)
        tracker.finish()
        assert list((tmp_path / "tensorboard_log" / "p" / name).iterdir())


def test_without_the_package_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[tensorboard\]', or leave"):
        TensorboardTracker("p", "e")


def test_after_a_kill_a_resumed_run_has_every_step_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    killed = TensorboardTracker("p", "e")
    killed.start(10)
    for step in (1, 2, 3):
        killed.log({"loss": float(step)}, step)  # nothing is closed: the steps must be on the disk all the same
    resumed = TensorboardTracker("p", "e")
    resumed.start(10, first_step=1)
    for step in (2, 3, 4):
        resumed.log({"loss": 10.0 * step}, step)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]
