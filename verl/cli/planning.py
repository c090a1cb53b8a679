"""``python -m verl.planner COMMAND CONFIG...``: a run checked, costed and placed without allocating anything."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich import box
from rich.console import Console
from rich.table import Table

from verl import env
from verl.cli.report import Bar, PlanReport, bar_chart, memory_chart, placements_chart, planned_spans, seconds_chart
from verl.config import PPOTrainerConfig, load_config
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.config.schema.root import skips_old_log_prob
from verl.errors import ConfigError, VerlError
from verl.journal.gantt import draw_gantt
from verl.json_text import Json
from verl.planner.estimate import HOUR, Estimate
from verl.planner.from_config import RunPlan, run_plan
from verl.planner.hardware import Cluster, Device, device, read_device, to_json
from verl.planner.pace import Conversations, MeasuredSteps, Pace, log_normal, share_lost
from verl.planner.proposal import MODES, Proposal, overrides, proposal
from verl.planner.ranges import Range
from verl.planner.space import ACTOR, ASYNC, SYNC, PlacementPlan
from verl.trainer.command import run_program

if TYPE_CHECKING:
    from verl.trainer.planning.simulation import SimulatedSchedule

WIDTH = 110
"""Columns of a table where no terminal says how wide it is."""
STAGES = ("generation", "preparation", "training")


def main(argv: Sequence[str]) -> int:
    """Command line; the exit status: 0, 1 where `check` finds something, 2 after a message to the user."""
    settings, config = _parser().parse_known_args(argv)
    settings.command = shlex.join(["python", "-m", "verl.planner", *argv])
    status = 0

    def work() -> None:
        nonlocal status
        _check_files(settings)
        status = settings.work(settings, config)

    return run_program(work) or status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m verl.planner", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    helps: dict[str, tuple[Callable[[argparse.Namespace, list[str]], int], str]] = {
        "estimate": (_estimate, "bytes per device of every role and phase, seconds, tokens per second"),
        "check": (_check, "faults of a run that show before it starts; exit status 1 where there are any"),
        "simulate": (_simulate, "schedules on a simulated clock: seconds of a step, idle devices, staleness"),
        "plan": (_plan, "the fastest placement, parallel sizes, budgets and offloading; the overrides"),
    }
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, (work, text) in helps.items():
        parsers[name] = command = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False,
            epilog="All other arguments are those of verl.trainer.main_ppo.")  # fmt: skip
        command.set_defaults(work=work)
        command.add_argument("--devices", help="8xH100; default: this machine's CPU, of plan none")
        command.add_argument("--hardware", type=Path, metavar="FILE", help="what calibrate measured of a device")
        command.add_argument("--json", action="store_true", help="print objects")
        if name != "check":
            command.add_argument("--report", type=Path, metavar="FILE", help="write tables and charts as HTML, too")
    parsers["plan"].add_argument("--schedule", choices=(SYNC, ASYNC), help="default: the faster of both")
    _add_simulation(parsers["simulate"])
    parsers["estimate"].add_argument("--live", type=Path, metavar="RUN", help="what is left of the run in this folder")
    parsers["estimate"].add_argument("--metrics", type=Path, metavar="FILE", help="of that run, outside of its folder")
    parsers["estimate"].add_argument("--price", type=float, metavar="NUMBER", help="of a device hour")
    text = "measure this machine, or by torchrun its ranks and their links: a file for --hardware"
    calibration = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    calibration.set_defaults(work=_calibrate)
    calibration.add_argument("file", type=Path, metavar="FILE")
    return parser


def _check_files(settings: argparse.Namespace) -> None:
    """Refuse files that could not be written in the end."""
    for key, option in (("report", "--report"), ("gantt", "--gantt"), ("file", "FILE")):
        file = getattr(settings, key, None)
        if file is not None and (file.is_dir() or not os.access(file.parent, os.W_OK)):
            fix = "Name a file in a folder that is there."
            raise ConfigError("this file cannot be written", key=option, got=str(file), fix=fix)


def _cluster(settings: argparse.Namespace) -> Cluster | None:
    return None if settings.devices is None else Cluster.parse(settings.devices, _calibrated(settings))


def _calibrated(settings: argparse.Namespace) -> Device | None:
    return None if settings.hardware is None else read_device(settings.hardware)


def cluster_of(config: PPOTrainerConfig, calibrated: Device | None = None) -> Cluster:
    """This machine; the free memory of a CPU is divided by its processes.

    Raises:
        ConfigError: it has an accelerator that is not ``calibrated``: `hardware.yaml` may not have its figures.
    """
    from verl.device import free_host_memory, resolve_device  # loads torch

    each, is_cpu = config.trainer.n_gpus_per_node or 1, resolve_device(config.trainer.device) == "cpu"
    entry = calibrated or (device("CPU") if is_cpu else None)
    if entry is None or entry.is_cpu != is_cpu:
        raise ConfigError("say what the devices are", key="--devices", allowed="8xH100")
    if is_cpu:
        entry = replace(entry, memory=free_host_memory() / each)
    return Cluster(entry, config.trainer.nnodes * each)


def _plan(settings: argparse.Namespace, words: list[str]) -> int:
    cluster = _cluster(settings)
    if cluster is None:
        raise ConfigError("say what the devices are", key="--devices", allowed="64xH100")
    config = _printed(words)
    mode, modes = config.trainer.v1.trainer_mode, tuple(MODES.values())
    if mode not in modes:
        raise ConfigError("plan has no costs of this schedule", key="trainer.v1.trainer_mode", got=mode, allowed=modes,
                          fix="Plan with one of these, or use estimate.")  # fmt: skip
    run, schedules = _run_of(config, cluster), (settings.schedule,) if settings.schedule else (SYNC, ASYNC)
    # Old log-probs are counted where one of these schedules computes them.
    others = (read_config("ppo_trainer", [*words, f"trainer.v1.trainer_mode={MODES[name]}"]) for name in schedules)
    infers = not all(skips_old_log_prob(cast(PPOTrainerConfig, other)) for other in others)
    run = replace(run, roles=(replace(run.roles[0], infers=infers), *run.roles[1:]))
    answer = proposal(run, cluster, schedules, ASYNC if run.overlaps else SYNC)
    arguments = overrides(answer.plan, cluster, answer.replaces_pools)
    text = f"{step_text(answer)}\n\n" + " \\\n    ".join(map(shlex.quote, arguments))
    placements: list[tuple[str, PlacementPlan]] = [(str(answer.plan), answer.plan), *answer.others]

    def charts() -> list[str]:
        return [placements_chart(placements, STAGES), draw_gantt(planned_spans(answer.plan), "Steps of the plan")]

    _show(settings, answer.to_json(), text, (_placement(answer), _others(answer)), charts)
    return 0


def _placement(answer: Proposal) -> Table:
    plan = answer.plan
    heads = ["role", "engine", "t p d s e", "tokens", "offload", "recompute", "GB", *STAGES]
    title = "Tensor, pipeline, data, sequence, expert sizes; tokens of a micro-batch; GB per device; seconds"
    table = _table(title, heads, 2)
    for pool in plan.pools:
        for role, choice in pool.choices.items():
            cost, sizes = pool.costs[role], choice.parallel
            offload = {(False, False): "-", (True, False): "optimizer", (False, True): "weights", (True, True): "both"}
            numbers = sizes.tensor, sizes.pipeline, sizes.data, sizes.sequence, sizes.expert
            seconds = cost.sampling(ACTOR in pool.choices), cost.preparation, cost.training
            table.add_row(role, choice.engine, " ".join(map(str, numbers)),
                          str(choice.micro_tokens or choice.infer_tokens or "-"),
                          offload[choice.optimizer_offload, choice.param_offload], "yes" if choice.recompute else "-",
                          f"{(cost.resident + cost.working) / 1e9:.1f}",
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
    """Seconds of a step, GB per device of each pool, and free devices."""
    plan, cluster = answer.plan, answer.cluster
    stages = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in zip(STAGES, plan.stages, strict=True))
    lines = [f"A step takes {plan.seconds:.3g} s ({plan.schedule}): {stages}. No placement takes less under this "
             "model."]  # fmt: skip
    for pool in plan.pools:
        lines.append(f"{' and '.join(pool.choices)} on {pool.devices} devices: {pool.bytes / 1e9:.1f} GB each, "
                     f"at most {answer.memory / 1e9:.1f}")  # fmt: skip
    free = cluster.devices - plan.devices
    if free:
        lines.append(f"{free} of {cluster.devices} devices stay free: no placement on more devices is faster")
    return "\n".join(lines)


def _estimate(settings: argparse.Namespace, words: list[str]) -> int:
    if settings.live is not None:
        return _live(settings, words)
    if settings.metrics is not None:
        raise ConfigError("this is of a run, which --live names", key="--metrics", got=str(settings.metrics))
    estimate = _estimate_of(settings, words)
    hours = estimate.device_hours or estimate.device_hours_per_step
    price = None if settings.price is None else settings.price * hours
    tables = _memory(estimate), _pools(estimate), _hosts(estimate), _seconds(estimate)
    phases = [(f"{role.role}, {name}", part) for role in estimate.seconds for name, part in role.phases.items()]

    def charts() -> list[str]:
        return [memory_chart(estimate), seconds_chart("Seconds of a step", [*phases, ("step", estimate.step)])]

    _show(settings, {**estimate.to_json(), "price": price}, _summary(estimate, price), tables, charts)
    return 0


def _live(settings: argparse.Namespace, words: list[str]) -> int:
    from verl.trainer.planning.live import WINDOW, progress_of

    progress = progress_of(settings.live, settings.metrics)
    place = ["--config-path", str(settings.live.resolve()), "--config-name", "config"]
    estimate = _estimate_of(settings, [*place, *words])
    predicted = {phase: estimate.phase(phase) for phase in progress.seconds}
    hours = estimate.run.devices * progress.seconds_left / HOUR
    price = None if settings.price is None else settings.price * hours
    facts = {**asdict(progress), "seconds_left": progress.seconds_left, "device_hours_left": hours,
             "price_left": price, "predicted": {n: asdict(p) for n, p in predicted.items()}}  # fmt: skip
    table = _table(f"Seconds of a step, mean of the last {WINDOW}", ["phase", "measured", "predicted", "range"], 1)
    for phase, seconds in progress.seconds.items():
        table.add_row(phase, f"{seconds:.3g}", *_range(predicted[phase]))
    left = timedelta(seconds=round(progress.seconds_left))
    cost = "" if price is None else f", which cost {price:.2f}"
    done = f"step {progress.last_step} of {progress.total_steps} ({progress.state})"
    text = f"{done}, {left} and {hours:.2g} device hours left{cost}"
    title = "Predicted seconds of a step"
    _show(settings, facts, text, (table,), lambda: [seconds_chart(title, list(predicted.items()))])
    return 0


def _estimate_of(settings: argparse.Namespace, words: list[str]) -> Estimate:
    cluster = _cluster(settings)
    if cluster is None:
        config = cast(PPOTrainerConfig, load_config("ppo_trainer", words))
        cluster = cluster_of(config, _calibrated(settings))
    else:
        config = _printed(words)
    return Estimate.of(_run_of(config, cluster), cluster)


def _printed(words: list[str]) -> PPOTrainerConfig:
    """A configuration whose run may be on another machine."""
    config = cast(PPOTrainerConfig, read_config("ppo_trainer", words))
    validate.check_printed(config)
    return config


def _run_of(config: PPOTrainerConfig, cluster: Cluster) -> RunPlan:
    from verl.models.shape import model_shape  # loads transformers

    return run_plan(config, cluster.device.is_cpu, model_shape)


def _show(
    settings: argparse.Namespace, facts: Json, text: str, tables: Sequence[Table], charts: Callable[[], list[str]]
) -> None:
    """Print the answer as objects, or as tables and text; also write the page of ``--report``."""
    if settings.report is not None:
        settings.report.write_text(PlanReport(settings.command, text, tables, charts()).html(), encoding="utf-8")
    if settings.json:
        print(json.dumps(facts))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables:
        console.print(table)
    if text:
        print(text)


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


def _hosts(estimate: Estimate) -> Table:
    hosts = estimate.hosts()
    terms = list(next(iter(hosts.values())))
    table = _table("GB on the host of a machine (processes and batch are assumptions)", ["pool", *terms, "total"], 1)
    for pool, sizes in hosts.items():
        table.add_row(pool, *map(_gb, sizes.values()), _gb(sum(sizes.values())))
    return table


def _seconds(estimate: Estimate) -> Table:
    table = _table("Seconds of a step", ["role", "phase", "likely", "range", "the range is due to"], 2)
    for role in estimate.seconds:
        for phase, seconds in role.phases.items():
            table.add_row(role.role, phase, *_range(seconds), seconds.because)
    table.add_row("all", "step", *_range(estimate.step), estimate.step.because)
    return table


def _summary(estimate: Estimate, price: float | None) -> str:
    steps, hours = estimate.run.work.steps, estimate.device_hours
    work = (f"{estimate.device_hours_per_step:.2g} device hours per step" if hours is None
            else f"{hours:.2g} device hours for {steps} step(s)")  # fmt: skip
    cost = "" if price is None else f" (price {price:.2f})"
    line = (f"{estimate.tokens_per_second:,.0f} tokens/s on {estimate.run.devices} devices, {work}{cost}, "
            f"{estimate.checkpoint_bytes / 1e9:.2f} GB per checkpoint")  # fmt: skip
    return "\n".join([line, *(f"does not fit: {problem}" for problem in estimate.problems())])


def _range(seconds: Range) -> tuple[str, str]:
    return f"{seconds.likely:.3g}", f"{seconds.low:.3g} to {seconds.high:.3g}"


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.2f}" if amount else "-"


def _calibrate(settings: argparse.Namespace, words: list[str]) -> int:
    from verl.trainer.planning.calibrate import calibrated, with_links  # loads torch

    if words:
        raise ConfigError("calibrate reads no configuration", key="calibrate", got=words, fix="Name one file.")
    rank, size = env.get_int("RANK", 0), env.get_int("WORLD_SIZE", 1)
    machine = calibrated() if size == 1 else with_links(read_device(settings.file))
    if rank == 0:
        settings.file.write_text(json.dumps(to_json(machine), indent=1) + "\n", encoding="utf-8")
        links = f", {machine.node_link / 1e9:.4g} GB/s of links" if size > 1 else "; links are not measured"
        rates = f"{machine.bf16_flops / 1e9:.4g} GFLOP/s, {machine.memory_bandwidth / 1e9:.4g} GB/s of memory"
        print(f"{settings.file}: {rates}{links}")
    return 0


def _check(settings: argparse.Namespace, words: list[str]) -> int:
    from verl.trainer.planning.check import findings  # loads torch

    calibrated = _calibrated(settings)
    problems: list[VerlError] = findings(words, _cluster(settings), lambda config: cluster_of(config, calibrated))
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


def _add_simulation(command: argparse.ArgumentParser) -> None:
    """What a simulation reads besides the configuration."""
    group = command.add_argument_group("what is simulated")
    numbers = (
        ("--steps", _number(1, int), 8, "inner steps, between those that fill the queue and those that empty it"),
        ("--seed", int, 0, "of lengths and waits"),
        ("--sigma", _number(0), 0.7, "of log-normal lengths of responses; 0: all equal"),
        ("--turns", _number(1, int), 1, "equal parts of a response, each followed by a wait"),
        ("--tool", _number(0), 0.0, "median seconds of such a wait: of a tool, the last one of the score"),
        ("--tool-sigma", _number(0), 0.0, "of log-normal waits; 0: all equal"),
        ("--straggler", _number(1), 1.0, "one replica of the sampler takes this many times longer"),
        ("--mtbf", _number(1e-6), math.inf, "hours between two failures of one device"),
    )
    for name, kind, default, text in numbers:
        group.add_argument(name, type=kind, default=default, metavar="NUMBER", help=f"{text} (default: {default})")
    group.add_argument("--filtered", type=_number(0, most=0.99), metavar="NUMBER",
                       help="share of the groups that dynamic sampling drops")  # fmt: skip
    group.add_argument("--schedules", metavar="NAME,NAME", help=f"next to {SYNC}; default: that of the configuration")
    group.add_argument("--from", dest="run", type=Path, metavar="RUN",
                       help="folder of this configuration's run under sync, for seconds and lengths")  # fmt: skip
    group.add_argument("--gantt", type=Path, metavar="FILE", help="the inner steps of the last schedule, as SVG")


def _number(least: float, kind: Callable[[str], float] = float, most: float = math.inf) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not (least <= value <= most and value < math.inf):
            raise ArgumentTypeError(
                f"got {text}, allowed: a number from {least:g}" + (f" to {most:g}" * (most < math.inf))
            )
        return value

    return number


def _simulate(settings: argparse.Namespace, words: list[str]) -> int:
    from verl.trainer.planning.simulation import fitted, simulated  # loads torch

    configured = cast(PPOTrainerConfig, read_config("ppo_trainer", words))
    mode = configured.trainer.v1.trainer_mode
    if configured.algorithm.filter_groups.enable and settings.filtered is None:
        raise ConfigError("dynamic sampling drops groups whose samples all score the same: say what share",
                          key="--filtered", allowed="0 to 0.99")  # fmt: skip
    names = dict.fromkeys((SYNC, *(settings.schedules or mode).split(",")))
    configs = {name: _printed([*words, f"trainer.v1.trainer_mode={name}"]) for name in names}
    sync = configs[SYNC]
    cluster = _cluster(settings) or cluster_of(sync, _calibrated(settings))
    estimates = [Estimate.of(_run_of(config, cluster), cluster) for config in configs.values()]
    paces, run = [Pace.of(estimate) for estimate in estimates], estimates[0].run
    problems = [list(map(str, estimate.problems())) for estimate in estimates]
    steps = None if settings.run is None else MeasuredSteps.of(settings.run)
    lengths = log_normal(run.work.response, settings.sigma) if steps is None else steps.lengths
    work = Conversations(lengths, round(run.work.prompt.mean), settings.turns, settings.tool, settings.tool_sigma,
                         settings.seed, settings.filtered or 0.0)  # fmt: skip
    if steps is not None:  # other schedules may add the pass over old log-probs to the training of the measured run
        measured = fitted(sync, paces[0], work, settings.steps, steps)
        paces = [replace(measured, train=measured.train * pace.train / paces[0].train) for pace in paces]
    paces = [replace(pace, straggler=settings.straggler) for pace in paces]
    rows = [simulated(config, pace, work, settings.steps) for config, pace in zip(configs.values(), paces, strict=True)]
    if settings.gantt is not None:
        settings.gantt.write_text(draw_gantt(rows[-1].spans, f"{rows[-1].name}, simulated"), encoding="utf-8")
    lost = [_lost(sync, row.seconds["step"], run.devices, settings.mtbf) for row in rows]
    facts = [{**asdict(replace(row, spans=())), "lost": share, "problems": misfits}
             for row, share, misfits in zip(rows, lost, problems, strict=True)]  # fmt: skip
    text = "\n".join(f"does not fit: {problem}" for problem in dict.fromkeys(chain.from_iterable(problems)))

    def charts() -> list[str]:
        steps = bar_chart("Seconds of a step", [Bar(row.name, {"step": row.seconds["step"]}) for row in rows])
        return [steps, *(draw_gantt(row.spans, f"{row.name}, simulated") for row in rows)]

    _show(settings, facts, text, _schedules(rows, lost), charts)
    return 0


def _schedules(rows: Sequence[SimulatedSchedule], lost: Sequence[float]) -> tuple[Table, Table]:
    heads = ["", "step", "x sync", "tokens/s", "trainer idle", "sampler idle", "training", "weight sync"]
    seconds, base = _table("Seconds of a step, simulated", heads, 1), rows[0].seconds
    heads = [
        "",
        "slots in use",
        "in weight sync",
        "too stale",
        "no signal",
        "lost to failures",
        "mean age",
        "samples by age",
    ]
    shares = _table("Shares; age: versions by which trained samples are stale", heads, 1)
    for row, share in zip(rows, lost, strict=True):
        step, samples = row.seconds["step"], sum(row.staleness.values())
        names = "trainer_idle", "sampler_idle", "training", "sync"
        seconds.add_row(row.name, f"{step:.3g}", f"{base['step'] / step:.2f}", f"{row.tokens / step:,.0f}",
                        *(f"{row.seconds[name]:.3g}" for name in names))  # fmt: skip
        values = row.occupancy, row.seconds["sync"] / step, row.dropped, row.filtered, share
        mean = sum(age * number for age, number in row.staleness.items()) / samples
        ages = ", ".join(f"{age}: {number / samples:.0%}" for age, number in row.staleness.items())
        shares.add_row(row.name, *(f"{value:.1%}" for value in values), f"{mean:.2f}", ages)
    ideal = max(base["trainer_idle"], base["training"])
    seconds.add_row("ideal overlap", f"{ideal:.3g}", f"{base['step'] / ideal:.2f}", f"{rows[0].tokens / ideal:,.0f}")
    return seconds, shares


def _lost(config: PPOTrainerConfig, step: float, devices: int, hours: float) -> float:
    """Share of the time that failures take, where one device fails once in ``hours``."""
    trainer = config.trainer
    steps = trainer.save_freq if trainer.save_freq > 0 else trainer.total_training_steps
    if math.isfinite(hours) and steps is None:
        raise ConfigError("a failure costs the work since the last checkpoint: the run of unknown length has none",
                          key="trainer.save_freq", got=trainer.save_freq, allowed="a number of steps")  # fmt: skip
    return share_lost((steps or 0) * step, devices / (hours * HOUR))
