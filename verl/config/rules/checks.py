"""How a rule of the validation speaks: it returns problems, each one line that says what to change."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

from verl import env
from verl.config.rules.refusals import raise_all
from verl.config.schema.bounds import in_range
from verl.config.schema.leaves import schema_of
from verl.errors import ConfigError, NotBuiltError, suggest
from verl.registry import Registry

LARGEST_SEED = 2**32 - 1  # of numpy's generators
Problems = list[ConfigError]
Rule = Callable[[Any], Problems]


def collect(rules: Iterable[Rule], cfg: Any) -> None:
    """Run every rule and raise all problems together; a single one is raised as it is."""
    problems = [problem for rule in (*rules, _seeds) for problem in rule(cfg)]
    raise_all([problem for problem in problems if not _is_echo(problem, problems, cfg)])


def _seeds(cfg: Any) -> Problems:
    """Numbers that every generator takes, also with a step or a rank added to them."""
    problems: Problems = []
    for key in schema_of(type(cfg)).leaves:
        if key.endswith("seed"):
            seed = reduce(lambda node, name: node[name], key.split("."), cfg)
            problems += in_range(key, seed, f"0 to {LARGEST_SEED}", seed is None or 0 <= seed <= LARGEST_SEED)
    return problems


def _is_echo(problem: ConfigError, problems: Problems, cfg: Any) -> bool:
    """The same problem at a setting that only follows the one where it was made."""
    leaf = schema_of(type(cfg)).leaves.get(str(problem.key))
    if leaf is None or leaf.follows is None:
        return False
    return any(other.key == leaf.follows and other.got == problem.got for other in problems)


def caught(check: Callable[..., Any], *arguments: Any) -> Problems:
    """The error that a check raises, as a list."""
    try:
        check(*arguments)
    except ConfigError as error:
        return [error]
    return []


def known_name(registry: Registry, key: str, name: str, instead: str) -> Problems:
    """A name that the registry does not have; ``instead`` is what to write where it is known but not built yet."""
    problems = caught(registry.check, name)
    return [
        type(error)(
            error.message,
            key=key,
            got=name,
            allowed=error.allowed,
            fix=instead if isinstance(error, NotBuiltError) else error.fix,
        )
        for error in problems
    ]


def is_remote(path: str) -> bool:
    """A URL of any kind, which is not looked up here."""
    return "://" in path


def missing_files(key: str, files: Any, hint: str = "") -> Problems:
    """Local paths of a file setting that are no files, each with the nearest names in its folder."""
    problems: Problems = []
    for name in [files] if isinstance(files, str) else list(files or []):
        path = Path(env.expand(name))
        if is_remote(name) or (name and path.is_file()):
            continue
        problems.append(_no_file(key, name, path, hint))
    return problems


def _no_file(key: str, name: str, path: Path, hint: str) -> ConfigError:
    if not name:
        return ConfigError("an empty path", key=key, got=name, fix=hint or "Name a file.")
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_file())
        fix = f"It holds: {', '.join(inside[:8])}." if inside else "It holds no file."
        return ConfigError("this is a folder; name the files in it", key=key, got=name, fix=fix)
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else None
    near = f"The folder {str(path.parent)!r} does not exist either." if names is None else suggest(path.name, names)
    return ConfigError("no such file", key=key, got=name, fix=f"{near} {hint}".strip())


def missing_folder(key: str, path: str) -> Problems:
    """A local path that is no folder, with the nearest names beside it."""
    folder = Path(env.expand(path))
    if is_remote(path) or folder.is_dir():
        return []
    names = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    return [ConfigError("no such folder", key=key, got=path, fix=suggest(folder.name, names))]


def looks_local(path: str) -> bool:
    """A path of this machine rather than a name on a hub."""
    return path.startswith(("/", ".", "~", "$")) or Path(path).exists() or path.count("/") > 1


def bad_model_folder(key: str, path: str, hint: str = "") -> Problems:
    """A path that looks local must be a folder with a config.json; hub names pass unseen."""
    if is_remote(path) or not looks_local(path):
        return []
    folder = Path(env.expand(path))
    missing = missing_folder(key, path)
    if missing:
        fix = f"{missing[0].fix} {hint}".strip()
        return [ConfigError("no such model folder", key=key, got=path, fix=fix)]
    if not (folder / "config.json").exists():
        message = "this folder is not a Hugging Face model: it has no config.json"
        return [ConfigError(message, key=key, got=path, fix=hint)]
    return []


def missing_package(key: str, name: str, package: str) -> Problems:
    """A named thing whose package is not installed."""
    if importlib.util.find_spec(package) is not None:
        return []
    return [
        ConfigError(
            f"{name!r} needs the package {package!r}, which is not installed",
            key=key,
            fix=f"pip install {package}, or take {name!r} out of {key}.",
        )
    ]
