"""``python -m verl.planner COMMAND CONFIG...``: a run checked, costed and placed without allocating anything."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import cast

from rich import box
from rich.console import Console
from rich.table import Table

from verl.config import PPOTrainerConfig, load_config
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.errors import ConfigError, VerlError
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster, device
from verl.planner.proposal import MODES, Proposal, overrides, proposal
from verl.planner.seconds import Range
from verl.planner.space import ACTOR, ASYNC, SYNC, PlacementPlan, PlacementRules
from verl.trainer.command import run_program

WIDTH = 110
"""Columns of a table where no terminal says how wide it is."""
STAGES = ("generation", "preparation", "training")
GIB = 1 << 30


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status: 0, 1 where `check` finds something, 2 after a message to the user."""
    settings, config = _parser().parse_known_args(argv)
    status = 0

    def work() -> None:
        nonlocal status
        status = settings.work(settings, config)

    return run_program(work) or status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m verl.planner", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    helps: dict[str, tuple[Callable[[argparse.Namespace, list[str]], int], str]] = {
        "estimate": (_estimate, "bytes per device of every role and phase, seconds, tokens per second"),
        "check": (_check, "faults of a run that show before it starts; exit status 1 where there are any"),
        "plan": (_plan, "the fastest placement, parallel sizes, budgets and offloading; a bound; the overrides"),
    }
    for name, (work, text) in helps.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False,
                                      epilog="All other arguments are those of verl.trainer.main_ppo.")  # fmt: skip
        command.set_defaults(work=work)
        command.add_argument("--devices", help="8xH100; default: this machine's CPU, of plan none")
        command.add_argument("--json", action="store_true", help="print objects")
    rules = command.add_argument_group("what a plan keeps to")
    rules.add_argument("--gap", type=_share, default=0.0, help="share by which it may be slower than the optimum")
    rules.add_argument("--schedule", choices=(SYNC, ASYNC), help="default: the faster of both")
    for name, text in (("--together", "one pool"), ("--separate", "different pools")):
        rules.add_argument(name, type=_roles, action="append", default=[], metavar="actor,ref", help=text)
    rules.add_argument("--pool", type=_pool, action="append", default=[], metavar="critic:8", help="a pool's devices")
    return parser


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise ArgumentTypeError(f"got {text}, allowed: a number from 0 to below 1")
    return number


def _roles(text: str) -> frozenset[str]:
    roles = frozenset(text.split(","))
    if len(roles) < 2:
        raise ArgumentTypeError(f"got {text}, allowed: two roles or more, for example actor,ref")
    return roles


def _pool(text: str) -> tuple[str, int]:
    role, _, number = text.partition(":")
    if not number.isdigit():
        raise ArgumentTypeError(f"got {text}, allowed: a role and its devices, for example critic:8")
    return role, int(number)


def _cluster(settings: argparse.Namespace) -> Cluster | None:
    return None if settings.devices is None else Cluster.parse(settings.devices)


def cluster_of(config: PPOTrainerConfig) -> Cluster:
    """This machine, where it has no accelerator: its free memory, divided by its processes.

    Raises:
        ConfigError: it has one, whose figures `hardware.yaml` may not have.
    """
    from verl.device import free_host_memory, resolve_device  # loads torch

    if resolve_device(config.trainer.device) != "cpu":
        raise ConfigError("say what the devices are", key="--devices", allowed="8xH100")
    each = config.trainer.n_gpus_per_node or 1
    return Cluster(replace(device("CPU"), memory=free_host_memory() / each), config.trainer.nnodes * each)


def _plan(settings: argparse.Namespace, words: list[str]) -> int:
    cluster = _cluster(settings)
    if cluster is None:
        raise ConfigError("say what the devices are", key="--devices", allowed="64xH100")
    config = cast(PPOTrainerConfig, read_config("ppo_trainer", words))
    validate.check_printed(config)
    mode, modes = config.trainer.v1.trainer_mode, tuple(MODES.values())
    if mode not in modes:
        raise ConfigError("plan has no costs of this schedule", key="trainer.v1.trainer_mode", got=mode, allowed=modes,
                          fix="Plan with one of these, or use estimate.")  # fmt: skip
    from verl.models.shape import model_shape  # loads transformers

    run = run_plan(config, cluster.device.name == "CPU", model_shape)
    pairs = (frozenset(pair) for roles in settings.separate for pair in combinations(sorted(roles), 2))
    schedules = (settings.schedule,) if settings.schedule else (SYNC, ASYNC)
    rules = PlacementRules(tuple(settings.together), tuple(pairs), dict(settings.pool), schedules)
    answer = proposal(run, cluster, rules, ASYNC if run.overlaps else SYNC, settings.gap)
    if settings.json:
        print(json.dumps(answer.to_json()))
        return 0
    _print_tables(_placement(answer), _others(answer))
    arguments = overrides(answer.plan, cluster, answer.replaces_pools)
    print(step_text(answer), " \\\n    ".join(map(shlex.quote, arguments)), sep="\n\n")
    return 0


def _placement(answer: Proposal) -> Table:
    plan = answer.plan
    heads = ["role", "engine", "t p d s e", "tokens", "offload", "recompute", "GiB", *STAGES]
    table = _table("Parallel sizes, tokens of a micro-batch, GiB per device, seconds", heads, 2)
    for pool in plan.pools:
        for role, choice in pool.choices.items():
            cost, sizes = pool.costs[role], choice.parallel
            offload = {(False, False): "-", (True, False): "optimizer", (False, True): "weights", (True, True): "both"}
            numbers = sizes.tensor, sizes.pipeline, sizes.data, sizes.sequence, sizes.expert
            seconds = cost.sampling(ACTOR in pool.choices), cost.preparation, cost.training
            table.add_row(role, choice.engine, " ".join(map(str, numbers)),
                          str(choice.micro_tokens or choice.infer_tokens or "-"),
                          offload[choice.optimizer_offload, choice.param_offload], "yes" if choice.recompute else "-",
                          f"{(cost.resident + cost.working) / GIB:.1f}",
                          *(f"{value:.3g}" for value in seconds))  # fmt: skip
    return table


def _others(answer: Proposal) -> Table:
    """The plan against others, each with the stage that makes the difference."""
    table = _table("Other placements", ["", "step, s", "slower by", "most of it in", "fits"], 1)
    plan = answer.plan
    placements: list[tuple[str, PlacementPlan]] = [(str(plan), plan), *answer.others]
    for title, other in placements:
        differences = [theirs - ours for theirs, ours in zip(other.stages, plan.stages, strict=True)]
        stage = STAGES[differences.index(max(differences))] if other.seconds > plan.seconds else "-"
        fits = all(pool.bytes <= answer.memory for pool in other.pools)
        table.add_row(title, f"{other.seconds:.3g}", f"{other.seconds / plan.seconds - 1:.0%}", stage,
                      "yes" if fits else "no")  # fmt: skip
    return table


def step_text(answer: Proposal) -> str:
    """Seconds of a step with their bound, GiB per device of each pool, and free devices."""
    plan, cluster = answer.plan, answer.cluster
    stages = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in zip(STAGES, plan.stages, strict=True))
    lines = [f"A step takes {plan.seconds:.3g} s ({plan.schedule}): {stages}. No placement takes less than "
             f"{plan.bound:.3g} s under this model."]  # fmt: skip
    for pool in plan.pools:
        lines.append(f"{' and '.join(pool.choices)} on {pool.devices} devices: {pool.bytes / GIB:.1f} GiB each, "
                     f"at most {answer.memory / GIB:.1f}")  # fmt: skip
    free = cluster.devices - plan.devices
    if free:
        proved = "" if plan.bound < plan.seconds else ": under these rules no placement on more devices is faster"
        lines.append(f"{free} of {cluster.devices} devices stay free{proved}")
    return "\n".join(lines)


def _estimate(settings: argparse.Namespace, words: list[str]) -> int:
    cluster = _cluster(settings)
    if cluster is None:
        config = cast(PPOTrainerConfig, load_config("ppo_trainer", words))
        cluster = cluster_of(config)
    else:  # the machine of the run is another one
        config = cast(PPOTrainerConfig, read_config("ppo_trainer", words))
        validate.check_printed(config)
    from verl.models.shape import model_shape  # loads transformers

    estimate = Estimate.of(run_plan(config, cluster.device.name == "CPU", model_shape), cluster)
    if settings.json:
        print(json.dumps(estimate.to_json()))
        return 0
    _print_tables(_memory(estimate), _pools(estimate), _seconds(estimate))
    print(_summary(estimate))
    return 0


def _print_tables(*tables: Table) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        console.print(table)


def _table(title: str, heads: Sequence[str], names: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < names else "right")
    return table


def _memory(estimate: Estimate) -> Table:
    terms = list(estimate.memory[0].phases[0].terms)
    table = _table("GB per device", ["role", "phase", *(term.replace("_", " ") for term in terms), "total"], 2)
    for memory in estimate.memory:
        for phase in memory.phases:
            table.add_row(memory.role, phase.phase, *(_gb(v) for v in phase.terms.values()), f"{phase.total / 1e9:.2f}")
    return table


def _pools(estimate: Estimate) -> Table:
    planned = estimate.cluster.device
    table = _table("Peak of each pool", ["pool", "role", "phase", "GB", f"of {planned.name}"], 3)
    for peak in estimate.peaks():
        table.add_row(peak.pool, peak.role, peak.phase, f"{peak.total / 1e9:.2f}", f"{peak.total / planned.memory:.0%}")
    return table


def _seconds(estimate: Estimate) -> Table:
    table = _table("Seconds of a step", ["role", "phase", "likely", "range", "the range is due to"], 2)
    for role in estimate.seconds:
        for phase, seconds in role.phases.items():
            table.add_row(role.role, phase, *_range(seconds), seconds.because)
    table.add_row("all", "step", *_range(estimate.step), estimate.step.because)
    return table


def _summary(estimate: Estimate) -> str:
    steps, hours = estimate.run.work.steps, estimate.device_hours
    work = (f"{estimate.device_hours_per_step:.2g} device hours per step" if hours is None
            else f"{hours:.2g} device hours for {steps} step(s)")  # fmt: skip
    lines = [
        f"{estimate.tokens_per_second:,.0f} tokens/s on {estimate.run.devices} devices, {work}, "
        f"{estimate.checkpoint_bytes / 1e9:.2f} GB per checkpoint"
    ]
    return "\n".join([*lines, *(f"does not fit: {problem}" for problem in estimate.problems())])


def _range(seconds: Range) -> tuple[str, str]:
    return f"{seconds.likely:.3g}", f"{seconds.low:.3g} to {seconds.high:.3g}"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2f}" if amount else "-"


def _check(settings: argparse.Namespace, words: list[str]) -> int:
    from verl.trainer.planning.check import findings  # loads torch

    problems: list[VerlError] = findings(words, _cluster(settings), cluster_of)
    if settings.json:
        fields = ("key", "message", "got", "allowed", "fix")
        print(json.dumps([{name: getattr(problem, name) for name in fields} for problem in problems], default=str))
    else:
        for problem in problems:
            print(f"{problem.key or 'run'}: {problem.message}")
            for name in ("got", "allowed", "fix"):
                if getattr(problem, name) not in (None, ""):
                    print(f"  {name}: {getattr(problem, name)}")
        print(f"{len(problems)} finding(s)" if problems else "no findings: the run can start")
    return int(bool(problems))
