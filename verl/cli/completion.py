"""Completion of the command ``verl``: commands, methods, flags and settings."""

from __future__ import annotations

from collections.abc import Sequence

from verl.errors import ConfigError

SCRIPTS = {
    "bash": """_verl() {
    local IFS=$'\\n'
    local words="$(verl __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)"
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
    [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _verl verl""",
    "zsh": """#compdef verl
_verl() {
    local -a offers
    offers=(${(f)"$(verl __complete "${(@)words[2,$CURRENT]}" 2>/dev/null)"})
    compadd -S '' -a offers || _files
}
compdef _verl verl""",
    "fish": "complete -c verl -a '(verl __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'",
}


def script(shell: str) -> str:
    """The script of a shell, to be sourced.

    Raises:
        ConfigError: another shell.
    """
    if shell not in SCRIPTS:
        raise ConfigError("a shell is needed", key="verl completion", got=shell, allowed=list(SCRIPTS))
    return SCRIPTS[shell]


def complete_word(words: Sequence[str]) -> list[str]:
    """What the last word may become."""
    from verl.api.methods import BY_REWARD, METHODS
    from verl.cli.help import COMMANDS, FLAGS

    *before, last = words or [""]
    if not before:
        return _starting(last, [name.split()[0] for name in COMMANDS])
    command = {"rm": "reward_model", "train": "grpo"}.get(before[0], before[0])
    configuration = {"generate": "generation", "eval": "evaluation"}.get(command)
    if command in METHODS:
        configuration = METHODS[command].configuration
    if configuration is None:
        return []
    if last.startswith("-"):
        return _starting(last, [name.split()[0].rstrip(",") for name in FLAGS])
    methods = list(BY_REWARD) if before == ["train"] else []
    return _starting(last, methods) + _keys(configuration, last)


def _keys(configuration: str, start: str) -> list[str]:
    """Settings up to their next dot: a section at a time."""
    from verl.config.loading.groups import program_of
    from verl.config.schema.node import schema_of

    keys: dict[str, None] = {}
    for key, leaf in schema_of(program_of(configuration)[0].root).leaves.items():
        if key.startswith(start) and leaf.planned is None:
            section, dot, _ = key[len(start) :].partition(".")
            keys[f"{start}{section}{dot or '='}"] = None
    return list(keys)


def _starting(start: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]
