"""The command that shows and changes the replicas of a run, and which runs have replicas that come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from verl.config import elastic, load_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.single_controller.ray import unit
from verl.trainer.replicas import __main__ as command
from verl.trainer.replicas import files

RUN = {
    "controller": os.getpid(),
    "node": os.uname().nodename,
    "replaced": 1,
    "allowed": 3,
    "said": "A replica could not join: no room",
    "replicas": [{"name": "replica 2", "state": "serving", "processes": [7], "node": "10.0.0.1"}],
}


def test_the_command_shows_the_replicas_of_a_run_and_asks_for_another_number_of_them(tmp_path, capsys):
    files.write_seen(tmp_path, RUN)
    assert command.main([str(tmp_path)]) == 0 and files.take_wanted(tmp_path) is None
    assert capsys.readouterr().out == (
        "replica 2  serving  processes [7] on 10.0.0.1\n1 of 3 replacements used. A replica could not join: no room\n"
    )
    assert command.main([str(tmp_path), "--count", "5"]) == 0
    assert files.take_wanted(tmp_path) == 5 and files.take_wanted(tmp_path) is None
    assert command.main([str(tmp_path), "--count", "0"]) == 2
    assert "error: --count: no number of replicas. Got 0. Allowed: 1 to 4096." in capsys.readouterr().err
    files.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_over_or_has_fixed_replicas_is_no_run_whose_replicas_can_be_changed(tmp_path, capsys):
    with subprocess.Popen(["true"]) as over:
        over.wait()
    for content in (None, json.dumps({**RUN, "controller": over.pid})):
        if content is not None:
            (tmp_path / files.SEEN).write_text(content)
        assert command.main([str(tmp_path), "--count", "2"]) == 2
        assert "no run is under way here whose replicas come and go" in capsys.readouterr().err
        assert not (tmp_path / files.WANTED).exists()


@pytest.mark.parametrize(
    "content", ["[]", "no JSON", json.dumps({**RUN, "replicas": [3]}), json.dumps({**RUN, "replicas": [{}]})]
)
def test_a_file_of_replicas_in_another_form_is_named(tmp_path, capsys, content):
    (tmp_path / files.SEEN).write_text(content)
    assert command.main([str(tmp_path), "--count", "2"]) == 2
    assert "replicas.json holds something else than a run writes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[3]", '{"count": "3"}', '{"count": true}', '{"count": 0}', '{"count": 1e9}'])
def test_a_file_that_asks_for_no_number_is_refused_once_and_gone(tmp_path, text):
    (tmp_path / files.WANTED).write_text(text)
    with pytest.raises(ConfigError, match=r"replicas_wanted\.json holds no number of replicas"):
        files.take_wanted(tmp_path)
    assert files.take_wanted(tmp_path) is None


OWN_POOL = (
    "trainer.runtime=ray",
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
)


def configured(*changes: str):
    return load_config("ppo_trainer", ["data.train_files=x.parquet", "actor_rollout_ref.model.path=m", *changes])


@pytest.fixture
def no_files(monkeypatch):
    """Only the rules about replicas, whatever this machine has."""
    monkeypatch.setattr("verl.config.validate.validate", lambda cfg, served=False: None)
    yield


@pytest.mark.usefixtures("no_files")
def test_replicas_come_and_go_in_a_pool_of_their_own_and_elsewhere_a_notice_says_why_not():
    allowed = "actor_rollout_ref.rollout.max_replacements=2"
    own = configured(*OWN_POOL, allowed)
    assert elastic.is_elastic(own) and not elastic.problems(own)
    assert not elastic.is_elastic(configured(*OWN_POOL))
    elastic.tell(own)
    assert not notices().get(elastic.KEY)
    for changes, why in (
        ((), "the samplers share the trainers' processes"),
        (
            ("actor_rollout_ref.rollout.name=server", "actor_rollout_ref.rollout.server.url=http://127.0.0.1:1"),
            "servers",
        ),
    ):
        reset_notices()
        here = configured(*changes, allowed)
        elastic.tell(here)
        assert not elastic.is_elastic(here) and why in notices()[elastic.KEY]


@pytest.mark.usefixtures("no_files")
def test_a_pool_that_samplers_share_with_a_model_is_refused_and_so_is_a_negative_number():
    pool = "trainer.resource_pools={apart:{roles:[rollout,rm],processes:[2]}}"
    ours = configured(pool, "actor_rollout_ref.rollout.max_replacements=2")
    (error,) = elastic.problems(ours)
    assert error.key == elastic.KEY and "replaced together with rm, which share its process" in str(error)
    (error,) = elastic.problems(configured("actor_rollout_ref.rollout.max_replacements=-1"))
    assert "Allowed: 0 or more" in str(error)


def test_only_a_process_that_still_goes_by_its_title_is_ended():
    waits = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "up\n"
        unit.end_process(other.pid, "ray::ReplicaWorker")
        assert other.poll() is None
        unit.end_process(other.pid, sys.executable)
        assert other.wait() == -9
