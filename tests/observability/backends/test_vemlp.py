"""The tracker of Volcengine's platform against a stand-in of the calls that it makes: no index in reach has it."""

from __future__ import annotations

import sys
import types

import pytest

from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.observability.backends.vemlp import VemlpTracker
from verl.observability.tracker import Sample


class Wandb(types.ModuleType):
    """The module logs and finishes by itself; `calls` has what it got."""

    def __init__(self):
        super().__init__("volcengine_ml_platform.wandb")
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options))

    def log(self, data, step):
        self.calls.append(("log", data, step))

    def finish(self, exit_code):
        self.calls.append(("finish", exit_code))

    class Table:
        def __init__(self, columns):
            self.columns, self.rows = columns, []

        def add_data(self, *row):
            self.rows.append(row)


@pytest.fixture
def platform(monkeypatch):
    module = types.ModuleType("volcengine_ml_platform")
    module.wandb, module.access = Wandb(), []
    module.init = lambda **access: module.access.append(access)
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform", module)
    monkeypatch.setitem(sys.modules, "volcengine_ml_platform.wandb", module.wandb)
    monkeypatch.setenv("VOLC_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("VOLC_SECRET_ACCESS_KEY", "word")
    monkeypatch.setenv("MLP_TRACKING_REGION", "cn-beijing")
    return module


def test_a_run_is_opened_with_the_keys_of_the_shell_and_gets_all_that_is_logged(platform):
    tracker = VemlpTracker("p", "e", {"reward": {"password": "hush"}})
    tracker.log({"x": 0.5, "text": "no"}, 2)
    tracker.log_samples("val", [Sample("q", "a", 1.0)], 2)
    tracker.finish(1)
    assert platform.access == [{"ak": "key", "sk": "word", "region": "cn-beijing"}]
    (begun, options), logged, (_, shown, _), ended = platform.wandb.calls
    assert (begun, options["project"], options["name"], options["sync_tensorboard"]) == ("init", "p", "e", True)
    assert "hush" not in str(options) and shown["val"].rows == [(2, "q", "a", 1.0, None)]
    assert (logged, ended) == (("log", {"x": 0.5}, 2), ("finish", 1))


@pytest.mark.parametrize("lacks, pictures", [("Table", 0), ("Image", 1)])
def test_a_module_without_tables_or_images_still_gets_the_metrics(platform, monkeypatch, lacks, pictures):
    reset_notices()
    if lacks == "Table":
        monkeypatch.delattr(Wandb, "Table")
    tracker = VemlpTracker("p", "e", {})
    for step in (1, 2):
        tracker.log({"x": 0.5}, step)
        tracker.log_samples("val", [Sample("q", "a", picture=b"png" * pictures or None)], step)
    assert platform.wandb.calls[1:] == [("log", {"x": 0.5}, 1), ("log", {"x": 0.5}, 2)]
    assert notices() == {"vemlp_wandb": f"its module has no {lacks}: these samples are not sent to it"}


def test_the_variables_that_the_shell_lacks_are_named(platform, monkeypatch):
    monkeypatch.delenv("VOLC_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="variables of the shell: VOLC_SECRET_ACCESS_KEY"):
        VemlpTracker("p", "e", {})
    assert not platform.access
