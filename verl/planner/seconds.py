"""Seconds of every phase of a step, as ranges: from operations, bytes and what devices reach of their data sheets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from verl.planner.engines import sampler_costs, trainer_costs
from verl.planner.hardware import Cluster
from verl.planner.layout import RolePlan, Workload, computed_prompts
from verl.planner.memory import local_trained, memory_of, sequence_cache, trained_parameters
from verl.planner.ranges import Range
from verl.planner.shapes import ModelShape

HOST_LINK = 25e9
"""Bytes per second between a device and its host, in one direction: PCIe 4.0 x16 at 80 % (an assumption). A device's
part of the host's memory bandwidth is taken to be as much."""
ADAM_BYTES = 28
"""Bytes per weight that an optimizer step on the host reads and writes: weight, gradient and two moments, less one."""
LENGTHS = (0.5, 2.0)
"""How far the mean response may be from the assumed one, as factors; a response never is longer than its limit."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step of a role, per phase.

    Args:
        role: its name.
        phases: ``generate``, ``infer``, ``update``, ``sync``.
    """

    role: str
    phases: dict[str, Range]

    def phase(self, name: str) -> Range:
        """A phase by its name; no time where the role has no such phase."""
        return self.phases.get(name, Range(0, 0, 0))


def seconds_of(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster, shares_pool: bool = False
               ) -> Seconds:  # fmt: skip
    """Seconds of a role in one step, where it has its devices to itself.

    Args:
        shares_pool: of a sampler, that the actor is in its pool.

    Raises:
        ConfigError: no costs of this engine.
    """
    if plan.samples:
        sync = weight_sync(plan, shape, cluster, shares_pool)
        phases = {"generate": generation(plan, shape, work, cluster), "sync": sync}
    else:
        phases = {"infer": _pass(plan, shape, work, cluster, trains=False)} if plan.infers else {}
        if plan.trains:
            phases["update"] = _pass(plan, shape, work, cluster, trains=True) * plan.epochs
        if (plan.param_offload or plan.optimizer_offload) and not plan.offload_policy:
            for name, seconds in _transfers(plan, shape, work).items():
                phases[name] += _exactly(seconds)
    return Seconds(plan.role, phases)


def _transfers(plan: RolePlan, shape: ModelShape, work: Workload) -> dict[str, float]:
    """Seconds of offloading per phase: weights come before a pass; before and after an update, the optimizer, too."""
    memory = memory_of(plan, shape, work)
    idle, infer = memory.phase("idle"), memory.phase("infer")
    seconds = {"infer": (infer.weights - idle.weights) / HOST_LINK} if plan.infers else {}
    if plan.trains:
        update = memory.phase("update")
        seconds["update"] = 2 * (update.weights + update.optimizer - idle.weights - idle.optimizer) / HOST_LINK
    return seconds


def stage_seconds(plans: Sequence[RolePlan], seconds: Sequence[Seconds], phase: str) -> Range:
    """Of a phase: the pools at once, the roles of a pool in turn."""
    pools: dict[str, Range] = {}
    for plan, role in zip(plans, seconds, strict=True):
        pools[plan.pool] = pools.get(plan.pool, Range(0, 0, 0)) + role.phase(phase)
    return functools.reduce(Range.at_least, pools.values(), Range(0, 0, 0))


def step_seconds(plans: Sequence[RolePlan], seconds: Sequence[Seconds], overlaps: bool = False) -> Range:
    """Of a step: in each stage the pools at once, the roles of a pool in turn; then the stages in turn.

    Args:
        overlaps: generation and weight sync run at once with the other stages.
    """
    stages = {name: stage_seconds(plans, seconds, name) for name in ("generate", "infer", "update", "sync")}
    generation, training = stages["generate"] + stages["sync"], stages["infer"] + stages["update"]
    return generation.at_least(training) if overlaps else generation + training


def _pass(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster, trains: bool) -> Range:
    """All tokens of a step through a model, forwards, or forwards and backwards.

    Weights and gradients cross the links while the device computes, at best; activations do while it waits.
    """
    parallel, shares = plan.parallel, cluster.device.reached
    link, reached, turns = shares["link"], shares["train" if trains else "infer"], 3 + plan.recompute if trains else 1
    budget, steps = (plan.micro_tokens, plan.mini_batches) if trains else (plan.infer_tokens, 1)
    repeated = work.sequences * work.prompt.mean * (1 - computed_prompts(plan, work, budget, steps))
    tokens = work.tokens - repeated
    flops = shape.flops_per_token(work.mean_length) * work.tokens - shape.flops_per_token(work.prompt.mean) * repeated
    flops *= turns
    if trains and plan.lora_rank:
        flops -= 2 * shape.active_parameters * tokens  # frozen matrices get no gradient
    passes = max(float(steps), tokens / (parallel.data * (budget * parallel.sequence or work.longest)))
    launches = turns * passes * shape.layers / parallel.pipeline
    computed = reached.seconds(flops, plan.devices * cluster.device.bf16_flops, launches)
    computed = computed * (1 + (parallel.pipeline - 1) * steps / passes)  # a pipeline drains before an optimizer step
    tensor, sequence = _activations_moved(plan, shape, tokens, trains)
    computed += link.seconds(tensor, cluster.link(parallel.tensor))
    computed += link.seconds(sequence, cluster.link(parallel.tensor * parallel.sequence))
    gathers = passes * (2 if trains and not plan.keeps_gathered else 1)
    reductions = steps if plan.full_gradients else passes
    moved = _weights_moved(plan, shape, steps, gathers, reductions, trains)
    computed = computed.overlapping(link.seconds(moved, cluster.link(plan.devices)))
    if plan.offload_policy:  # shards come from the host for every gather; gradients leave for the optimizer there
        trained = local_trained(plan, shape) if trains else 0.0
        traffic = gathers * plan.weight_bytes * shape.parameters / plan.shards + reductions * 4 * trained
        computed = computed.overlapping(_exactly(traffic / HOST_LINK))
        computed += _exactly(steps * ADAM_BYTES * trained / HOST_LINK)
    return computed


def _exactly(seconds: float) -> Range:
    return Range(seconds, seconds, seconds, "the link to the host (assumed)")


def _weights_moved(
    plan: RolePlan, shape: ModelShape, steps: int, gathers: float, reductions: float, trains: bool
) -> float:
    """Bytes that one device sends in all passes: gathered weights and reduced gradients (float32).

    Args:
        steps: of the optimizer.
        gathers, reductions: passes over all weights, and over all gradients.
    """
    costs = trainer_costs(plan.engine)
    if costs.shards and plan.shards > 1:
        moved = gathers * plan.compute_bytes * shape.parameters + reductions * 4 * trained_parameters(plan, shape)
        return moved * (plan.shards - 1) / plan.shards
    if not trains or plan.parallel.data == 1:
        return 0.0
    # A ring sends gradients twice, or once, and then the weights that each rank's part of the optimizer made.
    sent = 4 + (plan.compute_bytes if costs.optimizer_over_data else 4)
    return steps * sent * local_trained(plan, shape)


def _activations_moved(plan: RolePlan, shape: ModelShape, tokens: float, trains: bool) -> tuple[float, float]:
    """Bytes that one device sends in all passes over a step's tokens for tensor and for sequence parallelism."""
    parallel, costs = plan.parallel, trainer_costs(plan.engine)
    tokens /= parallel.data * parallel.sequence
    turns = 2 + plan.recompute if trains else 1
    reduced = 2 * turns * shape.layers * tokens * _reduced_bytes(plan, shape)  # two all-reduces per layer
    others = parallel.sequence - 1
    if costs.passes_keys:  # and their gradients
        width, turns = sum(block.stored for block in shape.blocks) * others, turns + trains
    else:
        width = sum(block.scores + block.stored + block.mixed for block in shape.blocks) * others // parallel.sequence
    exchanged = turns * tokens * plan.compute_bytes * width / parallel.tensor
    return reduced / parallel.pipeline, exchanged / parallel.pipeline


def _reduced_bytes(plan: RolePlan, shape: ModelShape) -> float:
    """Bytes per token that one device sends in a ring all-reduce over the tensor-parallel ranks."""
    return 2 * shape.hidden * plan.compute_bytes * (plan.parallel.tensor - 1) / plan.parallel.tensor


def generation(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster) -> Range:
    """Prefill of all prompts, then decoding: as many rows at once as the cache holds, and at least the longest row.

    A decoding step reads all weights and the cache of its rows, or is bound by operations; tensor-parallel ranks then
    exchange two all-reduces per layer.
    """
    device, split, shares = cluster.device, plan.parallel.model, cluster.device.reached
    rows = max(1.0, work.sequences / plan.parallel.data)
    prompts = work.prompts / plan.parallel.data * work.prompt.mean
    prefill = shares["prefill"].seconds(
        prompts * shape.flops_per_token(work.prompt.mean), split * device.bf16_flops, shape.layers
    )
    context = work.prompt.mean + work.response.mean / 2
    cache = sequence_cache(plan, shape, context)
    at_once = max(1.0, min(rows, plan.batch_rows))
    if sampler_costs(plan.engine).reserves:
        room = memory_of(plan, shape, work, device).phase("generate").kv_cache
        at_once = max(1.0, min(at_once, room / max(1.0, sequence_cache(plan, shape, work.mean_length))))
    kind = sampler_costs(plan.engine).decoding
    reached, by_operations = shares[kind], shares[f"{kind} flops"]

    def reduced(tokens: float, steps: float) -> Range:
        if plan.parallel.tensor == 1:
            return Range(0, 0, 0)
        sent = 2 * shape.layers * tokens * _reduced_bytes(plan, shape)
        return shares["link"].seconds(sent, cluster.link(plan.parallel.tensor), 2 * shape.layers * steps)

    def decoded(mean: float) -> Range:
        steps = max(rows * mean / at_once, float(min(work.response.longest, 2 * mean)))
        in_work = rows * mean / steps  # in the mean: fewer at the end of the longest rows
        read = steps * (plan.compute_bytes * _weights_read(shape, in_work) / split + in_work * cache)
        launches = steps * shape.layers / plan.parallel.pipeline
        by_bytes = reached.seconds(read, device.memory_bandwidth, launches)
        flops = rows * mean * shape.flops_per_token(context)
        computed = by_bytes.at_least(by_operations.seconds(flops, split * device.bf16_flops, launches))
        return computed + reduced(rows * mean, steps)

    short, usual, long = (
        decoded(min(factor * work.response.mean, work.response.longest)) for factor in (LENGTHS[0], 1.0, LENGTHS[1])
    )
    by_length, by_device = long.likely - short.likely, usual.high - usual.low
    because = "the mean length of responses" if by_length > by_device else usual.because
    return prefill + reduced(prompts, 1) + Range(short.low, usual.likely, long.high, because)


def _weights_read(shape: ModelShape, rows: float) -> float:
    """Weights that a decoding step reads: of a mixture the experts that some row meets, of embeddings the head."""
    read = float(shape.parameters - shape.head - shape.vision - shape.expert_parameters)
    for block in shape.blocks:
        if block.experts:
            read += block.expert_parameters * (1 - (1 - block.active / block.experts) ** max(1.0, rows))
    return read


def weight_sync(plan: RolePlan, shape: ModelShape, cluster: Cluster, shares_pool: bool) -> Range:
    """All weights once into each replica, over the links of its pool, or of the cluster where the actor has another."""
    received = plan.compute_bytes * shape.parameters / plan.parallel.model
    link = cluster.link(plan.devices if shares_pool else cluster.devices)
    return cluster.device.reached["link"].seconds(received, link)
