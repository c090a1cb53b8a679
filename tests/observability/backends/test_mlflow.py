"""Names and parameters of the mlflow tracker, and what it says without the package; with it: tests/engines_real."""

from __future__ import annotations

import sys

import pytest

from verl.errors import MissingDependencyError
from verl.observability.backends.mlflow import LONGEST_PARAM, MlflowTracker, flatten, plain_name
from verl.observability.tracker import MetricNames


def test_without_the_package_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[mlflow\]', or leave 'mlflow' out"):
        MlflowTracker("p", "e")


def test_a_metric_name_keeps_every_character_that_mlflow_takes():
    assert plain_name("val-core/gsm8k/acc/mean@8") == "val-core/gsm8k/acc/mean_at_8"
    assert plain_name("a.b:c d-e_f/g") == "a.b:c d-e_f/g"
    assert plain_name("rate (%) ü") == "rate ___ _"


def test_two_metrics_never_share_one_name():
    names = MetricNames(plain_name)
    assert [names.of(key) for key in ("a(b", "a)b", "a_b", "a(b")] == ["a_b", "a_b_2", "a_b_3", "a_b"]


def test_the_configuration_becomes_dotted_parameters_and_long_texts_are_cut():
    config = {"trainer": {"logger": ["console", "mlflow"], "nnodes": 1}, "kwargs": {}, "text": "x" * 7000, "none": None}
    found = dict(flatten(config))
    assert found["trainer.logger"] == "['console', 'mlflow']" and found["trainer.nnodes"] == "1"
    assert found["kwargs"] == "{}" and found["none"] == "None" and len(found["text"]) == LONGEST_PARAM
