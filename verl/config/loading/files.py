"""What the user says: YAML files with their ``defaults:`` lists, and the command line in Hydra's grammar, as layers.

Hydra's parser reads each override, so that quoting, lists and mappings mean what they mean there. Its application
framework (output folders, sweeps, launchers) is deliberately left out. Files that a setting names (tools, simulated
users, agent loops) are plain data, in which nothing is resolved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl import env
from verl.config.loading.groups import NAMES, Program, choose
from verl.errors import ConfigError, NotBuiltError, suggest


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


_VALUE_FLAGS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "dir",
    "-cd": "dir",
    "--config-name": "name",
    "-cn": "name",
    "--cfg": "cfg",
    "-c": "cfg",
}
_SWITCHES = {"--help": "help", "-h": "help", "--resolve": "resolve"}
_SWEEPS = ("--multirun", "-m")


@dataclass(frozen=True)
class Override:
    """One ``a.b=c``; ``delete`` is ``~a.b``. A group choice may carry the package after ``@``."""

    key: str
    value: Any
    delete: bool = False
    package: str | None = None


@dataclass
class CommandLine:
    """What the command line says, in order."""

    path: str | None = None
    dir: str | None = None
    name: str | None = None
    cfg: str | None = None
    help: bool = False
    resolve: bool = False
    overrides: list[Override] = field(default_factory=list)


def parse_command_line(argv: list[str]) -> CommandLine:
    """Flags and overrides; every mistake in them is reported at once."""
    command, problems, words = CommandLine(), [], list(argv)
    while words:
        word = words.pop(0)
        try:
            if word.startswith("-") and not word.startswith("-="):
                _flag(command, word, words)
            else:
                command.overrides.append(parse_override(word))
        except ConfigError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ConfigError("\n  - ".join(["the command line cannot be read:", *(str(p) for p in problems)]))
    return command


def parse_override(text: str) -> Override:
    """One override by Hydra's grammar; a value that the grammar refuses (``~/data``, ``a=b``) is taken as a text."""
    from hydra.core.override_parser.types import OverrideType

    read = _read(text)
    if read.is_sweep_override():
        value = text.partition("=")[2]
        raise ConfigError(
            "a sweep over several values is not a setting",
            key=read.key_or_group,
            got=value,
            fix=f"For a list write '{read.key_or_group}=[{value}]', for a text with commas quote it twice.",
        )
    return Override(read.key_or_group, read.value(), read.type == OverrideType.DEL, read.package)


def _read(text: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for attempt in (text, _quoted(text)):
        if attempt is not None:
            try:
                return parser.parse_override(attempt)
            except HydraException:
                continue
    raise _unreadable(text)


def _flag(command: CommandLine, word: str, rest: list[str]) -> None:
    name, equals, value = word.partition("=")
    if name in _VALUE_FLAGS:
        if not equals:
            if not rest:
                raise ConfigError("the flag needs a value", key=name)
            value = rest.pop(0)
        setattr(command, _VALUE_FLAGS[name], value.strip("'\""))
    elif word in _SWITCHES:
        setattr(command, _SWITCHES[word], True)
    elif word in _SWEEPS:
        raise NotBuiltError("runs over several values are not built", key=word, fix="Start one run per value.")
    else:
        flags = ["--config-path", "--config-name", "--config-dir", "--cfg", "--help"]
        raise ConfigError("unknown flag", key=name, allowed=flags, fix=suggest(name, flags))


def _quoted(text: str) -> str | None:
    """The override with the text the grammar refuses in quotes; None where that cannot help."""
    match = re.match(r"([^=\s]+)=(.+)$", text, re.DOTALL)
    if match is None or match[2][0] in "{'\"":
        return None
    if match[2][0] == "[":  # a list with ~/paths
        return re.sub(r"([\[,]\s*)(~[^,\]]*)", r"\1'\2'", text)
    value = match[2].replace("'", "\\'")
    return f"{match[1]}='{value}'"


def _unreadable(text: str) -> ConfigError:
    key, equals, value = text.partition("=")
    if equals:
        fix = "Quote texts with special characters, e.g. \"key='a b'\"; close every bracket."
        return ConfigError("the value cannot be read", key=key.strip("+~"), got=value, fix=fix)
    return ConfigError("not a setting", got=text, allowed="key=value, +key=value, ++key=value, ~key and flags")
