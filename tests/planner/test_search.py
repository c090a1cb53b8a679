"""The search against an enumeration of everything, written out here; its bound; what it says where nothing fits."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from verl.planner.search import PlacementSearch, explanation
from verl.planner.space import NoPlacement, RoleCost, SearchSpace, pool_sizes

FOUR = ("actor", "rollout", "ref", "critic")
SIX = (*FOUR, "rm", "teacher")


def random_cost(seed, role, devices, choice):
    """Seconds that fall with the devices, and bytes that choices trade for them; all from a seed."""
    rng = random.Random(f"{seed} {role} {devices} {choice}")
    work = random.Random(f"{seed} {role}").uniform(50, 800)

    def seconds():
        return work / devices ** rng.uniform(0.6, 1) * rng.uniform(0.9, 1.2) + rng.uniform(0, 2)

    resident, working = rng.uniform(10, 400) / devices, rng.uniform(5, 50)
    if role == "rollout":
        return RoleCost(seconds(), 0, 0, resident, working, rng.uniform(0, 2), rng.uniform(0, 5))
    return RoleCost(0, seconds() / 3, seconds() if role in ("actor", "critic") else 0, resident, working)


def random_space(seed, roles, devices, sizes, choices=2, memory=80.0, **more):
    return SearchSpace(roles, devices, memory, sizes, lambda role, number: range(choices),
                       lambda *key: random_cost(seed, *key), **more)  # fmt: skip


def set_partitions(roles):
    if not roles:
        yield []
        return
    first, *rest = roles
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


def pool_rows(space, pool, devices):
    """Seconds of the stages for every way to choose that fits."""
    options = [[(space.group(choice), space.cost(role, devices, choice)) for choice in space.choices(role, devices)]
               for role in pool]  # fmt: skip
    for selection in itertools.product(*options):
        costs = [cost for _, cost in selection]
        if (
            len({group for group, _ in selection} - {None}) < 2
            and sum(c.resident for c in costs) + max(c.working for c in costs) <= space.memory
        ):
            update = sum(c.update if "actor" in pool else c.update_across for c in costs)
            yield (sum(c.generation for c in costs) + update, sum(c.preparation for c in costs),
                   sum(c.training for c in costs))  # fmt: skip


def fewest_seconds(space):
    """The fewest seconds of all plans there are."""
    best = math.inf
    for partition in set_partitions(list(space.roles)):
        rows = {(number, size): list(pool_rows(space, pool, size))
                for number, pool in enumerate(partition) for size in space.sizes}  # fmt: skip
        for sizes in itertools.product(space.sizes, repeat=len(partition)):
            if sum(sizes) > space.devices:
                continue
            for stages in itertools.product(*(rows[number, size] for number, size in enumerate(sizes))):
                generation, preparation, training = (max(stage[i] for stage in stages) for i in range(3))
                best = min(best, generation + preparation + training)
                if ["rollout"] in partition:
                    best = min(best, max(generation, preparation + training))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_choices_of_a_pool_have_one_group(seed):
    """Choices 1 and 2 exclude each other, 0 is at one with both."""
    space = random_space(seed, FOUR, 4, (1, 2, 3, 4), choices=3, memory=300.0, group=lambda choice: choice or None)
    plan = PlacementSearch(space).best()
    assert plan.seconds == pytest.approx(fewest_seconds(space), rel=1e-9)
    assert all(not {1, 2} <= set(pool.choices.values()) for pool in plan.pools)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_an_enumeration_is_faster(seed):
    space = random_space(seed, FOUR, 6, (1, 2, 3, 4, 5, 6), memory=120.0)  # which refuses the fastest choices
    plan = PlacementSearch(space).best()
    assert plan.seconds == pytest.approx(fewest_seconds(space), rel=1e-12)


def test_the_optimum_on_128_devices_is_that_of_an_enumeration():
    space = random_space(3, FOUR, 128, pool_sizes(128, 16), choices=1, memory=math.inf)
    plan = PlacementSearch(space).best()
    assert plan.seconds == pytest.approx(fewest_seconds(space), rel=1e-12)


def test_six_roles_on_1024_devices_need_few_points():
    """131 sizes, 63 pools and 4 choices per role: thousands of limits on each axis, millions of pairs."""
    space = random_space(1, SIX, 1024, pool_sizes(1024, 8), choices=4)
    assert PlacementSearch(space).best().points < 10_000


@pytest.mark.parametrize("devices", [6, 12, 14, 24])
def test_all_divisions_into_pools_fit_on_the_machines(devices):
    """Placed largest first, each pool on the first machine with room: no division needs more than the devices."""
    sizes = pool_sizes(devices, 8)
    assert set(sizes) <= {1, 2, 4, 8, 16, 24}
    for parts in range(1, 5):
        for pools in itertools.combinations_with_replacement(sizes, parts):
            if sum(pools) > devices:
                continue
            room = [8] * (devices // 8) + [devices % 8]
            for size in sorted(pools, reverse=True):
                for piece in [8] * (size // 8) or [size]:
                    machine = next(number for number, free in enumerate(room) if free >= piece)
                    room[machine] -= piece


def test_a_plan_keeps_to_its_devices_and_their_memory():
    space = random_space(5, SIX, 64, pool_sizes(64, 8), choices=3)
    plan = PlacementSearch(space).best()
    assert sorted(role for pool in plan.pools for role in pool.choices) == sorted(SIX)
    assert plan.devices <= 64 and all(pool.bytes <= 80 for pool in plan.pools)
    for pool in plan.pools:
        assert all(random_cost(5, role, pool.devices, c) == pool.costs[role] for role, c in pool.choices.items())


def test_devices_that_no_grid_can_use_are_refused():
    space = SearchSpace(("actor",), 7, 80, (7,), lambda role, n: [1] if n % 2 == 0 else [], lambda *key: RoleCost())
    with pytest.raises(NoPlacement, match=r"actor: no parallel size.*7 devices"):
        PlacementSearch(space)


@pytest.mark.parametrize("gigabytes", [240, 120])
def test_where_nothing_fits_the_error_lists_what_roles_need(gigabytes):
    """240 over two devices are 120 on each; 120 alone are 60, of which two roles are too large together."""
    size = gigabytes * 1e9
    space = SearchSpace(("actor", "critic"), 2, 80e9, (2,), lambda role, n: [1],
                        lambda role, n, c: RoleCost(training=1, resident=size / n))  # fmt: skip
    search = PlacementSearch(space)
    assert search.best() is None
    error = str(explanation(search))
    assert f"actor {gigabytes / 2:.1f} GB on each of 2, critic {gigabytes / 2:.1f} GB on each of 2" in error
    assert "2 devices of 80.0 GB" in error


def test_other_kinds_of_plans_are_never_faster():
    search = PlacementSearch(random_space(7, FOUR, 16, pool_sizes(16, 8)))
    plan = search.best()
    others = search.runners_up(plan)
    assert others and all(other.seconds >= plan.seconds for other in others)
    assert len({plan.kind, *(other.kind for other in others)}) == len(others) + 1
