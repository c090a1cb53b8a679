"""``verl COMMAND ...``: what each word starts. ``verl --help`` loads neither torch nor Hydra."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl import env
from verl.errors import ConfigError, VerlError, suggest

PRESETS = Path(__file__).parent / "presets"
HELP, HELP_ALL = ("--help", "-h"), "--help-all"
ONE_LINE = ("resume", "data", "doctor", "completion")
"""Commands whose help is their line of the overview."""


@dataclass
class Words:
    """A command line without its command: the flags of ``verl``, and what the program reads."""

    help: bool = False
    help_all: bool = False
    search: str = ""
    dry_run: bool = False
    preset: str = ""
    rest: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, argv: Sequence[str]) -> Words:
        """Read them.

        Raises:
            ConfigError: a flag lacks its value.
        """
        words, left = cls(), list(argv)
        while left:
            word = left.pop(0)
            name, equals, value = word.partition("=")
            if word in HELP:
                words.help = True
            elif word == "--dry-run":
                words.dry_run = True
            elif name == HELP_ALL:
                words.help_all = True
                words.search = value if equals else (left.pop(0) if left and "=" not in left[0] else "")
            elif name in ("--config", "--preset"):
                if not equals:
                    value = left.pop(0) if left else ""
                if not value:
                    raise ConfigError("the flag needs a value", key=name)
                words._take(name, value)
            else:
                words.rest.append(word)
        return words

    def _take(self, name: str, value: str) -> None:
        if name == "--config":
            file = Path(env.expand(value)).absolute()
            self.rest += ["--config-path", str(file.parent), "--config-name", file.stem]
        else:
            self.preset = value


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 0, 2 after a message to the user, 128 + signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        from verl.cli.help import overview

        print(overview())
        return 0 if words else 2
    if words[0] in ("--version", "-V"):
        from verl import __version__

        print(__version__)
        return 0
    command, *rest = words
    if command in ONE_LINE and not {*HELP}.isdisjoint(rest):
        from verl.cli.help import command_line

        print(command_line(command))
        return 0
    try:
        here = _working_directory()
        if argv is None and not sys.flags.safe_path:  # its modules can be imported, as for `python -m verl`
            sys.path.insert(0, here)
        return _program(command)(rest)
    except VerlError as error:
        from verl.trainer.command import report_error

        return report_error(error)


def _working_directory() -> str:
    """Its path.

    Raises:
        ConfigError: it was deleted, so that no relative path means anything.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory was deleted", fix="Change to one that exists: cd ~") from None


def _program(command: str) -> Callable[[list[str]], int]:
    known: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "sft": lambda rest: _begin("sft", Words.of(rest)),
        "dpo": lambda rest: _begin("dpo", Words.of(rest)),
        "rm": lambda rest: _begin("reward_model", Words.of(rest)),
        "resume": _resume,
        "generate": lambda rest: _other("generation", Words.of(rest)),
        "eval": lambda rest: _other("evaluation", Words.of(rest)),
        "plots": _plots,
        "view": _view,
        "data": _data,
        "doctor": _doctor,
        "completion": _completion,
        "__complete": _complete,
    }
    if command not in known:
        allowed = [name for name in known if not name.startswith("_")]
        raise ConfigError("unknown command", key="verl", got=command, allowed=allowed, fix=suggest(command, allowed))
    return known[command]


def _train(rest: list[str]) -> int:
    from verl.api.methods import method_of

    words = Words.of(rest)
    named = bool(words.rest) and not words.rest[0].startswith("-") and "=" not in words.rest[0]
    method = words.rest.pop(0) if named else "grpo"
    method_of(method)
    return _begin(method, words)


def _resume(rest: list[str]) -> int:
    words = Words.of(rest)
    if not words.rest or "=" in words.rest[0]:
        raise ConfigError("the folder of a run is needed", key="verl resume", fix="verl resume runs/grpo-...")
    from verl.api.run import open_run

    run = open_run(words.rest.pop(0))
    words.rest = [*run.words, *words.rest]
    return _begin(run.method, words)


def _begin(name: str, words: Words) -> int:
    """A run of a method: help, a dry run, or the run itself."""
    from verl.api.methods import METHODS, SUPERVISED

    method = METHODS[name]
    if words.help or words.help_all:
        return _help(name, method.configuration, words)
    if words.preset:
        words.rest += words_of_preset(words.preset, words.rest)
    if words.dry_run:
        from verl.cli.dry_run import check_run

        return check_run(method, words.rest)
    if name in SUPERVISED and env.get_int("WORLD_SIZE", 1) > 1:  # a rank of torchrun does not choose the folder
        return method.main(words.rest)
    from verl.api.start import begin
    from verl.cli.last_words import tell_end
    from verl.trainer.command import run_program

    return run_program(lambda: tell_end(begin(name, words.rest, stops=False)))


def words_of_preset(name: str, rest: Sequence[str]) -> list[str]:
    """The flags that read a preset's file.

    Raises:
        ConfigError: no such preset, or a configuration file besides.
    """
    names = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if name not in names:
        raise ConfigError("unknown preset", key="--preset", got=name, allowed=names, fix=suggest(name, names))
    if "--config-name" in rest:
        fix = f"Copy {PRESETS / name}.yaml and change it."
        raise ConfigError(
            "a preset is a configuration file, and one is given already", key="--preset", got=name, fix=fix
        )
    return ["--config-path", str(PRESETS), "--config-name", name]


def _other(configuration: str, words: Words) -> int:
    if words.help or words.help_all:
        return _help({"generation": "generate", "evaluation": "eval"}[configuration], configuration, words)
    for flag in ("--dry-run",) * words.dry_run + ("--preset",) * bool(words.preset):
        raise ConfigError("only programs that train have this flag", key=flag, fix="Leave it out.")
    from verl.trainer import main_eval, main_generation

    program = main_generation if configuration == "generation" else main_eval
    return program.main(words.rest)


def _help(command: str, configuration: str, words: Words) -> int:
    from verl.cli.help import all_settings, program_help

    print(all_settings(configuration, words.search) if words.help_all else program_help(command, configuration))
    return 0


def _plots(rest: list[str]) -> int:
    from verl.api.run import METRICS
    from verl.journal.places import newest_file
    from verl.observability.plots import main as plots

    return plots([str(newest_file(Path(word) / METRICS) or word) if Path(word).is_dir() else word for word in rest])


def _view(rest: list[str]) -> int:
    from verl.viewer.__main__ import main as view

    return view(rest)


def _data(rest: list[str]) -> int:
    from verl.cli.data import main as data

    return data(rest)


def _doctor(rest: list[str]) -> int:
    from verl.cli.doctor import main as doctor

    return doctor(rest)


def _completion(rest: list[str]) -> int:
    from verl.cli.completion import script

    print(script(rest[0] if rest else ""))
    return 0


def _complete(rest: list[str]) -> int:
    from verl.cli.completion import complete_word

    print("\n".join(complete_word(rest)))
    return 0
