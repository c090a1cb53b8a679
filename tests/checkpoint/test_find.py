from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.builders import assert_holds, save
from verl.checkpoint import CheckpointWriter, find_checkpoint
from verl.checkpoint.manifest import Manifest
from verl.errors import CheckpointError, ConfigError
from verl.metrics import notices


@pytest.fixture
def run(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            save(writer, step)
    return tmp_path


def damage_flip(folder):
    flip(folder / "actor" / "optimizer.safetensors", -5)


def damage_truncate(folder):
    path = folder / "actor" / "huggingface" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_manifest(folder):
    """One bit of a number: what is read is still a manifest."""
    flip(folder / "manifest.json", (folder / "manifest.json").read_bytes().index(b'"sequence": 2') + 12)


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


DAMAGES = {
    "the checksum of actor/optimizer.safetensors is wrong": damage_flip,
    "actor/huggingface/model.safetensors has": damage_truncate,
    "trainer.json is missing": lambda folder: (folder / "trainer.json").unlink(),
    "the checksum of its manifest.json is wrong": damage_manifest,
    "its manifest.json is damaged": lambda folder: (folder / "manifest.json").write_text("{"),
    "never finished": lambda folder: (folder / "manifest.json").unlink(),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_auto_names_a_damaged_checkpoint_and_takes_the_one_before(run, message):
    DAMAGES[message](run / "global_step_2")
    assert_holds(find_checkpoint(run), 1)
    told = " ".join(f"{key}: {text}" for key, text in notices().items())
    assert "global_step_2" in told and message in told


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_checkpoint_named_by_path_is_refused(run, message):
    DAMAGES[message](run / "global_step_2")
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(run, "resume_path", run / "global_step_2")


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed(run):
    folder = run / "global_step_2"
    sound = (folder / "manifest.json").read_bytes()
    for place in range(len(sound)):
        flip(folder / "manifest.json", place, bit=place % 8)
        with pytest.raises(CheckpointError):
            Manifest.read(folder)
        (folder / "manifest.json").write_bytes(sound)
    assert_holds(find_checkpoint(run), 2)


def test_a_checkpoint_of_before_the_manifests_checksum_is_still_taken(run):
    found = json.loads((run / "global_step_2" / "manifest.json").read_text())
    del found["crc32"]
    old = json.dumps({**found, "format": "verl-checkpoint-1"}, indent=1)
    (run / "global_step_2" / "manifest.json").write_text(old)
    assert_holds(find_checkpoint(run), 2)


def test_a_checkpoint_of_a_later_format_is_named_with_its_folder(run):
    file = run / "global_step_2" / "manifest.json"
    file.write_text(file.read_text().replace("verl-checkpoint-2", "verl-checkpoint-9"))
    with pytest.raises(CheckpointError, match="global_step_2 has the format 'verl-checkpoint-9'"):
        find_checkpoint(run, "resume_path", run / "global_step_2")


OTHERS = [
    "actor/huggingface/model-00002.safetensors",
    "actor/huggingface/model.safetensors.index.json",
    "actor/huggingface/modeling.py",
    "actor/model.safetensors",
    "critic/extra.json",
    "notes.txt",
]


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_the_manifest_does_not_name_is_refused_and_sends_nobody_back_to_an_older_checkpoint(
    run, name, mode
):
    path = run / "global_step_2" / name
    path.parent.mkdir(exist_ok=True)
    save_file({"w": torch.zeros(40, 30)}, path)
    with pytest.raises(CheckpointError, match=rf"does not name {name}.*global_step_2.*Move it out"):
        find_checkpoint(run, mode, run / "global_step_2")


@pytest.mark.parametrize("name", [".DS_Store", "actor/.nfs0000001"])
def test_hidden_files_of_a_desktop_or_a_network_file_system_pass(run, name):
    file = run / "global_step_2" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("x")
    assert_holds(find_checkpoint(run), 2)


def test_what_a_kill_leaves_of_a_manifest_that_was_being_replaced_is_no_other_file(run):
    (run / "global_step_2" / ".manifest.json.new").write_text("{")
    assert_holds(find_checkpoint(run), 2)


def test_auto_without_any_checkpoint_starts_afresh(tmp_path):
    assert find_checkpoint(tmp_path) is None
    assert find_checkpoint(tmp_path / "never_made") is None


def test_disable_looks_at_nothing(run):
    assert find_checkpoint(run, "disable") is None


def test_a_path_to_a_sound_checkpoint_is_taken(run):
    assert find_checkpoint(run, "resume_path", str(run / "global_step_1")) == run / "global_step_1"


def test_a_moved_checkpoint_is_still_sound(run, tmp_path_factory):
    moved = shutil.copytree(run / "global_step_1", tmp_path_factory.mktemp("elsewhere") / "best")
    assert_holds(find_checkpoint(run, "resume_path", moved), 1)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (None, ConfigError, "resume_from_path"),
        ("nowhere", CheckpointError, "no such folder.*nowhere"),
        (".", CheckpointError, "holds checkpoints.*global_step_2"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_an_error_with_a_way_out(run, path, error, message):
    with pytest.raises(error, match=message):
        find_checkpoint(run, "resume_path", None if path is None else run / path)


def test_an_unknown_mode_is_an_error(run):
    with pytest.raises(ConfigError, match=r"Did you mean 'resume_path'"):
        find_checkpoint(run, "resumepath")


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
@pytest.mark.parametrize(("name", "command"), [
    ("model_world_size_8_rank_0.pt", r"python -m verl\.model_merger merge --local_dir \S+/actor --target_dir merged"),
    ("dist_ckpt", "upstream's own merger with --backend megatron.*its index is a pickle"),
    ("model/dist_ckpt", "upstream's own merger with --backend megatron.*its index is a pickle"),
])  # fmt: skip
def test_a_checkpoint_in_upstreams_format_is_refused_with_the_command_that_converts_it(tmp_path, mode, name, command):
    place = tmp_path / "global_step_5" / "actor" / name
    place.parent.mkdir(parents=True)
    place.write_bytes(b"") if name.endswith(".pt") else place.mkdir()
    with pytest.raises(CheckpointError, match=rf"upstream's format \(actor/{name}\).*{command}"):
        find_checkpoint(tmp_path, mode, tmp_path / "global_step_5")
