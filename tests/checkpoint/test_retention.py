from __future__ import annotations

import shutil

import pytest

from tests.checkpoint.builders import assert_holds, save
from verl.checkpoint import CheckpointWriter, find_checkpoint, list_checkpoints
from verl.checkpoint import retention as retention_module
from verl.errors import ConfigError
from verl.metrics import notices


def steps(root) -> list[int]:
    return sorted(int(p.name.split("_")[-1]) for p in root.glob("global_step_*"))


def test_the_newest_k_stay_also_across_restarts(tmp_path):
    for first in (1, 3, 5):
        with CheckpointWriter(tmp_path, keep={"actor": 2}) as writer:
            save(writer, first)
            save(writer, first + 1)
    assert steps(tmp_path) == [5, 6]


def test_without_a_limit_all_stay(tmp_path):
    with CheckpointWriter(tmp_path, keep={"actor": None}) as writer:
        for step in range(1, 5):
            save(writer, step)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_not_counted_and_the_sound_one_before_it_stays(tmp_path):
    with CheckpointWriter(tmp_path, keep={"actor": 1}) as writer:
        save(writer, 1)
        kept = shutil.copytree(tmp_path / "global_step_1", tmp_path / "copy")
        save(writer, 2)
        shutil.move(kept, tmp_path / "global_step_1")
        (tmp_path / "global_step_2" / "actor" / "optimizer.safetensors").write_bytes(b"")
        retention_module.prune_checkpoints(tmp_path, {"actor": 1})
    assert steps(tmp_path) == [1, 2]
    assert_holds(find_checkpoint(tmp_path), 1)


def test_roles_have_their_own_limits(tmp_path):
    with CheckpointWriter(tmp_path, keep={"actor": 1, "critic": 2}) as writer:
        for step in (1, 2, 3):
            save(writer, step, ("actor", "critic"))
    assert steps(tmp_path) == [2, 3]
    assert sorted(p.name for p in (tmp_path / "global_step_2").iterdir() if p.is_dir()) == ["critic"]
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_3"
    assert (
        list_checkpoints(tmp_path)[1].manifest.problem(tmp_path / "global_step_2") == "retention has deleted its actor"
    )


def test_a_part_without_a_limit_of_its_own_goes_with_the_roles(tmp_path):
    with CheckpointWriter(tmp_path, keep={"actor": 1, "critic": 1}) as writer:
        for step in (1, 2):
            save(writer, step, ("actor", "surplus"))
    assert steps(tmp_path) == [2]


def test_a_deletion_that_fails_is_told_and_tried_again(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path, keep={"actor": 1}) as writer:
        save(writer, 1)
        with monkeypatch.context() as patch:

            def refuse(*_args):
                raise PermissionError("not yours")

            patch.setattr(retention_module.os, "rename", refuse)
            retention_module.prune_checkpoints(tmp_path, {"actor": 1})
            writer.keep = {}
        save(writer, 2)
        with monkeypatch.context() as patch:
            patch.setattr(retention_module, "remove_tree", refuse)
            retention_module.prune_checkpoints(tmp_path, {"actor": 1})
        assert any("could not be deleted: not yours" in text for text in notices().values())
        retention_module.prune_checkpoints(tmp_path, {"actor": 1})
    assert steps(tmp_path) == [2]


def test_a_limit_of_zero_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"max_actor_ckpt_to_keep"):
        CheckpointWriter(tmp_path, keep={"actor": 0})
