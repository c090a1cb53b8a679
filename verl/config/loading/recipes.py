"""Settings that a recipe brings: dataclasses in its own folder, which stand in the tree of a run that names it.

A run names a recipe where its estimator, its policy loss or its schedule is a dotted path: the package of that path, or
else its module, has a `RECIPE`. Its settings are known, checked, printed and saved as the library's own are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import Any, cast

from verl.config.loading.aliases import Aliases
from verl.config.loading.files import Layer
from verl.config.loading.groups import PPO, Program
from verl.config.schema.node import ConfigNode, section
from verl.errors import ConfigError
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, SCHEDULES, is_dotted, sibling

NAMED_BY = tuple(str(table.key) for table in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, SCHEDULES))
"""The settings whose dotted paths lead to recipes."""
Additions = tuple[tuple[str, type[ConfigNode]], ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe adds to the configuration.

    Attributes:
        name: what messages and pages call it.
        settings: key of a section -> class of the settings that stand there. A section of the library's gets them beside
            its own, so they have names of their own; any other key is a new section.
        problems: the rules between settings: what is wrong with a configuration, all of it.
        tell: gives a notice of every setting without effect.
        aliases: older spellings.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Weights(ConfigNode):
        ...     style: float = setting(0.5, "weight of the style in the reward")
        >>> RECIPE = Recipe("my_recipe", settings={"my_recipe": Weights})
    """

    name: str
    settings: Mapping[str, type[ConfigNode]]
    problems: Callable[[Any], list[ConfigError]] = lambda _: []
    tell: Callable[[Any], None] = lambda _: None
    aliases: Aliases = dataclasses.field(default_factory=lambda: Aliases({}, {}, {}))


def of_run(cfg: ConfigNode) -> list[Recipe]:
    """The recipes that a configuration names."""
    return _of_paths(_value(cfg, key) for key in NAMED_BY)


def problems(cfg: ConfigNode) -> list[ConfigError]:
    """What is wrong with the settings that the recipes of a configuration bring, and with what they require of others."""
    return [problem for recipe in of_run(cfg) for problem in recipe.problems(cfg)]


def of_layers(program: Program, layers: Iterable[Layer]) -> list[Recipe]:
    """The recipes that settings name before they are merged; the last word on a setting counts."""
    if program.name != PPO.name:
        return []
    values: dict[str, Any] = {}
    for entry in (entry for layer in layers for entry in layer):
        for key in NAMED_BY:
            if entry.key == key:
                values[key] = None if entry.delete else entry.value
            elif key.startswith(f"{entry.key}.") and isinstance(entry.value, dict):
                values[key] = _value(entry.value, key.removeprefix(f"{entry.key}.")) or values.get(key)
    return _of_paths(values.values())


def with_recipes(program: Program, recipes: Iterable[Recipe]) -> Program:
    """The program with the settings and the older spellings of recipes in its tree."""
    recipes = list(recipes)
    additions = tuple((key, cls) for recipe in recipes for key, cls in recipe.settings.items())
    root, tables = extended(program.root, additions), vars(program.aliases)
    merged = {name: dict(table) for name, table in tables.items()}
    for recipe in recipes:
        for name, table in vars(recipe.aliases).items():
            merged[name] |= table
    return dataclasses.replace(program, tree=root, aliases=Aliases(**merged))


@cache  # a section sent to another process keeps its class
def _made(cls: Hashable, additions: Additions) -> Any:
    return _extension(cls, additions)


def extended(cls: type[ConfigNode], additions: Additions) -> type[ConfigNode]:
    """A section class with more settings; ``additions`` are keys below it, the empty one its own level.

    Raises:
        ConfigError: a name that is taken.
    """
    return _made(cast(Hashable, cls), additions)


def _extension(cls: Any, additions: Additions) -> type[ConfigNode]:
    mixed = tuple(dict.fromkeys(more for key, more in additions if not key))
    names = [name for more in mixed for name in more.__dataclass_fields__]
    taken = sorted({name for name in names if name in cls.__dataclass_fields__ or names.count(name) > 1})
    if taken:
        raise ConfigError("a recipe brings a setting that exists", key=taken[0], fix="Give it another name.")
    below: dict[str, list[tuple[str, type[ConfigNode]]]] = {}
    for key, more in additions:
        head, _, rest = key.partition(".")
        if head:
            below.setdefault(head, []).append((rest, more))
    sections = []
    for head, inside in below.items():
        inner = _section_at(cls, head)
        meta = {} if inner is None else cls.__dataclass_fields__[head].metadata
        is_new = inner is None and inside[0][0] == ""
        made = inside[0][1] if is_new else extended(inner or ConfigNode, tuple(inside))
        sections.append((head, made, section(made, meta.get("follows", {}), **meta.get("defaults", {}))))
    if not mixed and not sections:
        return cls
    namespace = {
        "__reduce__": _reduced,
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "_made_of": (cls, additions),
    }
    return dataclasses.make_dataclass(cls.__name__, sections, bases=(*mixed, cls), frozen=True, namespace=namespace)


def _section_at(cls: type[ConfigNode], name: str) -> type[ConfigNode] | None:
    declared = cls.__dataclass_fields__.get(name)
    if declared is None:
        return None
    inner = declared.metadata.get("section")
    if inner is None:
        raise ConfigError("a recipe's settings cannot stand below a setting", key=name, fix="Name a section.")
    return inner


def _reduced(node: Any) -> tuple[Any, ...]:
    """How a section of a class that was made here travels to other processes: as what it was made of."""
    return _remade, (*type(node)._made_of, node.__dict__)


def _remade(cls: type[ConfigNode], additions: Additions, state: dict[str, Any]) -> ConfigNode:
    node = object.__new__(extended(cls, additions))
    node.__dict__.update(state)
    return node


def _of_paths(paths: Iterable[Any]) -> list[Recipe]:
    dotted = [path for path in paths if isinstance(path, str) and is_dotted(path) and "${" not in path]
    brought = {id(recipe): (path, recipe) for path in dotted if (recipe := sibling(path, "RECIPE")) is not None}
    for path, recipe in brought.values():
        if not isinstance(recipe, Recipe):
            raise ConfigError("its RECIPE is of another class", got=path, allowed="verl.config.loading.recipes.Recipe")
    return [recipe for _, recipe in brought.values()]


def _value(node: Any, key: str) -> Any:
    """What stands at a dotted key; None where nothing does, or where a value stands in the place of a section."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping | ConfigNode) else None
    return node
