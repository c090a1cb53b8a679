"""copy_to_local: what is passed through, what is fetched once, and what is said when it cannot be."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from verl.errors import DataError, MissingDependencyError, ModelError
from verl.metrics import notices
from verl.storage import copy_to_local, fetch


def test_a_local_path_is_passed_through(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOT", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert copy_to_local("$ROOT/model") == str(tmp_path / "model")
    assert copy_to_local(f"file://{tmp_path}/model") == str(tmp_path / "model")


def test_a_missing_local_path_is_an_error_of_the_asked_class(tmp_path):
    with pytest.raises(DataError):
        copy_to_local(tmp_path / "none")
    with pytest.raises(ModelError, match=r"model\.path: no such file or folder"):
        copy_to_local(tmp_path / "none", error=ModelError, key="model.path")


def test_an_hdfs_file_is_fetched_once_and_again_on_request(tmp_path, fake_hdfs):
    source = fake_hdfs / "train.txt"
    source.write_text("one")
    first = copy_to_local("hdfs://cluster/train.txt", cache_dir=str(tmp_path / "cache"))
    source.write_text("two")
    second = copy_to_local("hdfs://cluster/train.txt", cache_dir=str(tmp_path / "cache"))
    assert first == second and Path(second).read_text() == "one"
    copy_to_local("hdfs://cluster/train.txt", cache_dir=str(tmp_path / "cache"), always_recopy=True)
    assert Path(second).read_text() == "two"


def test_a_fetch_that_fails_leaves_nothing_that_looks_complete(tmp_path, fake_hdfs):
    with pytest.raises(DataError):
        copy_to_local("hdfs://cluster/late.txt", cache_dir=str(tmp_path / "cache"))
    (fake_hdfs / "late.txt").write_text("now")
    path = copy_to_local("hdfs://cluster/late.txt", cache_dir=str(tmp_path / "cache"))
    assert Path(path).read_text() == "now"


def test_shared_memory_gets_a_copy_that_follows_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    staged = copy_to_local(model, use_shm=True)
    assert staged.startswith(str(tmp_path / "shm")) and Path(f"{staged}/config.json").read_text() == "{}"
    (model / "config.json").write_text('{"a": 1}')
    assert Path(f"{copy_to_local(model, use_shm=True)}/config.json").read_text() == '{"a": 1}'


def test_without_shared_memory_the_path_itself_is_used_with_a_notice(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SHARED_MEMORY", tmp_path / "none")
    (tmp_path / "a.txt").touch()
    assert copy_to_local(tmp_path / "a.txt", use_shm=True) == str(tmp_path / "a.txt")
    assert "use_shm" in notices()


def test_a_hub_name_that_cannot_be_reached_is_a_model_error():
    with pytest.raises(
        ModelError, match=r"not a local folder, and Hugging Face gave no model.*set the path to a folder"
    ):
        copy_to_local("nobody-at-all/not-a-model")


def test_modelscope_is_asked_when_its_variable_is_set(tmp_path, monkeypatch):
    asked = []
    package = ModuleType("modelscope")
    package.snapshot_download = lambda name: asked.append(name) or str(tmp_path)
    monkeypatch.setitem(sys.modules, "modelscope", package)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    assert copy_to_local("qwen/Qwen2.5-0.5B") == str(tmp_path) and asked == ["qwen/Qwen2.5-0.5B"]


def test_modelscope_that_is_not_installed_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    with pytest.raises(MissingDependencyError, match="pip install modelscope"):
        copy_to_local("qwen/Qwen2.5-0.5B")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A stand-in for /dev/shm in which everybody may write, and a file to stage there."""
    place = tmp_path / "shm"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr(fetch, "SHARED_MEMORY", place)
    (tmp_path / "rows.txt").write_text("mine")
    return place


def test_what_is_staged_in_shared_memory_lies_in_a_folder_that_only_its_user_can_enter(memory, tmp_path):
    staged = Path(copy_to_local(tmp_path / "rows.txt", use_shm=True))
    (folder,) = memory.iterdir()
    assert folder in staged.parents and str(os.geteuid()) in folder.name
    assert folder.stat().st_mode & 0o777 == 0o700 and folder.stat().st_uid == os.geteuid()


def a_link(place, elsewhere):
    elsewhere.mkdir(mode=0o700)
    place.symlink_to(elsewhere)


def a_folder_that_others_may_enter(place, elsewhere):
    place.mkdir()
    place.chmod(0o755)


def a_file(place, elsewhere):
    place.write_text("")


@pytest.mark.parametrize("made", [a_link, a_folder_that_others_may_enter, a_file])
def test_a_name_in_shared_memory_that_somebody_else_prepared_is_refused(memory, tmp_path, made):
    made(memory / f"verl-{os.geteuid()}", tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"not a folder of this user's alone.*Remove it") as caught:
        copy_to_local(tmp_path / "rows.txt", use_shm=True, key="data.train_files")
    assert caught.value.key == "data.train_files"


def test_a_folder_in_shared_memory_of_another_user_is_refused(memory, tmp_path, monkeypatch):
    (memory / f"verl-{os.geteuid() + 1}").mkdir(mode=0o700)
    monkeypatch.setattr(fetch.os, "geteuid", lambda before=os.geteuid(): before + 1)
    with pytest.raises(DataError, match="not a folder of this user's alone"):
        copy_to_local(tmp_path / "rows.txt", use_shm=True)
