"""Forks runs of the library's programs on request: one JSON line in, one line out."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

RESTART_SECONDS = "VERL_TEST_RESTART_SECONDS"
"""A variable: the seconds that a run which starts again waits for machines; without it, the library's."""
PRELOADED = (
    "torch",
    "datasets",
    "hydra",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
    "verl.config.rules.validate",
    "verl.rewards.managers",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.sft_trainer",
    "verl.trainer.supervised",
    "verl.workers",
)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)  # no pool of threads that a fork would lose
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        answer = _wait(request["wait"], request["timeout"]) if "wait" in request else _fork(request)
        answers.write(f"{answer}\n")
        answers.flush()


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _run(request)
    return pid


def _run(request: dict[str, Any]) -> None:
    status = 1
    try:
        os.setsid()  # a group of its own, as a shell gives each command
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup
        os.chdir(request["folder"])
        with open("output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["VERL_FILE_LOGGER_ROOT"] = os.path.join(request["folder"], "logs")
        os.environ["VERL_TEST_FAULT"] = request["fault"]
        os.environ["VERL_TEST_RUN"] = request["folder"]
        importlib.import_module("tests.faults.points")
        if RESTART_SECONDS in os.environ:
            importlib.import_module("verl.trainer.elastic").RESTART_SECONDS = float(os.environ[RESTART_SECONDS])
        program = importlib.import_module(f"verl.trainer.{request['program']}")
        status = program.main(request["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # boundary: what Python itself would print
        traceback.print_exc()
    finally:
        gc.collect()  # what objects say when they go, as at the end of an interpreter
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(pid: int, timeout: float) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.02)
    return ""


if __name__ == "__main__":
    main()
