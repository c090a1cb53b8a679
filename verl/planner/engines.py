"""What each engine and each sampler costs, by its name: bytes that it saves, gathers and copies.

Rows of `TRAINERS` were read off real steps tensor by tensor (``benchmarks/bench_planner.py`` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from verl.errors import ConfigError, suggest
from verl.planner.layout import RolePlan
from verl.planner.shapes import LayerShape, ModelShape

RowT = TypeVar("RowT")
LOGITS_BYTES = 1 << 28
"""Largest tensor of logits that an engine makes of its own accord."""
CPU_TOKENS = 2048
"""On a CPU 4096 at once gain nothing, and memory that was not touched before is slow; 1024 cost 1 to 9 % more time."""
CPU_TOKENS_OF_LARGE, LARGE, ROWS = (384, 1024), 64_000_000, 4
"""A model of `LARGE` parameters has work enough in fewer tokens, whose activations take less memory; within these
bounds as many as `ROWS` rows have, so that few micro-batches compute the same prompt again. A GRPO step of 135 million
parameters with rows of 88 tokens takes 5 % less memory with 384 tokens than with 704, with an adapter 10 %; its
processor time was 4 % more to 4 % less in three rounds."""
GPU_TOKENS = 16384
CPU_TILE, GPU_TILE = 1 << 21, 1 << 26
"""Logits of one tile of the fused head in torch (`verl.models.fused_head.tiled`)."""
ADAM = 8
OPTIMIZERS: dict[str, float] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "adam"), ADAM),
    **dict.fromkeys(("SGD", "sgd", "ASGD"), 0),
    **dict.fromkeys(("Adagrad", "RMSprop", "Muon"), 4),
    **dict.fromkeys(("Adam8bit", "AdamW8bit", "AdamFp8", "AdamWFp8"), 2),
    **dict.fromkeys(("Adam4bit", "AdamW4bit"), 1),
    "Adadelta": 8,
    "Adafactor": 0.01,
}
"""Bytes of state per trained weight, with the default arguments (``SGD`` without momentum; Muon's few vectors, which
AdamW trains, are left out)."""


@dataclass(frozen=True)
class TrainerCosts:
    """What a training engine does with memory.

    Args:
        shards: it spreads weights, gradients and optimizer over all shards, and gathers layers (FSDP).
        optimizer_over_data: it spreads the optimizer alone, over all processes (Megatron's distributed one).
        norm: bytes that autograd keeps per value of a norm, below float32: its input, its normalised input, its output.
        casts: whether each matrix keeps a copy of its input in the compute dtype (autocast).
        caches: whether copies of all matrices in the compute dtype live through a pass (autocast).
        main_weights: bytes of a second copy of each trained weight, which the optimizer updates.
        passes_keys: processes that share sequences pass keys and values on (context parallelism); others exchange heads
            (Ulysses).
        fuses_head: it has the model's fused head and the kernels for a CPU, and offloads activations.
        offloads: it has ``offload_policy``: shards stay on the host during training.
        adapts: it trains LoRA adapters.
    """

    shards: bool = False
    optimizer_over_data: bool = False
    norm: tuple[int, int, int] = (4, 2, 2)
    casts: bool = False
    caches: bool = False
    main_weights: int = 0
    passes_keys: bool = False
    fuses_head: bool = False
    offloads: bool = False
    adapts: bool = True


TRAINERS = {
    "plain": TrainerCosts(norm=(4, 4, 0), casts=True, caches=True, fuses_head=True),
    "fsdp2": TrainerCosts(shards=True, fuses_head=True, offloads=True),
    "torchtitan": TrainerCosts(shards=True, passes_keys=True, adapts=False),
    "megatron": TrainerCosts(optimizer_over_data=True, norm=(2, 0, 2), main_weights=4, passes_keys=True),
}
"""Engine -> its costs. Those of Megatron-Core and TorchTitan are read from their code, not measured."""


@dataclass(frozen=True)
class SamplerCosts:
    """What a sampler does with memory.

    Args:
        reserves: it takes `RolePlan.memory_fraction` of the device at once, and its cache what is left in that.
        overhead: bytes of CUDA graphs, workspaces and its own buffers.
        cache_growth: most that the cache takes in parts of its final size, where it grows with its requests.
        shares_weights: on a CPU it reads the tensors of the trainer.
        decoding: its row of `ranges.EFFICIENCY`; the one with `` flops`` counts where operations bound it.
    """

    reserves: bool = True
    overhead: float = 2e9
    cache_growth: float = 1.0
    shares_weights: bool = False
    decoding: str = "decode"


BUILT_IN = "hf"
"""The library's own sampler, which needs no installation."""
SAMPLERS = {
    "vllm": SamplerCosts(),
    "sglang": SamplerCosts(),
    BUILT_IN: SamplerCosts(
        reserves=False, overhead=0.5e9, cache_growth=2.2, shares_weights=True, decoding="decode built in"
    ),
    "server": SamplerCosts(overhead=0.0),
}
"""Sampler -> its costs. ``overhead`` is an assumption; the growth was counted on a CPU (docs/appendix/gpu.md)."""


def trainer_costs(name: str) -> TrainerCosts:
    """The row of a training engine.

    Raises:
        ConfigError: there is none.
    """
    return _row(TRAINERS, name, "strategy", "the planner has no costs of this engine")


def sampler_costs(name: str) -> SamplerCosts:
    """The row of a sampler.

    Raises:
        ConfigError: there is none.
    """
    return _row(SAMPLERS, name, "actor_rollout_ref.rollout.name", "the planner has no costs of this sampler")


def _row(rows: Mapping[str, RowT], name: str, key: str, message: str) -> RowT:
    if name not in rows:
        raise ConfigError(message, key=key, got=name, allowed=list(rows), fix=suggest(name, rows))
    return rows[name]


def state_bytes(plan: RolePlan) -> float:
    """Bytes of optimizer state per trained weight; moments have the dtype of the weights.

    Raises:
        ConfigError: an optimizer that is not in `OPTIMIZERS`.
    """
    key = ("critic" if plan.role == "critic" else "actor_rollout_ref.actor") + ".optim.optimizer"
    message = "the planner does not know how much state this optimizer has"
    state = _row(OPTIMIZERS, plan.optimizer, key, message)
    return state * plan.trained_bytes / 4 if state >= 4 else state


def automatic_tokens(logits_per_token: int, device: str, longest: int, num_parameters: int = 0) -> int:
    """A token budget for runs that set none: logits stay below `LOGITS_BYTES`, and one row always fits."""
    tokens = GPU_TOKENS
    if device == "cpu":
        least, most = CPU_TOKENS_OF_LARGE
        tokens = CPU_TOKENS if num_parameters < LARGE else min(most, max(least, ROWS * longest))
    if logits_per_token:
        tokens = min(tokens, LOGITS_BYTES // (4 * logits_per_token))
    return max(tokens, longest)


def saved_per_token(plan: RolePlan, shape: ModelShape, block: LayerShape) -> float:
    """Bytes per token that autograd keeps of one layer until its backward pass, on one device.

    Norms keep their input and what they multiply with their weight, matrices their inputs, attention its queries, keys,
    values, output and log-sum-exp (flash attention), gated feed-forward parts four tensors of their width. Kernels for
    a CPU (`verl.models.kernels`) keep a norm's input and three of the four.
    """
    costs, c, hidden = trainer_costs(plan.engine), plan.compute_bytes, shape.hidden
    is_lowered, has_kernels = c < plan.weight_bytes, plan.on_cpu and costs.fuses_head and not plan.compiled
    read, scaled, out = costs.norm if is_lowered else (c, c, c)
    if plan.compiled:
        scaled, out = 0, c
    if has_kernels:
        read, scaled = plan.weight_bytes if costs.casts else c, 0
    if plan.lora_rank:
        scaled = 0  # its weight is frozen
    norms = hidden * (block.norms * (read + scaled) + 2 * out) + block.normed * (read + min(scaled, c))
    if costs.casts and is_lowered and not plan.compiled:
        norms += hidden * c * (len(block.attention) - 1 + sum(inputs == hidden for inputs, _ in block.mlp))
    tensors = 3 if plan.compiled or has_kernels or plan.engine == "megatron" else 4
    mlp = c * (tensors * block.inner + block.active * (tensors * _expert_width(block) + 2 * hidden))
    attention = c * (block.scores + block.stored + block.mixed) + 4 * shape.heads
    adapter = plan.lora_rank * c * len((*block.attention, *block.mlp))
    return norms + adapter + (mlp + attention) / plan.parallel.tensor


def worked_per_token(plan: RolePlan, shape: ModelShape, block: LayerShape) -> float:
    """Bytes per token that the backward pass of one layer takes in addition: gradients of its widest tensors."""
    widest = max(block.inner, block.active * _expert_width(block))
    residual = plan.weight_bytes if trainer_costs(plan.engine).casts else plan.compute_bytes
    return 2 * plan.compute_bytes * widest / plan.parallel.tensor + residual * shape.hidden


def head_bytes(plan: RolePlan, shape: ModelShape, tokens: float, trains: bool) -> float:
    """Bytes of the language-model head over the predicted tokens, at its peak.

    Args:
        trains: with a backward pass.
    """
    if plan.scalar_head:
        return 8 * tokens
    vocabulary = shape.vocabulary / plan.parallel.tensor
    weight = 4 * vocabulary * shape.hidden if trains and not plan.lora_rank else 0
    if plan.fused_head == "triton":
        return weight + 12 * tokens * shape.hidden
    if plan.fused_head:
        tile = min(CPU_TILE if plan.on_cpu else GPU_TILE, tokens * vocabulary)
        return weight + 8 * tile + 3 * plan.compute_bytes * tokens * shape.hidden
    # Float32 logits and probabilities; for the entropy again, masked logits with their mask, and three passing tensors.
    if not trains:
        return (21 if plan.infer_entropy else 8) * tokens * vocabulary
    return (29 if plan.entropy else 8) * tokens * vocabulary


def _expert_width(block: LayerShape) -> int:
    return block.expert[0][1] if block.expert else 0
