"""`register`: tag a worker method with how the controller calls it.

The tag is data on the function, which stays as it is: calling it wraps nothing around it. A worker group of any runtime
reads the tag and binds a method of the same name that dispatches, executes and collects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, TypeVar

from verl.errors import WorkerError, suggest
from verl.protocol import DataProtoFuture
from verl.single_controller.base import dispatch as modes
from verl.single_controller.base.dispatch import (
    PADDING_SIZE_KEY,
    CollectFn,
    DispatchFn,
    collect_all_to_all,
    collect_dp_compute,
    collect_dp_compute_data_proto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_one_to_all,
)
from verl.single_controller.base.dynamic_enum import DynamicEnum

MAGIC_ATTR = "attrs_3141562937"
"""Attribute of a tagged method: a dict with dispatch_mode, execute_mode, blocking and materialize_futures."""
F = TypeVar("F", bound=Callable[..., Any])
_ND = "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=...)) takes its place."


class Dispatch(DynamicEnum):
    """How arguments are spread over the workers; `register_dispatch_mode` adds a mode."""

    _gone = dict.fromkeys(
        (
            "MEGATRON_COMPUTE",
            "MEGATRON_PP_AS_DP",
            "MEGATRON_PP_ONLY",
            "MEGATRON_COMPUTE_PROTO",
            "MEGATRON_PP_AS_DP_PROTO",
        ),
        _ND,
    )


class Execute(DynamicEnum):
    """Which workers run the method."""


for _name in (
    "RANK_ZERO",
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
):
    Dispatch.register(_name)
for _name in ("ALL", "RANK_ZERO"):
    Execute.register(_name)


def _functions(dispatch_fn: DispatchFn, collect_fn: CollectFn) -> dict[str, Callable[..., Any]]:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


_DISPATCH_FUNCTIONS: dict[Dispatch, dict[str, Callable[..., Any]]] = {
    Dispatch.ONE_TO_ALL: _functions(modes.dispatch_one_to_all, modes.collect_all_to_all),
    Dispatch.ALL_TO_ALL: _functions(modes.dispatch_all_to_all, modes.collect_all_to_all),
    Dispatch.DP_COMPUTE: _functions(modes.dispatch_dp_compute, modes.collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _functions(modes.dispatch_dp_compute_data_proto, modes.collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _functions(
        modes.dispatch_dp_compute_data_proto_with_func, modes.collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: _functions(modes.dispatch_dp_compute_data_proto, modes.collect_dp_compute),
    Dispatch.DIRECT_ROLLOUT_METHOD: _functions(modes.refuse_direct_rollout, modes.refuse_direct_rollout),
}
_SPLITTING = (
    Dispatch.DP_COMPUTE,
    Dispatch.DP_COMPUTE_PROTO,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
    Dispatch.DP_COMPUTE_METRIC,
)
_EXECUTE_FUNCTIONS = {
    Execute.ALL: {"execute_fn_name": "execute_all"},
    Execute.RANK_ZERO: {"execute_fn_name": "execute_rank_zero"},
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """``{"dispatch_fn", "collect_fn"}`` of a mode."""
    functions = _DISPATCH_FUNCTIONS.get(dispatch_mode)
    if functions is None:
        raise WorkerError(
            "this dispatch mode has no functions",
            got=dispatch_mode,
            allowed=[mode.name for mode in _DISPATCH_FUNCTIONS],
            fix="To run on one worker use execute_mode=Execute.RANK_ZERO.",
        )
    return functions


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """``{"execute_fn_name": name of the worker group's method}``."""
    return _EXECUTE_FUNCTIONS[execute_mode]


def register_dispatch_mode(dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> Dispatch:
    """Add a mode, afterwards ``Dispatch.<NAME>``; a used name is a ValueError."""
    mode = Dispatch.register(dispatch_mode_name)
    _DISPATCH_FUNCTIONS[mode] = _functions(dispatch_fn, collect_fn)
    return mode


def update_dispatch_mode(dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> None:
    """Replace the functions of a mode, for groups that are made from now on."""
    _check_dispatch_mode(dispatch_mode)
    _DISPATCH_FUNCTIONS[dispatch_mode] = _functions(dispatch_fn, collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """The mode for workers on a mesh: batches are split by its data-parallel size.

    All workers of one data-parallel rank get the same part; results come only from those with ``is_collect``. A worker
    reports its rank with `Worker.set_dispatch_collect`; the group queries it at the first call.
    """
    return _functions(
        partial(modes.dispatch_nd_compute_data_proto, mesh_name),
        partial(modes.collect_nd_compute_data_proto, mesh_name),
    )


def make_nd_compute_metric_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """As `make_nd_compute_dataproto_dispatch_fn`, for methods whose results stay a list, one per data-parallel rank."""
    return _functions(
        partial(modes.dispatch_nd_compute_data_proto, mesh_name),
        partial(modes.collect_nd_compute, mesh_name),
    )


def register(
    dispatch_mode: Dispatch | dict[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Tag a method of a `Worker`, sync or async.

    Args:
        dispatch_mode: a `Dispatch` member, or a dict with ``dispatch_fn`` and ``collect_fn``.
        execute_mode: `Execute.ALL` or `Execute.RANK_ZERO`.
        blocking: wait for the result; else the caller gets futures at once.
        materialize_futures: the runtime fetches `DataProtoFuture` arguments inside the worker, before the method runs.

    Example:
        >>> class Critic(Worker):
        ...     @register(Dispatch.DP_COMPUTE_PROTO)
        ...     def compute_values(self, data: DataProto) -> DataProto: ...
    """
    _check_dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise WorkerError("unknown execute mode", got=execute_mode, allowed=Execute.names())
    if execute_mode is Execute.RANK_ZERO and dispatch_mode in _SPLITTING:
        raise WorkerError(
            "a mode that splits its arguments over all workers cannot run on one",
            got=(dispatch_mode, execute_mode),
            fix="Use Dispatch.ALL_TO_ALL with Execute.RANK_ZERO.",
        )
    tag = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
        "materialize_futures": materialize_futures,
    }

    def tagged(function: F) -> F:
        if isinstance(function, FunctionType) and hasattr(function, MAGIC_ATTR):
            function = _copied(function)  # a subclass that registers its parent's method again leaves the parent's tag
        setattr(function, MAGIC_ATTR, tag)
        return function

    return tagged


def _copied(function: FunctionType) -> Any:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


def materialized(
    method: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a runtime calls a worker's method: futures of batches fetched, unless its tag says not.

    A method without a tag gets them as they are.
    """
    # Read by name: any callable may stand behind a method's name, also one that was never registered.
    if not getattr(method, MAGIC_ATTR, {}).get("materialize_futures", False):
        return tuple(args), dict(kwargs)
    return tuple(_fetched(value) for value in args), {key: _fetched(value) for key, value in kwargs.items()}


def _fetched(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture) else value


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    if isinstance(dispatch_mode, Dispatch):
        return
    if isinstance(dispatch_mode, dict):
        missing = [key for key in ("dispatch_fn", "collect_fn") if not callable(dispatch_mode.get(key))]
        if not missing:
            return
        raise WorkerError(
            "a dispatch mode given as a dict needs two functions", got=sorted(dispatch_mode), fix=f"Add {missing}."
        )
    raise WorkerError(
        "unknown dispatch mode",
        got=dispatch_mode,
        allowed=Dispatch.names(),
        fix=suggest(str(dispatch_mode), Dispatch.names()),
    )


__all__ = [
    "MAGIC_ATTR",
    "PADDING_SIZE_KEY",
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_metric_dispatch_fn",
    "materialized",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]
