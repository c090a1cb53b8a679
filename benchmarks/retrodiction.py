"""Predicts published asynchronous runs from published synchronous ones, and says how wrong it is for every row.

    python benchmarks/retrodiction.py [--write]

`published/synchronous.yaml` is all that constants are fitted on; they are printed before `published/asynchronous.yaml`
is opened. ``--write`` makes the tables of `docs/appendix/retrodiction.md` again.

The model
---------
A phase takes constant + work / n seconds on n devices: least squares of relative errors, both parts at least zero,
where a phase is published for several n. Elsewhere

- a phase has, on n devices, the share of constant seconds that the same phase of the fitted run has on n devices;
- a step that is published as a total is divided by a share of generation from a run that says both.

An asynchronous step takes max(T, G, (1 - f) G + T / k): T of training, with no pass for old log-probs unless the run
has one; G of generation, in which the longest response is hidden where samples may wait (f > 0) and go on after new
weights; f the share of a step sampled ahead, k the chunks of a step. One step off waits for the batch:
max(T, constant + work / n). A delta broadcast sends 6 bytes per changed value instead of 2 per value, at the rate of
the full one, and has its constant seconds.

The naive model divides every second by the devices, takes the smallest synchronous run of a family, and the
larger of training and generation; a delta saves in it what it does not send.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parent / "published"
PAGE = Path(__file__).parents[1] / "docs" / "appendix" / "retrodiction.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
FITTED = "7B 28k"
MISS = 0.25
TRAINING = ("old_log_prob", "ref", "update")


class Law(NamedTuple):
    """Seconds on n devices: constant + work / n."""

    constant: float
    work: float

    def on(self, devices: int) -> float:
        return self.constant + self.work / devices

    def share(self, devices: int) -> float:
        """Of the constant seconds on a number of devices."""
        return self.constant / self.on(devices)


def fit(points: dict[int, float]) -> Law:
    """Least squares of relative errors over devices and seconds; a part below zero is zero, and the other refitted."""
    rows = [(1 / seconds, 1 / (devices * seconds)) for devices, seconds in points.items()]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in (
        [(x, x) for x, _ in rows], rows, [(y, y) for _, y in rows]))  # fmt: skip
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    det = aa * bb - ab * ab
    if len(points) == 1:
        return Law(0.0, b / bb)
    constant, work = (a * bb - b * ab) / det, (b * aa - a * ab) / det
    if constant < 0:
        return Law(0.0, b / bb)
    return Law(a / aa, 0.0) if work < 0 else Law(constant, work)


@dataclass(frozen=True)
class Row:
    """A published figure and what the two models say of it; seconds."""

    name: str
    published: float
    predicted: float
    naive: float
    why: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def naive_error(self) -> float:
        return self.naive / self.published - 1


class Calibration:
    """The constants, from synchronous rows alone."""

    def __init__(self, published: dict[str, Any]):
        self.runs, self.totals, self.broadcasts = published["runs"], published["totals"], published["broadcasts"]
        rows = self.runs[FITTED]["rows"]
        self.laws = {phase: fit({n: row[phase] for n, row in rows.items()})
                     for phase in ("generation", "old_log_prob", "update")}  # fmt: skip
        self.shares = {name: row["generation"] / row["step"] for name, row in published["shares"].items()}
        self.shares["other mixtures"] = statistics.mean(self.shares.values())
        self.steps = {name: fit(total["rows"]) for name, total in self.totals.items()}
        self.rates = {kind: self._broadcast(kind) for kind in ((False, False), (False, True), (True, True))}

    def _broadcast(self, kind: tuple[bool, bool]) -> Law:
        """Of billions of bytes: constant seconds, and seconds per billion bytes (with 1 / n as the bytes)."""
        rows = [row for row in self.broadcasts.values() if (row["mixture"], row["offload"]) == kind]
        return fit({1 / (2 * row["weights"]): row["seconds"] for row in rows})  # type: ignore[misc]

    def __str__(self) -> str:
        lines = [f"{FITTED}, {phase}: {law.constant:.1f} s + {law.work:.0f} device seconds"
                 for phase, law in self.laws.items()]  # fmt: skip
        lines += [f"share of generation, {name}: {share:.3f}" for name, share in self.shares.items()]
        lines += [
            f"step, {name}: {law.constant:.1f} s + {law.work:.0f} device seconds" for name, law in self.steps.items()
        ]
        for (is_mixture, offload), law in self.rates.items():
            lines.append(f"full broadcast, mixture {is_mixture}, offload {offload}: "
                         f"{law.constant:.1f} s + {law.work:.3f} s per GB")  # fmt: skip
        return "\n".join(lines)

    def phase(self, run: str, phase: str) -> Law:
        """Of a phase of a run."""
        law = self.laws["old_log_prob" if phase == "ref" else phase]
        if run == FITTED:
            return law
        ((devices, row),) = self.runs[run]["rows"].items()
        constant = row[phase] * law.share(devices)
        return Law(constant, (row[phase] - constant) * devices)


def run_row(name: str, row: dict[str, Any], constants: Calibration) -> Row:
    """A row with phases."""
    rows, trainers, samplers = constants.runs[row["of"]]["rows"], row["trainers"], row["samplers"]
    recomputes = row.get("recomputes", False)
    phases = [phase for phase in TRAINING if phase in next(iter(rows.values()))
              and (recomputes or phase != "old_log_prob")]  # fmt: skip
    base = trainers + samplers if trainers + samplers in rows else min(rows)
    training = sum(constants.phase(row["of"], phase).on(trainers) for phase in phases)
    generation, other = constants.phase(row["of"], "generation"), rows[base]["other"]
    if "ahead" not in row:
        predicted = max(training, generation.on(samplers)) + other
    else:
        ahead, chunks = float(row["ahead"]), int(row["chunks"])
        sampling = generation.work / samplers + (generation.constant if ahead == 0 else 0)
        predicted = max(training, sampling, (1 - min(1.0, ahead)) * sampling + training / chunks) + other
    least = min(rows)
    naive = max(sum(rows[least][phase] for phase in phases) * least / trainers,
                rows[least]["generation"] * least / samplers)  # fmt: skip
    return Row(name, row["step"], predicted, naive, row.get("why", ""))


def total_row(name: str, row: dict[str, Any], constants: Calibration) -> Row:
    """A row of whole steps."""
    total, law, trainers, samplers = (
        constants.totals[row["of"]],
        constants.steps[row["of"]],
        row["trainers"],
        row["samplers"],
    )
    share = constants.shares[total["share"]]
    least = min(total["rows"])
    linear = total["rows"][least] * least
    predicted = max(share * law.on(samplers), (1 - share) * law.on(trainers))
    naive = max(share * linear / samplers, (1 - share) * linear / trainers)
    return Row(name, row["step"], predicted, naive, row.get("why", ""))


def delta_row(name: str, row: dict[str, Any], constants: Calibration) -> Row:
    """A row of a broadcast of what changed."""
    full = constants.broadcasts[name]
    law = constants.rates[full["mixture"], full["offload"]]
    billions = 6 * row["changed"] * full["weights"]
    naive = full["seconds"] * 3 * row["changed"]
    return Row(f"delta, {name}", row["seconds"], law.constant + law.work * billions, naive, row.get("why", ""))


def table(rows: list[Row]) -> str:
    """Markdown, the largest error first."""
    lines = ["| run, trainers:samplers | published, s | predicted, s | error | error of the naive model |",
             "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        lines.append(
            f"| {row.name} | {row.published:g} | {row.predicted:.1f} | {row.error:+.0%} | {row.naive_error:+.0%} |"
        )
    return "\n".join(lines)


def summary(parts: dict[str, list[Row]]) -> str:
    """Medians of each part and of all, and the number of misses."""
    lines = ["| rows | median error (goal 10 %) | naive model | more than 25 % off (goal 0) | naive model |",
             "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for name, rows in {**parts, "all": [row for part in parts.values() for row in part]}.items():
        errors, naive = [abs(row.error) for row in rows], [abs(row.naive_error) for row in rows]
        far, naive_far = sum(error > MISS for error in errors), sum(error > MISS for error in naive)
        lines.append(f"| {name} | {statistics.median(errors):.0%} | {statistics.median(naive):.0%} | "
                     f"{far} of {len(rows)} | {naive_far} |")  # fmt: skip
    return "\n".join(lines)


def predictions(constants: Calibration, published: dict[str, Any]) -> dict[str, list[Row]]:
    """Every asynchronous row: runs with published phases, whole steps, delta broadcasts."""
    parts = {
        "runs with phases": ("runs", run_row),
        "whole steps": ("totals", total_row),
        "deltas": ("deltas", delta_row),
    }
    return {title: [make(name, row, constants) for name, row in published[part].items()]
            for title, (part, make) in parts.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the tables of docs/appendix/retrodiction.md")
    writes = parser.parse_args().write
    constants = Calibration(yaml.safe_load((FOLDER / "synchronous.yaml").read_text(encoding="utf-8")))
    print(constants, end="\n\n")
    sys.stdout.flush()
    parts = predictions(constants, yaml.safe_load((FOLDER / "asynchronous.yaml").read_text(encoding="utf-8")))
    rows = [row for part in parts.values() for row in part]
    text = f"{table(rows)}\n\n{summary(parts)}"
    print(text)
    print("\n".join(f"{row.name}: {row.why}" for row in rows if abs(row.error) > MISS))
    if writes:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
