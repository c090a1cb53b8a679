"""Every scorer and parser of texts against random texts, from a seed: nothing may raise, and nothing may take long.

``python -m tests.fuzzing.run --texts 300000 --programs 3000`` is the long form; the suite runs a few hundred of each.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzzing import programs, texts
from tests.harness.sandboxes import HERE
from verl.registry import TOOL_PARSERS
from verl.rewards import RewardFunction, RewardSample, Scorer, ScoringLimits, default_compute_score
from verl.rewards.dispatch import answer_of
from verl.rewards.scorers import code, geo3k, gsm8k, math_boxed, math_dapo, numina, search_qa, symbolic
from verl.sandbox import Outcome

MOST_SECONDS = 1.0
TRUTHS = (
    "18", "57", "5,7", "0.5", r"\frac{1}{2}", "-3", "1,000", "", " ", "x", "(1,2)", "[0,\\infty)", r"\sqrt{2}", "yes",
    "1e9", "1000000000", "(x+1)^2", r"4\pi", "50%", "7 3/4", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "x=5", "{1,2}",
    "A",
)  # fmt: skip
FRAMES = {
    "gsm8k": "#### {}", "math": r"\boxed{{}}", "dapo, strict": r"\boxed{{}}", "dapo": "Answer: {}", "geo3k, all": "{}",
    "geo3k": r"<think>a</think> \boxed{{}}", "numina, answer": "{}", "numina": r"\boxed{{}}",
    "search": "<answer>{}</answer>",
}  # fmt: skip
Target = Callable[[str, Random], Any]


class Answers:
    """Stands for a sandbox: a program "printed" or "returned" what the text says."""

    def __init__(self, text: str):
        self.text = text

    def run(self, program: str, stdin: str, seconds: float) -> Outcome:
        mark = stdin.rpartition('"mark": "')[2].rstrip('"}')
        return Outcome("ok", stdout=f"{mark}{self.text}\n", seconds=0.01)


@dataclass
class Report:
    """What became of the texts of one target."""

    texts: int = 0
    slowest: float = 0.0
    """Processor time of this process and of those that compare formulas, of one text."""
    at_their_limit: int = 0
    """Texts whose formulas the comparing process was ended for."""
    faults: list[str] = field(default_factory=list)


def scorers() -> dict[str, Target]:
    """Every built-in scorer in each of its ways, and the reader of votes."""

    def compared(score: Callable[[str, Any], Any]) -> Target:
        return lambda text, random: score(text, truth_for(text, random))

    return {
        "gsm8k": compared(gsm8k.compute_score),
        "gsm8k, flexible": compared(lambda text, truth: gsm8k.compute_score(text, truth, "flexible", lenient=True)),
        "math": compared(math_boxed.compute_score),
        "dapo": compared(math_dapo.compute_score),
        "dapo, strict": compared(lambda text, truth: math_dapo.compute_score(text, truth, True)),
        "geo3k": compared(geo3k.compute_score),
        "geo3k, all": compared(lambda text, truth: geo3k.compute_score(text, truth, use_boxed=False)),
        "numina": compared(numina.compute_score),
        "numina, answer": compared(numina.same_answer),
        "search": compared(lambda text, truth: search_qa.compute_score(text, {"target": [truth]})),
        "search, part": compared(search_qa.compute_score_subem),
        "formulas": lambda text, random: symbolic.equal(*pair(text, random)),
        "printed": compared(lambda text, truth: code.compute_score("x", printing(truth), Answers(text))),
        "returned": compared(lambda text, truth: code.compute_score("x", returning(truth), Answers(text))),
        "votes": lambda text, random: answer_of(random.choice(("openai/gsm8k", "lighteval/MATH", "searchR1_a")), text),
    }


def parsers() -> dict[str, Target]:
    """Every registered parser of tool calls."""

    def reads(name: str) -> Target:
        parser = TOOL_PARSERS.get(name)(None)
        return lambda text, random: parser.parse_text(text)

    return {f"parser {name}": reads(name) for name in TOOL_PARSERS.builtin_targets()}


def printing(truth: str) -> dict[str, Any]:
    return {"inputs": ["1"], "outputs": [truth]}


def returning(truth: str) -> dict[str, Any]:
    values = (2.5, 18, None, "x", [1, 2], 10**9, 1e9, [[1.5]], -1.0, True, {"k": 1.5})
    return {"fn_name": "f", "inputs": [[1]], "outputs": [truth if len(truth) % 2 else values[len(truth) % len(values)]]}


def truth_for(text: str, random: Random) -> str:
    """A ground truth: one of a list, or what the text itself says, sometimes in another form."""
    kind = random.random()
    if kind < 0.6:
        return random.choice(TRUTHS)
    found = math_boxed.last_boxed(text) or text[-40:]
    return found if kind < 0.8 else texts.same(random, found[:150])


def pair(text: str, random: Random) -> tuple[str, str]:
    """Two formulas, mostly equal ones in different forms."""
    one = texts.formula(random) if random.random() < 0.7 else text[:200]
    return one, texts.same(random, one) if random.random() < 0.8 else texts.formula(random)


def run(targets: Mapping[str, Target], count: int, seed: int) -> dict[str, Report]:
    """Give ``count`` texts to the targets in turn. Each target sees texts and random numbers of its own."""
    reports = {}
    for index, (name, target) in enumerate(targets.items()):
        report, random = Report(), Random(f"{seed} {name}")
        share = count // len(targets) + (index < count % len(targets))
        frame = next((frame for start, frame in FRAMES.items() if name.startswith(start)), "{}")
        for text in islice(texts.texts(random, frame), share):
            _try(target, text, random, report)
        reports[name] = report
    return reports


def _try(target: Target, text: str, random: Random, report: Report) -> None:
    before, began = _graders(), time.process_time()
    try:
        found = target(text, random)
        score = found["score"] if isinstance(found, dict) else found
        if isinstance(score, (int, float)) and not math.isfinite(score):
            report.faults.append(f"score {score} of {text[:200]!r}")
    except Exception as error:  # what is looked for
        report.faults.append(f"{type(error).__name__}: {error} of {text[:200]!r}")
        return
    spent, after = time.process_time() - began, _graders()
    ended = before.keys() - after.keys()
    grading = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items() if pid in before)
    report.texts += 1
    report.at_their_limit += bool(ended)
    if ended and score:
        report.faults.append(f"score {score} although its process was ended: {text[:200]!r}")
    report.slowest = max(report.slowest, spent + grading)
    if spent + grading > MOST_SECONDS:
        report.faults.append(f"{spent:.2f} s here and {grading:.2f} s of a grader for {text[:200]!r}")


def _graders() -> dict[int, float]:
    """Processor time of each child process of this one."""
    found = {}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found[int(pid)] = (int(words[11]) + int(words[12])) / 100
    return found


def run_programs(count: int, seed: int, seconds: float = 1.0) -> tuple[Report, dict[str, int]]:
    """Score programs in the sandbox of this machine, as a run does; a report, and how often each verdict was given."""
    kwargs = {"seconds": seconds, "most_seconds": 2 * seconds, "memory_limit_mb": 128, **_allowed()}
    scorer = Scorer(RewardFunction.of(default_compute_score, kwargs), ScoringLimits())
    report, verdicts, made = Report(), {}, programs.programs(Random(f"{seed} programs"))
    while rows := [RewardSample("apps", *one) for one in islice(made, min(64, count - report.texts))]:
        began = time.process_time()
        results = scorer.score(rows)
        report.slowest = max(report.slowest, (time.process_time() - began) / len(rows))
        for row, result in zip(rows, results, strict=True):
            report.texts += 1
            if failure := result.failure or result.caught:
                report.faults.append(f"{failure.message} of {row.solution_str[:300]!r}")
                continue
            verdict = str(result.extra["verdict"])
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
    scorer.close()
    return report, verdicts


def _allowed() -> dict[str, Any]:
    return {"allow_missing": HERE["allow_missing"]}


def lines(reports: Mapping[str, Report]) -> Iterator[str]:
    """The reports as a table, with the first faults."""
    for name, report in reports.items():
        ended = f", {report.at_their_limit} at their limit" if report.at_their_limit else ""
        yield f"{name:24} {report.texts:7} texts, slowest {report.slowest:.3f} s{ended}, {len(report.faults)} faults"
        yield from (f"    {fault}" for fault in report.faults[:10])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--texts", type=int, default=300_000)
    arguments.add_argument("--programs", type=int, default=3_000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", default="", help="targets whose name begins so")
    given = arguments.parse_args()
    targets = {name: target for name, target in {**scorers(), **parsers()}.items() if name.startswith(given.only)}
    reports = run(targets, given.texts, given.seed)
    print("\n".join(lines(reports)), flush=True)
    if given.programs:
        reports["programs"], verdicts = run_programs(given.programs, given.seed)
        print("\n".join(lines({"programs": reports["programs"]})), verdicts, sep="\n")
    return int(any(report.faults for report in reports.values()))


if __name__ == "__main__":
    sys.exit(main())
