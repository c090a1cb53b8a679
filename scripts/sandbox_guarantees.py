"""Write the table of docs/howto/sandbox.md: what the sandbox guarantees on which kernel, as its tests find it here.

    PYTHONPATH=. python scripts/sandbox_guarantees.py [--measure] [--suite]

``--measure`` tries every guarantee on every kernel that this one can be taken for; ``--suite`` runs all tests of
the sandbox on each of them. Results are kept in docs/howto/sandbox_guarantees.json; without either option, only
the page is made of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "howto" / "sandbox.md", ROOT / "docs" / "howto" / "sandbox_guarantees.json"
BEGIN, END = "<!-- guarantees: scripts/sandbox_guarantees.py -->\n", "<!-- end of guarantees -->\n"
SUITE = "all tests of the sandbox"
OWN = "tests/sandbox/test_guarantees.py"
"""It tries kernels of its own."""


def table(results: dict[str, Any]) -> str:
    """The results as Markdown: kernels without a difference share a column, guarantees alike share a row."""
    columns = {name: {**column, SUITE: results["suite"].get(name, "")} for name, column in results["kernels"].items()}
    groups = [list(names) for _, names in itertools.groupby(columns, columns.__getitem__)]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in next(iter(columns.values())):
        alike.setdefault(tuple(cell(columns[names[0]][name]) for names in groups), []).append(name)
    rows = [["", *map(heading, groups)], ["---"] * (len(groups) + 1)]
    rows += [["<br>".join(names), *cells] for cells, names in alike.items()]
    where = f"\nMeasured on Linux {results['release']}.\n"
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + where


def heading(names: list[str]) -> str:
    """``Landlock 7, 6, 5``: what later names share with the first is said once."""
    shared = names[0].rpartition(" ")[0] + " "
    return ", ".join([names[0], *(name.removeprefix(shared) for name in names[1:])])


def cell(said: str) -> str:
    return "**no**" if said == "no" else said


def page(results: dict[str, Any]) -> str:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + table(results) + END + rest.split(END)[1]


def measure() -> dict[str, dict[str, str]]:
    from tests.sandbox.guarantees import KERNELS, measure

    found = {}
    for kernel in KERNELS:
        found[kernel.name] = measure(kernel)
        print(kernel.name, found[kernel.name], flush=True)
    return found


def kernels() -> list[Any]:
    """Those on which the tests can be run: a masked /proc is tried by tests of its own."""
    from tests.sandbox.guarantees import KERNELS

    return [kernel for kernel in KERNELS if not kernel.masked]


def run_suite(kernel: Any) -> str:
    """The tests of the sandbox on a kernel: how many passed, and how many did not."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/sandbox", f"--ignore={OWN}"]
    given = {**os.environ, "TEST_SANDBOX_LANDLOCK": str(kernel.landlock)}
    given["TEST_SANDBOX_WITHOUT"] = " ".join(kernel.without if kernel.landlock else ())
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1]
    print(kernel.name, last, flush=True)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            print(line, flush=True)
    counts = [f"{number} {word}" for number, word in re.findall(r"(\d+) (passed|failed|error)", last)]
    return ", ".join(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--suite", action="store_true")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"suite": {}}
    if asked.measure:
        results["kernels"], results["release"] = measure(), platform.release().partition("-")[0]
    write(results)
    for kernel in kernels() if asked.suite else ():
        results["suite"][kernel.name] = run_suite(kernel)
        write(results)


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
