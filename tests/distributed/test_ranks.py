"""Collectives of four processes, and of one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from tests.harness.programs import python
from tests.harness.ranks import cells_on_demand
from verl import distributed
from verl.distributed import RankPlace, Ranks, data_parallel_mesh, metrics, shards
from verl.errors import ConfigError, EngineError, WorkerError
from verl.metrics import Metric, MetricSet

SIZE = 4
ROWS = (1, 3, 4, 7, 9)


def numbers(ranks: Ranks, folder: Path) -> dict:
    own = torch.tensor([float(ranks.rank), 1.0])
    return {
        "sum": ranks.sum(own).tolist(),
        "max": ranks.max(own).tolist(),
        "untouched": own.tolist(),
        "gather": [found.tolist() for found in ranks.gather(own)],
        "broadcast": ranks.broadcast(own.clone()).tolist(),
    }


def facts(ranks: Ranks, folder: Path) -> dict:
    values = ranks.exchange({"rank": ranks.rank, "text": "ä" * ranks.rank, "number": math.inf})
    return {"exchange": values, "from_first": ranks.from_first(["rank", ranks.rank]), "empty": ranks.exchange("")}


def failure(ranks: Ranks, folder: Path) -> dict:
    def work() -> tuple[int, int]:
        if ranks.rank == 2:
            raise ConfigError("no such thing", key="a.b")
        return ranks.rank, 10 * ranks.rank

    told = ""
    try:
        ranks.together(work)
    except (ConfigError, WorkerError) as error:
        told = f"{type(error).__name__}: {error}"
    result, all_facts = ranks.together(lambda: (ranks.rank, 10 * ranks.rank))
    return {"told": told, "result": result, "facts": all_facts}


def first_alone(ranks: Ranks, folder: Path) -> dict:
    ran = []
    found = ranks.on_first(lambda: ran.append(ranks.rank) or {"folder": "x"})
    try:
        ranks.on_first(lambda: 1 / 0)
    except (WorkerError, ZeroDivisionError) as error:
        return {"ran": ran, "found": found, "told": f"{type(error).__name__}: {error}"}
    return {}


def disagreement(ranks: Ranks, folder: Path) -> str:
    try:
        ranks.agree("the step", ranks.exchange(1 if ranks.rank < 3 else 2))
    except EngineError as error:
        return str(error)
    return ""


def round_trips(ranks: Ranks, folder: Path) -> dict:
    """Scatter and gather for every shape of mesh, also where an axis is shorter than the number of ranks."""
    wrong, local = [], {}
    for fsdp_size in (-1, 2, 1):
        mesh = data_parallel_mesh(ranks, "cpu", fsdp_size)
        for rows in ROWS:
            whole = torch.arange(rows * 3.0).view(rows, 3) + 1
            target = zeros(rows, 3, device_mesh=mesh, placements=[Replicate()] * (mesh.ndim - 1) + [Shard(0)])
            shards.scatter(whole if ranks.is_first else whole.to("meta"), target)
            low, local_rows = shards.first_row(target), target.to_local()
            good = torch.equal(local_rows, whole[low : low + len(local_rows)])
            if not good or not torch.equal(target.full_tensor(), whole):
                wrong.append([fsdp_size, rows])
            local[f"{fsdp_size} {rows}"] = target.to_local().shape[0]
    return {"wrong": wrong, "local": local}


def mirrored(ranks: Ranks, folder: Path) -> dict:
    own = (
        {"b": torch.ones(2, 3), "a": torch.zeros(1, dtype=torch.int32)} if ranks.is_first else {"other": torch.ones(1)}
    )
    return {
        name: [tensor.device.type, str(tensor.dtype), list(tensor.shape)]
        for name, tensor in shards.mirror(own, ranks).items()
    }


def merged_metrics(ranks: Ranks, folder: Path) -> dict:
    own = MetricSet()
    if ranks.rank != 1:  # a rank without rows
        own = MetricSet({"tokens": Metric(2.0, "sum"), "mean": Metric(ranks.rank, "mean", 1.0 + ranks.rank)})
    loss, gathered = metrics.merge_metrics(float(ranks.rank), own, ranks)
    return {"loss": loss, **gathered.values()}


def meshes(ranks: Ranks, folder: Path) -> dict:
    try:
        data_parallel_mesh(ranks, "cpu", 3)
    except ConfigError as error:
        return {"told": str(error), "more": list(data_parallel_mesh(ranks, "cpu", 8).shape)}
    return {}


CELLS = (
    numbers,
    facts,
    failure,
    first_alone,
    disagreement,
    round_trips,
    mirrored,
    merged_metrics,
    meshes,
)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with cells_on_demand({SIZE: CELLS}, tmp_path_factory.mktemp("four")) as answers:
        yield answers[SIZE]


@pytest.mark.slow
class TestFourProcesses:
    def test_numbers_are_reduced_and_gathered_in_rank_order(self, four):
        for rank, found in enumerate(four["numbers"]):
            assert found["sum"] == [6.0, 4.0] and found["max"] == [3.0, 1.0] and found["untouched"] == [rank, 1.0]
            assert found["gather"] == [[r, 1.0] for r in range(SIZE)] and found["broadcast"] == [0.0, 1.0]

    def test_facts_of_any_length_reach_everyone(self, four):
        expected = [{"rank": r, "text": "ä" * r, "number": math.inf} for r in range(SIZE)]
        for found in four["facts"]:
            assert found == {"exchange": expected, "from_first": ["rank", 0], "empty": [""] * SIZE}

    def test_a_failure_on_one_rank_is_an_error_on_all_and_the_group_goes_on(self, four):
        told = [found["told"] for found in four["failure"]]
        assert told[2] == "ConfigError: a.b: no such thing"
        assert all(told[r] == "WorkerError: rank 2 failed: a.b: no such thing" for r in (0, 1, 3))
        assert [found["facts"] for found in four["failure"]] == [[0, 10, 20, 30]] * SIZE
        assert [found["result"] for found in four["failure"]] == [0, 1, 2, 3]

    def test_work_of_the_first_rank_is_everyones_result_and_everyones_failure(self, four):
        assert [found["ran"] for found in four["first_alone"]] == [[0], [], [], []]
        assert all(found["found"] == {"folder": "x"} for found in four["first_alone"])
        assert four["first_alone"][0]["told"] == "ZeroDivisionError: division by zero"
        assert four["first_alone"][3]["told"] == "WorkerError: rank 0 failed: ZeroDivisionError: division by zero"

    def test_ranks_that_disagree_are_told_who_differs(self, four):
        assert all("disagree about the step" in told and "rank 3 2" in told for told in four["disagreement"])

    def test_sharded_tensors_come_back_whole(self, four):
        assert all(found["wrong"] == [] for found in four["round_trips"])
        assert [found["local"]["-1 7"] for found in four["round_trips"]] == [2, 2, 2, 1]
        assert [found["local"]["-1 3"] for found in four["round_trips"]] == [1, 1, 1, 0]
        assert [found["local"]["2 7"] for found in four["round_trips"]] == [4, 3, 4, 3]
        assert [found["local"]["1 7"] for found in four["round_trips"]] == [7, 7, 7, 7]

    def test_other_ranks_see_names_and_shapes_of_the_first_ranks_tensors(self, four):
        for rank, found in enumerate(four["mirrored"]):
            where = "meta" if rank else "cpu"
            assert found == {"b": [where, "torch.float32", [2, 3]], "a": [where, "torch.int32", [1]]}
            assert list(found) == ["b", "a"]

    def test_metrics_are_equal_everywhere_and_merge_by_their_own_reduction(self, four):
        for found in four["merged_metrics"]:
            assert found["loss"] == 1.5 and found["tokens"] == 6.0
            assert found["mean"] == pytest.approx((0 * 1 + 2 * 3 + 3 * 4) / 8)

    def test_a_shard_group_must_divide_the_ranks(self, four):
        for found in four["meshes"]:
            assert "fsdp_size" in found["told"] and "1, 2, 4" in found["told"] and found["more"] == [4]


class TestOneProcess:
    def test_needs_no_group(self):
        ranks = Ranks()
        own = torch.tensor([3.0])
        assert ranks.sum(own) is own and ranks.max(own) is own and ranks.broadcast(own) is own
        assert ranks.gather(own) == [own] and ranks.exchange("x") == ["x"] and ranks.from_first({"a": 1}) == {"a": 1}
        ranks.barrier()

    def test_its_group_has_no_thread_left_when_the_interpreter_ends(self):
        code = (
            "import atexit, os, torch, torch.distributed as dist\n"
            "from pathlib import Path\n"
            "from verl import distributed\n"
            "def threads():\n"
            "    names = [(task / 'comm').read_text() for task in Path('/proc/self/task').iterdir()]\n"
            "    return sum('gloo' in name for name in names)\n"
            "atexit.register(lambda: print('at the end', threads()))\n"
            "distributed.join_group()\n"
            "dist.all_reduce(torch.ones(1))\n"
            "print('meanwhile', threads() > 0)\n"
        )
        assert python("-c", code).stdout.splitlines() == ["meanwhile True", "at the end 0"]

    def test_errors_come_as_they_are(self):
        with pytest.raises(ZeroDivisionError):
            Ranks().together(lambda: 1 / 0)

    def test_joins_without_a_port_and_keeps_its_place(self):
        try:
            ranks = distributed.join_group(RankPlace())
            assert (ranks.rank, ranks.size) == (0, 1) and distributed.join_group().size == 1
            with pytest.raises(EngineError, match="already"):
                distributed.join_group(RankPlace(rank=0, world_size=2, master_port=1))
            tensor = zeros(3, 2, device_mesh=data_parallel_mesh(ranks, "cpu"), placements=[Shard(0)])
            shards.scatter(torch.ones(3, 2), tensor)
            assert isinstance(tensor, DTensor) and torch.equal(shards.gather(tensor), torch.ones(3, 2))
        finally:
            distributed.leave_group()

    @pytest.mark.parametrize(
        "place, device, words",
        [
            (RankPlace(rank=0, world_size=2), "cpu", "torchrun"),
            (RankPlace(rank=2, world_size=2, master_port=1), "cpu", "below WORLD_SIZE"),
            (RankPlace(), "mps", "cuda"),
        ],
    )
    def test_a_place_that_cannot_be_is_refused(self, place, device, words):
        with pytest.raises(EngineError, match=words):
            distributed.join_group(place, device)

    def test_peers_that_do_not_come_are_an_error_with_the_address(self):
        with pytest.raises(EngineError, match=r"127\.0\.0\.1:1\b"):
            distributed.join_group(RankPlace(rank=1, world_size=2, master_port=1), timeout=0.5)
