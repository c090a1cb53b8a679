"""Files of several ranks, made in one process: what each rank writes, and that it is read as complete tensors."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.checkpoint import CheckpointWriter, EngineState, find_checkpoint, prepare_part, read_part, write_part
from verl.checkpoint.state import WeightFiles
from verl.checkpoint.tensors import read_metadata
from verl.distributed.boxes import ShardTable, assign_ranks
from verl.errors import CheckpointError, EngineError
from verl.protocol import ShardSpec

RANKS = 3
WHOLE = torch.arange(7 * 4.0).view(7, 4)
FILES = WeightFiles.of([[("a", 40), ("b", 30)], [("c", 40)], [("d", 8), ("e", 8)]], max_bytes=64)


def state(rank: int, step: int = 0) -> EngineState:
    """Rows of one matrix, columns of another, and the third part of the weights."""
    rows = [(0, 3), (3, 6), (6, 7)][rank]
    columns = [(0, 1), (1, 3), (3, 4)][rank]
    moments = {"optimizer/w/m": (WHOLE[slice(*rows)] + step, 0, rows[0])}
    moments["optimizer/w/v"] = (WHOLE[:, slice(*columns)], 1, columns[0])
    tensors = {name: tensor for name, (tensor, _, _) in moments.items()}
    shards = {name: ShardSpec.along(tensor, WHOLE.shape, axis, low) for name, (tensor, axis, low) in moments.items()}
    weights = [{"a": 10, "b": 7}, {"c": 10}, {"d": 2, "e": 2}][rank]
    tensors |= {f"model/{name}": torch.full((size,), float(ord(name))) for name, size in weights.items()}
    if rank == 0:
        tensors |= {"extra/rng/cpu": torch.zeros(2, dtype=torch.uint8), "optimizer/w/step": torch.tensor(5.0)}
    scalars = {name: {} for name in ("model", "optimizer", "extra")}
    return EngineState(tensors, scalars, shards, rank, RANKS, FILES)


def write(folder, step: int = 0):
    """Every rank's records."""
    prepare_part(folder)
    return [write_part(folder, state(rank, step), hf=lambda *given: None) for rank in (1, 2, 0)]


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "actor")
    return tmp_path / "actor"


def test_what_the_ranks_wrote_is_one_complete_state(folder):
    loaded = read_part(folder)
    assert torch.equal(loaded.tensors["optimizer/w/m"], WHOLE) and torch.equal(loaded.tensors["optimizer/w/v"], WHOLE)
    assert sorted(loaded.section("model")) == list("abcde") and loaded.tensors["optimizer/w/step"] == 5
    assert all(tensor.eq(ord(name)).all() for name, tensor in loaded.section("model").items())


@pytest.mark.parametrize("bounds", [[(2, 7), (1, 4)], [(0, 7), (3, 4)], [(4, 5), (0, 4)], [(3, 3), (0, 4)]])
def test_any_part_is_read_from_the_files_that_hold_it(folder, bounds):
    for name in ("w/m", "w/v"):
        section = read_part(folder).section("optimizer")
        assert torch.equal(section.box(name, bounds), WHOLE[tuple(slice(*span) for span in bounds)])
        assert section.shape(name) == WHOLE.shape


def test_every_rank_gives_the_records_of_its_own_files_alone(tmp_path):
    records = write(tmp_path / "actor")
    titles = [f"huggingface/model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    shards = [f"optimizer-0000{n}-of-00003.safetensors" for n in range(1, 4)]
    assert set(records[0]) == {shards[1], titles[2]} and set(records[1]) == {shards[2], titles[3]}
    index = "huggingface/model.safetensors.index.json"
    assert set(records[2]) == {shards[0], *titles[:2], index, "extra.json", "extra.safetensors"}


def test_weights_fill_files_up_to_their_limit_and_a_single_file_has_no_number():
    assert len(set(FILES.names.values())) == 4, "a and b have 70 bytes together, d and e 16"
    assert FILES.names["d"] == FILES.names["e"] != FILES.names["c"]
    assert set(WeightFiles.of([[("a", 40), ("b", 30)], []], 80).names.values()) == {"model.safetensors"}


def swap(folder):
    one, two = (folder / f"optimizer-0000{n}-of-00003.safetensors" for n in (1, 2))
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


def truncate(folder):
    file = folder / "optimizer-00003-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def of_another_model(folder):
    """The second rank's file of a model of 9 rows, where the others have 7."""
    name = "optimizer-00002-of-00003.safetensors"
    moments = {"optimizer/w/m": (torch.ones(4, 4), 0, 3), "optimizer/w/v": (torch.ones(9, 2), 1, 1)}
    shards = {key: ShardSpec.along(part, (9, 4), axis, low) for key, (part, axis, low) in moments.items()}
    tensors = {key: part for key, (part, _, _) in moments.items()}
    scalars = {"model": {}, "optimizer": {}, "extra": {}}
    prepare_part(folder.with_name("other"))
    write_part(
        folder.with_name("other"), EngineState(tensors, scalars, shards, 1, RANKS, FILES), hf=lambda *given: None
    )
    shutil.copy(folder.with_name("other") / name, folder / name)


DAMAGES = {
    "two files disagree about the shape of w/m.*optimizer-00002-of-00003": of_another_model,
    "optimizer-00002-of-00003.safetensors is missing": lambda f: (f / "optimizer-00002-of-00003.safetensors").unlink(),
    "not that of rank 0: it says that it is 2 of 3": swap,
    r"cannot be read.*optimizer-00003-of-00003": truncate,
    "model-00003-of-00004.safetensors is missing": lambda f: (
        f / "huggingface" / "model-00003-of-00004.safetensors"
    ).unlink(),
    "different numbers of ranks": lambda f: (f / "optimizer.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_a_set_of_files_that_is_not_complete_is_refused_by_name(folder, says):
    DAMAGES[says](folder)
    with pytest.raises(CheckpointError, match=says):
        read_part(folder)


@pytest.mark.parametrize("start", [[2, 0], [5, 0], [-1, 0], [3, 1], [3]])
def test_boxes_that_overlap_or_lie_outside_are_refused(folder, start):
    """Rows 3 to 5 of w/m are said to begin elsewhere: as many elements as before, some twice, some nowhere."""
    file = folder / "optimizer-00002-of-00003.safetensors"
    metadata, tensors = read_metadata(file), load_file(file)
    boxes = json.loads(metadata["boxes"])
    boxes["w/m"][1] = start
    save_file(tensors, file, {**metadata, "boxes": json.dumps(boxes)})
    with pytest.raises(CheckpointError, match="the files of the ranks do not make up w/m"):
        read_part(folder)


def test_a_shard_of_another_step_is_refused_and_the_previous_checkpoint_is_used(tmp_path):
    name = "optimizer-00002-of-00003.safetensors"
    with CheckpointWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.save(step, {"actor": lambda folder, step=step: write(folder, step)[2]})
    shutil.copy(tmp_path / "global_step_1" / "actor" / name, tmp_path / "global_step_2" / "actor" / name)
    assert find_checkpoint(tmp_path) == tmp_path / "global_step_1"
    with pytest.raises(CheckpointError, match=f"the checksum of actor/{name} is wrong"):
        find_checkpoint(tmp_path, "resume_path", tmp_path / "global_step_2")


def test_another_number_of_ranks_replaces_the_files_of_an_earlier_save(folder):
    prepare_part(folder)
    complete = {"model/a": torch.ones(2), "optimizer/w/m": torch.ones(3)}
    write_part(folder, EngineState(complete, {"model": {}, "optimizer": {}, "extra": {}}))
    assert list(read_part(folder).section("optimizer")) == ["w/m"]


def box(low: int, high: int) -> ShardSpec:
    return ShardSpec((8, 4), "float32", (low, 0), (high - low, 4))


def test_a_box_that_several_ranks_hold_is_written_by_the_one_with_least_to_write():
    table = ShardTable({"x": {box(0, 8): [0, 1]}, "y": {box(0, 6): [0], box(6, 8): [1]}, "z": {box(0, 8): [0, 1]}})
    writers = table.writers()
    assert writers["y", box(0, 6)] == 0 and writers["y", box(6, 8)] == 1
    assert writers["x", box(0, 8)] == 1 and writers["z", box(0, 8)] == 0, "6 and 2 rows, then 6 and 10"


def test_ranks_whose_parts_overlap_are_refused_before_anything_is_written():
    with pytest.raises(EngineError, match="the parts of x on all ranks do not make it up"):
        ShardTable({"x": {box(0, 4): [0], box(2, 6): [1]}})


def test_complete_tensors_are_spread_evenly_and_groups_stay_together():
    table = ShardTable({name: {box(0, 8): [0]} for name in "abcd"})
    owners = assign_ranks([["a", "b"], ["c"], ["d"]], table, 2)
    assert owners["a"] == owners["b"] and owners["c"] == owners["d"] != owners["a"]


def test_parts_that_do_not_make_up_a_tensor_are_an_error_before_anything_is_written():
    with pytest.raises(EngineError, match="the parts of x on all ranks do not make it up"):
        ShardTable({"x": {box(0, 3): [0], box(4, 8): [1]}})
