"""Two-process runs of this library, measured and simulated: seconds of a step, and staleness.

    python benchmarks/bench_simulation.py [--prompts 32] [--steps 8] [--schedules one_step_off fully_async]
                                          [--folder FOLDER]

The runs are those of `bench_schedules.py`. `python -m verl.planner simulate --from` reads the seconds of the run under
``sync``, and the waits of the environments from the command line; all other schedules are predictions.
A folder keeps the runs: another call with the same arguments measures only what it lacks.

``--recorded`` measures nothing. It takes the runs of docs/howto/async.md (`bench_schedules.py --steps 4`), of a
machine of two cores with no other load but for a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_schedules import MEDIAN, SCHEDULES, SIGMA, call, figures_of, make_inputs, measure, words_of
from figures import Figures, add_json

from verl.cli.planning import cluster_of
from verl.config.loading.configuration import read_config
from verl.journal.ledger_reader import History, ledger_in
from verl.models.shape import model_shape
from verl.planner.estimate import Estimate
from verl.planner.from_config import run_plan
from verl.planner.pace import Conversations, MeasuredSteps, Pace
from verl.trainer.planning.simulation import fitted, simulated

INNER = 16
SIZES = {"prompts": 32, "samples": 4, "turns": 4, "tokens": 32, "steps": 8}
"""Arguments that change a run, with their defaults."""
RECORDED_SYNC = MeasuredSteps(sampling=8.41, training=3.97, update=0.0, lengths=(128,))
RECORDED = {"sync": 12.38, "one_step_off": 7.84, "separate_async": 7.80, "fully_async": 5.76,
            "fully_async, completion": 5.25}  # fmt: skip
"""Seconds of a step. The sync's are among those of training: the recorded run does not tell them apart."""


def clock_of(folder: Path, schedule: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `bench_schedules.py` measures of a run, and the load of the machine over its last minute."""
    place = folder / f"{schedule}.json"
    if not place.exists():
        clock = measure(folder, schedule, arguments)
        place.write_text(json.dumps({**clock, "load": os.getloadavg()[0]}))
    return dict(json.loads(place.read_text()))


def staleness(folder: Path) -> float:
    """Versions by which the oldest tokens of trained samples are stale, in the mean of the inner steps."""
    trained = [record.facts for record in History.of(ledger_in(folder)).samples if record.stage == "trained"]
    last = max(facts["settled"] for facts in trained)
    return statistics.mean(
        facts["settled"] - 1 - facts["oldest_version"] for facts in trained if 1 < facts["settled"] < last
    )


def simulated_run(folder: Path, schedule: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step, and mean staleness."""
    options = ["--from", "sync", "--json", "--steps", str(INNER), "--turns", str(arguments.turns)]
    options += ["--tool", str(MEDIAN), "--tool-sigma", str(SIGMA)]
    printed = call(["-m", "verl.planner", "simulate", *options, *words_of(schedule, arguments)], folder)
    row = json.loads(printed.splitlines()[-1])[-1]
    samples = sum(row["staleness"].values())
    return row["seconds"]["step"], sum(int(age) * number for age, number in row["staleness"].items()) / samples


def compare_recorded(folder: Path, arguments: argparse.Namespace) -> None:
    """Simulate the recorded runs, from the stage seconds of the one under ``sync``."""
    make_inputs(folder, arguments)
    os.chdir(folder)
    configs = {name: read_config("ppo_trainer", words_of(name, arguments)) for name in RECORDED}
    sync, work = configs["sync"], Conversations(RECORDED_SYNC.lengths, 32, arguments.turns, MEDIAN, SIGMA)
    estimate = Estimate.of(run_plan(sync, True, model_shape), cluster_of(sync))
    pace = fitted(sync, Pace.of(estimate), work, INNER, RECORDED_SYNC)
    print("| schedule | recorded step, s | simulated, s | error | simulated staleness |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, seconds in RECORDED.items():
        row = simulated(configs[name], pace, work, INNER)
        age = sum(age * samples for age, samples in row.staleness.items()) / sum(row.staleness.values())
        step = row.seconds["step"]
        print(f"| {name} | {seconds:.2f} | {step:.2f} | {step / seconds - 1:+.0%} | {age:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--schedules", nargs="*", default=["one_step_off", "fully_async"], choices=list(SCHEDULES))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--recorded", action="store_true")
    add_json(parser)
    arguments = parser.parse_args()
    arguments.slots, figures = None, Figures()
    if arguments.recorded:
        arguments.prompts = 64
        with tempfile.TemporaryDirectory() as name:
            return compare_recorded(Path(name), arguments)
    print("| schedule | measured step, s | simulated, s | error | measured staleness | simulated | load |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(arguments.folder or name).absolute()
        sizes = {name: getattr(arguments, name) for name in SIZES}
        place = folder / "arguments.json"
        if not (folder / "prompts.parquet").exists():
            folder.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(sizes))
            make_inputs(folder, arguments)
        elif not place.exists() or json.loads(place.read_text()) != sizes:
            parser.error(f"the runs in {folder} are of other arguments: repeat those, or name another --folder")
        for schedule in ["sync", *arguments.schedules]:
            clock = clock_of(folder, schedule, arguments)
            load, seconds = clock["load"], figures_of([clock], arguments.prompts * arguments.samples)["step, s"]
            prediction, simulated_age = simulated_run(folder, schedule, arguments)
            age, error = staleness(folder / schedule.replace(", ", "-")), prediction / seconds - 1
            figures.add(schedule, {"measured, s": seconds, "simulated, s": prediction, "measured staleness": age,
                                   "simulated staleness": simulated_age, "load": load})  # fmt: skip
            cells = f"{seconds:.2f} | {prediction:.2f} | {error:+.0%} | {age:.2f} | {simulated_age:.2f} | {load:.1f}"
            print(f"| {schedule} | {cells} |", flush=True)
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
