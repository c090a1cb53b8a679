"""Every dispatch and execute mode through a local group of several workers, with results worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict

from verl.errors import BatchError, WorkerError
from verl.protocol import SHARED_ROWS, DataProto, DataProtoFuture
from verl.single_controller.base import CallOptions, ClassWithInitArgs, ResourcePool, Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from verl.single_controller.local import LocalWorkerGroup


@dataclass(frozen=True)
class Scaled(CallOptions):
    by: int = 1


def two_to_all(group, *args):
    """A custom mode: two values go to the workers in turn."""
    return tuple([arg[rank % 2] for rank in range(group.world_size)] for arg in args), {}


def tagged(data: DataProto, rank: int) -> DataProto:
    """The rows a worker got, and who it was."""
    return DataProto.from_dict({"x": data.batch["x"], "by": torch.full((len(data),), rank)})


class Modes(Worker):
    """Four workers; the mesh is (dp=2, tp=2) with tp innermost: ranks 0, 1 are dp 0 and ranks 2, 3 are dp 1."""

    def __init__(self):
        super().__init__()
        self.set_dispatch_collect("actor", dispatch_dp_rank=self.rank // 2, collect_dp_rank=self.rank % 2 == 0)
        # dp innermost and counted backwards, so that worker order and data order differ
        self.set_dispatch_collect("turned", dispatch_dp_rank=1 - self.rank % 2, collect_dp_rank=self.rank >= 2)
        self.seen: list = []

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def scale(self, data, options):
        return DataProto.from_dict({"x": data.batch["x"] * options.by})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, x, y=0):
        return self.rank, x, y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_only(self, x):
        self.seen.append(x)
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first_of_all(self, x):
        return self.rank, x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def calls_seen(self):
        return len(self.seen)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, x, y):
        return x * 10 + y

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_proto(self, data, other=None):
        self.seen.append(len(data))
        if other is not None:
            data = DataProto.from_dict({"x": data.batch["x"] + other.batch["x"]})
        return tagged(data, self.rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def dp_proto_later(self, data):
        return tagged(data, self.rank)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def dp_metric(self, data):
        return {"rows": len(data), "sum": int(data.batch["x"].sum())}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def dp_tensordict(self, data):
        return TensorDict({"x": data["x"] + self.rank}, batch_size=data.batch_size)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def returns_nothing(self, data):
        return None

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self):
        return None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def nd(self, data):
        self.seen.append(data.batch["x"].tolist())
        return tagged(data, self.rank)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), blocking=False)
    def nd_later(self, data):
        return tagged(data, self.rank)

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn(mesh_name="actor"))
    def nd_metric(self, data):
        return {"by": self.rank, "sum": int(data.batch["x"].sum()), "shared": data.meta_info.get(SHARED_ROWS, False)}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def nd_back(self, data):
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="turned"))
    def nd_turned(self, data):
        return tagged(data, self.rank)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actr"))
    def nd_unknown(self, data):
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_seen(self):
        return self.seen[-1]

    @register(dispatch_mode={"dispatch_fn": two_to_all, "collect_fn": collect_all_to_all})
    def custom(self, x, y):
        return self.rank, x, y


@pytest.fixture
def group() -> LocalWorkerGroup:
    return LocalWorkerGroup(ResourcePool([4]), ClassWithInitArgs(Modes), name_prefix="modes")


def x(rows: int, **options) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, **options)


def seen(data: DataProto) -> list[tuple[int, int]]:
    return list(zip(data.batch["x"].tolist(), data.batch["by"].tolist()))


def test_one_to_all_gives_every_worker_the_same(group):
    assert group.one_to_all(5, y=[1]) == [(0, 5, [1]), (1, 5, [1]), (2, 5, [1]), (3, 5, [1])]
    same_length = [0, 0, 0, 0]  # a list of world size is still one argument here
    assert group.one_to_all(same_length)[2] == (2, same_length, 0)


def test_all_to_all_passes_arguments_and_splits_lists_of_world_size(group):
    assert group.all_to_all("a") == [(0, "a"), (1, "a"), (2, "a"), (3, "a")]
    assert group.all_to_all([5, 6, 7, 8]) == [(0, 5), (1, 6), (2, 7), (3, 8)]
    assert group.all_to_all([5, 6]) == [(0, [5, 6]), (1, [5, 6]), (2, [5, 6]), (3, [5, 6])]


def test_rank_zero_runs_on_the_first_worker_only(group):
    assert group.first_only("a") == (0, "a")
    assert group.first_of_all("a") == (0, "a")
    assert group.calls_seen() == [1, 0, 0, 0]


def test_dp_compute_takes_one_entry_per_worker(group):
    assert group.dp_compute([1, 2, 3, 4], y=[5, 6, 7, 8]) == [15, 26, 37, 48]
    with pytest.raises(WorkerError, match=r"argument 'y'.*list of 3"):
        group.dp_compute([1, 2, 3, 4], y=[5, 6, 7])
    with pytest.raises(WorkerError, match="argument 0"):
        group.dp_compute(1, y=[5, 6, 7, 8])


def test_dp_compute_proto_splits_and_joins(group):
    assert seen(group.dp_proto(x(8))) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (7, 3)]
    assert group.dp_proto(x(4), other=x(4)).batch["x"].tolist() == [0, 2, 4, 6]


def test_a_batch_that_does_not_divide_is_refused_with_sizes_and_other_types_by_name(group):
    with pytest.raises(BatchError, match="6 rows does not divide into 4"):
        group.dp_proto(x(6))
    with pytest.raises(WorkerError, match=r"argument 'other'.*'float'.*CallOptions"):
        group.dp_proto(x(4), other=0.5)


def test_the_options_of_a_call_go_to_every_worker_beside_its_part_of_the_batch(group):
    assert group.scale(x(4), Scaled(10)).batch["x"].tolist() == [0, 10, 20, 30]
    assert group.scale(x(3, auto_padding=True), options=Scaled(by=2)).batch["x"].tolist() == [0, 2, 4]


def test_auto_padding_fills_up_and_takes_off_again_without_touching_the_argument(group):
    data = x(6, auto_padding=True)
    assert seen(group.dp_proto(data)) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert [worker.seen for worker in group.workers] == [[2], [2], [2], [2]]  # the last worker got row 5 twice
    assert len(data) == 6
    assert group.dp_proto(data, other=x(6, auto_padding=True)).batch["x"].tolist() == [0, 2, 4, 6, 8, 10]
    with pytest.raises(WorkerError, match="same number of rows"):
        group.dp_proto(data, other=x(5, auto_padding=True))


def test_auto_padding_of_a_call_that_does_not_wait_is_taken_off_when_fetched(group):
    future = group.dp_proto_later(x(5, auto_padding=True))
    assert seen(future.get()) == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert [len(part.get()) for part in future.chunk(5)] == [1] * 5


def test_a_metric_comes_back_from_every_worker_also_with_padding(group):
    assert group.dp_metric(x(8)) == [
        {"rows": 2, "sum": 1},
        {"rows": 2, "sum": 5},
        {"rows": 2, "sum": 9},
        {"rows": 2, "sum": 13},
    ]
    assert [m["sum"] for m in group.dp_metric(x(7, auto_padding=True))] == [1, 5, 9, 12]


def test_a_function_goes_to_every_worker_with_its_part_of_the_batch(group):
    def double(worker, data):
        return DataProto.from_dict({"x": data.batch["x"] * 2 + 100 * worker.rank})

    assert group.execute_with_func_generator(double, x(4)).batch["x"].tolist() == [0, 102, 204, 306]
    with pytest.raises(WorkerError, match="plain function"):
        group.execute_with_func_generator(x(4))
    assert group.execute_func_rank_zero(lambda a, b: a + b, 1, b=2) == 3


def test_tensordicts_are_split_and_joined_like_batches(group):
    out = group.dp_tensordict(TensorDict({"x": torch.zeros(4)}, batch_size=[4]))
    assert isinstance(out, TensorDict) and out["x"].tolist() == [0, 1, 2, 3]


def test_workers_that_get_the_same_rows_are_told_so_and_heard_once(group):
    found = group.nd_metric(x(4))
    assert [(entry["sum"], entry["shared"]) for entry in found] == [(1, True), (5, True)]
    assert len({entry["by"] for entry in found}) == group.data_parallel_size("actor") == 2
    back = group.nd_back(x(4))
    assert back.batch["x"].tolist() == [0, 1, 2, 3]
    assert SHARED_ROWS not in back.meta_info, "the next call may hand every worker rows of its own"


def test_a_method_that_returns_no_batch_is_named(group):
    with pytest.raises(WorkerError, match=r"NoneType.*DP_COMPUTE_METRIC"):
        group.returns_nothing(x(4))


def test_a_direct_rollout_method_cannot_be_called_through_the_group(group):
    with pytest.raises(WorkerError, match="DIRECT_ROLLOUT_METHOD"):
        group.direct()


def test_a_mode_given_as_functions_is_used(group):
    assert group.custom([1, 2], ["a", "b"]) == [(0, 1, "a"), (1, 2, "b"), (2, 1, "a"), (3, 2, "b")]


# ---- meshes ----------------------------------------------------------------------------------------------------


def test_on_a_mesh_model_parallel_ranks_share_a_part_and_one_of_them_is_heard(group):
    out = group.nd(x(4))
    assert seen(out) == [(0, 0), (1, 0), (2, 2), (3, 2)]
    assert group.last_seen() == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_results_are_in_data_order_whatever_the_order_of_the_workers(group):
    """On the turned mesh workers 3 and 2 speak for data ranks 0 and 1."""
    assert seen(group.nd_turned(x(4))) == [(0, 3), (1, 3), (2, 2), (3, 2)]


def test_padding_on_a_mesh_counts_its_data_parallel_size(group):
    assert seen(group.nd(x(3, auto_padding=True))) == [(0, 0), (1, 0), (2, 2)]
    assert group.last_seen()[2:] == [[2, 2], [2, 2]]


def test_the_workers_are_asked_about_a_mesh_only_once(group):
    group.nd(x(2))
    for worker in group.workers:
        worker.set_dispatch_collect("actor", 0, True)
    assert seen(group.nd(x(2))) == [(0, 0), (1, 2)]


def test_an_unknown_mesh_is_reported_with_the_known_ones(group):
    with pytest.raises(WorkerError, match=r"actor.*turned"):
        group.nd_unknown(x(4))


def test_a_mesh_on_which_nobody_or_two_speak_for_a_rank_is_refused(group):
    for worker in group.workers:
        worker.set_dispatch_collect("actor", worker.rank // 2, worker.rank < 2)
    with pytest.raises(WorkerError, match="exactly one worker"):
        group.nd(x(4))


def test_mesh_information_can_be_queried(group):
    assert group.query_collect_info("actor") == [True, False, True, False]
    assert group.get_dispatch_collect()[3] == {
        "dispatch_dp_rank": {"actor": 1, "turned": 0},
        "collect_dp_rank": {"actor": False, "turned": True},
    }
    with pytest.raises(WorkerError, match="registered already"):
        group.workers[0]._register_dispatch_collect_info("actor", 0, True)


# ---- futures ---------------------------------------------------------------------------------------------------


def test_a_call_that_does_not_wait_gives_a_future_that_the_next_call_takes(group):
    future = group.dp_proto_later(x(8))
    assert isinstance(future, DataProtoFuture)
    assert seen(group.nd(future)) == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 2), (5, 2), (6, 2), (7, 2)]
    assert seen(group.dp_proto(group.nd_later(future)))[-1] == (7, 3)


def test_a_future_can_go_to_a_group_of_another_size(group):
    small = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Modes))
    assert seen(small.dp_proto(group.dp_proto_later(x(4)))) == [(0, 0), (1, 0), (2, 1), (3, 1)]
