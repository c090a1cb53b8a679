"""``python -m verl.planner COMMAND CONFIG...``: the words of a run, checked and costed without allocating anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from rich import box
from rich.console import Console
from rich.table import Table

from verl.cli.proposing import FLAGS, plan_command
from verl.config import PPOTrainerConfig, load_config
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.errors import ConfigError, VerlError, suggest
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.hardware import Cluster, device
from verl.planner.seconds import Range
from verl.trainer.command import report_error, run_program

USAGE = f"""python -m verl.planner estimate|check|plan [--devices 8xH100] [--json] CONFIG...

  estimate   bytes per device of every role and phase, seconds, tokens per second, price
  check      faults of a run that show before it starts; exit status 1 where there are any
{FLAGS}

CONFIG... are the words of python -m verl.trainer.main_ppo. Without --devices: this machine's CPU."""


WIDTH = 110
"""Columns of a table where no terminal says how wide it is."""


@dataclass
class PlannerWords:
    """A command line: the planner's own flags, and the words of the run."""

    cluster: Cluster | None = None
    as_json: bool = False
    run: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, argv: Sequence[str]) -> PlannerWords:
        """Read them.

        Raises:
            ConfigError: a flag without its value, or devices that are unknown.
        """
        words, left = cls(), list(argv)
        while left:
            name, equals, value = left.pop(0).partition("=")
            if name == "--devices":
                if not equals and not left:
                    raise ConfigError("the flag needs a value", key=name, allowed="8xH100")
                words.cluster = Cluster.parse(value if equals else left.pop(0))
            elif name == "--json":
                words.as_json = True
            else:
                words.run.append(name + equals + value)
        return words


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status: 0, 1 where `check` finds something, 2 after a message to the user."""
    if not argv or argv[0] in ("--help", "-h"):
        print(USAGE)
        return 0 if argv else 2
    command, *rest = argv
    commands: dict[str, Callable[[PlannerWords], int]] = {"estimate": _estimate, "check": _check, "plan": _plan}
    if command not in commands:
        return report_error(ConfigError("unknown command", key="verl.planner", got=command, allowed=list(commands),
                                        fix=suggest(command, commands)))  # fmt: skip
    status = 0

    def work() -> None:
        nonlocal status
        status = commands[command](PlannerWords.of(rest))

    return run_program(work) or status


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


def _plan(words: PlannerWords) -> int:
    return plan_command(words.run, words.cluster)


def _estimate(words: PlannerWords) -> int:
    if words.cluster is None:
        config = cast(PPOTrainerConfig, load_config("ppo_trainer", words.run))
    else:  # the machine of the run is another one
        config = cast(PPOTrainerConfig, read_config("ppo_trainer", words.run))
        validate.check_printed(config)
    cluster = words.cluster or cluster_of(config)
    estimate = Estimate.of(run_plan(config, cluster.device.name == "CPU"), cluster)
    if words.as_json:
        print(json.dumps(estimate.to_json()))
        return 0
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in (_memory(estimate), _pools(estimate), _seconds(estimate)):
        console.print(table)
    console.print(_summary(estimate), highlight=False)
    return 0


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
    hours = estimate.run.devices * estimate.run.work.steps * estimate.step.likely / 3600
    lines = [
        f"{estimate.tokens_per_second:,.0f} tokens/s on {estimate.run.devices} devices, {hours:.2g} device hours for "
        f"{estimate.run.work.steps} step(s), {estimate.checkpoint_bytes / 1e9:.2f} GB per checkpoint"
    ]
    if estimate.price is not None:
        lines.append(f"${estimate.price.likely:,.2f} (${estimate.price.low:,.2f} to ${estimate.price.high:,.2f})")
    return "\n".join([*lines, *(f"does not fit: {problem}" for problem in estimate.problems())])


def _range(seconds: Range) -> tuple[str, str]:
    return f"{seconds.likely:.3g}", f"{seconds.low:.3g} to {seconds.high:.3g}"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2f}" if amount else "-"


def _check(words: PlannerWords) -> int:
    from verl.trainer.planning.check import findings  # loads torch

    problems: list[VerlError] = findings(words.run, words.cluster, cluster_of)
    if words.as_json:
        named = ("key", "message", "got", "allowed", "fix")
        print(json.dumps([{name: getattr(problem, name) for name in named} for problem in problems], default=str))
    else:
        for problem in problems:
            print(f"{problem.key or 'run'}: {problem.message}\n  got: {problem.got}\n  allowed: {problem.allowed}\n"
                  f"  change: {problem.fix}")  # fmt: skip
        print(f"{len(problems)} finding(s)" if problems else "no findings: the run can start")
    return int(bool(problems))
