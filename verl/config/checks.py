"""How a rule of the validation speaks: it returns problems, each one line that says what to change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from verl.errors import ConfigError, suggest

Problems = list[ConfigError]


def collect(rules: Iterable[Callable[..., Problems]], cfg: Any) -> None:
    """Run every rule and raise all problems together; a single one is raised as it is."""
    problems = [problem for rule in rules for problem in rule(cfg)]
    if len(problems) == 1:
        raise problems[0]
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
        raise ConfigError(f"{len(problems)} settings cannot be used:\n{lines}")


def caught(check: Callable[..., None], *arguments: Any) -> Problems:
    """The error that a check raises, as a list."""
    try:
        check(*arguments)
    except ConfigError as error:
        return [error]
    return []


def in_range(key: str, value: float, allowed: str, holds: bool) -> Problems:
    return [] if holds else [ConfigError("out of range", key=key, got=value, allowed=allowed)]


def one_of(key: str, value: Any, choices: Iterable[str]) -> Problems:
    choices = list(choices)
    if value in choices:
        return []
    return [ConfigError("unknown value", key=key, got=value, allowed=choices, fix=suggest(str(value), choices))]


def is_remote(path: str) -> bool:
    return "://" in path


def missing_files(key: str, files: Any, hint: str = "") -> Problems:
    """Local files of a data setting that do not exist, each with the nearest names in its folder."""
    problems: Problems = []
    for name in [files] if isinstance(files, str) else list(files or []):
        path = Path(name)
        if is_remote(name) or path.exists():
            continue
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = suggest(path.name, beside) if beside else f"The folder {str(path.parent)!r} does not exist either."
        problems.append(ConfigError("no such file", key=key, got=name, fix=f"{near} {hint}".strip()))
    return problems


def looks_local(path: str) -> bool:
    """A path of this machine rather than a name on a hub."""
    return path.startswith(("/", ".", "~")) or Path(path).exists() or path.count("/") > 1


def bad_model_folder(key: str, path: str, hint: str = "") -> Problems:
    """A local-looking model path must be a folder with a config.json; hub names pass unseen."""
    if is_remote(path) or not looks_local(path):
        return []
    folder = Path(path)
    if not folder.is_dir():
        beside = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        return [
            ConfigError("no such model folder", key=key, got=path, fix=f"{suggest(folder.name, beside)} {hint}".strip())
        ]
    if not (folder / "config.json").exists():
        return [ConfigError("this folder is not a Hugging Face model: it has no config.json", key=key, got=path)]
    return []


def missing_tracker(key: str, name: str) -> Problems:
    """A tracker whose package is not installed."""
    package = {"wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab", "tensorboard": "tensorboard"}.get(name)
    if package is None or importlib.util.find_spec(package) is not None:
        return []
    return [
        ConfigError(
            f"the tracker {name!r} needs the package {package!r}, which is not installed",
            key=key,
            fix=f"pip install 'verl[{package}]', or take {name!r} out of the list.",
        )
    ]
