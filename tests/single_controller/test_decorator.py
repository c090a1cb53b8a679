"""`register`, the dynamic enums and the table of modes."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import traceback

import pytest

from verl.errors import WorkerError
from verl.protocol import DataProtoFuture
from verl.single_controller.base import ClassWithInitArgs, Worker
from verl.single_controller.base.decorator import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.local import LocalWorkerGroup


def test_the_members_are_those_of_upstream():
    assert Dispatch.names() == [
        "RANK_ZERO",
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    ]
    assert repr(Execute.ALL) == "<Execute.ALL: 0>" and repr(Execute.RANK_ZERO) == "<Execute.RANK_ZERO: 1>"
    assert Dispatch["one_to_all"] is Dispatch.ONE_TO_ALL is Dispatch.from_name("one_to_all")
    assert "ALL" in Execute and Execute.ALL in Execute and Execute.ALL not in Dispatch and len(Execute) == 2


def test_members_keep_their_identity_through_a_pickle():
    assert pickle.loads(pickle.dumps(Dispatch.DP_COMPUTE)) is Dispatch.DP_COMPUTE


def test_a_mode_of_an_older_release_names_its_replacement():
    with pytest.raises(AttributeError, match="make_nd_compute_dataproto_dispatch_fn"):
        Dispatch.MEGATRON_COMPUTE_PROTO  # noqa: B018
    with pytest.raises(AttributeError, match="members: RANK_ZERO"):
        Dispatch.NOTHING  # noqa: B018


def test_register_tags_a_sync_and_an_async_function_and_keeps_its_name():
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO, blocking=False)
    def sync(self, x):
        """Doc."""
        return x

    @register()
    async def asynchronous(self, x):
        return x

    assert getattr(sync, MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.ONE_TO_ALL,
        "execute_mode": Execute.RANK_ZERO,
        "blocking": False,
        "materialize_futures": True,
    }
    assert sync.__name__ == "sync" and sync.__doc__ == "Doc." and sync(None, 3) == 3
    assert getattr(asynchronous, MAGIC_ATTR)["dispatch_mode"] is Dispatch.ALL_TO_ALL
    assert inspect.iscoroutinefunction(asynchronous) and not inspect.iscoroutinefunction(sync)


class Futures(Worker):
    @register()
    def fetched(self, a, *, b):
        return a, b

    @register(materialize_futures=False)
    def kept(self, a):
        return a

    def untagged(self, a):
        return a


def test_futures_are_fetched_for_a_tagged_method_unless_told_not_to():
    future = DataProtoFuture(collect_fn=lambda parts: "whole", futures=[])
    group = LocalWorkerGroup(None, ClassWithInitArgs(Futures))
    assert group.fetched(future, b=future) == [("whole", "whole")]
    assert group.kept(future) == [future] == group.execute_all_sync("untagged", future)
    assert asyncio.run(group.handle().call(Futures.fetched, future, b=1)) == ("whole", 1)
    assert asyncio.run(group.handle().call(Futures.kept, future)) is future


def test_a_method_that_is_registered_anew_keeps_its_first_tag_in_the_parent():
    class Wider(Futures):
        fetched = register(Dispatch.ONE_TO_ALL)(Futures.fetched)

    assert getattr(Futures.fetched, MAGIC_ATTR)["dispatch_mode"] is Dispatch.ALL_TO_ALL
    assert getattr(Wider.fetched, MAGIC_ATTR)["dispatch_mode"] is Dispatch.ONE_TO_ALL
    assert Wider().fetched(1, b=2) == (1, 2)


def test_register_puts_no_frame_around_a_method():
    def names(self):
        return [frame.name for frame in traceback.extract_stack()[-2:]]

    tagged = register()(names)
    assert tagged is names and tagged(None)[1] == "names" != tagged(None)[0]


def test_wrong_modes_are_refused_when_the_class_is_written():
    with pytest.raises(WorkerError, match="DP_COMPUTE_PROTO"):
        register(dispatch_mode="DP_COMPUTE_PROTOS")
    with pytest.raises(WorkerError, match="collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})
    with pytest.raises(WorkerError, match="ALL, RANK_ZERO"):
        register(execute_mode=Dispatch.ALL_TO_ALL)
    with pytest.raises(WorkerError, match="cannot run on one"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)


def test_modes_can_be_added_and_replaced():
    one, two = (lambda group, *a, **k: (a, k)), (lambda group, out: out)
    mode = register_dispatch_mode("added_by_test", one, two)
    try:
        assert mode is Dispatch.ADDED_BY_TEST and mode.value == 8
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": one, "collect_fn": two}
        update_dispatch_mode(mode, two, one)
        assert get_predefined_dispatch_fn(mode) == {"dispatch_fn": two, "collect_fn": one}
        with pytest.raises(ValueError, match="already"):
            register_dispatch_mode("ADDED_BY_TEST", one, two)
    finally:
        Dispatch.remove("added_by_test")
    assert "ADDED_BY_TEST" not in Dispatch


def test_rank_zero_dispatch_has_no_functions_and_says_what_to_use():
    with pytest.raises(WorkerError, match=r"execute_mode=Execute\.RANK_ZERO"):
        get_predefined_dispatch_fn(Dispatch.RANK_ZERO)
    assert get_predefined_execute_fn(Execute.ALL) == {"execute_fn_name": "execute_all"}
    assert get_predefined_execute_fn(Execute.RANK_ZERO) == {"execute_fn_name": "execute_rank_zero"}


def test_the_nd_mode_is_a_pair_of_functions_that_can_travel():
    mode = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")
    assert sorted(mode) == ["collect_fn", "dispatch_fn"] and pickle.loads(pickle.dumps(mode)).keys() == mode.keys()
