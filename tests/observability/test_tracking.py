"""Several trackers at once; a wrong name stops the run before it begins, a failing tracker never stops it later."""

from __future__ import annotations

import sys

import pytest

from tests.observability.spies import BrokenAtLog, BrokenAtStart, SpyTracker
from verl.errors import ConfigError, MissingDependencyError
from verl.metrics import notices, reset_notices
from verl.observability.tracking import Tracking, current_tracking
from verl.utils.tracking import Tracking as FacadeTracking

SPY = "tests.observability.spies:SpyTracker"
BROKEN_LOG = "tests.observability.spies:BrokenAtLog"
EXITING = "tests.observability.spies:ExitsAtLog"
BROKEN_START = "tests.observability.spies:BrokenAtStart"


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SpyTracker.calls.clear()
    reset_notices()


def test_metrics_reach_every_tracker_and_a_dotted_path_is_a_tracker():
    with Tracking("p", "e", ["file", SPY], {"a": 1}) as tracking:
        tracking.start(10)
        tracking.log({"x": 1.0}, 3)
    assert SpyTracker.calls == [
        ("open", "p", "e", {"a": 1}),
        ("start", 10, 0),
        ("log", {"x": 1.0}, 3),
        ("finish", 0),
    ]


def test_backend_selects_trackers_of_one_call(tmp_path):
    with Tracking("p", "e", ["file", SPY]) as tracking:
        tracking.log({"x": 1.0}, 1, backend="file")
        tracking.log({"x": 2.0}, 2, backend=[SPY])
    assert [c for c in SpyTracker.calls if c[0] == "log"] == [("log", {"x": 2.0}, 2)]
    assert (tmp_path / "p" / "e.jsonl").read_text().count("\n") == 1


def test_an_unknown_tracker_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"trainer.logger.*tensorbord.*Did you mean 'tensorboard'"):
        Tracking("p", "e", ["file", "tensorbord"])


PACKAGES = {
    "wandb": ("wandb", r"pip install -e '\.\[wandb\]'"),
    "trackio": ("trackio", "pip install trackio"),
    "clearml": ("clearml", "pip install clearml"),
    "vemlp_wandb": ("volcengine_ml_platform", "Install volcengine_ml_platform from Volcengine's index"),
    "rl_insight": ("rl_insight", "pip install rl-insight"),
    "prometheus": ("prometheus_client", "pip install prometheus-client"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_that_is_not_installed_names_the_command_that_installs_it(monkeypatch, name):
    package, words = PACKAGES[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=f"{name} is not installed.*{words}, or leave '{name}'"):
        Tracking("p", "e", ["console", name])


def test_a_tracker_that_fails_is_off_and_the_others_go_on():
    assert BrokenAtLog and BrokenAtStart
    with Tracking("p", "e", [BROKEN_START, BROKEN_LOG, SPY]) as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 2.0}, 2)
        assert list(tracking.logger) == [SPY]
    assert [c[2] for c in SpyTracker.calls if c[0] == "log"] == [1, 2]
    told = notices()
    assert "off from now on (OSError: disk full)" in told[f"trainer.logger={BROKEN_LOG}"]
    assert "off from now on (RuntimeError: no network)" in told[f"trainer.logger={BROKEN_START}"]


def test_a_tracker_that_wants_to_exit_is_off_and_the_run_continues():
    with Tracking("p", "e", [EXITING, SPY]) as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 2.0}, 2)
    assert [call[2] for call in SpyTracker.calls if call[0] == "log"] == [1, 2]
    assert "SystemExit: 1" in notices()[f"trainer.logger={EXITING}"]


def test_an_exception_in_the_run_finishes_the_trackers_with_code_1():
    with pytest.raises(KeyError), Tracking("p", "e", SPY):
        raise KeyError("x")
    assert SpyTracker.calls[-1] == ("finish", 1)


def test_finish_may_be_called_twice_and_the_facade_is_the_same_class():
    tracking = Tracking("p", "e", SPY)
    assert current_tracking() is tracking
    tracking.finish()
    tracking.finish(3)
    assert [c for c in SpyTracker.calls if c[0] == "finish"] == [("finish", 0)]
    assert FacadeTracking is Tracking and "console" in Tracking.supported_backend
