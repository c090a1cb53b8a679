"""The pages ``docs/reference/configuration*.md``, generated from the declarations of the settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from scripts.config_outline import OutlinePart, parts
from verl.config.loading.groups import PPO, SFT, Program
from verl.config.loading.recipes import Recipe, with_recipes
from verl.config.schema.node import ABSENT, UNSET, rows, schema_of

HEADER = "| key | default | meaning |\n|---|---|---|"
SCRIPT = "scripts/generate_config_docs.py"
MADE = f"<!-- Made by {SCRIPT} from verl/config: change the declarations there, then run it again. -->"
INTRO = f"""\
# Configuration

{MADE}

Every setting of `python -m verl.trainer.main_ppo` (RL), with type, default and meaning. Supervised runs
(`python -m verl.trainer.sft_trainer`), recipes and older spellings have [a page of their own](configuration_more.md).

- On the command line: `key=value`, lists as `key=[a,b]`, `key=null`; `+key=value` and `++key=value` work as well, and
  `~key` takes a setting back to its default.
- From a file: `--config-path DIR --config-name NAME` reads `DIR/NAME.yaml` over the defaults, with or without a
  `defaults:` list; the command line wins over the file.
- [`every_setting.yaml`](../../verl/trainer/config/every_setting.yaml) is a file to copy from: every setting of an RL
  run that works, behind a comment sign.
- `--cfg job` prints the resolved configuration and leaves, with an error if no machine can run it (packages, devices
  and folders are not looked at); a run writes the same into its folder (`trainer.default_local_dir`).
- A key that does not exist is an error that names the nearest one.
  [Older spellings](configuration_more.md#older-spellings) work, with a notice that has the current name.

How to read the tables: keys are relative to the heading, which is the first place of a section; the text below it names
the other places. **default** `= key` means the value of that key, until this one is set. A setting works unless its row
says *no effect* with the reason (setting it gives one notice), or names the samplers with which it works. Below the
tables stand the settings of features that are not built: any value but the default is an error that names the feature.
"""
MORE = f"""\
# Configuration: supervised runs, recipes, older spellings

{MADE}

The tables read like those of [RL runs](configuration.md), which also list the deviations from upstream's defaults, and
the settings that are not built or have no effect.
"""


def pages(recipes: Iterable[Recipe] = ()) -> dict[str, str]:
    """File name -> text of both pages in Markdown: RL runs, and supervised runs with recipes and older spellings."""
    every, recipes = parts(), list(recipes)
    rl = [part for part in every if part.places[0].program is PPO]
    sft = [part for part in every if part.places[0].program is SFT]
    shared = [place.key for part in every for place in part.places if place.program is SFT and part not in sft]
    first = [
        INTRO,
        _deviations(every),
        "## RL runs\n",
        *(_part(part) for part in rl),
        "## Known and not built yet\n",
        "Settings of features that do not exist in this version. They are known by name, so that a script that carries "
        "them with upstream's defaults (`verl/config/schema/upstream_only.yaml`) runs, and any other value is refused "
        "by the name of the feature.\n",
        _upstream_only("feature"),
        "## Known and without effect\n",
        "Settings that have nothing to change here. Setting one gives a notice with the reason.\n",
        _upstream_only("no_effect"),
    ]
    second = [
        MORE,
        "## Supervised runs\n",
        f"The sections {_words(key for key in shared if '.' not in key)} are those of [RL runs]"
        "(configuration.md#rl-runs).\n",
        *(_part(part) for part in sft),
        "## Settings of recipes\n",
        "They are there where the run names the recipe: where its estimator, its policy loss or its schedule is one of "
        "the recipe's. A recipe of your own brings settings the same way: "
        "[extending](../howto/extending.md#settings-of-your-own).\n",
        *(_recipe(recipe) for recipe in recipes),
        _spellings(recipes),
    ]
    return {"configuration.md": "\n".join(first), "configuration_more.md": "\n".join(second)}


def _upstream_only(kind: str) -> str:
    """One row per feature, or per reason: its settings, and the sections they stand in."""
    said: dict[str, dict[str, list[str]]] = {}
    for section, own in rows().items():
        for row in own if _place(section) is not None else ():  # batch generation has no table on this page
            if (why := getattr(row, kind)) is not None:
                said.setdefault(why, {}).setdefault(str(_place(section)), []).append(row.name)
    title = {"feature": "feature", "no_effect": "why it has no effect"}[kind]
    lines = [f"| {title} | settings |\n|---|---|"]
    for why, sections in sorted(said.items(), key=lambda item: item[0].lower()):
        alike: dict[str, list[str]] = {}
        for place, names in sections.items():
            alike.setdefault(_braced(names), []).append(place)
        blocks = [f"in {', '.join(places)}: {names}" for names, places in alike.items()]
        lines.append(_cells(why, "; ".join(blocks)))
    return "\n".join(lines) + "\n"


def _place(section: str) -> str | None:
    """The first place of the sections of a class, in supervised runs only where RL runs have none."""
    for program in (PPO, SFT):
        for key, cls in {"": program.root, **schema_of(program.root).sections}.items():
            if section in (base.__name__ for base in cls.__mro__):
                return f"`{key}`{_of(program)}" if key else f"the top{_of(program)}"
    return None


def _part(part: OutlinePart) -> str:
    lines = [f"### `{part.key}`{_of(part.places[0].program)}\n", f"{_summary(part)}\n", HEADER]
    lines += [_row(part, name) for name in part.rows]
    return "\n".join(lines) + "\n"


def _recipe(recipe: Recipe) -> str:
    """Its settings, by their full names; a section that stands on this page already is named with its defaults."""
    schema = schema_of(with_recipes(PPO, [recipe]).root)
    lines = [f"### `{recipe.name}`\n", HEADER]
    for key, cls in recipe.settings.items():
        for name, declared in cls.__dataclass_fields__.items():
            if (inner := declared.metadata.get("section")) is None:
                leaf = schema.leaves[f"{key}.{name}"]
                default = f"= `{leaf.follows}`" if leaf.follows else _value(leaf.default)
                lines.append(_cells(f"`{leaf.key}`", default, _meaning(declared.metadata)))
            else:
                known = next(place for place, other in schema.sections.items() if other is inner)
                changes = ", ".join(f"{name}: {_value(value)}" for name, value in declared.metadata["defaults"].items())
                lines.append(_cells(f"`{key}.{name}`", changes, f"the settings of `{known}`"))
    return "\n".join(lines) + "\n"


def _summary(part: OutlinePart) -> str:
    said = (part.cls.__doc__ or "").split("\n")[0]
    if part.base is not None:
        said += f" All settings of `{part.base.key}`, of which these are redefined or added."
    others = []
    for place in part.distinct_places[1:]:
        changes = ", ".join(f"{name}: {_value(value)}" for name, value in place.defaults.items())
        where = f"`{place.key}`{_of(place.program)}"
        others.append(f"{where} ({changes})" if changes else where)
    if others:
        said += f" The same under {_words(others, quote=False)}."
    following: dict[tuple[str, str], list[str]] = {}
    for place in part.distinct_places:
        for name, target in place.follows.items():
            following.setdefault((f"`{place.key}`{_of(place.program)}", target.rpartition(".")[0]), []).append(name)
    places: dict[tuple[str, str], list[str]] = {}
    for (place_, target), names in following.items():
        places.setdefault((_words(names), target), []).append(place_)
    for (own, target), alike in places.items():
        said += f" In {_words(alike, quote=False)} the settings {own} follow `{target}`."
    return said


def _row(part: OutlinePart, name: str) -> str:
    meta, first = part.rows[name].metadata, part.places[0]
    leaf = schema_of(first.program.root).leaves[first.leaf(name)]
    default = f"= `{leaf.follows}`" if leaf.follows else _value(leaf.default)
    return _cells(f"`{name}`", default, "; ".join(filter(None, (_meaning(meta), _status(meta)))))


def _cells(*cells: str) -> str:
    """A row of a table; what Markdown would take for its own is escaped outside of code."""
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return "| " + " | ".join(cell if "`" in cell else cell.replace("<", "&lt;") for cell in escaped) + " |"


def _braced(names: Iterable[str]) -> str:
    """Names in order, those directly below one section together: `a.{b, c}`."""
    below: dict[str, list[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        below.setdefault(parent, []).append(last)
    listed = []
    for parent, own in below.items():
        if not parent:
            listed += own
        else:
            listed.append(f"{parent}.{own[0]}" if len(own) == 1 else f"{parent}.{{{', '.join(own)}}}")
    return ", ".join(f"`{name}`" for name in listed)


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
    return _value(upstream)


def _value(value: Any) -> str:
    """A value as it is written in YAML and on the command line."""
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _words(names: Iterable[str], quote: bool = True) -> str:
    words = [f"`{name}`" if quote else name for name in names]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _deviations(every: list[OutlinePart]) -> str:
    lines = ["## Defaults that deviate from upstream\n", "| key | default | upstream's default |\n|---|---|---|"]
    ours: dict[str, list[str]] = {}
    for part in every:
        first = part.places[0]
        for name, row in part.rows.items():
            upstream = row.metadata["upstream"]
            if upstream is UNSET:
                continue
            if upstream == ABSENT:
                ours.setdefault(_of(first.program), []).append(first.leaf(name))
                continue
            leaf = schema_of(first.program.root).leaves[first.leaf(name)]
            key = f"`{leaf.key}`{_of(first.program)}"
            lines.append(_cells(key, _value(leaf.default), _deviation(upstream)))
    lines.append("\nUpstream does not have these; their defaults leave a run as it is there.\n")
    lines += [f"- {_braced(names)}{of}" for of, names in ours.items()]
    return "\n".join(lines) + "\n"


def _of(program: Program) -> str:
    return "" if program is PPO else " of supervised runs"


def _spellings(recipes: Iterable[Recipe]) -> str:
    lines = ["## Older spellings\n", "`x.*` stands for the same names below `x`.\n"]
    brought = [(recipe.aliases, f"with `{recipe.name}`") for recipe in recipes]
    for tables, said in ((PPO.aliases, "of RL runs"), *brought, (SFT.aliases, "of supervised runs")):
        if not any(vars(tables).values()):
            continue
        lines.append(f"### Spellings {said}\n\n| spelling | what becomes of it |\n|---|---|")
        becomes: dict[str, list[str]] = {}
        for old, moved in tables.moved.items():
            last = old.rpartition(".")[2]
            kept = "." in old and all(target.rpartition(".")[2] == last for target in moved.targets)
            now = [f"{target.rpartition('.')[0]}.*" if kept else target for target in moved.targets]
            becomes.setdefault(
                f"{_words(now)}\0{old.rpartition('.')[0]}" if kept else f"{_words(now)}\0{old}", []
            ).append(old)
        for old, text in tables.removed.items():
            becomes.setdefault(f"an error: {text}\0{old.rpartition('.')[0]}", []).append(old)
        for old, text in tables.ignored.items():
            becomes.setdefault(text, []).append(old)
        lines += [_cells(_braced(names), said.partition("\0")[0]) for said, names in becomes.items()]
        lines.append("")
    return "\n".join(lines)
