"""Which programs upstream's shell scripts start, and with which words: facts, without a line of the scripts.

Every script of a checkout runs with a search path of its own: stand-ins for all programs that would work (python,
torchrun, ray, uv, pip, ...) note their words and do nothing, tools that change files or wait do nothing, and tools that
only turn texts into texts are the real ones. It runs in a copy of the checkout, with an empty home folder and a time
limit. That keeps honest scripts from doing anything; it is no sandbox for hostile ones: a redirection or an absolute
path acts as it is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STARTERS = ("python", "python3", "torchrun", "ray", "uv", "accelerate", "deepspeed", "nsys", "msprof", "numactl")
IDLE = (
    "pip", "pip3", "conda", "source", "nvidia-smi", "npu-smi", "rocm-smi", "huggingface-cli", "hf", "wget", "curl",
    "git", "ssh", "scp", "rsync", "rm", "mv", "cp", "mkdir", "ln", "touch", "chmod", "kill", "pkill", "killall",
    "sleep", "sudo", "apt", "apt-get", "docker", "sbatch", "srun", "module", "tee", "nc", "hdfs", "aws", "lsof",
)  # fmt: skip
TEXT_TOOLS = (
    "bash", "sh", "env", "dirname", "basename", "realpath", "readlink", "pwd", "date", "seq", "cat", "echo", "printf",
    "tr", "cut", "head", "tail", "sed", "awk", "grep", "sort", "uniq", "wc", "expr", "bc", "hostname", "uname", "nproc",
    "id", "whoami", "test", "true", "false", "ls", "find", "xargs", "which", "timeout", "nohup", "mktemp", "tac", "jq",
)  # fmt: skip
FOLDERS = ("examples", "tests", "verl/experimental", "recipe")
LIMIT_S = 20
_STAND_IN = """#!{python} -IS
import json, os, sys
with open(os.environ["RECORDING"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""
_MODULE = re.compile(r"(verl|recipe|verl_\w+)(\.\w+)+$")


def main(checkout: Path) -> int:
    """Print a line for every script of a checkout that starts a program of it."""
    if not (checkout / "verl").is_dir():
        print(f"error: {checkout} holds no folder 'verl', so it is no checkout of upstream", file=sys.stderr)
        return 2
    for script in record(checkout):
        print(json.dumps(script))
    return 0


def record(checkout: Path) -> list[dict[str, Any]]:
    """The scripts of a checkout that start programs, sorted by name."""
    with tempfile.TemporaryDirectory() as folder:
        copy, home = Path(folder) / "upstream", Path(folder) / "home"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"), symlinks=True)
        home.mkdir()
        tools = _tools(Path(folder) / "bin")
        files = sorted(file for name in FOLDERS for file in (copy / name).rglob("*.sh"))
        scripts = [(str(file.relative_to(copy)), _commands(file, copy, home, tools)) for file in files]
    return [{"script": name, "commands": commands} for name, commands in scripts if commands]


def _tools(folder: Path) -> Path:
    """A folder to be the whole search path."""
    folder.mkdir()
    for name in TEXT_TOOLS:
        real = shutil.which(name)
        if real:
            (folder / name).symlink_to(real)
    for name in STARTERS + IDLE:
        file = folder / name
        file.write_text(_STAND_IN.format(python=sys.executable) if name in STARTERS else "#!/bin/sh\nexit 0\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


def _commands(script: Path, checkout: Path, home: Path, tools: Path) -> list[dict[str, Any]]:
    """What one script starts, in order."""
    own = {"PATH": str(tools), "HOME": str(home), "USER": "user", "LANG": "C.UTF-8"}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        environment = {**own, "RECORDING": str(notes)}
        process = subprocess.Popen(
            [str(tools / "bash"), str(script)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{script.relative_to(checkout)}: stopped after {LIMIT_S} s", file=sys.stderr)
        finally:
            _end(process)
        started = [_started(json.loads(line), checkout) for line in notes.read_text(encoding="utf-8").splitlines()]
    places = {str(checkout): "@UPSTREAM", str(home): "@HOME"}
    return [_without(places, command) for command in started if command is not None]


def _end(process: subprocess.Popen[bytes]) -> None:
    """The script and what it left behind in its own group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _started(words: list[str], checkout: Path) -> dict[str, Any] | None:
    """The program of the checkout that a starter's words name, with the words behind it."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words) and _MODULE.match(words[place + 1]):
            return {"program": words[place + 1], "argv": words[place + 2 :]}
        name = word.removeprefix(f"{checkout}/").removeprefix("./")
        module = name.removesuffix(".py").replace("/", ".")
        if word.endswith(".py") and _MODULE.match(module):
            return {"program": module, "argv": words[place + 1 :]}
    return None


def _without(places: dict[str, str], command: dict[str, Any]) -> dict[str, Any]:
    argv = command["argv"]
    for place, name in places.items():
        argv = [word.replace(place, name) for word in argv]
    return {"program": command["program"], "argv": argv}
