"""The swanlab tracker against a stand-in of the package's calls; against the real one: tests/engines_real."""

from __future__ import annotations

import sys
import types

import pytest
from PIL import Image

from verl.data.vision.images import thumbnails
from verl.errors import MissingDependencyError
from verl.metrics import notices
from verl.observability.backends.swanlab import SwanlabTracker
from verl.observability.tracker import Sample


class FakeTable:
    def add(self, headers, rows):
        self.columns, self.rows = headers, rows


@pytest.fixture
def fake(monkeypatch):
    """A stand-in whose servers cannot be reached: only ``offline`` opens."""
    monkeypatch.delenv("SWANLAB_MODE", raising=False)
    monkeypatch.delenv("SWANLAB_LOG_DIR", raising=False)
    module = types.ModuleType("swanlab")
    module.asked, module.logged, module.ended = [], [], []
    module.echarts = types.SimpleNamespace(Table=FakeTable)
    module.Image = lambda image, caption=None: (image.size, caption)

    def init(**asked):
        module.asked.append(asked)
        if asked.get("mode") != "offline":
            raise RuntimeError("no API key")
        return types.SimpleNamespace(
            log=lambda data, step: module.logged.append((data, step)),
            finish=lambda **state: module.ended.append(state),
        )

    module.init = init
    monkeypatch.setitem(sys.modules, "swanlab", module)
    yield module


def test_without_the_package_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[swanlab\]', or leave 'swanlab' out"):
        SwanlabTracker("p", "e")


def test_a_run_without_servers_is_tracked_offline_with_a_notice(fake):
    SwanlabTracker("p", "e", {"a": 1})
    assert [asked.get("mode") for asked in fake.asked] == [None, "offline"]
    assert fake.asked[1] == {"mode": "offline", "project": "p", "name": "e", "config": {"a": 1}}
    assert "no API key" in notices()["SWANLAB_MODE"] and "swanlab sync" in notices()["SWANLAB_MODE"]


def test_an_asked_mode_is_taken_as_it_is_and_its_failure_is_the_callers(fake, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "online")
    with pytest.raises(RuntimeError, match="no API key"):
        SwanlabTracker("p", "e")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", "~/logs")
    monkeypatch.setenv("HOME", "/home/me")
    SwanlabTracker("p", "e")
    assert fake.asked[-1]["log_dir"] == "/home/me/logs" and not notices()


def test_metrics_samples_and_the_way_a_run_ended_reach_swanlab(fake, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    tracker = SwanlabTracker("p", "e")
    tracker.log({"x": 0.5, "text": "no"}, 2)
    tracker.log_samples("val", [Sample("q", "a", 1.0, "g"), Sample("q", "\ud83d --x_x--0_0--")], 2)
    tracker.log_samples("val", [], 3)
    (first, _), (shown, step) = fake.logged
    assert (first, step) == ({"x": 0.5}, 2)
    assert shown["val"].columns == ["step", "prompt", "response", "score", "ground_truth"]
    assert shown["val"].rows == [[2, "q", "a", 1.0, "g"], [2, "q", "\\ud83d - -x_x- -0_0- -", "", ""]]
    seen = Sample("q", "a", 0.0, picture=thumbnails([Image.new("RGB", (56, 28))]))
    tracker.log_samples("val", [seen, Sample("q", "b")], 4)
    assert fake.logged[-1][0]["val/images"] == [((56, 28), "score 0")]
    tracker.finish()
    SwanlabTracker("p", "e").finish(1)
    assert fake.ended == [{}, {"state": "crashed", "error": "the run ended with exit code 1"}]
