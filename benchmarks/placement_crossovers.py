"""Where the paper's placements cross over: the planner's search with the paper's stated cost model.

    python benchmarks/placement_crossovers.py [--models 7B 13B 34B 13B+70B] [--devices 16 32 64 96 128] [--write]

HybridFlow (2409.19256, figures 12 and 13) colocates all models on few devices, and splits them on many: PPO with four
Llama models of one size, 1,024 prompts and responses of 1,024 tokens each, 8 updates, machines of 8 A100-80GB with
600 GB/s inside and 200 Gb/s between them. The cost model is the one that the paper states, nothing is fitted:

- training: 6 operations per weight and token (attention besides) at `EFFICIENCY` of the peak, times the pipeline's
  bubble 1 + (p - 1) / m; four all-reduces per layer over t; per update a ring of gradients over d;
- passes without gradients: 2 operations per weight and token, two all-reduces per layer;
- decoding: per token the weights and the cache of all rows over t_g at `EFFICIENCY` of the bandwidth, and two
  all-reduces per layer of `LATENCY`; as many waves as the cache has room for;
- bytes: 2 of weights and 4 of gradients over t p, 12 of the optimizer over t p d.

Printed: the best plan per size, and how much slower the best of each kind is, and the plan of the paper's Algorithm 1.
The actor samples on its devices.
``13B+70B``: 13B as actor and reference, 70B as critic and reward model. ``--write`` makes the table of
`docs/appendix/placement_crossovers.md` again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from figures import ROOT

sys.path.insert(0, str(ROOT))
from verl.planner.search import PlacementSearch
from verl.planner.space import ACTOR, SYNC, PlacementPlan, PoolPlan, RoleCost, SearchSpace, pool_sizes

ROLES = ("actor", "rollout", "ref", "critic", "rm")
NODE, MEMORY, FLOPS, BANDWIDTH = 8, 80e9, 312e12, 2.0e12
NVLINK, NETWORK = 300e9, 25e9 / NODE
EFFICIENCY, LATENCY = 0.5, 20e-6
ROWS, PROMPT, RESPONSE, UPDATES, MICRO_ROWS = 1024, 1024, 1024, 8, 4
PAGE, BEGIN, END = ROOT / "docs/appendix/placement_crossovers.md", "<!-- table -->", "<!-- end of the table -->"
FRACTIONS = (0.2, 0.4, 0.6)
KINDS = {"colocated": lambda roles: len(roles) == len(ROLES),
         "split": lambda roles: roles in ({"actor", "rollout", "ref"}, {"critic", "rm"}),
         "standalone": lambda roles: roles == {"actor", "rollout"} or len(roles) == 1}  # fmt: skip


@dataclass(frozen=True)
class Llama:
    """What the cost model reads of a model."""

    weights: float
    hidden: int
    layers: int
    cache_values: int
    """Values of keys and values per token and layer."""


MODELS = {
    "7B": Llama(6.7e9, 4096, 32, 8192),
    "13B": Llama(13.0e9, 5120, 40, 10240),
    "34B": Llama(33.7e9, 8192, 48, 2048),
    "70B": Llama(69e9, 8192, 80, 2048),
}


class Grid(NamedTuple):
    """Sizes of a role: tensor, pipeline, data; of the sampler also the share of the memory for its cache."""

    t: int
    p: int
    d: int
    fraction: float = 0.0


def grids(model: Llama, role: str, devices: int) -> Iterator[Grid]:
    """All grids of powers of two that divide the devices and the batch."""
    for t in (1, 2, 4, 8):
        for p in (1,) if role == "rollout" else (1, 2, 4, 8, 16):
            d = devices // (t * p)
            rows = ROWS // UPDATES if role in ("actor", "critic") else ROWS
            if devices % (t * p) == 0 and model.layers % p == 0 and (role == "rollout" or rows % d == 0):
                for fraction in FRACTIONS if role == "rollout" else (0.0,):
                    yield Grid(t, p, d, fraction)


def ring_seconds(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size / bandwidth


def cost(model: Llama, role: str, devices: int, grid: Grid) -> RoleCost:
    """By the formulas of the module."""
    t, p, d, fraction = grid
    tokens, ranks_of_copy = ROWS * (PROMPT + RESPONSE), t * p
    attention = model.layers * model.hidden * (PROMPT + RESPONSE)
    if role == "rollout":
        rows, weights = ROWS / d, 2 * model.weights / t
        row = 2 * model.layers * model.cache_values * (PROMPT + RESPONSE) / t
        at_once = min(rows, max(1.0, fraction * MEMORY / row))
        read = weights + at_once * row * 0.75
        seconds = RESPONSE * rows / at_once * (read / (BANDWIDTH * EFFICIENCY) + 2 * model.layers * LATENCY * (t > 1))
        prefill = 2 * model.weights * ROWS * PROMPT / (devices * FLOPS * EFFICIENCY)
        return RoleCost(seconds + prefill, working=weights + fraction * MEMORY)
    per_layer = ring_seconds(2 * tokens / d * model.hidden, t, NVLINK) * model.layers / p
    operations = (2 * model.weights + 2 * attention) * tokens / (devices * FLOPS * EFFICIENCY)
    pass_seconds = operations * (1 + (p - 1) / max(1, ROWS / d / MICRO_ROWS)) + 2 * per_layer
    weights = 2 * model.weights / ranks_of_copy
    if role not in ("actor", "critic"):
        return RoleCost(preparation=pass_seconds, resident=weights)
    bubble = 1 + (p - 1) / max(1, ROWS / UPDATES / d / MICRO_ROWS)
    link = NVLINK if devices <= NODE else NETWORK
    update_seconds = (
        3 * operations * bubble + 4 * per_layer + UPDATES * ring_seconds(2 * model.weights / ranks_of_copy, d, link)
    )
    activations = 2 * MICRO_ROWS * (PROMPT + RESPONSE) * model.hidden * model.layers / p
    resident = 3 * weights + 12 * model.weights / (ranks_of_copy * d)
    return RoleCost(preparation=pass_seconds, training=update_seconds, resident=resident, working=activations)


def space(names: str, devices: int) -> SearchSpace[Grid]:
    """The search of one size, or of one for the policy and one for the critic."""
    policy, critic = MODELS[names.split("+")[0]], MODELS[names.split("+")[-1]]
    models = {role: critic if role in ("critic", "rm") else policy for role in ROLES}
    return SearchSpace(
        ROLES,
        devices,
        MEMORY,
        pool_sizes(devices, NODE),
        lambda role, n: grids(models[role], role, n),
        lambda role, n, grid: cost(models[role], role, n, grid),
        (SYNC,),
    )


def is_pool(roles: frozenset[str]) -> bool:
    """Of the paper: the actor and its sampler are in one."""
    return ("actor" in roles) == ("rollout" in roles)


def algorithm_1(
    search: PlacementSearch[Grid], admits: Callable[[frozenset[str]], bool] = lambda _: True
) -> PlacementPlan[Grid] | None:
    """Of HybridFlow: every set partition, every division of the devices, and for each role of a pool in turn the choice
    with the fewest seconds that leaves the least bytes which the others need: roles do not trade memory for seconds.

    Returns:
        None where nothing fits.
    """
    best, pools = None, dict[tuple[frozenset[str], int], PoolPlan[Grid] | None]()
    sizes = sorted(search.space.sizes)
    for partition in partitions(search.space.roles):
        if not all(map(admits, partition)):
            continue
        for devices in divisions(len(partition), search.space.devices, sizes):
            for key in zip(partition, devices, strict=True):
                if key not in pools:
                    pools[key] = fastest_pool(search, *key)
            parts = [pools[key] for key in zip(partition, devices, strict=True)]
            if all(parts):
                plan = PlacementPlan(SYNC, tuple(parts))
                best = plan if best is None or plan.seconds < best.seconds else best
    return best


def fastest_pool(search: PlacementSearch[Grid], pool: frozenset[str], devices: int) -> PoolPlan[Grid] | None:
    """The pool of `algorithm_1`; None where it does not fit."""
    options = {role: search.options[role].get(devices, []) for role in search.space.roles if role in pool}
    if not all(options.values()):
        return None
    least = [(min(cost.resident for _, cost in costs), min(cost.working for _, cost in costs))
             for costs in options.values()]  # fmt: skip
    choices, costs = dict[str, Grid](), dict[str, RoleCost]()
    for number, role in enumerate(options):
        resident = sum(cost.resident for cost in costs.values()) + sum(size for size, _ in least[number + 1 :])
        working = max(
            [*(cost.working for cost in costs.values()), *(size for _, size in least[number + 1 :])], default=0
        )
        fitting = [(choice, cost) for choice, cost in options[role]
                   if resident + cost.resident + max(working, cost.working) <= search.space.memory]  # fmt: skip
        if not fitting:
            return None
        choices[role], costs[role] = min(fitting, key=lambda entry: entry[1].seconds(ACTOR in pool))
    return PoolPlan(devices, choices, costs)


def partitions(roles: Sequence[str]) -> Iterator[list[frozenset[str]]]:
    """Ways to divide roles into pools."""
    if not roles:
        yield []
        return
    for rest in partitions(roles[1:]):
        yield [frozenset(roles[:1]), *rest]
        for place, pool in enumerate(rest):
            yield [*rest[:place], pool | {roles[0]}, *rest[place + 1 :]]


def divisions(parts: int, devices: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to assign a size to each of the parts, all of them within the devices; ``sizes`` ascend."""
    if parts == 0:
        yield ()
        return
    for size in sizes:
        if size > devices - (parts - 1) * sizes[0]:
            break
        for rest in divisions(parts - 1, devices - size, sizes):
            yield (size, *rest)


def row(names: str, devices: int) -> str:
    """Of the table."""
    search = PlacementSearch(space(names, devices))
    plan = search.best(admits=is_pool)
    if plan is None:
        return f"| {names} | {devices} | fits nowhere |{' |' * len(KINDS)} | |"
    others = [*(search.best(admits=admits) for admits in KINDS.values()), algorithm_1(search, is_pool)]
    cells = ["-" if other is None else f"{other.seconds / plan.seconds - 1:+.0%}" for other in others]
    pools = ", ".join(f"{'+'.join(role for role in ROLES if role in pool.choices and role != 'rollout')} on "
                      f"{pool.devices}" for pool in plan.pools)  # fmt: skip
    return f"| {names} | {devices} | {plan.seconds:.1f} | {' | '.join(cells)} | {pools} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["7B", "13B", "34B", "13B+70B"])
    parser.add_argument("--devices", nargs="+", type=int, default=[16, 32, 64, 96, 128])
    parser.add_argument("--write", action="store_true", help="the table of docs/appendix/placement_crossovers.md")
    settings = parser.parse_args()
    for names in settings.models:
        if not set(names.split("+")) <= set(MODELS) or names.count("+") > 1:
            parser.error(f"--models: got {names!r}, allowed: one of {', '.join(MODELS)}, or two joined by +")
    begun = time.process_time()
    lines = [f"| models | devices | step, s | {' | '.join(KINDS)} | Algorithm 1 | best plan |",
             f"| --- | ---: | ---: |{' ---: |' * len(KINDS)} ---: | --- |"]  # fmt: skip
    lines += [row(names, devices) for names in settings.models for devices in settings.devices]
    print("\n".join(lines), f"\n{time.process_time() - begun:.1f} s of processor time, gap 0 %", sep="\n")
    if settings.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        table = "\n".join(lines)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
