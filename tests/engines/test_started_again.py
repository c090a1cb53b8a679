"""A process may leave its group and join another one: a second run in one notebook, one test after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.engines import model_dir, ragged_batch
from verl import distributed
from verl.algorithms.losses import SFTLoss
from verl.config import FSDPEngineConfig, HFModelConfig, OptimizerConfig
from verl.distributed import data_parallel_mesh
from verl.errors import EngineError
from verl.registry import ENGINES


@pytest.fixture(autouse=True)
def no_group():
    distributed.leave_group()
    yield
    distributed.leave_group()


def fail_to_start() -> None:
    """After this torch calls the next group "1", and the one that is started behind that "0" again."""
    with pytest.raises(EngineError):
        distributed.join_group(distributed.RankPlace(rank=1, world_size=2, master_port=1), timeout=0.2)


def test_a_second_run_in_a_process_computes_what_the_first_did(tmp_path):
    path, found = model_dir(tmp_path, "qwen2", tie_word_embeddings=True), []
    fail_to_start()
    for _ in range(2):
        distributed.join_group()
        engine = ENGINES.get("fsdp2")(
            HFModelConfig(path=str(path)), FSDPEngineConfig(), OptimizerConfig(lr=1e-2), seed=3
        )
        losses = [engine.train_batch(ragged_batch(), SFTLoss()).values()["loss"] for _ in range(2)]
        found.append((losses, dict(engine.export_weights())))
        distributed.leave_group()
    assert found[0][0] == found[1][0] and found[0][0][1] < found[0][0][0]
    assert all(tensor.equal(found[1][1][name]) for name, tensor in found[0][1].items())


def threads_of_groups() -> list[str]:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def test_leaving_a_group_ends_its_threads_before_the_interpreter_may_cut_them_off(tmp_path):
    path, others = model_dir(tmp_path, "qwen2"), len(threads_of_groups())
    distributed.join_group()
    engine = ENGINES.get("fsdp2")(HFModelConfig(path=str(path)), FSDPEngineConfig(), OptimizerConfig(), seed=3)
    engine.train_batch(ragged_batch(), SFTLoss())
    assert len(threads_of_groups()) > others
    del engine
    distributed.leave_group()
    assert len(threads_of_groups()) <= others


def test_meshes_are_equal_in_one_group_and_differ_between_groups():
    meshes = []
    for _ in range(2):
        ranks = distributed.join_group()
        assert data_parallel_mesh(ranks, "cpu") == data_parallel_mesh(ranks, "cpu")
        meshes.append(data_parallel_mesh(ranks, "cpu"))
        distributed.leave_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # by somebody else
    meshes.append(data_parallel_mesh(distributed.join_group(), "cpu"))
    assert len(set(meshes)) == len(meshes) == 3
