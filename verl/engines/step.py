"""The end of an optimizer step: clip by the global norm, and skip a step that is not finite.

Every rank sees the same norm and so takes the same decision; a skipped step changes neither weights nor
optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from verl.distributed.shards import by_mesh
from verl.engines.loss_scale import LossScale
from verl.engines.low_bit import uncompiled_on_host
from verl.metrics import MetricSet, log, notice
from verl.protocol import DataProto

MAX_SHOWN = 16


@dataclass(frozen=True)
class StepReport:
    """What became of one optimizer step.

    Args:
        grad_norm: L2 norm of the whole gradient before clipping.
        lr: learning rate of the first parameter group.
        skipped_nonfinite / skipped_empty / skipped_overflow: why it was not taken, if it was not; an overflow is one
            that a smaller loss scale can avoid.
        loss_scale: by which the loss was multiplied in float16 training, else None.
    """

    grad_norm: float
    lr: float
    skipped_nonfinite: bool = False
    skipped_empty: bool = False
    skipped_overflow: bool = False
    loss_scale: float | None = None

    def metrics(self, loss: float) -> MetricSet:
        """``loss`` is this rank's sum over micro-batches, scaled so that the mean over ranks is the global loss."""
        metrics = MetricSet()
        metrics.add("loss", loss)
        metrics.add("grad_norm", self.grad_norm)
        metrics.add("lr", self.lr, "last")
        metrics.add("skipped_nonfinite_step", float(self.skipped_nonfinite), "sum")
        metrics.add("skipped_empty_step", float(self.skipped_empty), "sum")
        if self.loss_scale is not None:
            metrics.add("loss_scale", self.loss_scale, "last")
            metrics.add("skipped_overflow_step", float(self.skipped_overflow), "sum")
        return metrics


def clip_and_step(
    optimizer: Optimizer,
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    total_norm: Callable[[list[Tensor]], Tensor] = torch.nn.utils.get_total_norm,
    scale: LossScale | None = None,
) -> StepReport:
    """Clip the gradients to ``max_norm``, then step, unless their norm is not finite.

    Args:
        parameters: those with gradients; a parameter without one is left alone.
        max_norm: None or a value that is not positive does not clip.
        total_norm: the L2 norm over ALL shards of these gradients; a sharded backend reduces over its ranks.
        scale: that of the loss whose gradients these are; it is adapted. None: 1.
    """
    scale = scale or LossScale()
    used = scale.value if scale.is_dynamic else None
    with_grad = [p for p in parameters if p.grad is not None]
    scale.unscale(p.grad for p in with_grad if p.grad is not None)
    norm = total_norm([p.grad for p in with_grad if p.grad is not None])
    value, lr = float(norm), float(optimizer.param_groups[0]["lr"])
    if not math.isfinite(value):
        optimizer.zero_grad(set_to_none=True)
        if scale.overflowed():
            notice("skipped_overflow_step", f"the gradient norm is {value}: the loss scale falls to {scale.value:g}")
            return StepReport(value, lr, skipped_overflow=True, loss_scale=used)
        notice("skipped_nonfinite_step", f"the gradient norm is {value}: this optimizer step is skipped")
        return StepReport(value, lr, skipped_nonfinite=True, loss_scale=used)
    if max_norm is not None and max_norm > 0:
        for alike in by_mesh(with_grad):
            torch.nn.utils.clip_grads_with_norm_(alike, max_norm, norm)
    with uncompiled_on_host(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scale.taken()
    return StepReport(value, lr, loss_scale=used)


def tell_broken_rows(batch: DataProto, rows: Sequence[int]) -> None:
    """Log which rows went through the model in a micro-batch whose loss is not finite, every time it happens."""
    if not rows:
        return  # the loss was finite, its gradient was not; or the rows are another rank's
    names = batch.non_tensor_batch.get("uid")
    shown = [str(row if names is None else names[row]) for row in sorted(rows)[:MAX_SHOWN]]
    more = f" and {len(rows) - MAX_SHOWN} more" if len(rows) > MAX_SHOWN else ""
    what = "rows" if names is None else "uid"
    log.warning("the loss is not finite in a micro-batch with %s %s%s", what, ", ".join(shown), more)
