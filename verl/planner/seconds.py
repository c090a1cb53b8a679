"""Seconds of every phase of a step, as ranges: from operations, bytes and what devices reach of their data sheets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.planner.engines import sampler_costs, trainer_costs
from verl.planner.hardware import Cluster
from verl.planner.layout import RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.shapes import ModelShape


@dataclass(frozen=True)
class Range:
    """A quantity that is not known exactly; all three in one unit.

    Args:
        low, likely, high: ``low <= likely <= high``.
        because: the assumption that widens it most.
    """

    low: float
    likely: float
    high: float
    because: str = ""

    def __add__(self, other: Range) -> Range:
        """The sum; it names the assumption of the wider part."""
        wider = max(self, other, key=lambda part: part.high - part.low)
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high, wider.because)

    def __mul__(self, factor: float) -> Range:
        return Range(self.low * factor, self.likely * factor, self.high * factor, self.because)

    def at_least(self, other: Range) -> Range:
        """The longer of two that run at once."""
        longer = self if self.likely >= other.likely else other
        return Range(max(self.low, other.low), longer.likely, max(self.high, other.high), longer.because)


@dataclass(frozen=True)
class Reached:
    """The share of a data sheet's figure that a phase reaches.

    Args:
        low, likely, high: shares; the low one makes the phase slow.
        source: where they are from.
    """

    low: float
    likely: float
    high: float
    source: str

    def seconds(self, amount: float, rate: float) -> Range:
        """Of an amount of work at a nominal rate."""
        ideal = amount / rate
        return Range(ideal / self.high, ideal / self.likely, ideal / self.low, self.source)


EFFICIENCY = {
    "train": Reached(0.28, 0.40, 0.50, "share of the peak in training (docs/appendix/gpu.md: 31 to 48 %)"),
    "infer": Reached(0.28, 0.42, 0.55, "share of the peak in passes without gradients (assumed as in training)"),
    "prefill": Reached(0.28, 0.42, 0.55, "share of the peak in prefill (assumed as in training)"),
    "decode": Reached(0.40, 0.60, 0.80, "share of the memory bandwidth in decoding (assumed)"),
    "decode built in": Reached(
        0.11, 0.25, 0.40, "share of the bandwidth in decoding (docs/appendix/gpu.md: 11 to 32 %)"
    ),
    "link": Reached(0.40, 0.65, 0.85, "share of the links' bandwidth (assumed)"),
}
"""Phase -> what it reaches. Those that are assumed are corrected by a calibration."""
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


def seconds_of(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster) -> Seconds:
    """Seconds of a role in one step, where it has its devices to itself.

    Raises:
        ConfigError: no costs of this engine.
    """
    if plan.samples:
        phases = {"generate": generation(plan, shape, work, cluster), "sync": weight_sync(plan, shape, cluster)}
    else:
        phases = {"infer": _pass(plan, shape, work, cluster, trains=False)}
        if plan.trains:
            phases["update"] = _pass(plan, shape, work, cluster, trains=True) * work.epochs
    return Seconds(plan.role, phases)


def step_seconds(plans: Sequence[RolePlan], seconds: Sequence[Seconds]) -> Range:
    """Of a synchronous step: stages in turn, and in each the pools at once, the roles of a pool in turn."""
    total = Range(0, 0, 0)
    for stage in ("generate", "infer", "update", "sync"):
        pools: dict[str, Range] = {}
        for plan, role in zip(plans, seconds, strict=True):
            pools[plan.pool] = pools.get(plan.pool, Range(0, 0, 0)) + role.phase(stage)
        longest = Range(0, 0, 0)
        for pool in pools.values():
            longest = longest.at_least(pool)
        total = total + longest
    return total


def _pass(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster, trains: bool) -> Range:
    """All tokens of a step through a model, forwards, or forwards and backwards."""
    factor = (4 if plan.recompute else 3) if trains else 1
    flops = factor * shape.flops_per_token(work.mean_length) * work.tokens
    reached = EFFICIENCY["train" if trains else "infer"]
    computed = reached.seconds(flops, plan.devices * cluster.device.bf16_flops)
    budget = (plan.micro_tokens if trains else plan.infer_tokens) or work.longest
    passes = max(1.0, work.tokens / (plan.parallel.data * budget))
    computed = computed * (1 + (plan.parallel.pipeline - 1) / passes)  # a pipeline's bubble
    moved = _moved(plan, shape, work, passes, trains)
    return computed.at_least(EFFICIENCY["link"].seconds(moved, cluster.link(plan.devices)))


def _moved(plan: RolePlan, shape: ModelShape, work: Workload, passes: float, trains: bool) -> float:
    """Bytes that one device sends in all passes of a step: gathered weights, reduced gradients, tensor parallelism."""
    weights, moved = plan.compute_bytes * shape.parameters, 0.0
    if trainer_costs(plan.engine).shards and plan.shards > 1:
        moved = passes * (2 * weights + 4 * shape.parameters if trains else weights) * (plan.shards - 1) / plan.shards
    elif trains and plan.parallel.data > 1:
        moved = 2 * 4 * shape.parameters / plan.parallel.model
    tensor = plan.parallel.tensor
    if tensor > 1:  # ring all-reduces, two per layer forwards and two backwards
        tokens = work.tokens / plan.parallel.data
        width = 2 * shape.hidden * plan.compute_bytes * (tensor - 1) / tensor
        moved += (4 if trains else 2) * shape.layers / plan.parallel.pipeline * tokens * width
    return moved


def generation(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster) -> Range:
    """Prefill of all prompts, then decoding: as many rows at once as the cache holds, and at least the longest row.

    A decoding step reads all weights and the cache of its rows, or is bound by operations.
    """
    device, split = cluster.device, plan.parallel.model
    rows = max(1.0, work.sequences / plan.parallel.data)
    prompts = work.prompts / plan.parallel.data * work.prompt.mean
    prefill = EFFICIENCY["prefill"].seconds(
        prompts * shape.flops_per_token(work.prompt.mean), split * device.bf16_flops
    )
    context = work.prompt.mean + work.response.mean / 2
    cache = shape.cache_bytes(context, plan.cache_bytes)
    at_once = max(1.0, min(rows, plan.batch_rows))
    if sampler_costs(plan.engine).reserves:
        room = memory_of(plan, shape, work, device).phase("generate").kv_cache * split
        at_once = max(1.0, min(at_once, room / max(1.0, shape.cache_bytes(work.mean_length, plan.cache_bytes))))
    reached = EFFICIENCY[sampler_costs(plan.engine).decoding]

    def decoded(mean: float) -> Range:
        steps = max(rows * mean / at_once, float(min(work.response.longest, 2 * mean)))
        in_work = rows * mean / steps  # in the mean: fewer at the end of the longest rows
        read = steps * (plan.compute_bytes * _weights_read(shape, in_work) + in_work * cache)
        by_bytes = reached.seconds(read, split * device.memory_bandwidth)
        flops = rows * mean * shape.flops_per_token(context)
        return by_bytes.at_least(EFFICIENCY["prefill"].seconds(flops, split * device.bf16_flops))

    short, usual, long = (
        decoded(min(factor * work.response.mean, work.response.longest)) for factor in (LENGTHS[0], 1.0, LENGTHS[1])
    )
    by_length, by_device = long.likely - short.likely, usual.high - usual.low
    because = "the mean length of responses" if by_length > by_device else usual.because
    return prefill + Range(short.low, usual.likely, long.high, because)


def _weights_read(shape: ModelShape, rows: float) -> float:
    """Weights that a decoding step reads: of a mixture the experts that some row meets."""
    read = float(shape.parameters - shape.vision - shape.expert_parameters)
    for block in shape.blocks:
        if block.experts:
            read += block.expert_parameters * (1 - (1 - block.active / block.experts) ** max(1.0, rows))
    return read


def weight_sync(plan: RolePlan, shape: ModelShape, cluster: Cluster) -> Range:
    """All weights once into each replica, over the link that its devices share with the trainers."""
    received = plan.compute_bytes * shape.parameters / plan.parallel.model
    return EFFICIENCY["link"].seconds(received, cluster.link(cluster.devices))
