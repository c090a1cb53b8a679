"""`DataProto`, the batch that travels between the stages of a step.

Three parts: ``batch`` (tensors, one row per sample), ``non_tensor_batch`` (numpy arrays, usually of objects, one entry
per sample) and ``meta_info`` (anything, about the batch as a whole). Selecting, slicing and chunking share memory with
the original; what copies says so. A tensor may be a `LazyColumn`, whose entries lie elsewhere until they are read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from verl.errors import BatchError
from verl.protocol import disk, wire
from verl.protocol.columns import (
    Rows,
    as_column,
    as_index,
    divisors,
    even_bounds,
    names,
    object_array,
    union_meta_info,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.protocol.fields import missing_key_error
from verl.protocol.joining import join_arrays, join_meta_info, join_tensordicts
from verl.protocol.lazy import LazyColumn, fetched_tensors
from verl.protocol.settings import AUTO_PADDING_KEY, DataProtoConfig


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch axis, and the row's objects."""

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of rows.

    Example:
        >>> batch = DataProto.from_dict({"responses": torch.zeros(4, 3)}, {"uid": ["a", "a", "b", "b"]})
        >>> len(batch), len(batch[:2]), batch[3].non_tensor_batch["uid"]
        (4, 2, 'b')

    Raises:
        BatchError: columns of different lengths, or not exactly one batch axis.
    """

    batch: TensorDictBase | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---- making ------------------------------------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From tensors and per-row values (arrays as they are, other sequences become object arrays)."""
        _check_batch_dims(num_batch_dims)
        tensors = tensors or {}
        rows = {key: len(tensor) if tensor.dim() else -1 for key, tensor in tensors.items()}
        if len(set(rows.values())) > 1 or -1 in rows.values():
            raise BatchError(
                "the tensors do not have the same number of rows", got={k: tuple(t.shape) for k, t in tensors.items()}
            )
        batch = TensorDict(dict(tensors), batch_size=[next(iter(rows.values()))]) if tensors else None
        columns = {key: as_column(key, values) for key, values in (non_tensors or {}).items()}
        meta = dict(meta_info or {})
        if auto_padding:
            meta[AUTO_PADDING_KEY] = True
        return cls(batch=batch, non_tensor_batch=columns, meta_info=meta)

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """From one dictionary of tensors and numpy arrays, as a data loader makes it."""
        wrong = {k: type(v).__name__ for k, v in data.items() if not isinstance(v, (torch.Tensor, np.ndarray))}
        if wrong:
            raise BatchError("only tensors and numpy arrays can be columns here", got=wrong)
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        arrays = {k: v for k, v in data.items() if isinstance(v, np.ndarray)}
        return cls.from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """The reverse of `to_tensordict`: stacks of non-tensors become columns, single ones become meta_info."""
        _check_batch_dims(num_batch_dims)
        if tensor_dict is None:
            raise BatchError("there is no TensorDict to make a batch from")
        tensors: dict[str, Any] = {}
        columns: dict[str, np.ndarray] = {}
        meta = dict(meta_info or {})
        for key, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                columns[key] = object_array([item.data for item in value.tensordicts])
            elif isinstance(value, NonTensorData):
                union_meta_info(meta, {key: value.data})
            else:
                tensors[key] = value
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size[:1]) if tensors else None
        return cls(batch=batch, non_tensor_batch=columns, meta_info=meta)

    def to_tensordict(self) -> TensorDict:
        """One TensorDict: columns as `NonTensorStack`, meta_info as `NonTensorData`; a name may occur only once."""
        tensors = dict(self.batch.items()) if self.batch is not None else {}
        clash = (tensors.keys() & self.non_tensor_batch.keys()) | (
            (tensors.keys() | self.non_tensor_batch.keys()) & self.meta_info.keys()
        )
        if clash:
            raise BatchError("a name is used for more than one of tensors, columns and meta_info", got=sorted(clash))
        rows = len(self)
        merged = TensorDict(tensors, batch_size=[rows])
        for key, column in self.non_tensor_batch.items():
            merged.set(key, NonTensorStack(*[NonTensorData(value) for value in column]))
        for key, value in self.meta_info.items():
            merged.set(key, cast(Any, NonTensorData(value, batch_size=[rows])))
        return merged

    # ---- looking -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __repr__(self) -> str:
        tensors = list(self.batch.keys()) if self.batch is not None else []
        return f"DataProto(rows={len(self)}, batch={tensors}, non_tensor_batch={list(self.non_tensor_batch)})"

    def __getitem__(self, item: int | np.integer | Rows) -> Any:
        """An integer gives a `DataProtoItem`; a slice, list, array or tensor of indices or booleans a `DataProto`."""
        if isinstance(item, (int, np.integer)) and not isinstance(item, (bool, np.bool_)):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a batch of {len(self)} rows")
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[int(item)],
                non_tensor_batch={key: column[item] for key, column in self.non_tensor_batch.items()},
                meta_info=self.meta_info,
            )
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, tuple, np.ndarray, torch.Tensor)):
            return self.select_idxs(cast(Rows, item))
        raise TypeError(f"a batch is indexed by int, slice, list, array or tensor, not {type(item).__name__}")

    def check_consistency(self) -> None:
        """Raise `BatchError` unless there is one batch axis and every column has one entry per row."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError("a batch has exactly one batch axis", got=tuple(self.batch.batch_size))
        rows = len(self)
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray):
                raise BatchError(f"the non-tensor column {key!r} is not a numpy array", got=type(column).__name__)
            if column.ndim == 0 or len(column) != rows:
                raise BatchError(
                    f"the non-tensor column {key!r} does not have one entry per row", got=column.shape, allowed=(rows,)
                )

    def print_size(self, prefix: str = "") -> None:
        """Print the size of the tensors and of the arrays in GB."""
        tensors = self.batch.bytes() if self.batch is not None else 0
        arrays = sum(column.nbytes for column in self.non_tensor_batch.values())
        head = f"{prefix}: " if prefix else ""
        print(f"{head}tensors {tensors / 1024**3:.6f} GB, non-tensor columns {arrays / 1024**3:.6f} GB")

    def get_data_info(self) -> str:
        """A listing of every column with shape, type and device, and of meta_info."""
        lines = [f"rows: {len(self)}", "batch"]
        for key, value in self.batch.items() if self.batch is not None else ():
            lines.append(f"  {key}: {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}")
        lines.append("non_tensor_batch")
        for key, column in self.non_tensor_batch.items():
            kind = f" of {type(column[0]).__name__}" if column.dtype == object and len(column) else ""
            lines.append(f"  {key}: {column.shape} {column.dtype}{kind}")
        lines.append("meta_info")
        lines += [f"  {key}: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    # ---- choosing columns --------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only the listed keys of each part (None keeps all of them); shares memory unless ``deepcopy``."""
        tensors = self._existing(batch_keys, self._tensor_keys(), "batch")
        columns = self._existing(non_tensor_batch_keys, list(self.non_tensor_batch), "non_tensor_batch")
        metas = self._existing(meta_info_keys, list(self.meta_info), "meta_info")
        selection = type(self)(
            batch=None if self.batch is None else self.batch.select(*tensors),
            non_tensor_batch={key: self.non_tensor_batch[key] for key in columns},
            meta_info=self.meta_info if meta_info_keys is None else {key: self.meta_info[key] for key in metas},
        )
        return copy.deepcopy(selection) if deepcopy else selection

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove the listed keys from this batch and return them as a batch of their own (None removes nothing)."""
        tensors = self._existing(names(batch_keys), self._tensor_keys(), "batch")
        columns = self._existing(names(non_tensor_batch_keys), list(self.non_tensor_batch), "non_tensor_batch")
        metas = self._existing(names(meta_info_keys), list(self.meta_info), "meta_info")
        popped = {key: cast(TensorDictBase, self.batch).pop(key) for key in tensors}
        return type(self)(
            batch=TensorDict(popped, batch_size=[len(self)]) if popped else None,
            non_tensor_batch={key: self.non_tensor_batch.pop(key) for key in columns},
            meta_info={key: self.meta_info.pop(key) for key in metas},
        )

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Rename tensor columns in place; returns self."""
        old, new = names(old_keys), names(new_keys)
        if len(old) != len(new):
            raise BatchError("as many new names as old names are needed", got=(old, new))
        present = self._tensor_keys()
        self._existing(old, present, "batch")
        taken = [key for key in new if key in present and key not in old]
        if taken or len(set(new)) != len(new):
            raise BatchError("a new name is used already", got=taken or new)
        values = {name: cast(TensorDictBase, self.batch).pop(key) for key, name in zip(old, new)}
        for name, value in values.items():
            cast(TensorDictBase, self.batch)[name] = value
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns of ``other`` in place; what both have must be equal. Returns self."""
        if not self._is_empty() and not other._is_empty() and len(self) != len(other):
            raise BatchError("two batches of different sizes have no union", got=(len(self), len(other)))
        if other.batch is not None:
            self.batch = other.batch.copy() if self.batch is None else union_tensor_dict(self.batch, other.batch)
        union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        union_meta_info(self.meta_info, other.meta_info)
        return self

    # ---- choosing rows -----------------------------------------------------------------------------------------

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step`` as views (a negative step copies the tensors)."""
        cut = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(list(range(*cut.indices(len(self)))))
        tensors = None if self.batch is None else self.batch[cut]
        if tensors is self.batch is not None:  # all rows: columns that are added to one are not in the other
            tensors = self.batch.copy()
        return self._with_rows(tensors, {key: column[cut] for key, column in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Rows) -> DataProto:
        """A copy of the chosen rows, in the given order; ``idxs`` holds indices or one boolean per row."""
        index = as_index(idxs, len(self))
        array_index = index.numpy()
        tensors = None if self.batch is None else self.batch[index.to(self.batch.device or "cpu")]
        return self._with_rows(tensors, {key: column[array_index] for key, column in self.non_tensor_batch.items()})

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` parts of equal size, as views.

        Raises:
            BatchError: the rows do not divide and padding is not enabled. With padding enabled the sizes differ by one.
        """
        if chunks < 1:
            raise BatchError("a batch is cut into at least one part", got=chunks)
        if len(self) % chunks and not self.is_padding_enabled():
            raise BatchError(
                f"a batch of {len(self)} rows does not divide into {chunks} equal parts",
                allowed=f"{divisors(len(self), chunks)} parts, or a number of rows divisible by {chunks}",
                fix="pad_dataproto_to_divisor(batch, parts) repeats rows, and unpad_dataproto takes them off again.",
            )
        return [self.slice(start, end) for start, end in even_bounds(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows, as views; the last may be shorter."""
        if split_size < 1:
            raise BatchError("a part has at least one row", got=split_size)
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all batches in one; columns with a declared time axis are padded to the longest batch.

        ``meta_info`` is merged: a key of several batches must hold equal values, except ``metrics``, which become
        lists, one entry per batch.
        """
        parts = list(data)
        if not parts:
            raise BatchError("there is no batch to join")
        with_tensors = [bool(part._tensor_keys()) for part in parts]
        if any(with_tensors) and not all(with_tensors):
            raise BatchError("batches with and without tensors cannot be joined", got=with_tensors)
        meta_info = join_meta_info([part.meta_info for part in parts])
        tensors = [part.batch for part in parts if part.batch is not None]
        return type(parts[0])(
            batch=join_tensordicts(tensors, meta_info) if len(tensors) == len(parts) else None,
            non_tensor_batch=join_arrays([part.non_tensor_batch for part in parts]),
            meta_info=meta_info,
        )

    def reorder(self, indices: Rows) -> None:
        """Put the rows into this order, in place."""
        ordered = self.select_idxs(indices)
        if len(ordered) != len(self):
            raise BatchError("an order names every row", got=len(ordered), allowed=(len(self),))
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: AABB when interleaved, ABAB otherwise. Copies."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> DataProto:
        """Row i ``repeat_times[i]`` times, copies side by side."""
        counts = torch.as_tensor(np.asarray(repeat_times)).to(torch.int64)
        if counts.dim() != 1 or len(counts) != len(self):
            raise BatchError("one count per row is needed", got=tuple(counts.shape), allowed=(len(self),))
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut axis 1 of the listed columns into ``n_split`` rows each; the other columns are repeated to match."""
        split = names(split_keys)
        self._existing(split, [*self._tensor_keys(), *self.non_tensor_batch], "the batch")
        rows = torch.arange(len(self)).repeat_interleave(n_split)
        tensors = None
        if self.batch is not None:
            unfolded = {k: _fold_axis_1(k, v, n_split) if k in split else v[rows] for k, v in self.batch.items()}
            tensors = TensorDict(unfolded, batch_size=[len(rows)], device=self.batch.device)
        columns = self.non_tensor_batch.items()
        return self._with_rows(
            tensors, {k: _fold_axis_1(k, v, n_split) if k in split else v[rows.numpy()] for k, v in columns}
        )

    # ---- padding and iterating ---------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """This batch's own flag, or the global `DataProtoConfig.auto_padding`."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False)) or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the last row in place (of the first one for ``"first"``)."""
        if padding_candidate not in ("", "first", "last"):
            raise BatchError("unknown row to pad with", got=padding_candidate, allowed=("first", "last"))
        if padding_size == 0:
            return
        if not len(self):
            raise BatchError("an empty batch has no row to pad with")
        row = 0 if padding_candidate == "first" else len(self) - 1
        self_and_padding = torch.cat([torch.arange(len(self)), torch.full((padding_size,), row)])
        padded = self.select_idxs(self_and_padding)
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches over ``epochs`` passes; ``dataloader_kwargs={"shuffle": True}`` shuffles, reproducibly by seed.

        Raises:
            BatchError: the rows do not divide by ``mini_batch_size`` (raised here, not at the first mini-batch).
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(
                f"a batch of {len(self)} rows does not divide into mini-batches of {mini_batch_size}",
                allowed=f"mini-batches of {divisors(len(self), mini_batch_size)} rows",
            )
        return self._mini_batches(mini_batch_size, epochs, seed, dataloader_kwargs or {})

    def _mini_batches(
        self, mini_batch_size: int, epochs: int, seed: int | None, loader_options: dict[str, Any]
    ) -> Iterator[DataProto]:
        from torch.utils.data import DataLoader

        generator = torch.Generator()
        if seed is not None:
            generator.manual_seed(seed)
        elif loader_options.get("shuffle"):
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        rows = cast(Any, range(len(self)))  # indices are all the loader needs to see
        loader = DataLoader(rows, batch_size=mini_batch_size, collate_fn=list, generator=generator, **loader_options)
        for _ in range(epochs):
            for indices in loader:
                yield self.select_idxs(indices)

    def to(self, device: str | torch.device) -> DataProto:
        """Move the tensors, in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # ---- travelling --------------------------------------------------------------------------------------------

    @property
    def has_lazy_columns(self) -> bool:
        """Whether entries of some column lie elsewhere."""
        return self.batch is not None and any(isinstance(value, LazyColumn) for value in self.batch.values())

    def fetched(self) -> DataProto:
        """The batch with every column here, in ordinary tensors; itself where it has them already."""
        if self.batch is None or not self.has_lazy_columns:
            return self
        columns = fetched_tensors(dict(self.batch.items()))
        batch = TensorDict(columns, batch_size=self.batch.batch_size, device=self.batch.device)
        return self._with_rows(batch, self.non_tensor_batch)

    def __copy__(self) -> DataProto:
        return type(self)(
            batch=None if self.batch is None else self.batch.copy(),
            non_tensor_batch=dict(self.non_tensor_batch),
            meta_info=dict(self.meta_info),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        return type(self)(
            batch=None if self.batch is None else self.batch.clone(),
            non_tensor_batch=copy.deepcopy(self.non_tensor_batch, memo),
            meta_info=copy.deepcopy(self.meta_info, memo),
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        """Tensors and arrays travel as out-of-band buffers where the transport supports them (see `wire`)."""
        return wire.reduce_batch(self)

    def save_to_disk(self, filepath: str) -> None:
        """Write one safetensors file (see `disk`); a value that cannot be written is refused with its key and row."""
        disk.save(self, filepath)

    @classmethod
    def load_from_disk(cls, filepath: str) -> DataProto:
        """Read a file of `save_to_disk`; nothing in it is executed."""
        return disk.load(cls, filepath)

    # ---- internals ---------------------------------------------------------------------------------------------

    def _is_empty(self) -> bool:
        return self.batch is None and not self.non_tensor_batch

    def _tensor_keys(self) -> list[str]:
        return list(self.batch.keys()) if self.batch is not None else []

    @property
    def tensors(self) -> TensorDictBase:
        """``batch``, for code that needs tensor columns.

        Raises:
            BatchError: there are none.
        """
        if self.batch is None:
            raise BatchError("the batch has no tensor columns", got=sorted(self.non_tensor_batch))
        return self.batch

    def _with_rows(self, batch: TensorDictBase | None, columns: dict[str, np.ndarray]) -> DataProto:
        return type(self)(batch=batch, non_tensor_batch=columns, meta_info=self.meta_info)

    @staticmethod
    def _existing(keys: Sequence[str] | None, present: list[str], where: str) -> list[str]:
        """The listed keys (None: all), each of which must be present."""
        if keys is None:
            return present
        for key in names(keys):
            if key not in present:
                raise missing_key_error(key, present, where)
        return names(keys)


def _check_batch_dims(num_batch_dims: int) -> None:
    if num_batch_dims != 1:
        raise BatchError("a batch has exactly one batch axis", key="num_batch_dims", got=num_batch_dims, allowed=(1,))


def _fold_axis_1(key: str, values: Any, parts: int) -> Any:
    if len(values.shape) < 2 or values.shape[1] % parts:
        raise BatchError(f"axis 1 of {key!r} does not divide into {parts} parts", got=tuple(values.shape))
    return values.reshape(values.shape[0] * parts, values.shape[1] // parts, *values.shape[2:])
