"""``load_config``: defaults, then YAML, then the command line become one checked, frozen configuration."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config.loading import recipes
from verl.config.loading.files import CommandLine, DefaultsEntry, Layer, Reader, parse_command_line
from verl.config.loading.groups import COMPOSED_ENGINE, Program, program_of
from verl.config.loading.merge import Merge
from verl.config.loading.resolve import resolve
from verl.config.schema.node import ConfigNode, Schema, plain, schema_of, to_dict, unrecorded
from verl.errors import ConfigError

FirstLook = Callable[[Any], None]


def load_config(
    name: str,
    argv: list[str],
    first_look: FirstLook | None = None,
    *,
    served: bool = False,
    defaults: Iterable[str] = (),
) -> ConfigNode:
    """The configuration of a program, checked as a whole.

    Args:
        name: of `verl.config.loading.groups.NAMES`: ``ppo_trainer``, ``sft_trainer``, ``dpo_trainer``, ``rm_trainer``, ...
        argv: the command line without the program: ``a.b=c``, ``--config-path``, ``--config-name``, ``--cfg job``.
        first_look: is called with the configuration before the rules that load torch; what it raises ends the program.
        served: of ``ppo_trainer``: the program samples by servers that it starts, and has no workers.
        defaults: a recipe's settings, ``a.b=c``; files and the command line win over them, by any spelling.

    Raises:
        ConfigError: everything that is wrong, one line each, with the key, what it got and what is allowed.
        NotBuiltError: every problem is a feature that does not exist yet.
        SystemExit: ``--cfg job`` and ``--help`` print and leave; what no machine would run is printed, and then refused.
    """
    program, _ = program_of(name)
    command = parse_command_line(argv)
    if command.help:
        from verl.config.loading.groups import usage

        sys.stdout.write(usage(program))
        raise SystemExit(0)
    config = read_config(name, command, defaults)
    if command.cfg is not None:
        sys.stdout.write(to_yaml(config))
        _check_printed(program, config)
        raise SystemExit(0)
    if first_look is not None:
        first_look(config)
    _check_whole(program, config, served)
    return config


def read_config(name: str, command: CommandLine | list[str], defaults: Iterable[str] = ()) -> ConfigNode:
    """The configuration with every setting checked for itself, but not against the others or against this machine."""
    if isinstance(command, list):
        command = parse_command_line(command)
    if command.cfg not in (None, "job", "all"):
        raise ConfigError("nothing of that name can be printed", key="--cfg", got=command.cfg, allowed=["job"])
    program, engine = program_of(name)
    recipe = [DefaultsEntry(o.key, o.value, "the recipe's defaults") for o in parse_command_line([*defaults]).overrides]
    return _merged(program, lambda known: _layers(known, engine, command, recipe))


def config_from(name: str, values: object) -> ConfigNode:
    """The configuration of a program from a mapping of OmegaConf or dictionaries, as `load_config` makes it.

    What a mapping says as the default says it counts as not said: whole configurations come out of Hydra. Where it has a
    setting by two spellings, the older one counts, with a notice: a recipe's defaults are in it, and what was typed.
    """
    program, _ = program_of(name)

    def layers(target: Program) -> list[Layer]:
        schema = schema_of(target.root)
        reader = Reader(target, lambda key: schema.split(key) is not None)
        entries = reader.entries(plain(values), "the given configuration")
        composed = {entry.key for entry in entries if entry.value == COMPOSED_ENGINE} & {*target.strategies}
        unsaid = {key for key in composed if schema.leaves[key].follows in {None, *composed}}
        entries = [entry for entry in entries if _says_more(schema, entry) and entry.key not in unsaid]
        newer = [entry for entry in entries if schema.split(entry.key) is not None]
        return [newer, [entry for entry in entries if entry not in newer]]

    config = _merged(program, layers)
    _check_whole(program, config, served=False)
    return config


def _says_more(schema: Schema, entry: DefaultsEntry) -> bool:
    leaf = schema.leaves.get(entry.key)
    return leaf is None or leaf.default != entry.value


def _merged(program: Program, layers_of: Callable[[Program], list[Layer]]) -> ConfigNode:
    layers = layers_of(program)
    named = recipes.of_layers(program, layers)
    if named:
        program = recipes.with_recipes(program, named)
        layers = layers_of(program)  # with their settings it is known where a value of a file begins
    return resolve(Merge(program, layers))


def _layers(program: Program, engine: str, command: CommandLine, recipe: Layer) -> list[Layer]:
    """What a recipe, files and the command line say, lowest first."""
    schema = schema_of(program.root)
    reader = Reader(program, lambda key: schema.split(key) is not None)
    layers = reader.start(command)
    return [_engines(program, [engine, *_base_engines(program, reader.bases)]), recipe, *layers, _typed(command)]


def to_yaml(config: ConfigNode) -> str:
    """The resolved configuration as YAML that loads back to the same configuration, secrets left out.

    What was left out is refused when it is loaded: it has to be given again.
    """
    from omegaconf import OmegaConf

    from verl.config.loading.secrets import hide

    return OmegaConf.to_yaml(OmegaConf.create(_escaped(hide(to_dict(config)))))


def save_config(config: ConfigNode, path: str | Path) -> None:
    """Write the resolved configuration as YAML; missing folders are made.

    Raises:
        ConfigError: the folder, which is ``trainer.default_local_dir`` of a run, cannot be written.
    """
    file = Path(path)
    with writable(file.parent):
        write_private(file, to_yaml(config))


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """A folder that is made if it is missing; the same error for one that cannot be written, there and in the block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        yield
    except OSError as error:
        raise ConfigError(
            f"this folder cannot be written: {error}",
            key="trainer.default_local_dir",
            got=str(folder),
            fix="Choose one on a disk that can be written and has room.",
        ) from error


def _check_printed(program: Program, config: ConfigNode) -> None:
    """The table of who lives where as comments; what refuses a run wherever it is started is an error here as well."""
    if program.name == "ppo_trainer":
        from verl.config.machine import topology
        from verl.config.rules import validate

        with unrecorded():
            if not (topology.problems(config) or recipes.problems(config)):  # type: ignore[arg-type]
                table = str(topology.Topology.of(config, topology.added_roles(config)))  # type: ignore[arg-type]
                sys.stdout.writelines(f"{f'# {line}'.rstrip()}\n" for line in table.splitlines())
        validate.check_printed(config)  # type: ignore[arg-type]
    elif program.name not in ("generation", "evaluation"):
        from verl.config.rules import supervised

        supervised.check_printed_sft(config)  # type: ignore[arg-type]


def write_private(file: Path, text: str) -> None:
    """Write a text file that the user alone can read."""
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        os.fchmod(opened.fileno(), 0o600)  # of a file that was there
        opened.write(text)


def _check_whole(program: Program, config: ConfigNode, served: bool) -> None:
    """The rules of one program, imported here: they look at devices, which loads torch."""
    if program.name == "ppo_trainer":
        from verl.config.rules import validate

        validate.validate(config, served)  # type: ignore[arg-type]
        return
    from verl.config.rules import supervised

    checks: dict[str, Callable[[Any], None]] = {
        "generation": supervised.validate_generation,
        "evaluation": supervised.validate_evaluation,
    }
    checks.get(program.name, supervised.validate_sft)(config)


def _base_engines(program: Program, bases: list[str]) -> list[str]:
    """The engine choices of the configurations that files build on; another program's is an error."""
    engines = []
    for base in bases:
        other, engine = program_of(base)
        if other.name != program.name:
            raise ConfigError(
                "that configuration belongs to another program", got=base, fix=f"This one reads {program.name}."
            )
        engines.append(engine)
    return engines


def _engines(program: Program, engines: list[str]) -> Layer:
    return [
        DefaultsEntry(program.engine_group, engine, "the configuration's name") for engine in engines if engine != "dp"
    ]


def _typed(command: CommandLine) -> Layer:
    return [DefaultsEntry(o.key.replace("/", "."), o.value, "", o.delete) for o in command.overrides]


def _escaped(value: Any) -> Any:
    """``${`` in a resolved text is a text, not an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
