"""The same GRPO run from ten lines of Python: `grpo_verl.py` and TRL's `grpo_trl.py`, in turn, on the CPU.

    python benchmarks/door/compare.py --peer-python path/to/venv-with-trl/bin/python [--rounds 3] [--json FILE]

TRL lives in an environment of its own: ``pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0 psutil``. Both
scripts train the fine-tuned model that ``make quickstart`` leaves (``--model`` names another copy of it) on the same
1600 prompts: 100 steps of 16 prompts x 8 samples, learning rate 3e-4, float32. A step is over when its line is
printed. Figures are medians over the rounds; rewards are means over five steps. Without ``--peer-python`` only ours
runs.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from figures import Figures, add_json  # noqa: E402

MODEL = Path("outputs/quickstart/sft/global_step_360/model/huggingface")
REWARD = re.compile(r"critic/score/mean:([\d.e+-]+)|'reward': '?([\d.e+-]+)")
"""How the line of a step gives its mean reward: ours, TRL's."""
ENDS = 5
"""Steps at either end whose rewards are averaged."""


@dataclass(frozen=True)
class Measured:
    """What one run of a script took and reached."""

    steps: int
    first_step: float
    seconds: float
    cpu_seconds: float
    first_reward: float
    last_reward: float


def lines_of(script: Path) -> int:
    """Lines with something on them, the docstring left out."""
    body = script.read_text(encoding="utf-8").partition('"""\n')[2]
    return sum(bool(line.strip()) for line in body.splitlines())


def measure(python: str, script: Path, model: Path, ours: bool) -> Measured:
    """Run a script in an empty folder that has the model where the quickstart leaves it."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT)} if ours else {}
    rewards: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, MODEL)
        place.parent.mkdir(parents=True)
        place.symlink_to(model)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        process = subprocess.Popen(
            [python, str(script)],
            cwd=temporary,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        first, said = 0.0, []
        for line in process.stdout or ():
            said.append(line)
            for found in REWARD.findall(line):
                rewards.append(float(found[0] or found[1]))
                first = first or time.perf_counter() - began
        status = process.wait()
        seconds = time.perf_counter() - began
    if status or len(rewards) < 2 * ENDS:
        raise SystemExit(
            f"{script.name} ended with status {status} after {len(rewards)} steps\n{''.join(said)[-3000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    ends = statistics.mean(rewards[:ENDS]), statistics.mean(rewards[-ENDS:])
    return Measured(len(rewards), first, seconds, cpu, *ends)


def median_of(runs: list[Measured]) -> dict[str, float | str]:
    """Each figure's median, under the words of the table."""
    return {
        one.name.replace("_", " "): statistics.median(getattr(run, one.name) for run in runs)
        for one in fields(Measured)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="python of the environment with TRL; without it only ours runs")
    parser.add_argument("--model", type=Path, default=ROOT / MODEL, help="the quickstart's fine-tuned model")
    parser.add_argument("--rounds", type=int, default=3)
    add_json(parser)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} holds no model: make quickstart writes it")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sides = {"verl": (sys.executable, HERE / "grpo_verl.py")}
    if arguments.peer_python:
        sides["TRL"] = (os.path.abspath(arguments.peer_python), HERE / "grpo_trl.py")
    runs: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(arguments.rounds):
        for name, (python, script) in sides.items():
            runs[name].append(measure(python, script, arguments.model.resolve(), ours=name == "verl"))
            print(f"round {number + 1}, {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    figures = Figures()
    for name, (_, script) in sides.items():
        figures.add(name, {"lines": lines_of(script), **median_of(runs[name])})
    heads = list(figures.rows[0][1])
    print(f"| | {' | '.join(heads)} |\n|{' --- |' * (len(heads) + 1)}")
    for name, numbers in figures.rows:
        print(f"| {name} | {' | '.join(f'{value:.3g}' for value in numbers.values())} |")
    figures.write(arguments.json)


if __name__ == "__main__":
    main()
