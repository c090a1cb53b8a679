"""The page ``docs/configuration.md``, made from the declarations, so that it cannot say anything else than they do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from verl.config.groups import PPO, SFT, Program
from verl.config.node import ABSENT, UNSET
from verl.config.outline import Part, parts
from verl.config.schema import schema_of
from verl.config.upstream_only import rows

HEADER = "| key | default | meaning |\n| --- | --- | --- |"
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
one is set. A setting works unless its row says *no effect* with the reason (setting it gives one notice), or names the
samplers with which it works. Below them stand the settings of features that are not built: any value but the default is
an error that names the feature.
"""


def page() -> str:
    """The page in Markdown."""
    every = parts()
    rl = [part for part in every if part.places[0].program is PPO]
    sft = [part for part in every if part.places[0].program is SFT]
    shared = [place.key for part in every for place in part.places if place.program is SFT and part not in sft]
    chapters = [
        INTRO,
        _deviations(every),
        "## RL runs\n",
        *(_part(part) for part in rl),
        "## Supervised runs\n",
        f"The sections {_words(key for key in shared if '.' not in key)} are those of RL runs, above and below.\n",
        *(_part(part) for part in sft),
        "## Known and not built yet\n",
        "Settings of features that do not exist in this version. They are known by name, so that a script that carries "
        "them with upstream's defaults (`verl/config/upstream_only.yaml`) runs, and any other value is refused by the name "
        "of the feature.\n",
        _upstream_only("feature"),
        "## Known and without effect\n",
        "Settings that have nothing to change here. Setting one gives a notice with the reason.\n",
        _upstream_only("no_effect"),
        _spellings(),
    ]
    return "\n".join(chapters)


def _upstream_only(kind: str) -> str:
    """One row per feature, or per reason: its settings, and the sections they stand in."""
    said: dict[str, dict[str, list[str]]] = {}
    for section, own in rows().items():
        for row in own if _places(section) else ():  # batch generation has no table on this page
            if (why := getattr(row, kind)) is not None:
                said.setdefault(why, {}).setdefault(section, []).append(f"`{row.name}`")
    title = {"feature": "feature", "no_effect": "why it has no effect"}[kind]
    lines = [f"| {title} | settings |\n| --- | --- |"]
    for why, sections in sorted(said.items(), key=lambda item: item[0].lower()):
        blocks = [f"in {_words(_places(section))}: {', '.join(names)}" for section, names in sections.items()]
        lines.append(_cells(why, "; ".join(blocks)))
    return "\n".join(lines) + "\n"


def _places(section: str) -> list[str]:
    """Where the sections of a class stand, those of supervised runs only where RL runs have none."""
    for program in (PPO, SFT):
        found = [
            key or "the top"
            for key, cls in {"": program.root, **schema_of(program.root).sections}.items()
            if section in (base.__name__ for base in cls.__mro__)
        ]
        if found:
            return found
    return []


def _part(part: Part) -> str:
    lines = [f"### `{part.key}`{_of(part.places[0].program)}\n", f"{_summary(part)}\n", HEADER]
    lines += [_row(part, name) for name in part.rows]
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


def _row(part: Part, name: str) -> str:
    meta, first = part.rows[name].metadata, part.places[0]
    leaf = schema_of(first.program.root).leaves[first.leaf(name)]
    default = f"= `{leaf.follows}`" if leaf.follows else _value(leaf.default)
    return _cells(f"`{name}`", default, "; ".join(filter(None, (_meaning(meta), _status(meta)))))


def _cells(*cells: str) -> str:
    """A row of a table; what Markdown would take for its own is escaped outside of code."""
    found = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return "| " + " | ".join(cell if "`" in cell else cell.replace("<", "&lt;") for cell in found) + " |"


def _meaning(meta: Mapping[str, Any]) -> str:
    said, choices = meta["meaning"], [str(choice) for choice in meta["choices"] or ()]
    if all(choice in said for choice in choices):
        return said
    return f"{said} ({', '.join(choices)})"


def _status(meta: Mapping[str, Any]) -> str:
    """What is to be known besides the meaning, where the setting does not simply work."""
    on = f"works with rollout.name={' or '.join(meta['engines'])}" if meta["engines"] else ""
    if meta["planned"] is not None:
        return f"*{on}; refused with others*"
    if meta["no_effect"] is None:
        return ""
    return f"*no effect: {meta['no_effect']}" + (f"; {on}*" if on else "*")


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


def _deviations(every: list[Part]) -> str:
    lines = ["## Defaults that deviate from upstream\n", "| key | default | upstream's default |\n| --- | --- | --- |"]
    for part in every:
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
