"""Muon: the momentum of a matrix is made orthogonal, so that every direction moves by the same length.

Jordan et al. 2024, kellerjordan.github.io/posts/muon; step sizes as in Liu et al. 2025, arXiv 2502.16982. Matrices
inside the model take it; vectors, embeddings, the head and stacked experts take AdamW, as in both. torch's own class
takes matrices alone, and whole ones. Here a matrix in pieces is gathered, made orthogonal by one process of those that
share it, and cut again; as many at a time as there are processes, so that all of them compute. What a matrix is, the
Hugging Face model says: Megatron-Core's weights are split into its matrices (`verl.engines.megatron.matrices`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from verl.config.schema.role import OptimizerConfig
from verl.engines.optimizer import build_optimizer
from verl.models import lora
from verl.models.head import output_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "Muon"
_adamw: Any = adamw  # its decorator hides its arguments
Direct = Callable[[Tensor], Tensor]
"""A matrix -> the orthogonal one."""
Spread = Callable[
    [list[nn.Parameter], Callable[[nn.Parameter], Tensor], Direct, Callable[[Sequence[int]], float]],
    Iterator[tuple[nn.Parameter, Tensor, float]],
]
"""Parameters, the update of one, `Direct`, and the factor of a matrix's shape -> each with its direction and factor."""


class Muon(Optimizer):
    """Muon over some of the parameters and AdamW over the others, with one learning rate and decay.

    Args:
        params: all of them; sharded along their first axis or whole.
        matrices: those of two dimensions that take Muon.
        betas: of AdamW.
        momentum, nesterov, ns_coefficients, ns_steps, eps: as `torch.optim.Muon`; iterations are in float32.
        adjust_lr_fn: ``match_rms_adamw`` moves a number as far as AdamW does, so that its rate can be taken over;
            ``original`` is sqrt(max(1, rows / columns)).
        spread: brings the pieces of matrices together; None: those of sharded tensors.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        matrices: Collection[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        *,
        spread: Spread | None = None,
    ):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})
        self.matrices = frozenset(id(p) for p in matrices)
        self.momentum, self.nesterov, self.matches = momentum, nesterov, adjust_lr_fn == "match_rms_adamw"
        self.iteration: dict[str, Any] = {"coefficients": tuple(ns_coefficients), "steps": ns_steps, "eps": eps}
        self.spread = spread or _over_shards

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients; without any for parameters that have none. Collective where pieces are."""
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            self._step_matrices([p for p in with_grad if id(p) in self.matrices], group)
            self._step_others([p for p in with_grad if id(p) not in self.matrices], group)

    def _step_matrices(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p, direction, factor in self.spread(parameters, self._update, self._orthogonal, self._adjustment):
            p.mul_(1.0 - group["lr"] * group["weight_decay"])
            p.add_(direction, alpha=-group["lr"] * factor)

    def _update(self, p: nn.Parameter) -> Tensor:
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        state["momentum_buffer"].lerp_(grad, 1.0 - self.momentum)
        return grad.lerp(state["momentum_buffer"], self.momentum) if self.nesterov else state["momentum_buffer"]

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        return orthogonal(matrix, **self.iteration)

    def _adjustment(self, shape: Sequence[int]) -> float:
        rows, columns = shape
        return 0.2 * math.sqrt(max(rows, columns)) if self.matches else math.sqrt(max(1.0, rows / columns))

    def _step_others(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            moments: Any = [[state[key]] for key in ("exp_avg", "exp_avg_sq")]
            (beta1, beta2), grad = group["betas"], p.grad
            assert grad is not None
            options: dict[str, Any] = {"lr": group["lr"], "weight_decay": group["weight_decay"], "eps": 1e-8}
            options |= {"amsgrad": False, "maximize": False, "foreach": False, "beta1": beta1, "beta2": beta2}
            _adamw([p], [grad], *moments, [], [state["step"]], **options)


def orthogonal(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """U f(S) V^T of a matrix U S V^T over its Frobenius norm, f a polynomial of odd powers applied ``steps`` times.

    Args:
        coefficients: a, b, c of f(s) = a s + b s^3 + c s^5; torch's bring all s between 0.7 and 1.2.
    """
    a, b, c = coefficients
    wide = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().t() if wide else matrix.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.t() if wide else x).to(matrix.dtype)


def builds_muon(optim: OptimizerConfig) -> bool:
    """Whether an ``optim`` section asks for it."""
    return optim.optimizer_impl == "torch.optim" and optim.optimizer == NAME


def build_muon(model: PreTrainedModel, kind: str, optim: OptimizerConfig) -> Muon:
    """Of a model, as an ``optim`` section says."""
    excluded = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    excluded += list(output_head(model, kind).parameters())
    excluded += lora.stacked_factors(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() == 2 and not any(p is other for other in excluded)]
    arguments = dict(optim.override_optimizer_config or {})
    return Muon(parameters, matrices, optim.lr, optim.weight_decay, (optim.betas[0], optim.betas[1]), **arguments)


def build_for_model(
    model: PreTrainedModel, kind: str, parameters: list[nn.Parameter], optim: OptimizerConfig, device: str
) -> Optimizer:
    """The optimizer of a full model."""
    return build_muon(model, kind, optim) if builds_muon(optim) else build_optimizer(parameters, optim, device)


def _over_shards(
    parameters: list[nn.Parameter],
    update_of: Callable[[nn.Parameter], Tensor],
    direct: Direct,
    factor: Callable[[Sequence[int]], float],
) -> Iterator[tuple[nn.Parameter, Tensor, float]]:
    """Full matrices as they are, sharded ones in turn: a `Spread`."""
    for alike in _by_group(parameters):
        size = 1 if _shard_group(alike[0]) is None else dist.get_world_size(_shard_group(alike[0]))
        for first in range(0, len(alike), size):
            some = alike[first : first + size]
            for p, direction in zip(some, _in_turn([update_of(p) for p in some], direct)):
                yield p, direction, factor(p.shape)


def _in_turn(updates: list[Tensor], direct: Direct) -> list[Tensor]:
    """At most as many as there are ranks, of which number i makes the i-th orthogonal."""
    group = _shard_group(updates[0])
    if group is None:
        return [direct(update) for update in updates]
    complete = [update.full_tensor().float().contiguous() for update in updates if isinstance(update, DTensor)]
    rank = dist.get_rank(group)
    if rank < len(complete):
        complete[rank] = direct(complete[rank]).contiguous()
    for owner, matrix in enumerate(complete):
        dist.broadcast(matrix, group=group, group_src=owner)
    return [_piece_like(update, matrix) for update, matrix in zip(updates, complete)]


def _shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share a tensor in pieces."""
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return None if mesh is None else mesh.get_group(mesh.ndim - 1)


def _by_group(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(_shard_group(p), []).append(p)
    return list(groups.values())


def _piece_like(target: Tensor, matrix: Tensor) -> DTensor:
    """This rank's rows of a full matrix, laid out as the target is."""
    assert isinstance(target, DTensor)
    rows = -(-matrix.shape[0] // target.device_mesh.size(target.device_mesh.ndim - 1))
    first = min(matrix.shape[0], rows * dist.get_rank(_shard_group(target)))
    local = matrix[first : first + rows].to(target.dtype)
    mesh, shape, stride = target.device_mesh, target.shape, target.stride()
    return DTensor.from_local(local, mesh, target.placements, run_check=False, shape=shape, stride=stride)
