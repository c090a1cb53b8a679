"""Two tables of what faults and attacks come to: runs the tests of each row, and writes their results.

    python -m tests.faults.matrix [--quick] [--faults | --attacks] [F12 A7 ...] [--outcomes FILE ...] [--pages FOLDER]

The rows are in matrix.toml. Each row is a separate pytest: an interrupted run has the results of the rows before it.
``--quick`` leaves out the tests with the marker `slow`. ``--outcomes`` runs nothing: it takes the outcomes that
`scripts/run_tests.py` has written (.pytest_cache/outcomes/*.jsonl). ``matrix.json`` next to the pages ``faults.md`` and
``attacks.md`` keeps the results; the pages leave out one of a row whose test files have changed since. Exit status 1: a
row failed.

Tests measure by `record_property`: ``noticed_seconds``, ``recovered_seconds``, ``lost``, ``doubled``, ``bits_equal``.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.outcomes import read
from tests.sanity.source_tree import ROOT, read_toml
from verl.json_text import read_json
from verl.lifeline import guarded

ROWS = ROOT / "tests" / "faults" / "matrix.toml"
PAGES = ROOT / "docs" / "appendix"
RESULTS = "matrix.json"
MEASURES: dict[str, Any] = {
    "noticed_seconds": max,
    "recovered_seconds": max,
    "lost": sum,
    "doubled": sum,
    "bits_equal": all,
}
"""How the values of several tests become one."""
HEADS = {
    "F": """# Faults: what is done to a run, and what it comes to

`python -m tests.faults.matrix` runs the tests of each row and makes this page. Seconds are from the kill or stop to its
notice, and to the moment at which work continues, on the machine of that run; who hangs is noticed after
`trainer.hang_seconds`, which is up to 2 in these tests. A dash: no test of the row measures it.

| fault | what is done | what holds then | noticed | recovered | lost | doubled | bits | tests in | result | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
""",
    "A": """# Attacks: what is tried, and what keeps it out

`python -m tests.faults.matrix` runs the tests of each row and makes this page. What a run opens, and to whom, is on
[the page on security](../concepts/security.md).

| attack | what is tried | promise | layer | tests in | result | seconds |
| --- | --- | --- | --- | --- | --- | --- |
""",
}


@dataclass(frozen=True)
class Row:
    """A fault or an attack.

    Args:
        name: F1 to F28, A1 to A32.
        done: what its tests do.
        promise: what holds then.
        layer: of an attack, what keeps the promise.
        quick, slow: its tests, below tests/.
        missing: what no test shows, and why.
    """

    name: str
    done: str
    promise: str
    layer: str = ""
    quick: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    missing: str = ""

    def tests(self, is_quick: bool) -> list[str]:
        """Names of tests as pytest has them."""
        return [f"tests/{name}" for name in (*self.quick, *(() if is_quick else self.slow))]


@dataclass(frozen=True)
class Result:
    """What the tests of a row came to.

    Args:
        result: in words.
        seconds: that its tests took.
        date: of the run.
        tests: `digest` of the tests as they were then.
        measured: by the names of `MEASURES`.
    """

    result: str
    seconds: float
    date: str
    tests: str
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_failed(self) -> bool:
        return self.result.startswith("failed")


def rows() -> dict[str, Row]:
    """All rows by name."""
    return {name: Row(name, **_tuples(values)) for name, values in read_toml(ROWS).items()}


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def digest(tests: Sequence[str]) -> str:
    """A short name of a list of tests. What they contain may have changed since: a page shows the date of a run."""
    return hashlib.sha256("\n".join(tests).encode()).hexdigest()[:12]


def result_of(tests: Sequence[str], lines: Sequence[Mapping[str, Any]], otherwise: str = "did not run") -> Result:
    """What the outcomes of `tests.outcomes` say of some tests.

    Args:
        tests: as pytest has them; one without brackets stands for all of its parameters.
        lines: of these tests, and maybe of others.
        otherwise: why a test may have no outcome.
    """
    by_test = {test: [line for line in lines if line["test"].partition("[")[0] == test] for test in tests}
    of_row = [line for outcomes in by_test.values() for line in outcomes]
    count = Counter(line["outcome"] for line in of_row)
    failed = [_short(line["test"]) for line in of_row if line["outcome"] == "failed"]
    failed += [f"{_short(test)} ({otherwise})" for test, outcomes in by_test.items() if not outcomes]
    reasons = sorted({str(line.get("reason", "no reason")) for line in of_row if line["outcome"] == "skipped"})
    words = f"failed: {', '.join(failed)}" if failed else f"{count['passed']} passed" if count["passed"] else ""
    if reasons:
        words += f"{', ' * bool(words)}{count['skipped']} left out: {'; '.join(reasons)}"
    measured: dict[str, Any] = {}
    for name, joined in MEASURES.items():
        if values := [line["measured"][name] for line in of_row if name in line.get("measured", {})]:
            value = joined(values)
            measured[name] = round(value, 2) if isinstance(value, float) else value
    seconds = round(sum(line["seconds"] for line in of_row), 1)
    return Result(words, seconds, datetime.date.today().isoformat(), digest(tests), measured)


def _short(test: str) -> str:
    return test.rpartition("::")[2]


def run(tests: Sequence[str]) -> Result:
    """Run tests in a separate pytest."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.jsonl"
        plugin = ["-p", "no:cacheprovider", "-p", "tests.outcomes", f"--outcomes={file}"]
        command = guarded([sys.executable, "-m", "pytest", "-q", *plugin, *tests])
        ended = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        result = result_of(tests, read(file), f"pytest ended with status {ended.returncode}")
    if result.is_failed:
        print(ended.stdout[-4000:] + ended.stderr[-2000:], file=sys.stderr)
    return result


def page(kind: str, results: Mapping[str, Result]) -> str:
    """The page of the faults (F) or attacks (A)."""
    table, missing = HEADS[kind], []
    for row in rows().values():
        if not row.name.startswith(kind):
            continue
        cells = [row.name, row.done, row.promise]
        shown = [result for is_quick in (False, True) if (result := _shown(row, is_quick, results))]
        result = shown[0] if shown else Result("not run yet", 0.0, "", "")
        cells += _measured(result) if kind == "F" else [row.layer]
        files = sorted({test.partition("::")[0] for test in (*row.quick, *row.slow)})
        words = result.result
        if shown and row.slow and result.tests != digest(row.tests(is_quick=False)):
            words += ", slow ones not run"
        words += f", {result.date}" * bool(shown)
        cells += [", ".join(f"`{file}`" for file in files), words, f"{result.seconds:g}" if shown else "-"]
        table += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        if row.missing:
            missing.append(f"- {row.name}: {row.missing}.\n")
    return f"{table}\nWhat no test shows:\n\n{''.join(missing)}"


def _shown(row: Row, is_quick: bool, results: Mapping[str, Result]) -> Result | None:
    result = results.get(row.name)
    return result if result and result.tests == digest(row.tests(is_quick)) else None


def _measured(result: Result) -> list[str]:
    values = [result.measured.get(name) for name in MEASURES]
    equal = {True: "equal", False: "differ"}
    return ["-" if v is None else equal[v] if isinstance(v, bool) else f"{v:g}" for v in values]


def read_results(folder: Path) -> dict[str, Result]:
    """What earlier runs have left in a folder of pages."""
    file = folder / RESULTS
    values = read_json(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: Result(**value) for name, value in values.items()}


def write(folder: Path, results: Mapping[str, Result]) -> None:
    """Results and both pages, in the order of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    in_order = {name: asdict(results[name]) for name in rows() if name in results}
    (folder / RESULTS).write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    for kind, name in (("F", "faults.md"), ("A", "attacks.md")):
        (folder / name).write_text(page(kind, results), encoding="utf-8")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ROW", help="only these rows, such as F12 A7")
    parser.add_argument("--quick", action="store_true", help="without the tests that are marked slow")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--faults", action="store_const", const="F", dest="kind", default="", help="only F1 to F28")
    only.add_argument("--attacks", action="store_const", const="A", dest="kind", help="only A1 to A32")
    parser.add_argument("--outcomes", type=Path, nargs="+", help="files of outcomes: nothing is run")
    parser.add_argument("--pages", type=Path, default=PAGES, help="the folder of both pages")
    options, all_rows = parser.parse_args(words), rows()
    if unknown := set(options.names) - set(all_rows):
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are F1 to F28 and A1 to A32")
    results, failed = read_results(options.pages), []
    lines = [line for file in options.outcomes or () for line in read(file)]
    for name, row in all_rows.items():
        tests = row.tests(options.quick)
        if not name.startswith(options.kind) or (options.names and name not in options.names):
            continue
        if not tests:
            print(f"{name}: every test is marked slow, and --quick runs none")
            continue
        print(f"{name}: {row.done} ...", flush=True)
        results[name] = result_of(tests, lines) if options.outcomes else run(tests)
        print(f"{name}: {results[name].result} ({results[name].seconds:g} s)", flush=True)
        failed += [name] * results[name].is_failed
        write(options.pages, results)
    write(options.pages, results)
    print(f"failed rows: {', '.join(failed) or 'none'}; pages: {options.pages}/faults.md, attacks.md")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
