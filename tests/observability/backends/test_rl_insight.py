"""The RL-Insight tracker against a stand-in of the package's calls and of Ray."""

from __future__ import annotations

import sys
import types

import pytest

from verl.errors import ConfigError
from verl.observability.backends.rl_insight import SERVER, RlInsightTracker


@pytest.fixture
def insight(monkeypatch):
    module = types.ModuleType("rl_insight")
    module.calls = []
    module.init = lambda **names: module.calls.append(names)
    module.metric_gauge = lambda name, value, documentation: module.calls.append((name, value, documentation))
    module.finish = lambda: module.calls.append("finish")
    monkeypatch.setitem(sys.modules, "rl_insight", module)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setenv(SERVER, "http://127.0.0.1:1")
    return module


def test_each_metric_becomes_a_gauge_with_a_name_that_prometheus_takes(insight):
    tracker = RlInsightTracker("p", "e", {})
    tracker.log({"val-core/x/mean@8": 0.5, "text": "no"}, 3)
    tracker.finish()
    gauges = [("val_core_x_mean_8", 0.5, "val-core/x/mean@8"), ("step", 3, "step")]
    assert insight.calls == [{"project": "p", "experiment_name": "e"}, *gauges, "finish"]


def test_two_metrics_never_share_one_gauge(insight):
    tracker = RlInsightTracker("p", "e", {})
    for step in (1, 2):
        tracker.log({"a/b": 0.5, "a_b": 0.25}, step)
    gauges = [("a_b", 0.5, "a/b"), ("a_b_2", 0.25, "a_b")]
    assert insight.calls[1:] == [*gauges, ("step", 1, "step"), *gauges, ("step", 2, "step")]


@pytest.mark.parametrize("lacks, fix", [("ray", "trainer.runtime=ray"), ("server", SERVER)])
def test_what_it_needs_to_record_anything_is_named(insight, monkeypatch, lacks, fix):
    if lacks == "ray":
        monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(is_initialized=lambda: False))
    else:
        monkeypatch.delenv(SERVER)
    with pytest.raises(ConfigError, match=fix):
        RlInsightTracker("p", "e", {})
    assert not insight.calls
