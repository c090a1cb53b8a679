"""How the arguments of one call are spread over the workers, and how their results become one.

A dispatch function gets ``(worker_group, *args, **kwargs)`` and returns arguments in which every value is a list with
one entry per worker. A collect function gets ``(worker_group, outputs)``, one output per worker; for a call that does
not wait, the outputs are references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, Protocol, TypeVar

from tensordict import TensorDictBase

from verl.errors import WorkerError
from verl.protocol import SHARED_ROWS, DataProto, DataProtoFuture, is_reference

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
DispatchFn = Callable[..., Arguments]
CollectFn = Callable[[Any, Any], Any]
T = TypeVar("T")
Outputs = TypeVar("Outputs", bound=Sequence[Any])
PADDING_SIZE_KEY = "_padding_size_key_x123d"
"""Keyword under which a dispatch function tells how many rows it added; the caller takes them off the result again."""


class DispatchGroup(Protocol):
    """What the functions below read of a worker group."""

    @property
    def world_size(self) -> int: ...

    def dispatch_ranks(self, mesh_name: str) -> list[int]: ...

    def collect_flags(self, mesh_name: str) -> list[bool]: ...


class CallOptions:
    """Base of frozen dataclasses that say how a call is to be done; all workers get the same."""


def dispatch_one_to_all(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The same arguments for every worker."""
    size = worker_group.world_size
    return tuple([value] * size for value in args), {key: [value] * size for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The arguments as given."""
    return args, kwargs


def collect_all_to_all(worker_group: DispatchGroup, output: T) -> T:
    """The list of all outputs as it is."""
    return output


def dispatch_dp_compute(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Every argument must already be a list with one entry per worker."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, (list, tuple)) or len(value) != worker_group.world_size:
            raise WorkerError(
                f"argument {name!r} must be a list with one entry per worker",
                got=f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else type(value).__name__,
                allowed=f"a list of {worker_group.world_size}",
            )
    return args, kwargs


def collect_dp_compute(worker_group: DispatchGroup, output: Outputs) -> Outputs:
    """One output per worker, as a list."""
    if len(output) != worker_group.world_size:
        raise WorkerError("one output per worker is expected", got=len(output), allowed=(worker_group.world_size,))
    return output


def dispatch_dp_compute_data_proto(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """Every batch is cut into one part per worker; padding is added where the batch allows it."""
    return split_batches(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """The first argument, a plain function, goes to every worker; the batches after it are cut."""
    if not args or not isinstance(args[0], FunctionType):
        raise WorkerError(
            "the first argument must be a plain function", got=type(args[0]).__name__ if args else "no argument"
        )
    parts, keyword_parts = split_batches(worker_group.world_size, args[1:], kwargs)
    return ([args[0]] * worker_group.world_size, *parts), keyword_parts


def collect_dp_compute_data_proto(worker_group: DispatchGroup, output: Any) -> Any:
    """The outputs of all workers as one batch, or as the future of one."""
    return join_outputs(output)


def split_batches(parts: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Cut every batch among the arguments into ``parts``; the arguments themselves are not changed, `CallOptions`
    go to every part.

    A batch with padding enabled that does not divide gets copies of its last row, and the keyword
    `PADDING_SIZE_KEY` says how many; all batches of the call must then have the same number of rows.
    """
    batches: dict[int | str, Any] = dict(enumerate(args))
    batches.update(kwargs)
    for name, value in batches.items():
        if not isinstance(value, (DataProto, DataProtoFuture, TensorDictBase, CallOptions)):
            raise WorkerError(
                f"argument {name!r} cannot be split over {parts} workers",
                got=type(value).__name__,
                allowed="DataProto, DataProtoFuture, TensorDict",
                fix="Settings of the call go into a dataclass derived from CallOptions.",
            )
    padded = {n: v for n, v in batches.items() if isinstance(v, DataProto) and v.is_padding_enabled()}
    sizes = {len(batch) for batch in padded.values()}
    if len(sizes) > 1:
        raise WorkerError("batches that are padded together must have the same number of rows", got=sorted(sizes))
    pad_size = -sizes.pop() % parts if padded else 0
    for name, batch in padded.items():
        batches[name] = _padded(batch, pad_size)
    cut = {name: _chunks(value, parts) for name, value in batches.items()}
    keywords: dict[str, Any] = {key: cut[key] for key in kwargs}
    if padded:
        keywords[PADDING_SIZE_KEY] = pad_size
    return tuple(cut[i] for i in range(len(args))), keywords


def _padded(batch: DataProto, pad_size: int) -> DataProto:
    copy = batch.select()
    copy.padding(pad_size)
    return copy


def _chunks(value: Any, parts: int) -> list[Any]:
    if isinstance(value, CallOptions):
        return [value] * parts
    if isinstance(value, TensorDictBase):
        return [chunk.to_tensordict() for chunk in DataProto.from_tensordict(value).chunk(parts)]
    return value.chunk(parts)


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Batches are joined, references to batches become a `DataProtoFuture`."""
    if outputs and all(isinstance(output, DataProto) for output in outputs):
        return DataProto.concat(list(outputs))
    if outputs and all(is_reference(output) for output in outputs):
        return DataProtoFuture(collect_fn=join_outputs, futures=list(outputs))
    if outputs and all(isinstance(output, TensorDictBase) for output in outputs):
        return DataProto.concat([DataProto.from_tensordict(output) for output in outputs]).to_tensordict()
    raise WorkerError(
        "this method must return a batch on every worker, because its dispatch mode joins the results",
        got=[type(output).__name__ for output in outputs],
        allowed="DataProto, TensorDict",
        fix="For lists of metrics there is Dispatch.DP_COMPUTE_METRIC.",
    )


def trim_padding(output: Any, pad_size: int) -> Any:
    """The result of a call without the rows that were added to its batch."""
    if not pad_size:
        return output
    if isinstance(output, DataProtoFuture):
        return DataProtoFuture(
            collect_fn=partial(_collect_and_trim, collect_fn=output.collect_fn, pad_size=pad_size),
            futures=output.futures,
            dispatch_fn=output.dispatch_fn,
        )
    if isinstance(output, (DataProto, TensorDictBase)):
        return output[:-pad_size]
    return output


def _collect_and_trim(outputs: list[Any], collect_fn: Callable[[list[Any]], Any], pad_size: int) -> Any:
    return trim_padding(collect_fn(outputs), pad_size)


def dispatch_nd_compute_data_proto(mesh_name: str, worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> Arguments:
    """One part per data-parallel rank of a mesh; the workers that share such a rank get the same part.

    Such a part says so in its meta information (`SHARED_ROWS`), so that an engine whose ranks compute together knows
    whether they were handed the same rows or rows of their own.
    """
    data_ranks = worker_group.dispatch_ranks(mesh_name)
    size = max(data_ranks) + 1
    parts, keywords = split_batches(size, args, kwargs)
    pad_size = keywords.pop(PADDING_SIZE_KEY, None)
    if size < len(data_ranks):
        parts = tuple([_shared(part) for part in cut] for cut in parts)
        keywords = {key: [_shared(part) for part in cut] for key, cut in keywords.items()}
    spread = {key: [value[rank] for rank in data_ranks] for key, value in keywords.items()}
    if pad_size is not None:
        spread[PADDING_SIZE_KEY] = pad_size
    return tuple([part[rank] for rank in data_ranks] for part in parts), spread


def _shared(part: Any) -> Any:
    """The part with the mark of rows that several workers get."""
    if isinstance(part, DataProtoFuture):
        return replace(part, dispatch_fn=partial(_fetched_and_shared, before=part.dispatch_fn))
    if isinstance(part, DataProto):
        return DataProto(part.batch, part.non_tensor_batch, {**part.meta_info, SHARED_ROWS: True})
    return part


def _fetched_and_shared(whole: Any, before: Callable[[Any], Any] | None) -> Any:
    return _shared(whole if before is None else before(whole))


def collect_nd_compute(mesh_name: str, worker_group: DispatchGroup, output: Sequence[Any]) -> list[Any]:
    """The outputs of the workers that speak for their data-parallel rank, in the order of these ranks."""
    outputs = collect_dp_compute(worker_group, output)
    ranks, speaks = worker_group.dispatch_ranks(mesh_name), worker_group.collect_flags(mesh_name)
    speakers = sorted((rank, worker) for worker, rank in enumerate(ranks) if speaks[worker])
    return [outputs[worker] for _, worker in speakers]


def collect_nd_compute_data_proto(mesh_name: str, worker_group: DispatchGroup, output: Any) -> Any:
    """The outputs of those workers as one batch, or as the future of one, without the mark of shared rows."""
    return _joined(collect_nd_compute(mesh_name, worker_group, output))


def _joined(outputs: Sequence[Any]) -> Any:
    joined = join_outputs(outputs)
    if isinstance(joined, DataProtoFuture):
        return replace(joined, collect_fn=_joined)
    if isinstance(joined, DataProto) and SHARED_ROWS in joined.meta_info:
        meta = {name: value for name, value in joined.meta_info.items() if name != SHARED_ROWS}
        return DataProto(joined.batch, joined.non_tensor_batch, meta)
    return joined


def refuse_direct_rollout(worker_group: DispatchGroup, *args: Any, **kwargs: Any) -> NoReturn:
    raise WorkerError(
        "a method with Dispatch.DIRECT_ROLLOUT_METHOD cannot be called through the group",
        fix="The rollout engine's own executor calls it.",
    )
