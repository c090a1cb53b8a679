"""The page ``docs/configuration.md``, made from the declarations, so that it cannot say anything else than they do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from verl.config.groups import PPO, SFT, Program
from verl.config.node import ABSENT, UNSET
from verl.config.outline import Part, parts
from verl.config.schema import schema_of

Coverage = Mapping[str, Mapping[str, str]]
"""Program name -> full key -> the test that covers it."""

HEADER = "| key | default | meaning | upstream's default | status | covered by |\n| --- | --- | --- | --- | --- | --- |"
INTRO = """\
# Configuration

<!-- Made by scripts/generate_config_docs.py from verl/config: change the declarations there, then run it again. -->

Everything a run can be told, for `python -m verl.trainer.main_ppo` (RL) and `python -m verl.trainer.sft_trainer`
(supervised). Every default stands in `verl/config`, once, with its type and its meaning; this page is made from there.

- On the command line: `key=value`, lists as `key=[a,b]`, `key=null`; `+key=value` and `++key=value` work as well, and
  `~key` takes a setting back to its default.
- From a file: `--config-path DIR --config-name NAME` reads `DIR/NAME.yaml` over the defaults, with or without a
  `defaults:` list; the command line wins over the file.
- [`ppo_trainer.yaml`](../verl/trainer/config/ppo_trainer.yaml) is a file to copy from: every setting of an RL run that
  works, behind a comment sign.
- `--cfg job` prints the resolved configuration and leaves; a run writes the same into its folder
  (`trainer.default_local_dir`).
- A key that does not exist is an error that names the nearest one. Older spellings work and say what they are called
  today: see [the last table](#older-spellings).

How to read the tables: keys are relative to the heading. **default** `= key` means the value of that key, until this
one is set. **upstream's default** is given where ours deviates. **status** is *works*; or *no effect* with the reason
(setting it gives one notice); or *refused* with the name of a feature that is not built yet (any value but the default
is an error that says so). Some settings work with certain samplers only, which are named. **covered by** is the test
that shows that it is read.
"""


def page(coverage: Coverage | None = None) -> str:
    """The whole page in Markdown."""
    tests = coverage or {}
    whole = parts()
    built = [part for part in whole if part.is_built]
    later = [part for part in whole if not part.is_built]
    rl = [part for part in built if part.places[0].program is PPO]
    sft = [part for part in built if part.places[0].program is SFT]
    shared = [place.key for part in whole for place in part.places if place.program is SFT and part not in sft]
    chapters = [
        INTRO,
        _deviations(whole),
        "## RL runs\n",
        *(_part(part, tests) for part in rl),
        "## Supervised runs\n",
        f"The sections {_words(key for key in shared if '.' not in key)} are those of RL runs, above and below.\n",
        *(_part(part, tests) for part in sft),
        "## Known and not built yet\n",
        "Settings of features that do not exist in this version. They are known by name, so that a script that carries "
        "them with their defaults runs, and any other value is refused by the name of the feature.\n",
        *(_part(part, tests) for part in later),
        _spellings(),
    ]
    return "\n".join(chapters)


def _part(part: Part, tests: Coverage) -> str:
    lines = [f"### `{part.key}`{_of(part.places[0].program)}\n", f"{_summary(part)}\n", HEADER]
    order = sorted(part.rows, key=lambda name: _is_refused(part.rows[name].metadata))
    lines += [_row(part, name, tests) for name in order]
    return "\n".join(lines) + "\n"


def _summary(part: Part) -> str:
    said = (part.cls.__doc__ or "").split("\n")[0]
    if part.base is not None:
        said += f" All settings of `{part.base.key}`, of which these are declared anew or added."
    others = []
    for place in part.distinct_places[1:]:
        changes = ", ".join(f"{name}: {_value(value)}" for name, value in place.defaults.items())
        where = f"`{place.key}`{_of(place.program)}"
        others.append(f"{where} ({changes})" if changes else where)
    if others:
        said += f" The same under {_words(others, quote=False)}."
    return said


def _row(part: Part, name: str, tests: Coverage) -> str:
    meta, first = part.rows[name].metadata, part.places[0]
    leaf = schema_of(first.program.root).leaves[first.leaf(name)]
    default = f"= `{leaf.follows}`" if leaf.follows else _value(leaf.default)
    covered = [tests.get(place.program.name, {}).get(place.leaf(name)) for place in part.places]
    test = next((f"`{test}`" for test in covered if test), "")
    cells = [f"`{name}`", default, _meaning(meta), _deviation(meta["upstream"]), _status(meta), test]
    return _cells(*cells)


def _cells(*cells: str) -> str:
    """A row of a table; what Markdown would take for its own is escaped outside of code."""
    found = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return "| " + " | ".join(cell if "`" in cell else cell.replace("<", "&lt;") for cell in found) + " |"


def _meaning(meta: Mapping[str, Any]) -> str:
    said, choices = meta["meaning"], [str(choice) for choice in meta["choices"] or ()]
    if all(choice in said for choice in choices):
        return said
    return f"{said} ({', '.join(choices)})"


def _is_refused(meta: Mapping[str, Any]) -> bool:
    """Whether no rollout engine follows the setting."""
    return meta["planned"] is not None and not meta["engines"]


def _status(meta: Mapping[str, Any]) -> str:
    on = f"works with rollout.name={' or '.join(meta['engines'])}" if meta["engines"] else ""
    if meta["planned"] is not None:
        return f"{on}; refused with others" if on else f"refused: {meta['planned']}"
    if meta["no_effect"] is None:
        return "works"
    return f"no effect: {meta['no_effect']}" + (f"; {on}" if on else "")


def _deviation(upstream: Any) -> str:
    if upstream is UNSET:
        return ""
    if upstream == "???":
        return "none, it has to be given"
    return upstream if upstream == ABSENT else _value(upstream)


def _value(value: Any) -> str:
    """A value as it is written in YAML and on the command line."""
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _words(names: Iterable[str], quote: bool = True) -> str:
    found = [f"`{name}`" if quote else name for name in names]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _deviations(whole: list[Part]) -> str:
    lines = ["## Defaults that deviate from upstream\n", "| key | default | upstream's default |\n| --- | --- | --- |"]
    for part in whole:
        first = part.places[0]
        for name, row in part.rows.items():
            if row.metadata["upstream"] is UNSET:
                continue
            keys = [f"`{place.leaf(name)}`{_of(place.program)}" for place in part.distinct_places]
            leaf = schema_of(first.program.root).leaves[first.leaf(name)]
            lines.append(_cells(", ".join(keys), _value(leaf.default), _deviation(row.metadata["upstream"])))
    return "\n".join(lines) + "\n"


def _of(program: Program) -> str:
    return "" if program is PPO else " of supervised runs"


def _spellings() -> str:
    lines = ["## Older spellings\n", "| spelling | program | what becomes of it |\n| --- | --- | --- |"]
    for program, said in ((PPO, "RL"), (SFT, "supervised")):
        tables = program.aliases
        for old, moved in tables.moved.items():
            lines.append(_cells(f"`{old}`", said, f"now {_words(moved.targets)}"))
        lines += [_cells(f"`{old}`", said, f"an error: {text}") for old, text in tables.removed.items()]
        lines += [_cells(f"`{old}`", said, text) for old, text in tables.ignored.items()]
    return "\n".join(lines) + "\n"
