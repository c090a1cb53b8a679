"""Layers of a model that trains on a CPU, in fewer passes over memory.

Norms, rotary embeddings and gated activations of Llama-like layers are several operations each in transformers, and
autograd keeps what most of them return. Here each is one function with a written-out backward pass that keeps its
inputs alone; on a GPU Liger's kernels do the same. The backward pass of a linear layer adds the products of a second
micro-batch to the gradient in place, as Megatron's fused gradient accumulation does: autograd makes a tensor of the
weight's size and adds that. Values and gradients equal the modules' to rounding.

Shapes: T tokens after any leading dimensions, H values of each, d of each head.
"""

from __future__ import annotations

from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama

from verl.device import AutogradContext
from verl.models.liger import apply_liger

ROTATION = llama.apply_rotary_pos_emb.__name__


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class FusedRMSNorm(torch.autograd.Function):
    """x (..., H), weight (H,) -> weight * x / rms(x), in float32 inside (Zhang and Sennrich 2019, arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wide, grad, size = _wide(x), _wide(grads[0]), x.shape[-1]
        product = grad * wide
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (scale.reshape(1, -1) @ product.reshape(-1, size)).view(size).to(weight.dtype)
        # The output does not change with the length of x, so the gradient has no part along x.
        along = (product @ weight.to(wide.dtype)).unsqueeze(-1) * scale.pow(3) / -size
        grad_x = torch.mul(grad, weight, out=product).mul_(scale).addcmul_(wide, along)
        return grad_x.to(x.dtype), grad_weight, None


class FusedSwiGLU(torch.autograd.Function):
    """gate, up (..., H) -> silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

    @staticmethod
    def forward(ctx: AutogradContext, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        grad_gate = grads[0] * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


class FusedRotary(torch.autograd.Function):
    """x (..., T, d), cos and sin that broadcast with it -> each pair (i, i + d / 2) turned by its angle."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (first, second), (sin_first, sin_second) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        turned_first, turned_second = out.chunk(2, -1)
        turned_first.addcmul_(second, sin_first, value=-1)
        turned_second.addcmul_(first, sin_second)
        return out

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (first, second), (sin_first, sin_second) = grads[0].chunk(2, -1), sin.chunk(2, -1)
        grad = grads[0] * cos
        grad_first, grad_second = grad.chunk(2, -1)
        grad_first.addcmul_(second, sin_second)
        grad_second.addcmul_(first, sin_first, value=-1)
        return grad, None, None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """In place of `apply_rotary_pos_emb` of transformers: q and k (B, heads, T, d), cos and sin (B, T, d)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return FusedRotary.apply(q, cos, sin), FusedRotary.apply(k, cos, sin)


class AccumulatingLinear(torch.autograd.Function):
    """x (..., H), weight (O, H), bias (O,) or None -> (..., O); ``weight`` is a leaf without hooks."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # checkpointing hands back a detached weight, which has no .grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.flatten(0, -2), grads[0].flatten(0, -2)
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        if ctx.parameter.grad is None or not _is_accumulated(ctx.parameter):
            return grad_x, grad_rows.t() @ rows, grad_bias
        ctx.parameter.grad.addmm_(grad_rows.t(), rows)
        return grad_x, None, grad_bias


def _is_accumulated(weight: nn.Parameter) -> bool:
    """Inside a backward pass: whether it adds to ``weight.grad``; `torch.autograd.grad` returns gradients instead."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # raised where `torch.autograd.grad` has a leaf among its inputs
        return False


def _norm(module: llama.LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
    return FusedRMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)


def _mlp(module: llama.LlamaMLP, x: Tensor) -> Tensor:
    gate, up = module.gate_proj(x), module.up_proj(x)
    fits = gate.dtype == up.dtype  # an adapter may widen one of them
    return module.down_proj(FusedSwiGLU.apply(gate, up) if fits else F.silu(gate) * up)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """An adapter freezes the weight, autocast multiplies by a copy of it in another dtype, and hooks need gradients."""
    weight, bias = module.weight, module.bias
    is_lowered = weight.dtype != x.dtype or torch.is_autocast_enabled("cpu")
    if is_lowered or weight._backward_hooks or not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    return AccumulatingLinear.apply(x, weight, bias)


def apply_kernels(
    model: PreTrainedModel, device: str, *, use_liger: bool, compiles: bool | None, is_alone: bool
) -> None:
    """Quicker layers for the device: Liger's, or these on a CPU, where torch.compile does not make its own.

    Args:
        is_alone: the model is in one process; sharded engines collect gradients themselves.

    Raises:
        ConfigError, ModelError: Liger is not there, or does not know the family.
    """
    if use_liger:
        apply_liger(model, device)
    elif device == "cpu" and not compiles:
        replace_layers(model)
        if is_alone:
            accumulate_in_place(model)


def accumulate_in_place(model: nn.Module) -> None:
    """Let the backward passes of all plain linear layers add to the gradients that are there."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_linear, module)  # type: ignore[method-assign]


def replace_layers(model: nn.Module) -> int:
    """Replace the forward passes of modules whose code is Llama's, in place; returns how many those are.

    More than a hundred families of transformers copy Llama's norm, MLP or rotary embedding under other names. Only an
    exact copy counts: a norm with 1 + weight, or a rotation of a part of the dimensions, stays as it is.
    """
    return sum(_is_replaced(module) for module in model.modules())


def _is_replaced(module: nn.Module) -> bool:
    forward = type(module).forward
    if _is_copy(forward, llama.LlamaRMSNorm.forward):
        module.forward = MethodType(_norm, module)
    elif _is_copy(forward, llama.LlamaMLP.forward) and _is_silu(module.act_fn):
        module.forward = MethodType(_mlp, module)
    elif _is_copy(_rotation_of(forward), llama.apply_rotary_pos_emb):
        code, names = forward.__code__, {**forward.__globals__, ROTATION: apply_rotary}
        rotating = FunctionType(code, names, None, forward.__defaults__, forward.__closure__)
        rotating.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(rotating, module)
    else:
        return False
    return True


def _rotation_of(forward: object) -> object:
    """The function for rotary embeddings that a forward pass calls, None where it calls none by that name."""
    if isinstance(forward, FunctionType) and ROTATION in forward.__code__.co_names:
        return forward.__globals__.get(ROTATION)
    return None


def _is_silu(activation: object) -> bool:
    probe = torch.linspace(-4, 4, 9)
    return callable(activation) and torch.equal(activation(probe), F.silu(probe))


def _is_copy(function: object, original: object) -> bool:
    """Whether they have the same instructions, names and constants; docstrings may differ."""
    if not isinstance(function, FunctionType) or not isinstance(original, FunctionType):
        return False
    return _code(function) == _code(original)


def _code(function: FunctionType) -> tuple[object, ...]:
    code = function.__code__
    constants = [constant for constant in code.co_consts if constant != function.__doc__]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
