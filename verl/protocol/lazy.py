"""`LazyColumn`: a tensor of a batch whose entries are elsewhere, and are fetched when something reads them.

To code that handles batches it is a tensor: it has a shape and a type, rows are selected and batches joined as always.
Selecting, cutting, joining and what a plan knows by itself (row sums of masks, say) fetch nothing. Every other
operation fetches the entries of its rows, so nothing has to know about this class to be right; the bytes are counted
by column (`verl.protocol.traffic`). It cannot be written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from verl.errors import BatchError
from verl.protocol.stored import Index, OneEntry, PerRow, Plan, Stored, fetch, store_column

__all__ = ["LazyColumn", "fetched", "fetched_tensors", "last_places", "one_entry", "row_bounds",
           "scattered_rows", "store_tensors", "trimmed_axis", "zero_rows"]  # fmt: skip


class LazyColumn(Tensor):
    """A column that is not here.

    Args:
        plan: where its entries are.
    """

    plan: Plan

    @staticmethod
    def __new__(cls, plan: Plan) -> LazyColumn:
        return torch.Tensor._make_wrapper_subclass(cls, plan.shape, dtype=plan.dtype)

    def __init__(self, plan: Plan):
        self.plan = plan
        self._value: Tensor | None = None

    def value(self) -> Tensor:
        """The entries, as an ordinary tensor; kept, because several stages read some columns."""
        if self._value is None:
            self._value = self.plan.value()
        return self._value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyColumn(shape={tuple(self.shape)}, dtype={self.dtype}, {type(self.plan).__name__})"

    def __reduce_ex__(self, protocol: object) -> Any:
        return LazyColumn, (self.plan,)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = _LAZY.get(func)
        if lazy is not None:
            result = lazy(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if _writes(name) or "out" in kwargs:
            raise BatchError(
                f"{name} would write into a column whose entries lie elsewhere",
                fix="Put a new tensor in its place: batch.batch[name] = batch.batch[name].clone() may be written to.",
            )
        return func(*tree_map(fetched, args), **tree_map(fetched, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What torch calls below its Python interface."""
        return func(*tree_map(fetched, args), **tree_map(fetched, kwargs or {}))


def _writes(name: str) -> bool:
    """Whether an operation of torch of this name changes its first argument."""
    if name.endswith("__"):
        return name in ("__set__", "__setitem__") or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_")


def fetched(value: Any) -> Any:
    """An ordinary tensor for a lazy column; anything else as it is."""
    return value.value() if isinstance(value, LazyColumn) else value


def fetched_tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    """All columns as ordinary tensors; remote blocks are fetched in one go."""
    fetch(block for value in columns.values() if isinstance(value, LazyColumn) for block in value.plan.needs())
    return {name: fetched(value) for name, value in columns.items()}


def store_tensors(columns: Mapping[str, Any], put: Callable[[Tensor], Any], place: str) -> dict[str, Any]:
    """The columns with several entries per row put away; the others, and those that are away already, as they are.

    Args:
        put, place: as of `store_column`.
    """
    responses = columns.get("responses")
    widths = {} if responses is None else {"T": responses.shape[-1]}
    stored = {}
    for name, column in columns.items():
        goes = type(column) is Tensor and column.layout == torch.strided and column.dim() > 1
        stored[name] = LazyColumn(store_column(name, column, widths, put, place)) if goes else column
    return stored


# ---- what the stages ask that has a name of its own ----------------------------------------------------------------


def zero_rows(column: Tensor, rows: np.ndarray) -> Tensor:
    """A copy of a column (B, ...) with zeros in these rows (B,) bool."""
    if isinstance(column, LazyColumn) and isinstance(column.plan, Stored):
        return LazyColumn(column.plan.without(rows))
    out = torch.from_numpy(rows).reshape(-1, *[1] * (column.dim() - 1))
    return torch.where(out, torch.zeros_like(column), column)


def scattered_rows(values: Tensor, rows: np.ndarray, total: int) -> Tensor:
    """``total`` rows of zeros, in which the rows of number ``rows`` (B,) are those of ``values`` (B, T)."""
    if isinstance(values, LazyColumn) and isinstance(values.plan, Stored | PerRow):
        return values if len(rows) == total else LazyColumn(values.plan.scattered(rows, total))
    spread = values.new_zeros(total, *values.shape[1:])
    spread[torch.from_numpy(rows)] = fetched(values)
    return spread


def one_entry(numbers: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """(B, T) zeros with one of ``numbers`` (B,) in each row, at ``places`` (B,); -1: nowhere.

    Args:
        like: (B, T); the result is lazy where this is.
    """
    plan = OneEntry(numbers, places, like.shape[1])
    return LazyColumn(plan) if isinstance(like, LazyColumn) else plan.value()


def last_places(mask: Tensor) -> Tensor:
    """(B,) int64: the place of the last entry of each row of a mask (B, T) that is not zero; -1 where there is none."""
    if isinstance(mask, LazyColumn) and isinstance(mask.plan, Stored):
        facts = mask.plan.facts
        if facts is not None and facts.last is not None:
            return facts.last
    if mask.shape[1] == 0:
        return torch.full((len(mask),), -1)
    return (fetched(mask).ne(0) * torch.arange(1, mask.shape[1] + 1)).amax(-1) - 1


def row_bounds(column: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of integers (B, T): the smallest entry that is not negative, and the largest of all, (B,) int64.

    Where no entry counts the smallest is the largest number of the column's type.
    """
    if isinstance(column, LazyColumn) and isinstance(column.plan, Stored):
        facts = column.plan.facts
        if facts is not None and facts.lowest is not None and facts.highest is not None:
            return facts.lowest, facts.highest
    column = fetched(column)
    highest = torch.iinfo(column.dtype).max
    return torch.where(column >= 0, column, highest).amin(-1).long(), column.amax(-1).long()


def trimmed_axis(column: Tensor, axis: int, start: int, length: int) -> Tensor:
    """``length`` entries of an axis from ``start`` on, in memory of their own; all others are padding."""
    if isinstance(column, LazyColumn):
        if isinstance(column.plan, Stored):
            return LazyColumn(column.plan.cut(axis, start, length, only_padding=True))
        if isinstance(column.plan, OneEntry):
            return LazyColumn(column.plan.resized(-start, length))
    return column.narrow(axis, start, length).clone()


# ---- what torch's own operations do on a plan ----------------------------------------------------------------------


def join_lazy(parts: Sequence[Any]) -> Tensor | None:
    """The rows of all parts without fetching them; None where some are not lazy, or not of one kind."""
    plans = [part.plan if isinstance(part, LazyColumn) else None for part in parts]
    if all(isinstance(plan, Stored) for plan in plans) and len({plan.dtype for plan in plans if plan}) == 1:
        return LazyColumn(Stored.joined([plan for plan in plans if isinstance(plan, Stored)]))
    if all(isinstance(plan, OneEntry) for plan in plans):
        return LazyColumn(OneEntry.joined([plan for plan in plans if isinstance(plan, OneEntry)]))
    return None


def pad_lazy(column: LazyColumn, axis: int, count: int, value: Any, left: bool) -> Tensor | None:
    """More padding on one side; None where the plan cannot say so."""
    before, after = (count, 0) if left else (0, count)
    if isinstance(column.plan, Stored):
        return LazyColumn(column.plan.padded(axis, before, after, value))
    if isinstance(column.plan, OneEntry) and value == 0:
        return LazyColumn(column.plan.resized(before, column.shape[1] + count))
    return None


def _selected(column: Any, index: Any) -> Any:
    if not isinstance(column, LazyColumn):
        return NotImplemented
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, tuple):
        return _window(column, index)
    if isinstance(index, int | np.integer) and not isinstance(index, bool | np.bool_):
        row = range(len(column))[int(index)]
        return column.plan.take(slice(row, row + 1)).value()[0]
    rows = _rows(index, len(column))
    return NotImplemented if rows is None else LazyColumn(column.plan.take(rows))


def _window(column: LazyColumn, index: tuple[Any, ...]) -> Any:
    """``column[:, a:b]``."""
    rows, *rest = index
    if rows != slice(None) or len(rest) != 1 or not isinstance(rest[0], slice) or rest[0].step not in (None, 1):
        return NotImplemented
    start, stop, _ = rest[0].indices(column.shape[1])
    return _narrowed(column, 1, start, max(0, stop - start))


def _narrowed(column: Any, dim: int, start: int, length: int) -> Any:
    if isinstance(column, LazyColumn) and isinstance(column.plan, Stored) and dim % column.dim():
        return LazyColumn(column.plan.cut(dim, int(start), int(length)))
    return NotImplemented


def _rows(index: Any, count: int) -> Index | None:
    if isinstance(index, slice):
        return index
    if isinstance(index, LazyColumn) or not isinstance(index, list | np.ndarray | Tensor):
        return None
    indices = np.asarray(index)
    if indices.ndim != 1:
        return None
    if indices.dtype == bool:
        return np.flatnonzero(indices) if len(indices) == count else None
    return indices.astype(np.int64)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(column: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not isinstance(column, LazyColumn):
            return NotImplemented
        return _cast(column, dtype)

    return cast


def _cast(column: LazyColumn, dtype: torch.dtype) -> Any:
    if dtype == column.dtype:
        return column
    plan = column.plan.cast(dtype)
    return NotImplemented if plan is None else LazyColumn(plan)


def _to(column: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(column, LazyColumn) and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return _cast(column, args[0])
    return NotImplemented


def _itself(column: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else column


def _is_last(column: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a reduction is along the last of two axes, with no other argument."""
    dims = (*args, *kwargs.values())
    return column.dim() == 2 and set(kwargs) <= {"dim"} and len(dims) == 1 and dims[0] in (-1, 1)


def _summed(column: Any, *args: Any, **kwargs: Any) -> Any:
    sums = column.plan.row_sums() if _is_last(column, args, kwargs) else None
    return NotImplemented if sums is None else sums


def _largest(column: Any, *args: Any, **kwargs: Any) -> Any:
    largest = column.plan.amax() if _is_last(column, args, kwargs) else None
    return NotImplemented if largest is None else largest


def _smallest(column: Any, *args: Any, **kwargs: Any) -> Any:
    plan = column.plan
    smallest = plan.extreme(torch.minimum) if isinstance(plan, PerRow) and _is_last(column, args, kwargs) else None
    return NotImplemented if smallest is None else smallest


def _mapped(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def mapped(column: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or isinstance(column.plan, Stored):
            return NotImplemented
        return LazyColumn(column.plan.mapped(change))

    return mapped


def _where(*args: Any) -> Any:
    """``where(mask, a number per row, a number)``, and the same of what such a call returned for the same mask."""
    if len(args) != 3 or not isinstance(args[0], LazyColumn) or not isinstance(args[2], float):
        return NotImplemented
    mask, values, outside = args
    plan = mask.plan
    if not isinstance(plan, Stored) or mask.dtype != torch.bool or plan.row_sums() is None:
        return NotImplemented
    if isinstance(values, LazyColumn):
        inner = values.plan
        is_same = isinstance(inner, PerRow) and _is_same_mask(inner.mask, plan)
        return LazyColumn(PerRow(inner.numbers, plan, inner.dtype, outside)) if is_same else NotImplemented  # type: ignore[union-attr]
    if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] != 1 or values.requires_grad:
        return NotImplemented
    if values.element_size() > 4 or not values.is_floating_point():
        return NotImplemented
    return LazyColumn(PerRow(values[:, 0], plan, values.dtype, outside))


def _is_same_mask(one: Stored, other: Stored) -> bool:
    return (
        len(one.blocks) == len(other.blocks)
        and all(a is b for a, b in zip(one.blocks, other.blocks))
        and one.edits == other.edits
        and np.array_equal(one.where, other.where)
    )


def _concatenated(parts: Any, *args: Any, **kwargs: Any) -> Any:
    dims = (*args, *kwargs.values())
    joined = join_lazy(list(parts)) if dims in ((), (0,)) and set(kwargs) <= {"dim"} else None
    return NotImplemented if joined is None else joined


def _of_tensor(*names: str) -> Iterable[Any]:
    return (getattr(torch.Tensor, name) for name in names)


_ABOUT = frozenset(
    [
        *_of_tensor(
            "size",
            "dim",
            "numel",
            "nelement",
            "element_size",
            "ndimension",
            "is_floating_point",
            "is_complex",
            "__len__",
            "__hash__",
            "stride",
        ),
        torch.is_floating_point,
        torch.is_complex,
    ]
)
"""What a tensor says of itself without its entries."""
_LAZY: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _selected,
    torch.Tensor.narrow: _narrowed,
    torch.Tensor.bool: _cast_to(torch.bool),
    torch.Tensor.float: _cast_to(torch.float32),
    torch.Tensor.double: _cast_to(torch.float64),
    torch.Tensor.long: _cast_to(torch.int64),
    torch.Tensor.to: _to,
    torch.Tensor.detach: _itself,
    torch.Tensor.cpu: _itself,
    torch.Tensor.sum: _summed,
    torch.Tensor.amax: _largest,
    torch.Tensor.amin: _smallest,
    torch.Tensor.abs: _mapped(torch.abs),
    torch.nan_to_num: _mapped(torch.nan_to_num),
    torch.where: _where,
    torch.cat: _concatenated,
}
"""Operations that need no entries where the plan knows the answer."""
