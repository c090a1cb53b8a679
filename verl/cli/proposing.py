"""``python -m verl.planner plan --devices 64xH100 CONFIG...``: where the roles of a run go, and its words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import cast

from verl.config import PPOTrainerConfig
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.errors import ConfigError
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster
from verl.planner.proposal import EXACT, proposal
from verl.planner.space import ACTOR, ASYNC, SAMPLER, SYNC, PlacementRules

FLAGS = """  plan       the fastest placement, parallel sizes, budgets and offloading; a bound; the words to paste
             --method=exact|paper  the optimum, or Algorithm 1 of HybridFlow
             --gap=0.01            share by which the plan may be slower than the optimum
             --schedule=sync|async --together=actor,ref --separate=actor,critic --pool=critic:8
                                   what the plan must keep to; each may be repeated, but for the schedule"""
_NAMES = ("--method", "--gap", "--schedule", "--together", "--separate", "--pool")
WAITS_FOR_NOBODY = ("one_step_off", "separate_async", "fully_async")


def plan_command(words: Sequence[str], cluster: Cluster | None) -> int:
    """The command ``plan`` with its flags and the words of the run.

    Raises:
        ConfigError: a flag, a rule or a setting is wrong; `NoPlacement` where nothing fits.
    """
    if cluster is None:
        raise ConfigError("say what the devices are", key="--devices", allowed="64xH100")
    flags: dict[str, list[str]] = {name: [] for name in _NAMES}
    run = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in flags and not (equals and value):
            raise ConfigError("the flag needs a value", key=name, got=word, allowed=f"{name}=...")
        if name in flags:
            flags[name].append(value)
        else:
            run.append(word)
    config = cast(PPOTrainerConfig, read_config("ppo_trainer", run))
    validate.check_printed(config)
    plan = run_plan(config, cluster.device.name == "CPU")
    pools = {role.role: role.pool for role in plan.roles}
    overlaps = config.trainer.v1.trainer_mode in WAITS_FOR_NOBODY and pools.get(SAMPLER) != pools[ACTOR]
    text = proposal(
        plan.roles,
        plan.shapes,
        plan.work,
        cluster,
        rules_of(flags),
        ASYNC if overlaps else SYNC,
        (flags["--method"] or [EXACT])[-1],
        _number("--gap", (flags["--gap"] or ["0"])[-1]),
    )
    print(text)
    return 0


def rules_of(flags: dict[str, list[str]]) -> PlacementRules:
    """The rules of a command line.

    Raises:
        ConfigError: another schedule, a pool without a number, fewer than two roles in a set.
    """
    sets = {}
    for name in ("--together", "--separate"):
        sets[name] = tuple(frozenset(value.split(",")) for value in flags[name])
        for value, roles in zip(flags[name], sets[name], strict=True):
            if len(roles) < 2:
                raise ConfigError("this takes two roles or more", key=name, got=value, allowed=f"{name}=actor,ref")
    devices = {}
    for value in flags["--pool"]:
        role, colon, number = value.partition(":")
        if not colon or not number.isdigit():
            raise ConfigError("this takes a role and its devices", key="--pool", got=value, allowed="--pool=critic:8")
        devices[role] = int(number)
    for schedule in flags["--schedule"]:
        if schedule not in (SYNC, ASYNC):
            raise ConfigError("no such schedule", key="--schedule", got=schedule, allowed=[SYNC, ASYNC])
    schedules = tuple(flags["--schedule"][-1:]) or (SYNC, ASYNC)
    pairs = tuple(frozenset(pair) for roles in sets["--separate"] for pair in combinations(sorted(roles), 2))
    return PlacementRules(sets["--together"], pairs, devices, schedules)


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise ConfigError("this takes a share", key=name, got=text, allowed="a number from 0 to below 1")
    return number
