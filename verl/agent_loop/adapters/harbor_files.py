"""A task's folder in Harbor's format, and the refusal of what needs a container.

https://harborframework.com/docs/task-format. Of ``environment/Dockerfile`` a plain distribution as ``FROM``,
``WORKDIR`` and ``COPY`` are followed.
"""

from __future__ import annotations

import base64
import io
import posixpath
import re
import tarfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from verl.errors import ConfigError, NotBuiltError

FOLDERS = ("/app", "/data", "/logs", "/solution", "/tests", "/workspace")
"""Names in the root of a container that a task's files may have."""
KEY = "environment_kwargs.path"
ALLOWED = {
    "": {"schema_version", "version", "source", "task", "metadata", "agent", "verifier", "environment"},
    "environment": {"build_timeout_sec", "cpus", "memory_mb", "storage_mb", "allow_internet"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec"},
}
"""What task.toml may say, by section. Nothing is built, a sandbox has one core, and the loop's ``timeout`` limits the
agent: build_timeout_sec, cpus and agent.timeout_sec have no effect."""
PLAIN_IMAGE = re.compile(r"FROM\s+(docker\.io/)?(library/)?(alpine|bash|debian|python|ubuntu)([:@]\S+)?$", re.I)
COPY = re.compile(r"COPY\s+([^\s\[-]\S*)\s+(\S+)$", re.I)
WORKDIR = re.compile(r"WORKDIR\s+(\S+)$", re.I)


@dataclass(frozen=True)
class TaskFolder:
    """A task as it was read.

    Args:
        files, tests, solution: tar archives in base64, of paths without the leading slash; a solution may be empty.
        seconds: limit of the tests.
    """

    path: str
    instruction: str
    workdir: str
    files: str
    tests: str
    solution: str
    memory_mb: int
    disk_mb: int
    seconds: float


@lru_cache(maxsize=64)
def read_task(path: str) -> TaskFolder:
    """The task in a folder.

    Args:
        path: resolved.

    Raises:
        NotBuiltError: it needs more than the sandbox has; the message names it.
        ConfigError: the folder holds no task, or a file of it cannot be read.
    """
    folder = Path(path)
    for name in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            fix = "Name the folder of a Harbor task; one of Terminal-Bench 1 (task.yaml) is converted by harbor itself."
            raise ConfigError(f"no task: {name} is missing", key=KEY, got=path, fix=fix)
    settings = _settings(folder / "task.toml")
    workdir, files = _environment(folder / "environment", path)
    solution = {"/solution": folder / "solution"} if (folder / "solution/solve.sh").is_file() else {}
    return TaskFolder(
        path,
        _text(folder / "instruction.md").strip(),
        workdir,
        _archive(files),
        _archive({"/tests": folder / "tests"}),
        _archive(solution) if solution else "",
        int(settings["environment.memory_mb"]),
        int(settings["environment.storage_mb"]),
        settings["verifier.timeout_sec"],
    )


def _settings(file: Path) -> dict[str, float]:
    """The numbers of task.toml by section and name."""
    try:
        content = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}", key=KEY, allowed="TOML") from error
    numbers: dict[str, float] = {
        "environment.memory_mb": 1024, "environment.storage_mb": 256, "verifier.timeout_sec": 60.0,
    }  # fmt: skip
    for section, names in ALLOWED.items():
        values = content.get(section, {}) if section else content
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {section}", key=KEY, got=values, allowed=f"a section [{section}]")
        for name, value in values.items():
            key = f"{section}.{name}".lstrip(".")
            if name not in names or (name == "allow_internet" and value is not False):
                raise _needs_container(str(file.parent), f"task.toml sets {key}")
            if key in numbers:
                kinds = (int,) if name.endswith("_mb") else (int, float)
                if type(value) not in kinds or not 0 < value < float("inf"):
                    allowed = f"a positive {'whole ' * (len(kinds) == 1)}number"
                    raise ConfigError(f"{file}: {key}", key=KEY, got=value, allowed=allowed)
                numbers[key] = value
    return numbers


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", key=KEY, allowed="text in UTF-8") from error


def _environment(folder: Path, task: str) -> tuple[str, dict[str, Path]]:
    """The working folder, and what is where at the beginning."""
    workdir, files, dockerfile = "/app", dict[str, Path](), folder / "Dockerfile"
    for compose in folder.glob("*compose*.y*ml"):
        raise _needs_container(task, f"environment/{compose.name}")
    if not dockerfile.exists():
        return workdir, {workdir: folder} if folder.is_dir() else {}
    for number, line in enumerate(map(str.strip, _text(dockerfile).splitlines()), start=1):
        if not line or line.startswith("#") or PLAIN_IMAGE.match(line):
            continue
        if (change := WORKDIR.match(line)) and _is_inside(posixpath.join(workdir, change[1])):
            workdir = posixpath.normpath(posixpath.join(workdir, change[1]))
            continue
        copy = COPY.match(line)
        source = (folder / copy[1]).resolve() if copy else folder.parent
        target = posixpath.join(workdir, copy[2]) if copy else ""
        if not (source.exists() and source.is_relative_to(folder.resolve()) and _is_inside(target)):
            raise _needs_container(task, f"environment/Dockerfile, line {number} ({line})")
        into_folder = source.is_file() and (target.endswith("/") or posixpath.normpath(target) == workdir)
        files[posixpath.normpath(posixpath.join(target, source.name) if into_folder else target)] = source
    return workdir, files


def _is_inside(path: str) -> bool:
    """Whether a path of a container is one of `FOLDERS` or in one."""
    return f"/{posixpath.normpath(path).split('/')[1]}" in FOLDERS if path.startswith("/") else False


def _archive(files: Mapping[str, Path]) -> str:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, path in files.items():
            archive.add(path, arcname=name.lstrip("/"))
    return base64.b64encode(content.getvalue()).decode()


def _needs_container(task: str, what: str) -> NotBuiltError:
    fix = "Take it out of the task, or let harbor itself run the task with Docker, at the run's endpoint."
    return NotBuiltError(f"{task}: {what} needs a container, which the sandbox is not", key=KEY, fix=fix)
