"""The matrix products of a decoder, in the form that is fastest where they run.

A decoder's forward pass on few tokens is bound by reading its weights, so what can be read together should be stored
together: query, key and value in one product. Two forms hold the same numbers:

- `FusedProjections` makes the parameters views of larger tensors; for accelerators. New weights arrive through them.
- `PackedProjections` keeps a second copy in the layout that is fastest for its size; for CPU. `refresh` must be called
  after new weights arrived. Of layers in 8 bits it keeps nothing, and makes the copy for each product (`Restored`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from verl.metrics import log
from verl.rollout.hf.quantized import QuantizedLinear

MEMORY_SHARE = 0.25
"""Part of the available memory that a second copy of the weights may take."""
ROWS_HINT = 128
"""Rows that packed weights are laid out for; any number of rows may be multiplied."""
GRID = 16
"""More rows than these are best filled up to a multiple of it: oneDNN makes code for every number of rows that it
meets, about a millisecond each time."""
SMALL_BYTES = 5 << 19
"""Float32 weights up to this size, about a core's second-level cache, may be left to BLAS."""
PROBED_ROWS = (*range(GRID, 321, GRID), 512)
"""Row counts whose products are compared with each other; BLAS switches kernels above some number."""


@dataclass(frozen=True)
class LayerModules:
    """The linear layers of one decoder layer, in full or in 8 bits (`QuantizedLinear`)."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    @property
    def sizes(self) -> list[int]:
        """Columns of query, key and value."""
        return [module.out_features for module in (self.q, self.k, self.v)]


class Projections(Protocol):
    """The products of one layer; (T, hidden) in, (T, ...) out."""

    @property
    def fewest_rows(self) -> int:
        """Products of fewer rows than these may round differently."""
        ...

    def qkv(self, x: torch.Tensor) -> Sequence[torch.Tensor]: ...

    def joint_qkv(self, x: torch.Tensor) -> torch.Tensor:
        """Query, key and value side by side."""
        ...

    def out(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """The product plus ``onto`` (T, hidden)."""
        ...

    def mlp(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """``down(silu(gate(x)) * up(x))`` plus ``onto`` (T, hidden)."""
        ...

    def refresh(self) -> None:
        """The parameters hold new values."""
        ...

    def release(self) -> None:
        """Free what `refresh` makes."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of what `refresh` made."""
        ...


class FusedProjections:
    """See the module; the parameters of ``layer`` become views."""

    fewest_rows = 1

    def __init__(self, layer: LayerModules):
        self._layer = layer
        self._qkv = _join([layer.q, layer.k, layer.v])
        self._gate_up = _join([layer.gate, layer.up])

    def qkv(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.joint_qkv(x).split(self._layer.sizes, dim=-1)

    def joint_qkv(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self._qkv)

    def out(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        return _plus(F.linear(x, self._layer.out.weight, self._layer.out.bias), onto)

    def mlp(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        down = self._layer.down
        gate, up = F.linear(x, *self._gate_up).chunk(2, dim=-1)
        return _plus(F.linear(F.silu(gate) * up, down.weight, down.bias), onto)

    def refresh(self) -> None:
        pass

    def release(self) -> None:
        pass

    @property
    def num_bytes(self) -> int:
        return 0


class PackedProjections:
    """See the module.

    Args:
        lay_out: weight and bias -> the product with a copy of them; None: the fastest on CPU.
    """

    def __init__(self, layer: LayerModules, lay_out: LayOut | None = None):
        self._layer, self._lay_out = layer, lay_out or laid_out
        self.release()

    @property
    def fewest_rows(self) -> int:
        return max(linear.fewest_rows for linear in (self._qkv, self._out, self._gate, self._up, self._down))

    def refresh(self) -> None:
        layer = self._layer
        products = ([layer.q, layer.k, layer.v], [layer.out], [layer.gate], [layer.up], [layer.down])
        self._qkv, self._out, self._gate, self._up, self._down = (self._product(modules) for modules in products)

    def _product(self, modules: Sequence[nn.Linear]) -> CopiedLinear:
        if all(isinstance(module, QuantizedLinear) for module in modules):
            return Restored(modules, self._lay_out)
        return self._lay_out(*_joined(modules))

    def release(self) -> None:
        nothing: CopiedLinear = PackedLinear.nothing()
        self._qkv = self._out = self._gate = self._up = self._down = nothing

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in (self._qkv, self._out, self._gate, self._up, self._down))

    def qkv(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        return self.joint_qkv(x).split(self._layer.sizes, dim=-1)

    def joint_qkv(self, x: torch.Tensor) -> torch.Tensor:
        return self._qkv(x)

    def out(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        return self._out(x) if onto is None else self._out.joined(x, onto, "add")

    def mlp(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        inner = self._up.joined(x, self._gate.silu(x), "mul")
        return self._down(inner) if onto is None else self._down.joined(inner, onto, "add")


class CopiedLinear(Protocol):
    """``x @ weight.T + bias`` with a copy of ``weight`` that does not follow later changes."""

    fewest_rows: int
    """See `Projections`."""
    num_bytes: int
    """Memory of the copy."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        """``silu`` of the product."""
        ...

    def joined(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        """With ``other``, of the result's shape: ``add`` or ``mul``."""
        ...


class PackedLinear:
    """In the blocked layout of oneDNN, which spares it the reordering in every product.

    What is done to each number of the result happens before it is rounded and leaves the cache.
    """

    fewest_rows, num_bytes = 1, 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.num_bytes = weight.nbytes
        self._linear: Any = torch.ops.mkldnn._linear_pointwise
        with torch.no_grad():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    @classmethod
    def nothing(cls) -> PackedLinear:
        return cls.__new__(cls)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear.default(x, self._weight, self._bias, "none", [], "")

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:  # oneDNN's is good enough for it; float32 takes that of the model's own modules
            return F.silu(self(x), inplace=True)
        return self._linear.default(x, self._weight, self._bias, "swish", [], "")

    def joined(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        return self._linear.binary(x, other, self._weight, self._bias, how)


class TransposedLinear:
    """Transposed, for BLAS: half the time of oneDNN where calling it costs as much as the product."""

    fewest_rows = GRID

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self.num_bytes = weight.nbytes
        self._weight = weight.detach().t().contiguous()
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._weight) if self._bias is None else torch.addmm(self._bias, x, self._weight)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)

    def joined(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        if how == "mul":
            return self(x).mul_(other)
        summed = torch.addmm(other, x, self._weight)
        return summed if self._bias is None else summed.add_(self._bias)


class PlainLinear:
    """As torch computes it, from the weight as it is; for accelerators."""

    fewest_rows, num_bytes = 1, 0

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self(x), inplace=True)

    def joined(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        return self(x).mul_(other) if how == "mul" else self(x).add_(other)


class Restored:
    """Layers in 8 bits, side by side: their weights are restored and laid out for each product, and not kept.

    So a row has the bits that a sampler with the rounded weights in full would give it.

    Args:
        lay_out: see `PackedProjections`.
    """

    num_bytes = 0

    def __init__(self, modules: Sequence[nn.Linear], lay_out: LayOut):
        self._modules, self._lay_out = modules, lay_out
        self.fewest_rows = self._now().fewest_rows

    def _now(self) -> CopiedLinear:
        return self._lay_out(*_joined(self._modules))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._now()(x)

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return self._now().silu(x)

    def joined(self, x: torch.Tensor, other: torch.Tensor, how: str) -> torch.Tensor:
        return self._now().joined(x, other, how)


LayOut = Callable[[torch.Tensor, torch.Tensor | None], CopiedLinear]


def laid_out(weight: torch.Tensor, bias: torch.Tensor | None) -> CopiedLinear:
    """The form that is fastest for a weight (out, in), among those that give a row the same bits in every batch."""
    if weight.dtype == torch.float32 and weight.nbytes <= SMALL_BYTES and _blas_is_even(*weight.shape):
        return TransposedLinear(weight, bias)
    return PackedLinear(weight, bias)


@functools.cache
def _blas_is_even(outer: int, inner: int) -> bool:
    """Whether this machine's BLAS rounds a row of such a product alike for any other rows.

    It depends on the processor and on the shape, and is true of multiples of `GRID` at best. Where it is not, what a
    request draws could depend on concurrent requests.
    """
    numbers = torch.Generator().manual_seed(0)
    most = 2 * PROBED_ROWS[-1]
    x, weight = torch.randn(most, inner, generator=numbers), torch.randn(inner, outer, generator=numbers)
    onto = torch.randn(most, outer, generator=numbers)
    plain, added = torch.mm(x, weight), torch.addmm(onto, x, weight)
    return all(
        torch.equal(torch.mm(x[-n:], weight), plain[-n:])
        and torch.equal(torch.addmm(onto[-n:], x[-n:], weight), added[-n:])
        for n in PROBED_ROWS
    )


def _plus(x: torch.Tensor, onto: torch.Tensor | None) -> torch.Tensor:
    return x if onto is None else onto + x


def can_pack(dtype: torch.dtype, num_bytes: int) -> bool:
    """Whether torch was built with oneDNN's packed products for ``dtype``, and a second copy fits into memory."""
    import psutil

    if not torch.backends.mkldnn.is_available():
        return False
    if num_bytes > MEMORY_SHARE * psutil.virtual_memory().available:
        log.info("the hf sampler: too little memory to pack %d MB of weights, so decoding is slower", num_bytes >> 20)
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@torch.no_grad()
def _joined(modules: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases one below the other; those of a single module as they are."""
    if len(modules) == 1:
        return modules[0].weight.detach(), None if modules[0].bias is None else modules[0].bias.detach()
    biases = [m.bias for m in modules]
    bias = None if any(b is None for b in biases) else torch.cat([b.detach() for b in biases])
    return torch.cat([m.weight.detach() for m in modules]), bias


def _join(modules: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `_joined`, and from now on the modules' parameters are views of it."""
    weight, bias = _joined(modules)
    first = 0
    for module in modules:
        rows = slice(first, first + len(module.weight))
        module.weight.data = weight[rows]
        if bias is not None:
            module.bias.data = bias[rows]
        first = rows.stop
    return weight, bias
