"""Bytes per device of a role in every phase of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from verl.planner.engines import (
    head_bytes,
    sampler_costs,
    saved_per_token,
    state_bytes,
    trainer_costs,
    worked_per_token,
)
from verl.planner.hardware import Device
from verl.planner.layout import RolePlan, Workload, computed_prompts
from verl.planner.shapes import ModelShape


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes per device that one role takes in one phase.

    Args:
        phase: ``idle``, ``infer``, ``update``, ``generate`` or ``sync``.
        weights, gradients, optimizer: of the model's shard, and of copies in other precisions.
        activations: what the backward pass needs, and the largest layer's working values.
        logits: of the head: logits and their gradient, or the chunks of a fused head.
        kv_cache: of a sampler.
        transient: chunks and gathered tensors of a weight sync, of resharding, of FSDP.
    """

    phase: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    transient: float = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "phase"}

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The largest term."""
        return max(self.terms.items(), key=lambda term: term[1])[0]


@dataclass(frozen=True)
class Memory:
    """Bytes of a role.

    Args:
        role: its name.
        phases: per device; ``idle`` first.
        checkpoint: bytes of one checkpoint of the role, all processes together.
        offload: bytes on the host, per device, of what is offloaded at some moment of a step.
        snapshot: bytes on the host, per device, of a checkpoint that is written in the background.
    """

    role: str
    phases: tuple[PhaseMemory, ...]
    checkpoint: float = 0.0
    offload: float = 0.0
    snapshot: float = 0.0

    def phase(self, name: str) -> PhaseMemory:
        """A phase by its name; ``idle`` where the role has no such phase."""
        return next((phase for phase in self.phases if phase.phase == name), self.phases[0])


def memory_of(plan: RolePlan, shape: ModelShape, work: Workload, device: Device | None = None) -> Memory:
    """Bytes of a role.

    Args:
        device: what a sampler with a share of its memory takes the share of; None leaves its cache out.

    Raises:
        ConfigError: no costs of this engine or optimizer.
    """
    return _sampler(plan, shape, work, device) if plan.samples else _trainer(plan, shape, work)


def pool_memory(roles: Sequence[Memory], phase: str, active: str) -> float:
    """Bytes per device while one role of a pool works in a phase and the others idle."""
    return sum(role.phase(phase if role.role == active else "idle").total for role in roles)


def trained_parameters(plan: RolePlan, shape: ModelShape) -> int:
    """Weights with a gradient."""
    if not plan.trains:
        return 0
    if plan.lora_rank:
        return shape.adapter_parameters(plan.lora_rank)
    return shape.parameters - (shape.vision if plan.freeze_vision else 0)


def local_parameters(plan: RolePlan, dense: float, experts: float) -> float:
    """How many of a trainer's dense weights and of its experts' one device holds."""
    if trainer_costs(plan.engine).shards:
        return (dense + experts) / plan.shards
    return dense / plan.parallel.model + experts / (plan.parallel.pipeline * plan.parallel.expert_shards)


def local_trained(plan: RolePlan, shape: ModelShape) -> float:
    """How many weights with a gradient one device holds."""
    trained, experts = trained_parameters(plan, shape), 0 if plan.lora_rank else shape.expert_parameters
    return local_parameters(plan, trained - experts, experts) if plan.trains else 0.0


def sequence_cache(plan: RolePlan, shape: ModelShape, length: float) -> float:
    """Bytes that the KV cache of one sequence takes on each device of a sampler's replica.

    Tensor parallelism divides heads of keys and values; where it has more ranks than heads, they are replicated.
    """
    divided = plan.parallel.pipeline * min(plan.parallel.tensor, shape.kv_heads)
    return shape.cache_bytes(length, plan.cache_bytes) / divided


def _trainer(plan: RolePlan, shape: ModelShape, work: Workload) -> Memory:
    costs, trained, experts = trainer_costs(plan.engine), trained_parameters(plan, shape), shape.expert_parameters
    weights = shape.parameters + (trained if plan.lora_rank else 0)
    held, local = local_parameters(plan, weights - experts, experts), local_trained(plan, shape)
    state = state_bytes(plan) if plan.trains else 0.0
    if costs.main_weights:
        held, state = plan.compute_bytes * held, state + costs.main_weights * plan.trains
    else:
        held = held * plan.weight_bytes + local * (plan.trained_bytes - plan.weight_bytes)
    gradients = plan.trained_bytes * (trained if plan.full_gradients and costs.shards else local)
    optimizer = state * (trained / plan.parallel.devices if costs.optimizer_over_data else local)
    working = PhaseMemory("update")
    if not plan.offload_policy:
        working = PhaseMemory("update", weights=held, gradients=gradients, optimizer=optimizer)
    idle = PhaseMemory(
        "idle",
        weights=0.0 if plan.param_offload else working.weights,
        optimizer=0.0 if plan.optimizer_offload else working.optimizer,
    )
    inference = _inference(plan, shape, work, replace(idle, weights=working.weights))
    phases = [idle, inference][: 1 + plan.infers]
    if plan.trains:
        phases.append(_update(plan, shape, work, working))
    stored = trained if plan.lora_rank else weights  # of a model with an adapter, the adapter alone
    checkpoint = stored * plan.trained_bytes + trained * state if plan.trains else 0.0
    offload = held - idle.weights + optimizer - idle.optimizer + gradients * plan.offload_policy
    if plan.activation_offload:
        offload += _tokens(plan, work, plan.micro_tokens, plan.mini_batches) * _residual(plan, shape) * shape.layers
    snapshot = (stored / weights * held + optimizer) * plan.async_save
    return Memory(plan.role, tuple(phases), checkpoint, offload, snapshot)


def _residual(plan: RolePlan, shape: ModelShape) -> float:
    """Bytes per token of the residual stream."""
    return (plan.weight_bytes if trainer_costs(plan.engine).casts else plan.compute_bytes) * shape.hidden


def _gathers(plan: RolePlan) -> bool:
    """Whether a pass gathers each layer's weights first."""
    return trainer_costs(plan.engine).shards and (plan.shards > 1 or plan.offload_policy)


def _gathered(plan: RolePlan, shape: ModelShape) -> tuple[float, float]:
    """Bytes of weights in the compute dtype: what stays through a pass, and one layer that does not."""
    costs, c = trainer_costs(plan.engine), plan.compute_bytes
    root = shape.embedding + shape.head + shape.hidden
    if _gathers(plan):
        if plan.keeps_gathered:
            return c * shape.parameters, 0.0
        return c * root, c * shape.layer_parameters
    if costs.shards:
        return 0.0, 0.0
    if costs.caches and c < plan.weight_bytes and not plan.compiled:
        if plan.recompute:
            return c * shape.embedding, 0.0  # a layer's copies end with its pass; the head's stays
        return c * (shape.parameters - shape.vision - (0 if shape.tied else shape.embedding)), 0.0
    return 0.0, 0.0


def _inference(plan: RolePlan, shape: ModelShape, work: Workload, resting: PhaseMemory) -> PhaseMemory:
    """A pass without gradients: a layer's widest tensors, then the head."""
    tokens = _tokens(plan, work, plan.infer_tokens, 1)
    block = max(shape.blocks, key=lambda block: worked_per_token(plan, shape, block))
    through, layer = _gathered(plan, shape)
    working = tokens * 2 * worked_per_token(plan, shape, block)
    head = head_bytes(plan, shape, tokens * _predicted(plan, work, plan.infer_tokens, 1), trains=False)
    at_head = head > working + 2 * layer
    return replace(
        resting,
        phase="infer",
        activations=tokens * 8 * shape.hidden if at_head else working,
        logits=head if at_head else 0.0,
        transient=through + (0 if at_head else 2 * layer),
    )


def _update(plan: RolePlan, shape: ModelShape, work: Workload, resting: PhaseMemory) -> PhaseMemory:
    """The larger of two moments: the head with all activations, or a layer of the backward pass."""
    limits = plan.micro_tokens, plan.mini_batches
    c, tokens = plan.compute_bytes, _tokens(plan, work, *limits)
    residual, predicted = _residual(plan, shape), _predicted(plan, work, *limits)
    saved = [saved_per_token(plan, shape, block) for block in shape.blocks]
    worked = max(worked_per_token(plan, shape, block) for block in shape.blocks)
    if plan.recompute:
        inputs = 0 if plan.activation_offload else residual
        layers, worked = tokens * inputs * shape.layers, worked + max(saved) - inputs
    elif plan.activation_offload:
        layers, worked = 0.0, worked + max(saved)
    else:
        layers = tokens * sum(saved)
    # A pipeline's first stage has its share of the layers, and of as many micro-batches: `layers` is not divided.
    through, layer = _gathered(plan, shape)
    # The last norm, and the input of the head.
    edge = tokens * (2 * residual + c * shape.hidden * predicted)
    head = edge + head_bytes(plan, shape, tokens * predicted, trains=True)
    # Complete gradients: of tied or gathered embeddings until the end of the pass, and of the gathered layer.
    gathers = _gathers(plan)
    embedding = 0.0 if plan.lora_rank else shape.embedding * (c if gathers else 4) * (gathers or shape.tied)
    in_layer = (1 + plan.recompute) * layer + 4 * shape.layer_parameters * (gathers and not plan.lora_rank)
    if head > tokens * worked + in_layer + embedding:
        return replace(resting, activations=layers + edge, logits=head - edge, transient=through)
    return replace(resting, activations=layers + tokens * worked, transient=through + in_layer + embedding)


def _tokens(plan: RolePlan, work: Workload, limit: int, mini_batches: int) -> float:
    """Tokens of a micro-batch on one device: no more than there are."""
    share = plan.parallel.data * mini_batches
    length = work.response.longest + computed_prompts(plan, work, limit, mini_batches) * work.prompt.longest
    most = max(work.longest, work.sequences * length / share) / plan.parallel.sequence
    return min(limit or most, most)


def _predicted(plan: RolePlan, work: Workload, limit: int, mini_batches: int) -> float:
    """Share of a micro-batch's tokens that are of responses, whose log-probs are computed."""
    prompt = computed_prompts(plan, work, limit, mini_batches) * work.prompt.mean
    return work.response.mean / (work.response.mean + prompt)


def _sampler(plan: RolePlan, shape: ModelShape, work: Workload, device: Device | None) -> Memory:
    costs, split = sampler_costs(plan.engine), plan.parallel.model
    experts = shape.expert_parameters / max(plan.parallel.expert, split)
    dense = (shape.parameters - shape.expert_parameters) / split
    weights = 0.0 if costs.shares_weights and plan.on_cpu else plan.compute_bytes * (dense + experts)
    rows = min(plan.batch_rows, work.sequences / plan.parallel.data)
    if not costs.reserves or device is None:
        cache = rows * sequence_cache(plan, shape, work.longest) * costs.cache_growth
    else:
        cache = max(0.0, plan.memory_fraction * device.memory - weights - costs.overhead)
    bucket = max(plan.bucket_bytes, plan.compute_bytes * shape.embedding)
    idle = PhaseMemory("idle") if plan.sleeps else PhaseMemory("idle", weights=weights, kv_cache=cache)
    generate = PhaseMemory("generate", weights=weights, kv_cache=cache, transient=costs.overhead)
    sent = min(bucket, plan.compute_bytes * shape.parameters)
    sync = PhaseMemory("sync", weights=weights, transient=2.0 * sent)  # at the sender and at the receiver
    offload = weights if costs.reserves and plan.sleeps else 0.0
    return Memory(plan.role, (idle, generate, sync), offload=offload)
