"""Copies of checkpoints elsewhere: complete or not found, made in the background, never too late for a deletion."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace

import pytest

from tests.checkpoint.builders import assert_holds, save
from verl.checkpoint import BackgroundCopies, CheckpointWriter, RemoteCheckpoints, find_or_fetch
from verl.checkpoint.files import FileRecord
from verl.checkpoint.manifest import Manifest
from verl.config import SFTRunConfig
from verl.errors import CheckpointError, DataError
from verl.metrics import notices


@pytest.fixture
def places(tmp_path):
    """The run folder, and a folder that stands for a remote one."""
    return tmp_path / "run", tmp_path / "remote"


def remote(place) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{place}")


def writer(places, **more) -> CheckpointWriter:
    return CheckpointWriter(places[0], copies=BackgroundCopies(remote(places[1])), **more)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


def test_a_copy_is_the_checkpoint_and_is_fetched_where_the_local_one_is_gone(places):
    here, there = places
    with writer(places) as first:
        save(first, 1)
        save(first, 2)
    assert_holds(there / "global_step_2", 2)
    assert (there / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert find_or_fetch(here, remote=remote(there)) == here / "global_step_2"
    shutil.rmtree(here)
    assert find_or_fetch(here, "disable", remote=remote(there)) is None
    found = find_or_fetch(here, remote=remote(there))
    assert found == here / "global_step_2" and names(here) == ["global_step_2"]
    assert_holds(found, 2)
    shutil.rmtree(here)
    assert_holds(find_or_fetch(here, "resume_path", f"file://{there}/global_step_1"), 1)


def test_a_fetched_run_goes_on_counting_and_the_newer_of_two_places_is_taken(places):
    here, there = places
    with writer(places) as first:
        save(first, 1)
        save(first, 2)
    old = shutil.copytree(here / "global_step_1", places[0].parent / "old")
    shutil.rmtree(here)
    with writer(places) as again:
        save(again, 1)  # of a run that began anew: what it saves is newer than step 2
    assert_holds(find_or_fetch(here, remote=remote(there)), 1)
    shutil.rmtree(here)
    shutil.copytree(old, here / "global_step_1")  # an old disk
    newest = find_or_fetch(here, remote=remote(there))
    assert newest == here / "global_step_1"
    assert (newest / "manifest.json").read_text() == (there / "global_step_1" / "manifest.json").read_text()


@pytest.mark.parametrize("damage", ["manifest.json", "actor/optimizer.safetensors"])
def test_an_unfinished_or_damaged_copy_is_told_and_the_one_before_is_taken(places, damage):
    here, there = places
    with writer(places) as first:
        save(first, 1)
        save(first, 2)
    shutil.rmtree(here)
    (there / "global_step_2" / damage).write_text("{}")
    assert_holds(find_or_fetch(here, remote=remote(there)), 1)
    assert "it is not used" in notices()[f"checkpoint file://{there}/global_step_2"]
    (there / "global_step_1" / "manifest.json").unlink()
    shutil.rmtree(here)
    assert find_or_fetch(here, remote=remote(there)) is None
    assert names(here) == []


def test_nothing_is_deleted_or_replaced_before_its_copy_is_complete(places):
    here, there = places
    goes, order = threading.Event(), []
    copies = BackgroundCopies(remote(there))
    put = copies.remote.place.put

    def slow(local, path):
        assert goes.wait(30) and local.is_file()
        order.append(path)
        put(local, path)

    copies.remote.place.put = slow
    kept = CheckpointWriter(here, copies=copies, keep={"actor": 1})
    for step in (1, 2, 3):
        save(kept, step)
    assert names(here) == ["global_step_1", "global_step_2", "global_step_3"]  # retention waits, the run does not
    goes.set()
    kept.close()
    assert names(here) == ["global_step_3"] and names(there) == ["global_step_1", "global_step_2", "global_step_3"]
    for step in (1, 2, 3):
        assert_holds(there / f"global_step_{step}", step)
        of_step = [path for path in order if path.startswith(f"global_step_{step}/")]
        assert of_step[-1] == f"global_step_{step}/manifest.json"


def test_a_copy_that_fails_is_tried_again_and_its_loss_is_told_at_the_end(places, monkeypatch):
    here, there = places
    copies = BackgroundCopies(remote(there))
    put, failing = copies.remote.place.put, [True]

    def broken(local, path):
        if failing[0]:
            raise DataError("no route to host")
        put(local, path)

    copies.remote.place.put = broken
    run = CheckpointWriter(here, copies=copies, keep={"actor": 1})
    save(run, 1)
    copies.finish(here / "global_step_0")  # of no checkpoint: waits for nothing
    with pytest.raises(CheckpointError, match=r"global_step_1.*no route to host.*Start the run again"):
        run.close()
    assert "tried again after the next save" in notices()[f"copy of {here / 'global_step_1'}"]
    failing[0] = False
    with CheckpointWriter(here, copies=copies) as again:
        copies.catch_up(here)
        save(again, 2)
    assert names(there) == ["global_step_1", "global_step_2"]


def test_a_place_without_access_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("in the way")
    remote(tmp_path / "there").check()
    assert list((tmp_path / "there").iterdir()) == []
    with pytest.raises(CheckpointError, match=r"trainer\.default_hdfs_dir: the remote folder cannot be written"):
        remote(tmp_path / "file" / "run").check()
    with pytest.raises(CheckpointError, match=r"trainer\.default_hdfs_dir: the remote folder cannot be used.*tape"):
        RemoteCheckpoints("tape://archive")
    with pytest.raises(CheckpointError, match=r"Allowed: \.\.\./global_step_N"):
        find_or_fetch(tmp_path, "resume_path", "s3://bucket/run/newest")


def test_two_runs_cannot_copy_into_one_folder(places):
    first, second = (RemoteCheckpoints(f"file://{places[1]}", run=f"math/{name}") for name in ("first", "second"))
    first.check()
    second.check()  # nothing is there yet
    with CheckpointWriter(places[0], copies=BackgroundCopies(first)) as run:
        save(run, 1)
    first.check()
    remote(places[1]).check()  # a run that saves nothing may read what is there
    said = r"has the checkpoints of the run 'math/first', and 'math/second' would replace.*remote/math/second"
    with pytest.raises(CheckpointError, match=said):
        second.check()
    with_url = SFTRunConfig(default_hdfs_dir=second.place.url, project_name="math", experiment_name="second")
    saving = replace(with_url, save_freq="after_each_epoch", remote_timeout=7.0)
    reads, saves = RemoteCheckpoints.of(with_url), RemoteCheckpoints.of(saving)
    assert (reads.run, saves.run, saves.place.seconds) == (None, "math/second", 7.0)
    with pytest.raises(CheckpointError, match=said):  # of two runs that began at once
        second.copy(places[0] / "global_step_1")


def test_a_manifest_elsewhere_cannot_lead_out_of_its_folder(places):
    """Whoever may write there could otherwise write any file of the user's."""
    here, there = places
    (there / "global_step_1").mkdir(parents=True)
    (there / "escaped").write_text("x")
    for files, parts in (({"../escaped": FileRecord.of(there / "escaped")}, ("actor",)), ({}, ("../actor",))):
        Manifest(1, 1, parts, files).write(there / "global_step_1")
        assert find_or_fetch(here, remote=remote(there)) is None
        url = f"file://{there}/global_step_1"
        with pytest.raises(CheckpointError, match=rf"its manifest\.json is damaged. Got '{url}'"):
            find_or_fetch(here, "resume_path", url)
    assert not here.exists()


def test_a_checkpoint_of_another_run_does_not_replace_the_one_of_this_run(places):
    here, there = places
    with CheckpointWriter(there) as other:
        save(other, 1)
    with CheckpointWriter(here) as own:
        save(own, 2)
        save(own, 1)
    with pytest.raises(
        CheckpointError, match=r"trainer\.resume_from_path: .*would be replaced.*move .*global_step_1 away"
    ):
        find_or_fetch(here, "resume_path", f"file://{there}/global_step_1")
    assert Manifest.read(here / "global_step_1").sequence == 2
    shutil.rmtree(there)
    shutil.copytree(here, there)
    inode = (here / "global_step_1").stat().st_ino
    assert find_or_fetch(here, "resume_path", f"file://{there}/global_step_1") == here / "global_step_1"
    assert (here / "global_step_1").stat().st_ino == inode, "what is there already is not copied again"
