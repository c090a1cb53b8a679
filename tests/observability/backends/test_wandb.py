"""The wandb tracker against a stand-in of the package's documented calls; against the real one: tests/engines_real."""

from __future__ import annotations

import sys
import types

import pytest
from PIL import Image

from verl.data.vision.images import thumbnails
from verl.errors import MissingDependencyError
from verl.observability.backends.wandb import WandbTracker
from verl.observability.tracker import Sample


class FakeRun:
    def __init__(self):
        self.logged, self.code = [], None

    def log(self, data, step):
        self.logged.append((data, step))

    def finish(self, exit_code):
        self.code = exit_code


class FakeTable:
    def __init__(self, columns):
        self.columns, self.rows = columns, []

    def add_data(self, *row):
        self.rows.append(row)


@pytest.fixture
def fake(monkeypatch):
    module = types.ModuleType("wandb")
    module.run, module.asked = FakeRun(), []
    module.Settings = lambda **kw: kw
    module.Table = FakeTable
    module.Image = lambda image, caption: (image.size, caption)
    module.init = lambda **kw: module.asked.append(kw) or module.run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_is_opened_with_names_configuration_and_proxy(fake):
    WandbTracker("p", "e", {"trainer": {"wandb_proxy": "http://proxy:1"}, "data": {"n": 1}})
    (asked,) = fake.asked
    assert (asked["project"], asked["name"], asked["config"]["data"]) == ("p", "e", {"n": 1})
    assert asked["settings"] == {"https_proxy": "http://proxy:1"}


def test_metrics_samples_and_the_exit_code_reach_the_run(fake):
    tracker = WandbTracker("p", "e", {})
    tracker.log({"x": 0.5, "text": "no"}, 2)
    tracker.log_samples("validation", [Sample("q", "a", 1.0, "g")], 2)
    tracker.finish(1)
    assert fake.run.logged[0] == ({"x": 0.5}, 2)
    assert fake.run.logged[1][0]["validation"].rows == [(2, "q", "a", 1.0, "g")]
    assert fake.run.code == 1


def test_images_of_a_sample_are_logged_with_its_answer_and_row(fake):
    tracker = WandbTracker("p", "e", {})
    strip = thumbnails([Image.new("RGB", (64, 32)), Image.new("RGB", (256, 64))])
    tracker.log_samples("validation", [Sample("r", "b"), Sample("q", "a", 0.5, picture=strip)], 2)
    logged = fake.run.logged[0][0]
    assert (
        logged["validation/images"] == [((64 + 128, 32), "row 1, score 0.5: a")] and len(logged["validation"].rows) == 2
    )


def test_without_the_package_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[wandb\]', or leave 'wandb' out"):
        WandbTracker("p", "e")
