"""What a role of a run may be on its devices: parallel sizes, budgets, offloading; and what each costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from verl.config.machine.topology import backend_of
from verl.planner.engines import sampler_costs, trainer_costs
from verl.planner.estimate import USABLE, Estimate
from verl.planner.from_config import COMPILED_FROM, RunPlan
from verl.planner.hardware import Cluster
from verl.planner.layout import Parallel, RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.seconds import seconds_of, weight_sync
from verl.planner.shapes import ModelShape
from verl.planner.space import ASYNC, SYNC, PlacementPlan, PoolPlan, RoleCost, SearchSpace, pool_sizes

MICRO = (1, 2, 4)
"""Budgets of tokens of a micro-batch, in sequences of the longest length."""
SEQUENCE, TENSOR, DATA_ONLY = "sequence", "tensor and pipeline", "data"
FRACTIONS = (0.5, 0.7, 0.85)
"""Shares of a device's memory that a sampler may take."""


def space_of(roles: Sequence[RolePlan], shapes: Mapping[str, ModelShape], work: Workload, cluster: Cluster,
             schedules: tuple[str, ...] = (SYNC, ASYNC)) -> SearchSpace[RolePlan]:  # fmt: skip
    """The search for a run.

    Args:
        roles: as its configuration has them: engines and dtypes stay, sizes are searched.
        shapes: role -> its model.
    """
    base = {role.role: role for role in roles}
    return SearchSpace(
        roles=tuple(base),
        devices=cluster.devices,
        memory=USABLE * cluster.device.memory,
        sizes=pool_sizes(cluster.devices, cluster.device.node),
        choices=lambda role, devices: role_choices(base[role], shapes[role], work, cluster, devices),
        cost=lambda role, devices, choice: role_cost(choice, shapes[role], work, cluster),
        schedules=schedules,
        group=common_sizes,
    )


def common_sizes(plan: RolePlan) -> Parallel | None:
    """Sizes that all roles of a pool have: Megatron-Core has one set of groups per process; None of other engines."""
    return plan.parallel if not plan.samples and grid_of(plan.engine) == TENSOR else None


def role_choices(base: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster, devices: int
                 ) -> Iterator[RolePlan]:  # fmt: skip
    """All layouts of a role on a number of devices; none where no grid divides them and the batch.

    Samplers whose KV cache does not hold the longest sequence are left out.
    """
    if base.samples:
        yield from _sampler_choices(base, shape, work, cluster, devices)
        return
    rows = work.sequences // max(1, base.mini_batches)
    offloads = [(False, False), (True, False), (True, True)] if base.trains else [(False, False), (False, True)]
    recomputations = (False, True) if base.trains else (False,)
    for parallel in _grids(base, shape, cluster.device.node, devices):
        if rows % parallel.data:
            continue
        plan = replace(_on_engine(base, shape, devices), devices=devices, parallel=parallel)
        for (optimizer, params), recompute, micro in product(offloads, recomputations, MICRO):
            tokens = micro * -(-work.longest // parallel.sequence)
            yield replace(plan, optimizer_offload=optimizer, param_offload=params, recompute=recompute,
                          micro_tokens=tokens if base.trains else 0, infer_tokens=tokens)  # fmt: skip


def _on_engine(base: RolePlan, shape: ModelShape, devices: int) -> RolePlan:
    """A role with the engine for this number of devices, and what `overrides` writes about that engine."""
    grid = grid_of(base.engine)
    if grid == TENSOR:
        return base
    if grid == DATA_ONLY:
        return replace(base, shards=devices)
    engine, is_large = backend_of("auto", devices), shape.parameters >= COMPILED_FROM
    costs = trainer_costs(engine)
    return replace(
        base,
        engine=engine,
        shards=devices,
        offload_policy=base.offload_policy and costs.offloads,
        compiled=base.compiled if engine == base.engine else is_large and not (costs.shards or base.on_cpu),
    )


def _sampler_choices(base: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster, devices: int
                     ) -> Iterator[RolePlan]:  # fmt: skip
    has_processes = sampler_costs(base.engine).reserves
    fractions = sorted({*FRACTIONS, base.memory_fraction}) if has_processes else [base.memory_fraction]
    for tensor in _powers(min(cluster.device.node, devices) if has_processes else 1):
        if devices % tensor or shape.heads % tensor or work.sequences < devices // tensor:
            continue
        parallel = replace(base.parallel, tensor=tensor, pipeline=1, data=devices // tensor)
        for fraction in fractions:
            plan = replace(base, devices=devices, parallel=parallel, memory_fraction=fraction)
            if not Estimate.of(RunPlan((plan,), {plan.role: shape}, work), cluster).problems():
                yield plan


def grid_of(engine: str) -> str:
    """Which sizes of an engine are searched: `SEQUENCE`, `TENSOR` with the pipeline, or `DATA_ONLY`."""
    if engine in (backend_of("auto", 1), backend_of("auto", 2)):
        return SEQUENCE
    return TENSOR if trainer_costs(engine).optimizer_over_data else DATA_ONLY


def _grids(base: RolePlan, shape: ModelShape, node: int, devices: int) -> Iterator[Parallel]:
    """Grids that the expert-parallel size of the configuration divides, as its engine wants it."""
    grid, expert = grid_of(base.engine), base.parallel.expert
    if grid == TENSOR:
        context = base.parallel.sequence
        for tensor, pipeline in product(_powers(min(node, devices)), _powers(devices)):
            if devices % (tensor * pipeline * context) or shape.heads % tensor or shape.layers % pipeline:
                continue
            data = devices // (tensor * pipeline * context)
            parallel = replace(base.parallel, tensor=tensor, pipeline=pipeline, data=data)
            if parallel.stage % parallel.expert_shards == 0:
                yield parallel
    elif grid == DATA_ONLY:
        per_copy = base.parallel.devices // base.parallel.data
        if devices % per_copy == 0 and devices // base.parallel.pipeline % expert == 0:
            yield replace(base.parallel, data=devices // per_copy)
    elif devices % expert == 0:
        for sequence in _powers(min(node, devices)):
            if devices % sequence == 0 and shape.heads % sequence == 0:
                yield Parallel(data=devices // sequence, sequence=sequence, expert=expert)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(max(1, most).bit_length()) if 1 << power <= most]


def role_cost(plan: RolePlan, shape: ModelShape, work: Workload, cluster: Cluster) -> RoleCost:
    """Seconds of a role's stages and its bytes, from `seconds_of` and `memory_of`."""
    memory, seconds = memory_of(plan, shape, work, cluster.device), seconds_of(plan, shape, work, cluster)
    resident = memory.phase("idle").total
    working = max(phase.total for phase in memory.phases) - resident
    if plan.samples:
        inside = weight_sync(plan, shape, cluster, shares_pool=True)
        return RoleCost(seconds.phase("generate").likely, resident=resident, working=working, update=inside.likely,
                        update_across=seconds.phase("sync").likely)  # fmt: skip
    return RoleCost(
        preparation=seconds.phase("infer").likely,
        training=seconds.phase("update").likely,
        resident=resident,
        working=working,
    )


def present_placement(roles: Sequence[RolePlan], shapes: Mapping[str, ModelShape], work: Workload, cluster: Cluster,
                  schedule: str) -> PlacementPlan[RolePlan]:  # fmt: skip
    """What the configuration itself takes under the same model, whether or not it fits."""
    pools: dict[str, list[RolePlan]] = {}
    for role in roles:
        pools.setdefault(role.pool, []).append(role)
    parts = [PoolPlan(max(role.devices for role in members), {role.role: role for role in members},
                      {role.role: role_cost(role, shapes[role.role], work, cluster) for role in members})
             for members in pools.values()]  # fmt: skip
    return PlacementPlan(schedule, tuple(parts))
