"""Run the suite: what a commit has to pass, or with ``--all`` everything; the last lines say what it came to.

    python scripts/run_tests.py [--all] [--group NAME] [--last-failed] [pytest's options]

A commit has to pass all tests but the `slow` ones, and of those the few that tests/representatives.toml lists.
There are three passes. Parallel: two workers, of which only one at a time runs a test of several processes. Waiting, at
the same time: a third pytest runs, one after another, what mostly waits; its output is shown when it has ended. Alone:
what a clock or another test may fail. With ``--all`` tests of several processes, those that wait included, have a pass
to themselves: ranks that exchange messages take up to twelve times as long where other tests need the same cores. The
environments of trackers, vLLM and adapters then have a pass each, where they exist, and a table of all groups is
printed. However this process ends, nothing that it started outlives it.

Every pass writes a line per test into .pytest_cache/outcomes as it goes (`tests/outcomes.py`); ``--last-failed`` leaves
out what has passed by these files, also after a run that was killed. Failed tests that start processes or depend on a
clock run once more, by themselves. One that passes then does not fail the suite: the last lines say `flaky: NAME`, and
.pytest_cache/flaky.txt lists it.
"""

from __future__ import annotations

import argparse
import codecs
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import ALONE, PROCESSES, REPRESENTATIVES, WAITING  # noqa: E402
from tests.outcomes import read  # noqa: E402
from verl.lifeline import guarded  # noqa: E402

COMMIT = "(not slow or representative)"
NOTHING_COLLECTED, INTERRUPTED = 5, 2  # of pytest's statuses
SECONDS, RANKS = 5.0, 2
"""What a test may take and start without the marker `slow`; CONTRIBUTING.md states the rule."""
SPACE = 2 << 30
"""Bytes that the suite may need for temporary files."""
REAL = "tests/engines_real"
ADAPTERS = "tests/agent_loop/adapters"
ENVIRONMENTS = {
    "trackers": (f"{REAL}/trackers", f"{REAL}/math_verify"),
    "vllm": (f"{REAL}/vllm", "tests/rollout"),
    "adapters": (
        f"{ADAPTERS}/test_openenv.py", f"{ADAPTERS}/test_verifiers.py", "tests/recipe/test_langgraph_agent.py",
        "tests/recipe/test_curves.py::test_every_run_of_a_curve_starts_and_has_a_score_of_each_step[langgraph_agent]",
        "tests/e2e/test_libraries_of_environments.py",
    ),
}  # fmt: skip
"""The environments with packages that constraints.txt does not have -> the tests that run in each."""


@dataclass(frozen=True)
class Pass:
    """One pytest: which Python runs it, on what, and the marker expression that selects its tests."""

    name: str
    python: str
    words: tuple[str, ...]
    kept: Path

    @property
    def file(self) -> Path:
        """The outcomes of its tests."""
        return self.kept / "outcomes" / f"{self.name}.jsonl"

    def command(self, *words: str) -> list[str]:
        plugin = ["-p", "tests.outcomes", f"--outcomes={self.file}", "-o", f"cache_dir={self.kept / self.name}"]
        plugin += [f"--without-passed={self.file}"] if self.file.is_file() else []
        color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        return [self.python, "-m", "pytest", color, *plugin, *words]

    def failed(self) -> list[str]:
        return [line["test"] for line in read(self.file) if line["outcome"] == "failed"]


def main(words: list[str]) -> int:
    """Run all passes, the last ones also after a failure, but not after Ctrl-C; 0 if all passed."""
    options, further = arguments(words)
    if problem := what_is_missing(options):
        print(problem, file=sys.stderr)
        return 2
    # The terminal interrupts pytest as well, which then says how far it came.
    signal.signal(signal.SIGINT, lambda *_: None)
    began, passes = time.monotonic(), chosen_passes(options, further)
    for one in passes:
        one.file.parent.mkdir(parents=True, exist_ok=True)
        if not options.last_failed:
            one.file.unlink(missing_ok=True)
    ends = run_passes(passes, further)
    flaky = [name for one in passes for name in run_failed_again(one, ends, further)]
    lines = {one.name: read(one.file) for one in passes}
    for reason, count in Counter(line.get("reason") for found in lines.values() for line in found).items():
        if reason:
            print(f"skipped: {count} tests: {reason}")
    report_flaky(flaky, options.kept / "flaky.txt")
    problems = broken_rules(line for found in lines.values() for line in found)
    if not words:
        problems += absent_representatives(lines.values())
    print("\n".join(problems), end="\n" * bool(problems))
    if options.all:
        print(table(lines, flaky, (time.monotonic() - began) / 60))
    print("\n".join(f"tests {name}: {summary}" for name, (_, summary) in ends.items()), flush=True)
    return max([status(ends), *map(bool, problems)])


def arguments(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="slow tests, too")
    parser.add_argument("--group", default="", help="only this folder of tests/, or trackers, or vllm")
    parser.add_argument("--last-failed", action="store_true", help="leave out what passed in the run before")
    parser.add_argument(
        "--kept", type=Path, default=ROOT / ".pytest_cache", help="the folder of outcomes and flaky.txt"
    )
    parser.add_argument("--trackers", default=".venv-trackers", help="with wandb, mlflow and swanlab")
    parser.add_argument("--vllm", default=".venv-vllm", help="with vLLM")
    parser.add_argument("--adapters", default=".venv-adapters", help="with verifiers, OpenEnv and LangGraph")
    return parser.parse_known_args(words)


def groups() -> list[str]:
    return sorted({path.parent.name for path in (ROOT / "tests").glob("*/*")} - {"__pycache__", "harness"})


def what_is_missing(options: argparse.Namespace) -> str | None:
    """Why no test can be run, as a sentence."""
    if options.group and options.group not in (known := [*groups(), *ENVIRONMENTS]):
        return f"there is no group {options.group!r} of tests; there are: {', '.join(known)}"
    folder = tempfile.gettempdir()
    if (free := shutil.disk_usage(folder).free) < SPACE:
        return (
            f"{folder} has {free >> 20} MB left, and the tests write up to {SPACE >> 20} MB there: "
            "make room, or set TMPDIR to another folder"
        )
    return None


def chosen_passes(options: argparse.Namespace, further: list[str]) -> list[Pass]:
    """The three passes over the tests of the library, and those of the environments that exist."""
    tier = [] if options.all else [COMMIT]
    folder = [f"tests/{options.group}"] if options.group else []
    starts: dict[str, tuple[str, ...]] = {"waiting": WAITING, "alone": ALONE}
    if options.all:
        starts = {"processes": (*PROCESSES, *WAITING), "alone": ALONE}
    if folder or any(Path(word.partition("::")[0]).exists() for word in further):
        paths = dict.fromkeys(starts, folder)
    else:  # collecting all others costs half a minute
        paths = {name: [f"tests/{start}" for start in of_pass] for name, of_pass in starts.items()}
    marks = {"waiting": "waiting", "processes": "(waiting or processes)", "alone": "alone"}
    workers = str(min(2, os.cpu_count() or 1))
    in_parallel = (*folder, "-n", workers, "--no-loadscope-reorder")
    chosen = [("parallel", in_parallel, [f"not {marks[name]}" for name in starts])]
    chosen += [(name, paths[name], [marks[name]]) for name in starts]
    passes = [
        Pass(name, sys.executable, (*words, "-m", " and ".join([*tier, *expressions])), options.kept)
        for name, words, expressions in chosen
    ]
    if options.group in ENVIRONMENTS:
        passes = []
    for name, real_paths in ENVIRONMENTS.items():
        environment = getattr(options, name)
        if options.group not in ("", name) or not options.all:
            continue
        if (ROOT / environment / ".installed").exists():
            passes.append(Pass(name, str(ROOT / environment / "bin" / "python"), real_paths, options.kept))
        else:
            print(f"{name} are left out: there is no {environment} (make test-{name} makes it)")
    return passes


def run_passes(passes: list[Pass], further: list[str]) -> dict[str, tuple[int, str]]:
    """The name of each pass -> pytest's status and its last line."""
    ends: dict[str, tuple[int, str]] = {}
    with tempfile.TemporaryFile() as kept:
        meanwhile = {one.name: start(one.command(*one.words, *further), kept.fileno())
                     for one in passes if one.name == "waiting"}  # fmt: skip
        for one in passes:
            if INTERRUPTED in (code for code, _ in ends.values()):
                break
            if one.name in meanwhile:
                code = meanwhile[one.name].wait()
                kept.seek(0)
                ends[one.name] = (abs(code), show(kept.fileno()))
            else:
                ends[one.name] = run(one.command(*one.words, *further))
    return ends


def run_failed_again(one: Pass, ends: dict[str, tuple[int, str]], further: list[str]) -> list[str]:
    """Run the failed tests of a pass that start processes or depend on a clock by themselves; those that pass now."""
    failed = one.failed()
    if not failed or ends[one.name][0] == INTERRUPTED:
        return []
    run(one.command("--last-failed", "--last-failed-no-failures=none", f"--again={one.file}", *further))
    left = one.failed()
    if not left:
        ends[one.name] = (0, f"{ends[one.name][1]}; all that failed passed by themselves")
    return sorted(set(failed) - set(left))


def report_flaky(names: list[str], file: Path) -> None:
    """Print them, and put them into the file for whoever looks later."""
    file.write_text("".join(f"{name}\n" for name in names))
    for name in names:
        print(f"flaky: {name}")


def absent_representatives(lines: Iterable[list[dict[str, Any]]]) -> list[str]:
    """Representatives that did not run: they were renamed, or are not slow."""
    ran = {line["test"] for found in lines for line in found if "slow" in line["marks"]}
    return [
        f"tests/representatives.toml names what is no slow test: {name}" for name in REPRESENTATIVES if name not in ran
    ]


def broken_rules(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Tests that need the marker `slow`, by the rule of CONTRIBUTING.md.

    A count of ranks is the same on every machine, and breaks the rule. Seconds are not: a slow test is only named.
    """
    problems = []
    for line in lines:
        if "slow" in line["marks"]:
            continue
        if line["ranks"] > RANKS:
            problems.append(f"starts {line['ranks']} ranks without the marker slow: {line['test']}")
        elif line["seconds"] > SECONDS:
            print(f"takes {line['seconds']:.1f} s without the marker slow: {line['test']}")
    return problems


def table(lines: dict[str, list[dict[str, Any]]], flaky: list[str], minutes: float) -> str:
    """Group by group what the tests came to. Minutes are those of its tests; the last are those of the clock."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for name, found in lines.items():
        for line in found:
            group = name if name in ENVIRONMENTS else line["test"].removeprefix("tests/").split("/")[0]
            counts[group][line["outcome"]] += 1
            counts[group]["flaky"] += line["test"] in flaky
            seconds[group] += line["seconds"]
    total = sum(counts.values(), Counter())
    columns = ("passed", "failed", "flaky", "skipped")
    rows = [(group, *(counts[group][name] for name in columns), seconds[group] / 60) for group in sorted(counts)]
    rows.append(("all, by the clock", *(total[name] for name in columns), minutes))
    heading = f"{'group':18}" + "".join(f"{name:>8}" for name in (*columns, "minutes"))
    texts = [f"{name:18}" + "".join(f"{n:8}" for n in numbers) for name, *numbers, _ in rows]
    return "\n".join([heading, *(f"{text}{row[-1]:8.1f}" for text, row in zip(texts, rows))])


def status(ends: dict[str, tuple[int, str]]) -> int:
    """The worst of pytest's statuses; a pass that has no test is none, unless no pass has one."""
    codes = {code for code, _ in ends.values()}
    return max(codes - {NOTHING_COLLECTED}, default=NOTHING_COLLECTED)


def run(words: list[str]) -> tuple[int, str]:
    """pytest's status and its last line, while its output is shown as it comes."""
    process = start(words, subprocess.PIPE)
    assert process.stdout is not None
    last = show(process.stdout.fileno())
    return abs(process.wait()), last


def start(command: list[str], output: int) -> subprocess.Popen[bytes]:
    """A program that ends with this process."""
    return subprocess.Popen(guarded(command), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output)


def show(output: int) -> str:
    """The last line of what a pytest prints, which is shown as it is read."""
    decode, tail = codecs.getincrementaldecoder("utf-8")("replace").decode, ""
    while piece := os.read(output, 1 << 16):
        text = decode(piece)
        print(text, end="", flush=True)
        tail = (tail + text)[-1000:]
    last = re.sub(r"\x1b\[\d*m", "", tail.strip().rpartition("\n")[2]).strip("= ")
    return last or "nothing was said"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
