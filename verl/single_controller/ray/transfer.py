"""How values travel to and from workers: tensors as flat buffers, shared arguments once, batches by reference.

A large value is stored once in the node's shared memory and read there without a copy. No code may write to such a
tensor: torch cannot mark memory as read-only, so the worker's process checks after each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray.util.serialization import register_serializer
from tensordict import TensorDict, TensorDictBase

from verl.errors import WorkerError
from verl.protocol import DataProto, DataProtoFuture, register_reference, traffic
from verl.protocol.codec import DTYPE_CODES, DTYPES, tensor_bytes, tensor_from_bytes
from verl.protocol.lazy import LazyColumn, store_tensors
from verl.single_controller.ray import failures

SHARED_BYTES = 64 << 10
"""An argument for several workers of at least this size is put into shared memory once; smaller ones ride along."""
_COUNTED_ITEMS, _COUNTED_ROWS = 1000, 64

Call = tuple[tuple[Any, ...], dict[str, Any]]


def install_transfer() -> None:
    """Teach this process (the controller or a worker) to send tensors as buffers and to wait for Ray's references."""
    register_serializer(torch.Tensor, serializer=_flat, deserializer=_rebuilt)
    register_reference(ray.ObjectRef, failures.fetch_references)


def stored(result: object) -> object:
    """A result in which the columns of a batch stay in this node's object store, and their references travel.

    They live as long as a process holds a reference: with the last batch that has their rows the store frees them.
    """
    if not isinstance(result, DataProto) or result.batch is None:
        return result
    columns = store_tensors(dict(result.batch.items()), ray.put, ray.util.get_node_ip_address())
    batch = TensorDict(columns, batch_size=result.batch.batch_size)
    return DataProto(batch, result.non_tensor_batch, result.meta_info)


def fetch_columns(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Arguments whose batches have their columns here: only the rows that this process was given are fetched."""
    return (
        tuple(_fetched(value) for value in args),
        {name: _fetched(value) for name, value in kwargs.items()},
    )


def _fetched(value: Any) -> Any:
    return value.fetched() if isinstance(value, DataProto) else value


def count_calls(calls: Sequence[Call]) -> None:
    """Count what goes out by value: an argument that is shared once, of the others each."""
    for value in {id(v): v for args, kwargs in calls for v in (*args, *kwargs.values())}.values():
        traffic.count("sent", value_bytes(value))


def count_results(results: object) -> None:
    """Count what came in by value."""
    for value in results if isinstance(results, list) else [results]:
        traffic.count("received", value_bytes(value))


def value_bytes(value: object) -> int:
    """The bytes of a batch that travel in the message itself; of a lazy column those of its plan."""
    if not isinstance(value, DataProto):
        return 0
    tensors = value.batch.values() if value.batch is not None else ()
    columns = sum(_message_bytes(tensor) for tensor in tensors)
    return columns + sum(_column_bytes(column) for column in value.non_tensor_batch.values())


def _message_bytes(tensor: Any) -> int:
    if isinstance(tensor, LazyColumn):
        return tensor.plan.num_bytes
    return payload_bytes(tensor)


def _column_bytes(column: np.ndarray) -> int:
    """Of objects an estimate from some rows: to look at every value would take longer than to send them."""
    if column.dtype != object or len(column) <= _COUNTED_ROWS:
        return payload_bytes(column)
    some = column[:: -(-len(column) // _COUNTED_ROWS)]
    return payload_bytes(some) * len(column) // len(some)


def _flat(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODES or tensor.is_quantized or tensor.is_meta:
        return None, tensor.__reduce_ex__(5)
    return DTYPE_CODES[tensor.dtype], tuple(tensor.shape), tensor_bytes(tensor), tensor.requires_grad


def _rebuilt(packed: tuple[Any, ...]) -> torch.Tensor:
    code, *rest = packed
    if code is None:
        function, arguments = rest[0][:2]
        return function(*arguments)
    shape, raw, requires_grad = rest
    tensor = tensor_from_bytes(raw, DTYPES[code], shape)
    return tensor.requires_grad_() if requires_grad else tensor


@dataclass(frozen=True)
class BoxedRef:
    """A reference inside a value: Ray neither waits for it nor fetches it before the call, the worker does."""

    reference: Any


def share(calls: Sequence[Call]) -> list[Call]:
    """The same calls, in which every large value that several workers get is one object in shared memory.

    References that the caller made himself are fetched by the worker as well, so that no call waits for another's.
    """
    counted: dict[int, int] = {}
    for args, kwargs in calls:
        for value in (*args, *kwargs.values()):
            counted[id(value)] = counted.get(id(value), 0) + 1
    boxes: dict[int, BoxedRef] = {}

    def boxed(value: object) -> Any:
        if isinstance(value, ray.ObjectRef):
            return BoxedRef(value)
        if counted[id(value)] < 2 or payload_bytes(value) < SHARED_BYTES:
            return value
        if id(value) not in boxes:
            boxes[id(value)] = BoxedRef(ray.put(value))
        return boxes[id(value)]

    return [(tuple(boxed(v) for v in args), {k: boxed(v) for k, v in kwargs.items()}) for args, kwargs in calls]


def refers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether some argument is not there yet, but has to be fetched."""
    values = (*args, *kwargs.values())
    return any(isinstance(value, BoxedRef | DataProtoFuture) or _is_lazy(value) for value in values)


def _is_lazy(value: object) -> bool:
    return isinstance(value, DataProto) and value.has_lazy_columns


def open_shared(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Fetch what `share` put away; all at once, without a copy where it is on this node."""
    boxes = [value for value in (*args, *kwargs.values()) if isinstance(value, BoxedRef)]
    if not boxes:
        return tuple(args), dict(kwargs)
    opened_boxes = dict(zip(map(id, boxes), failures.fetch_references([box.reference for box in boxes])))
    return tuple(opened_boxes.get(id(v), v) for v in args), {k: opened_boxes.get(id(v), v) for k, v in kwargs.items()}


def payload_bytes(value: object) -> int:
    """About how much there is to send; enough to tell small from large."""
    total = 0
    for number, leaf in enumerate(_leaves(value)):
        if number >= _COUNTED_ITEMS:
            return max(total, SHARED_BYTES)  # too many to count is not small
        if isinstance(leaf, LazyColumn):
            total += leaf.plan.num_bytes
        elif isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size()  # as if it were dense: only the order of magnitude counts
        elif isinstance(leaf, np.ndarray):
            total += leaf.nbytes
        elif isinstance(leaf, (str, bytes, bytearray)):
            total += len(leaf)
        else:
            total += 8
    return total


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, DataProto):
        yield from _leaves(value.batch)
        yield from _leaves(value.non_tensor_batch)
        yield from _leaves(value.meta_info)
    elif isinstance(value, (Mapping, TensorDictBase)):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from _leaves(value.ravel().tolist())
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, DataProtoFuture):
        yield value


Arrived = list[tuple[str, torch.Tensor, int]]


def arrived_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arrived:
    """The tensors of the batches among the arguments, with their names and versions."""
    tensors: Arrived = []
    for value in (*args, *kwargs.values()):
        batch = value.batch if isinstance(value, DataProto) else value
        if isinstance(batch, TensorDictBase):
            here = ((str(key), item) for key, item in batch.items() if isinstance(item, torch.Tensor))
            tensors += [(key, item, item._version) for key, item in here if not item.is_inference()]
    return tensors


def check_untouched(arrived: Arrived) -> None:
    """Refuse what a method did to its arguments: the memory is also read by other workers and by the controller."""
    for name, tensor, version in arrived:
        if tensor._version != version:
            raise WorkerError(
                f"this method wrote into the tensor {name!r} of its batch, which is memory shared between processes",
                fix=f"Write into a copy: batch[{name!r}] = batch[{name!r}].clone(). In one process the same code would "
                "have changed the caller's batch.",
            )
