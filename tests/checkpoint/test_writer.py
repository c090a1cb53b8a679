from __future__ import annotations

import errno
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.builders import assert_holds, save, state, write_hf
from verl.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    EngineState,
    find_checkpoint,
    list_checkpoints,
    write_part,
)
from verl.checkpoint import stream as file_stream
from verl.errors import CheckpointError, ConfigError
from verl.metrics import notices


def names(folder) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_step_folder_has_the_documented_layout(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        folder = save(writer, 4, ("actor", "critic"))
    role = {"huggingface/config.json", "huggingface/model.safetensors", "optimizer.safetensors"}
    role |= {"extra.safetensors", "extra.json"}
    expected = {f"{part}/{name}" for part in ("actor", "critic") for name in role}
    assert folder == tmp_path / "global_step_4"
    assert names(folder) == expected | {"trainer.json", "manifest.json"}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4\n"
    assert_holds(folder, 4)
    assert_holds(folder, 4, "critic")


def test_the_manifest_lists_every_other_file(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        folder = save(writer, 1)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == names(folder) - {"manifest.json"}
    assert all(files[name]["size"] == (folder / name).stat().st_size for name in files)


@pytest.mark.parametrize(
    ("contents", "sections", "weights"),
    [
        (("model",), {"model"}, True),
        (("hf_model",), {"model"}, True),
        (("optimizer", "extra"), {"optimizer", "extra"}, False),
        (("model", "optimizer", "extra", "hf_model"), {"model", "optimizer", "extra"}, True),
    ],
)
def test_contents_choose_what_is_saved_and_weights_are_saved_once(tmp_path, contents, sections, weights):
    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(1, {"actor": state(1)}, hf={"actor": write_hf}, contents={"actor": contents})
    assert set(json.loads((folder / "actor" / "extra.json").read_text())) == sections
    assert (folder / "actor" / "huggingface" / "config.json").is_file()
    assert len(list(folder.rglob("model*.safetensors"))) == int(weights)


def test_loading_what_was_not_saved_says_what_is_there(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(1, {"actor": state(1)}, contents={"actor": ("model", "extra")})
    reader = CheckpointReader(folder)
    assert set(reader.load("actor", ("model",)).scalars) == {"model"}
    with pytest.raises(CheckpointError, match=r"no 'optimizer' of 'actor'.*load_contents"):
        reader.load("actor")
    with pytest.raises(CheckpointError, match=r"no such role.*critic.*actor"):
        reader.load("critic")


def test_without_a_hugging_face_writer_the_weights_have_a_file_of_their_own(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(1, {"actor": state(1)}, trainer_state={"step": 1, "kl": 0.1})
    assert set(load_file(folder / "actor" / "model.safetensors")) == {"w", "b"}
    assert_holds(folder, 1)


def test_an_unknown_content_is_an_error_with_the_nearest_name(tmp_path):
    with CheckpointWriter(tmp_path) as writer, pytest.raises(ConfigError, match=r"Did you mean 'optimizer'"):
        writer.save(1, {"actor": state(1)}, contents={"actor": ("optimiser",)})


def test_a_role_may_write_itself(tmp_path):
    """As a worker process does; what it does not report is summed by the writer."""

    def worker(folder):
        write_part(folder, state(3), hf=write_hf)

    with CheckpointWriter(tmp_path) as writer:
        folder = writer.save(
            3, {"actor": worker, "critic": lambda f: write_part(f, state(3))}, trainer_state={"step": 3, "kl": 0.1 * 3}
        )
    assert_holds(folder, 3)
    assert_holds(folder, 3, "critic")
    assert find_checkpoint(tmp_path) == folder


def test_a_state_that_json_cannot_hold_is_an_error_that_names_the_place(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        with pytest.raises(CheckpointError, match=r"trainer.json.loader.queue\[1\].*Tensor"):
            writer.save(1, {"actor": state(1)}, trainer_state={"loader": {"queue": [1, torch.ones(1)]}})
        with pytest.raises(CheckpointError, match=r"not a string.*Got 3"):
            writer.save(1, {"actor": state(1)}, trainer_state={"seen": {3: True}})
    assert list_checkpoints(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        writer.save(2, {"actor": state(7)})
        folder = save(writer, 2)
    assert_holds(folder, 2)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2]
    assert {p.name for p in tmp_path.iterdir()} == {"global_step_2", ".lock", "latest_checkpointed_iteration.txt"}


def test_the_newest_is_the_one_saved_last_not_the_largest_step(tmp_path):
    """A run that went back to step 1 and on must not jump to the branch it left."""
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            save(writer, step)
    with CheckpointWriter(tmp_path) as writer:
        folder = save(writer, 2)
    assert find_checkpoint(tmp_path) == folder


def test_a_save_in_the_background_holds_the_moment_of_the_call(tmp_path):
    live = {"model/w": torch.zeros(4)}
    with CheckpointWriter(tmp_path, background=True) as writer:
        for step in (1, 2):
            live["model/w"].fill_(step)
            folder = writer.save(step, {"actor": EngineState(live, {"model": {}})})
            live["model/w"].fill_(-1)
        writer.wait()
    assert CheckpointReader(folder).load("actor", ("model",)).tensors["model/w"].tolist() == [2.0] * 4
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 1]


def test_an_error_in_the_background_shows_at_the_next_call_once(tmp_path):
    with CheckpointWriter(tmp_path, background=True) as writer:
        writer.save(1, {"actor": EngineState({"model/w": torch.ones(1, dtype=torch.complex64)}, {"model": {}})})
        with pytest.raises(CheckpointError, match=r"dtype"):
            writer.wait()
        folder = save(writer, 2)
    assert_holds(folder, 2)


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_error_and_the_previous_checkpoint_stays(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path) as writer:
        first = save(writer, 1)
        with monkeypatch.context() as patch:
            patch.setattr(
                file_stream, "zlib", SimpleNamespace(crc32=full_disk)
            )  # in the middle of the first tensor file
            with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left.*global_step_1"):
                save(writer, 2)
        assert_holds(find_checkpoint(tmp_path), 1)
        assert not list(tmp_path.glob(".writing-*")) and first.is_dir()
        assert_holds(save(writer, 2), 2)  # the next save succeeds after space returns


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"default_local_dir.*cannot be written"):
        CheckpointWriter(tmp_path / "file" / "run")


def test_a_tracker_that_cannot_be_written_is_told_and_the_checkpoint_stands(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with CheckpointWriter(tmp_path) as writer:
        folder = save(writer, 1)
    assert_holds(folder, 1)
    assert any("the work after it failed" in text for text in notices().values())
