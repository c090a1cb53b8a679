"""A plan as a person reads it: the table, what it beats, and the overrides that make a run of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from verl.errors import ConfigError
from verl.planner.choices import AS_IT_IS, SEQUENCE, TENSOR, grid_of, present_placement, space_of
from verl.planner.engines import sampler_costs
from verl.planner.hardware import Cluster
from verl.planner.layout import RolePlan, Workload
from verl.planner.paper import algorithm_1
from verl.planner.search import PlacementSearch, explanation
from verl.planner.shapes import ModelShape
from verl.planner.space import (
    ACTOR,
    ASYNC,
    SAMPLER,
    SYNC,
    PlacementPlan,
    PlacementRules,
    PoolPlan,
    SearchSpace,
)

C = TypeVar("C")
EXACT, PAPER = "exact", "paper"

GIB = 1 << 30
_SECTIONS = {"actor": "actor_rollout_ref.actor", "ref": "actor_rollout_ref.ref", "critic": "critic",
             "rm": "reward.reward_model"}  # fmt: skip
_MODELS = {"actor": "actor_rollout_ref.model", "critic": "critic.model"}
_ROLLOUT = "actor_rollout_ref.rollout"


def proposal(roles: Sequence[RolePlan], shapes: Mapping[str, ModelShape], work: Workload, cluster: Cluster,
             rules: PlacementRules | None = None, schedule: str = SYNC, method: str = EXACT, gap: float = 0.0
             ) -> str:  # fmt: skip
    """What ``plan`` prints.

    Args:
        roles: as the configuration has them.
        schedule: of the configuration, to compare with.
        method: ``exact``, or ``paper`` for Algorithm 1 of HybridFlow.
        gap: share of its seconds by which the plan may be slower than the optimum.

    Raises:
        NoPlacement: nothing fits; with how far off it is and what helps.
        ConfigError: contradictory rules, or an unknown method.
    """
    if method not in (EXACT, PAPER):
        raise ConfigError("no such method", key="--method", got=method, allowed=[EXACT, PAPER])
    space = space_of(roles, shapes, work, cluster, rules)
    search = PlacementSearch(space)
    plan = search.best(gap) if method == EXACT else algorithm_1(search)
    if plan is None:
        raise explanation(space, _changes(roles, shapes, work, cluster, rules))
    others = [(str(other), other) for other in search.runners_up(plan, gap)]
    others.append(("the configuration itself", present_placement(roles, shapes, work, cluster, schedule)))
    memory = cluster.device.memory
    words = " \\\n    ".join(shlex.quote(word) for word in overrides(plan, cluster))
    return "\n\n".join([plan_table(plan, cluster), step_chart(plan), comparison_table(plan, others, memory), words])


def _changes(roles: Sequence[RolePlan], shapes: Mapping[str, ModelShape], work: Workload, cluster: Cluster,
             rules: PlacementRules | None) -> Iterator[tuple[str, SearchSpace[RolePlan]]]:  # fmt: skip
    """Changes that save memory, the cheapest first: shorter responses, then more devices."""
    response = replace(work.response, mean=work.response.mean / 2, longest=work.response.longest // 2)
    shorter = replace(work, response=response)
    yield f"data.max_response_length={response.longest}", space_of(roles, shapes, shorter, cluster, rules)
    for factor in (2, 4, 8, 16):
        more = replace(cluster, devices=factor * cluster.devices)
        yield f"{more.devices} devices of this kind", space_of(roles, shapes, work, more, rules)


def overrides(plan: PlacementPlan[RolePlan], cluster: Cluster) -> list[str]:
    """Arguments of a run that has this placement; shell quoting is the caller's."""
    words = []
    for pool in plan.pools:
        nodes, per_node = _processes(pool.devices, cluster.device.node)
        if ACTOR in pool.choices:
            words += [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"]
        else:
            roles = list(pool.choices)
            processes = ", ".join([str(per_node)] * nodes)
            words.append(f"+trainer.resource_pools.{roles[0]}_pool={{roles: [{', '.join(roles)}], "
                         f"processes: [{processes}]}}")  # fmt: skip
        for role, choice in pool.choices.items():
            words += _of_sampler(choice, pool) if role == SAMPLER else _of_trainer(role, choice)
    if plan.schedule == ASYNC:
        words.append("trainer.v1.trainer_mode=one_step_off")
    return list(dict.fromkeys(words))


def _processes(devices: int, node: int) -> tuple[int, int]:
    return (1, devices) if devices <= node else (devices // node, node)


def _of_sampler(choice: RolePlan, pool: PoolPlan[RolePlan]) -> Iterator[str]:
    if sampler_costs(choice.engine).reserves:
        yield f"{_ROLLOUT}.tensor_model_parallel_size={choice.parallel.tensor}"
        yield f"{_ROLLOUT}.gpu_memory_utilization={choice.memory_fraction:g}"
    if ACTOR not in pool.choices:
        yield f"{_ROLLOUT}.checkpoint_engine.backend=nccl"


def _of_trainer(role: str, choice: RolePlan) -> Iterator[str]:
    section = _SECTIONS[role]
    grid = grid_of(choice.engine)
    fsdp = ".fsdp" if role == "critic" else ".fsdp_config"
    engine = section + {TENSOR: ".megatron", AS_IT_IS: ".torchtitan"}.get(grid, fsdp)
    if grid == TENSOR:
        yield f"{engine}.tensor_model_parallel_size={choice.parallel.tensor}"
        yield f"{engine}.pipeline_model_parallel_size={choice.parallel.pipeline}"
    elif grid == SEQUENCE:
        yield f"{engine}.ulysses_sequence_parallel_size={choice.parallel.sequence}"
    yield f"{engine}.param_offload={str(choice.param_offload).lower()}"
    if choice.trains:
        yield f"{engine}.optimizer_offload={str(choice.optimizer_offload).lower()}"
        yield f"{_MODELS[role]}.enable_gradient_checkpointing={str(choice.recompute).lower()}"
        yield f"{section}.use_dynamic_bsz=true"
        yield f"{section}.ppo_max_token_len_per_gpu={choice.micro_tokens}"
    if role == "actor":
        yield f"{_ROLLOUT}.log_prob_use_dynamic_bsz=true"
        yield f"{_ROLLOUT}.log_prob_max_token_len_per_gpu={choice.infer_tokens}"
    elif role == "ref":
        yield f"{section}.log_prob_use_dynamic_bsz=true"
        yield f"{section}.log_prob_max_token_len_per_gpu={choice.infer_tokens}"
    else:
        yield f"{section}.use_dynamic_bsz=true"
        yield f"{section}.forward_max_token_len_per_gpu={choice.infer_tokens}"


def plan_table(plan: PlacementPlan[RolePlan], cluster: Cluster) -> str:
    """A row per role: its pool, sizes, bytes and seconds; then the step with its bound."""
    rows = [["devices", "role", "engine", "t", "p", "d", "s", "e", "offload", "recompute", "GiB at most",
             "generation", "preparation", "training"]]  # fmt: skip
    for pool in plan.pools:
        for role, choice in pool.choices.items():
            cost, sizes = pool.costs[role], choice.parallel
            offload = "+".join(["optimizer"] * choice.optimizer_offload + ["weights"] * choice.param_offload) or "-"
            rows.append([str(pool.devices), role, choice.engine,
                         *map(str, (sizes.tensor, sizes.pipeline, sizes.data, sizes.sequence, sizes.expert)),
                         offload, "yes" if choice.recompute else "-", f"{(cost.resident + cost.working) / GIB:.1f}",
                         f"{cost.sampling(ACTOR in pool.choices):.3g} s", f"{cost.preparation:.3g} s",
                         f"{cost.training:.3g} s"])  # fmt: skip
    generation, preparation, training = plan.stages
    stages = f"generation {generation:.3g} s, preparation {preparation:.3g} s, training {training:.3g} s"
    end = [f"A step takes {plan.seconds:.3g} s ({plan.schedule}): {stages}. No placement takes less than "
           f"{plan.bound:.3g} s under this model."]  # fmt: skip
    memory, free = cluster.device.memory, cluster.devices - plan.devices
    for pool in plan.pools:
        end.append(f"{' and '.join(pool.choices)}: {pool.bytes / GIB:.1f} of {memory / GIB:.1f} GiB per device")
    if free:
        end.append(f"{free} of {cluster.devices} devices stay free: no grid of more devices is faster")
    return "\n".join([_aligned(rows), "", *end])


def comparison_table(plan: PlacementPlan[RolePlan], others: Sequence[tuple[str, PlacementPlan[RolePlan]]],
               memory: float) -> str:  # fmt: skip
    """The plan against others, each with the stage that makes the difference."""
    rows = [["", "step", "slower by", "most of it in", "fits"]]
    names = ("generation", "preparation", "training")
    for title, other in [(str(plan), plan), *others]:
        slower_by = [theirs - ours for theirs, ours in zip(other.stages, plan.stages, strict=True)]
        stage = names[slower_by.index(max(slower_by))] if other.seconds > plan.seconds else "-"
        fits = all(pool.bytes <= memory for pool in other.pools)
        rows.append([title, f"{other.seconds:.3g} s", f"{other.seconds / plan.seconds - 1:.0%}", stage,
                     "yes" if fits else "no"])  # fmt: skip
    return _aligned(rows)


def step_chart(plan: PlacementPlan[C], width: int = 72) -> str:
    """One step on a line per pool: G while it generates, P while it prepares, T while it trains."""
    lines, names = [], ["+".join(pool.choices) for pool in plan.pools]
    begins = (0.0, 0.0, plan.stages[1]) if plan.schedule == ASYNC else (0.0, plan.stages[0], sum(plan.stages[:2]))
    for name, pool in zip(names, plan.pools, strict=True):
        cells = [" "] * width
        for letter, begin, seconds in zip("GPT", begins, pool.stages, strict=True):
            first, last = (round(width * moment / plan.seconds) for moment in (begin, begin + seconds))
            cells[first:last] = letter * (last - first)
        lines.append(f"{name.ljust(max(map(len, names)))} |{''.join(cells)}|")
    return "\n".join([*lines, f"0 to {plan.seconds:.3g} s; G generation and new weights, P preparation, T training"])


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in rows)  # fmt: skip
