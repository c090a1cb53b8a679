"""The command line: Hydra's flags and override grammar, read without starting Hydra.

Hydra's own parser reads each override, so that quoting, lists and mappings mean what they mean there. Its application
framework (output folders, sweeps, launchers) is deliberately left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, NotBuiltError, suggest

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
