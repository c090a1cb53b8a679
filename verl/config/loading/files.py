"""YAML files of the user: where they are found, and their ``defaults:`` lists, flattened into layers of settings.

Files that a setting names (tools, simulated users, agent loops) are plain data, in which nothing is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl import env
from verl.config.loading.groups import NAMES, Program, choose
from verl.config.loading.overrides import CommandLine
from verl.errors import ConfigError, suggest


@dataclass(frozen=True)
class DefaultsEntry:
    """One setting as somebody wrote it; an empty ``source`` is the command line."""

    key: str
    value: Any
    source: str = ""
    delete: bool = False


Layer = list[DefaultsEntry]
GENERATED = "_generated_"
"""A file of this name and a program's says what is declared; Hydra reads it, and here the declarations are at hand."""


@dataclass
class Reader:
    """Reads files for one program; ``stops`` says where a nested mapping is itself the value of a setting."""

    program: Program
    stops: Callable[[str], bool]
    folders: list[Path] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    _open: list[Path] = field(default_factory=list)

    def start(self, command: CommandLine) -> list[Layer]:
        """The layers of the file that the command line names, lowest first; none if it names a program."""
        self.folders = [_folder(text) for text in (command.path, command.dir) if text]
        name = _stem(command.name or self.program.name)
        if name in NAMES and not (self.folders and self._find(name)):
            self.bases.append(name)
            return []
        if not self.folders:
            self.folders = [Path.cwd()]
        file = self._find(name)
        if file is None:
            raise self._missing(name, "--config-name")
        return self.read(file)

    def read(self, file: Path, package: str = "") -> list[Layer]:
        """The layers of one file: those of its ``defaults:`` list, and its own settings where ``_self_`` stands."""
        data = _load(file)
        self._search_path(data.pop("hydra", None))
        entries = data.pop("defaults", None)
        layer = self.entries(data, str(file), package)
        if entries is None:
            return [layer]
        if not isinstance(entries, list):
            raise ConfigError("defaults has to be a list", key=str(file), got=entries)
        self._open.append(file)
        layers: list[Layer] = []
        for entry in entries if "_self_" in entries else [*entries, "_self_"]:
            layers += [layer] if entry == "_self_" else self._default(entry, file, package)
        self._open.pop()
        return layers

    def _default(self, entry: Any, file: Path, package: str) -> list[Layer]:
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, options),) = entry.items()
            group = re.sub(r"^(override|optional)\s+", "", str(group))
            layers = []
            for option in options if isinstance(options, list) else [options]:
                layers += [] if option is None else self._group(group, str(option), file)
            return layers
        if not isinstance(entry, str):
            raise ConfigError("an entry of defaults is a name or one 'group: name'", key=str(file), got=entry)
        name = _stem(re.sub(r"^optional\s+", "", entry).partition("@")[0])
        if name.removeprefix(GENERATED) in NAMES and name.startswith(GENERATED):
            self.bases.append(name.removeprefix(GENERATED))
            return []
        default = self._find(name, file.parent)
        if default is None or default in self._open:
            if name in NAMES:
                self.bases.append(name)
                return []
            if default in self._open:
                raise ConfigError("the defaults of the file lead back to itself", key=str(file), got=entry)
            raise self._missing(name, f"{file}: defaults", file.parent)
        return self.read(default, package or ".".join(name.split("/")[:-1]))

    def _group(self, group: str, option: str, file: Path) -> list[Layer]:
        group, _, package = group.partition("@")
        if group.startswith("hydra/"):
            return []
        option_file = self._find(f"{group}/{_stem(option)}", file.parent)
        if option_file is not None:
            package = _header_package(option_file) or package or group.replace("/", ".")
            return self.read(option_file, "" if package == "_global_" else package)
        settings = choose(self.program, group, option)
        if settings is None:
            raise self._missing(f"{group}/{option}", f"{file}: defaults", file.parent)
        return [[DefaultsEntry(key, value, str(file)) for key, value in settings]]

    def entries(self, data: dict[Any, Any], source: str, package: str = "") -> Layer:
        """What a nested mapping says, setting by setting."""
        return [DefaultsEntry(key, value, source) for key, value in self._flatten(data, package)]

    def _flatten(self, data: dict[Any, Any], prefix: str) -> list[tuple[str, Any]]:
        leaves: list[tuple[str, Any]] = []
        for name, value in data.items():
            key = f"{prefix}.{name}".removeprefix(".")
            if isinstance(value, dict) and not self.stops(key):
                leaves += self._flatten(value, key)
            else:
                leaves.append((key, value))
        return leaves

    def _find(self, name: str, first: Path | None = None) -> Path | None:
        for folder in ([first] if first else []) + self.folders:
            for suffix in (".yaml", ".yml"):
                file = folder / f"{name}{suffix}"
                if file.is_file():
                    return file.resolve()
        return None

    def _search_path(self, hydra: Any) -> None:
        paths = hydra.get("searchpath") if isinstance(hydra, dict) else None
        self.folders += [_folder(text) for text in paths or [] if not str(text).startswith("pkg://")]

    def _missing(self, name: str, key: str, first: Path | None = None) -> ConfigError:
        folders = ([first] if first else []) + self.folders
        there = [file.stem for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.yaml"))]
        looked = ", ".join(str(folder / f"{name}.yaml") for folder in folders)
        return ConfigError(
            f"no such configuration file; looked for {looked}",
            key=key,
            got=name,
            allowed=[*there, *NAMES],
            fix=suggest(name, [*there, *NAMES]),
        )


def _folder(text: str) -> Path:
    return Path(env.expand(str(text).removeprefix("file://"))).absolute()


def _stem(name: str) -> str:
    return re.sub(r"\.ya?ml$", "", name)


def _header_package(file: Path) -> str | None:
    match = re.search(r"^#\s*@package\s+(\S+)", file.read_text(), re.MULTILINE)
    return match[1] if match else None


def _load(file: Path) -> dict[Any, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import MarkedYAMLError, YAMLError

    try:
        data = OmegaConf.load(file)
        plain = OmegaConf.to_container(data, resolve=False)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"not readable as YAML, line {line}: {error.problem}", key=str(file)) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"not readable as YAML: {error}", key=str(file)) from error
    if not isinstance(plain, dict):
        raise ConfigError("a configuration file holds 'key: value' lines", key=str(file), got=plain)
    return plain


def read_user_yaml(path: str, key: str) -> Any:
    """What a YAML file holds, as lists, mappings and scalars; ``${...}`` stays text.

    Args:
        path: ``~`` and variables are expanded.
        key: the setting that names the file, for messages.

    Raises:
        ConfigError: no such file, not YAML, or a YAML tag that would run code.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = Path(env.expand(path.removeprefix("file://")))
    if not file.is_file():
        names = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise ConfigError("no such file", key=key, got=path, fix=suggest(file.name, names))
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"not readable as YAML: {error}", key=key, got=str(file)) from error


def entries_of(data: Any, key: str, source: str, section: str | None = None) -> list[dict[str, Any]]:
    """The list of mappings that such a file holds, under ``section`` or at its top.

    Raises:
        ConfigError: something else.
    """
    entries = data.get(section) if section and isinstance(data, dict) else data
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        allowed = f"'{section}:' with a list of entries" if section else "a list of entries"
        raise ConfigError(f"{source} holds something else", key=key, got=type(entries).__name__, allowed=allowed)
    return entries
