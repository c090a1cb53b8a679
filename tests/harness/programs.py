"""Runs the library's commands as a user would, and reads what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PROJECT = Path(__file__).resolve().parents[2]


def run(
    words: Sequence[str], cwd: Path | None = None, timeout: float = 600, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; a failure shows the end of its output.

    Args:
        cwd: also where modules are looked for, before the project, and where metrics go to ``logs``.
        environment: variables besides those of the shell.
    """
    cwd = cwd or Path.cwd()
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{cwd}:{PROJECT}"}
    named = {**os.environ, **paths, "VERL_FILE_LOGGER_ROOT": str(cwd / "logs"), **environment}
    done = subprocess.run(words, cwd=cwd, env=named, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise AssertionError(f"{words} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def python(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; ``how`` as in `run`."""
    return run([sys.executable, *words], **how)


def command(module: str, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments``."""
    return python("-m", module, *arguments, **how)


def benchmark(name: str, *words: str, **how: Any) -> str:
    """What a program of ``benchmarks`` prints; ``how`` as in `run`."""
    return python(str(PROJECT / "benchmarks" / f"{name}.py"), *words, **how).stdout


def metrics(cwd: Path, project: str, experiment: str) -> list[dict]:
    """The steps of a run from its metrics file, each with its number under ``step``."""
    lines = (cwd / "logs" / project / f"{experiment}.jsonl").read_text().splitlines()
    return [{"step": record["step"], **record["data"]} for record in map(json.loads, lines)]


def curve(steps: list[dict], name: str) -> list[float]:
    """All values of one metric in order."""
    return [step[name] for step in steps if name in step]


def trained(folder: Path, name: str, *words: str, program: str = "main_ppo") -> list[dict]:
    """The steps of a run of a trainer whose files lie in ``name``."""
    files = (f"trainer.experiment_name={name}", f"trainer.default_local_dir={name}", "trainer.logger=[file]")
    command(f"verl.trainer.{program}", "trainer.project_name=e2e", *files, *words, cwd=folder)
    return metrics(folder, "e2e", name)


def fine_tuned(folder: Path, steps: int, *words: str) -> Path:
    """The model that a supervised run makes of ``base``, and saves with its last step alone."""
    ends = (f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", "checkpoint.save_contents=[model]")
    trained(folder, "sft", "model.path=base", *ends, *words, program="sft_trainer")
    return folder / f"sft/global_step_{steps}/model/huggingface"


def replica_processes() -> set[int]:
    """Ids of the processes below this one that lead a replica on Ray, by their titles."""
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "".join(child.cmdline()).startswith("ray::ReplicaWorker"):
                pids.add(child.pid)
    return pids
