"""Layers of settings become one value per leaf: old spellings are translated, later layers win, contradictions are kept.

Nothing is raised here: every problem is collected, so that a person sees all of them at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.loading.aliases import ENGINE_STRATEGIES, longest_prefix
from verl.config.loading.files import DefaultsEntry, Layer
from verl.config.loading.groups import Program, choose, is_role
from verl.config.schema.node import Leaf, Schema, convert, holds_mapping, nearest, open_key, schema_of
from verl.errors import ConfigError
from verl.metrics import notice

_MODE, _GEN, _TRAIN = "trainer.v1.trainer_mode", "data.gen_batch_size", "data.train_batch_size"
_FACTOR, _KEEPS = "data.oversample_factor", "actor_rollout_ref.rollout.keep_unfinished"
_AT_UPDATE = "actor_rollout_ref.rollout.requests_at_update"
_HYBRID, _NODES = "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.rollout.nnodes"
NULL = ("data_loader_seed", "min_lr_ratio")
"""Last names of settings that are null in files of upstream's older releases, and mean their default."""
QUEUES = ("colocate_async", "separate_async")
"""Schedules that take prompts one by one out of what is drawn at once, besides fully_async."""


@dataclass(frozen=True)
class Implied:
    """A value that follows: of ``key``, because of the setting ``source``, and why."""

    key: str
    value: Any
    source: str
    why: str


def implied(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """All of an RL run.

    Args:
        settings: raw value of every setting that somebody set.
        usual: the default of a setting.
    """
    mode = str(settings.get(_MODE, usual(_MODE)))
    if mode == "separate_async":
        yield from _separate(settings, usual)
    if mode == "fully_async":
        yield from _streamed(settings, usual)
    if mode in (*QUEUES, "fully_async"):
        yield from _kept(settings)
    else:
        yield from _sampled(settings, usual)


def _kept(settings: Mapping[str, Any]) -> Iterator[Implied]:
    """In a queue responses are in flight when weights arrive, so that keeping them is what an update does to them."""
    if _AT_UPDATE not in settings and str(settings.get(_KEEPS)).lower() in ("true", "yes", "on", "1"):
        yield Implied(_AT_UPDATE, "abort", _KEEPS, "responses that an update interrupts continue with the new weights")


def _sampled(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """Where no group is filtered or passed over, a step trains on what it samples; a queue counts the two separately."""
    size, switch = settings.get(_GEN), "algorithm.filter_groups.enable"
    if size is None or "${" in str(size) or not _is_off(settings.get(switch, usual(switch))):
        return
    if str(settings.get(_FACTOR, usual(_FACTOR))) not in ("1", "1.0"):
        return
    if str(size) != str(settings.get(_TRAIN, usual(_TRAIN))):
        why = f"every step samples and trains on these prompts, without {switch}=true, and {_TRAIN} has no effect"
        yield Implied(_TRAIN, size, _GEN, why)


def _separate(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """separate_async: nodes of the samplers are a pool of their own; other schedules also need the switch."""
    nodes = str(settings.get(_NODES, usual(_NODES)))
    if nodes.isdigit() and int(nodes) > 0 and not _is_off(settings.get(_HYBRID, usual(_HYBRID))):
        yield Implied(_HYBRID, False, _NODES, f"under separate_async they are the samplers' own: {_HYBRID}=false")


def _streamed(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> Iterator[Implied]:
    """fully_async: what a step trains on; the number of prompts says so in no other schedule."""
    factors = (
        "async_training.trigger_parameter_sync_step",
        "async_training.require_batches",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    numbers = [str(settings.get(key, usual(key))) for key in factors]
    if not all(number.isdigit() for number in numbers):
        return
    size = math.prod(int(number) for number in numbers)
    if str(settings.get(_TRAIN)) != str(size):
        why = f"a step of fully_async trains on {' x '.join(numbers)} = {size} prompts ({', '.join(factors)})"
        yield Implied(_TRAIN, size, _MODE, why)


def left_open(settings: Mapping[str, Any], usual: Callable[[str], Any]) -> list[str]:
    """Settings that say nothing: ``???``, which requires a value, below an ``enable`` that is off, and `NULL` ones."""
    null = [key for key, value in settings.items() if value is None and key.rpartition(".")[2] in NULL]
    return null + [key for key, value in settings.items() if value == "???" and _is_below_off(key, settings, usual)]


def _is_below_off(key: str, settings: Mapping[str, Any], usual: Callable[[str], Any]) -> bool:
    parts = key.split(".")
    switches = [f"{'.'.join(parts[:cut])}.enable" for cut in range(1, len(parts))]
    return any(_is_off(settings.get(switch, usual(switch))) for switch in switches)


def _is_off(value: Any) -> bool:
    return str(value).lower() in ("false", "no", "off", "0")


_LISTED = 8


def unknown_settings(
    schema: Schema, entries: Iterable[tuple[str, DefaultsEntry]], where: Callable[[DefaultsEntry], str]
) -> list[ConfigError]:
    """One problem for each setting that has a near name, and one for all others of a section.

    Args:
        entries: the settings, by the key that nothing has, with what was given.
        where: says the file of an entry.
    """
    return [_problem(schema, group, where) for group in _groups(schema, entries)]


def _groups(
    schema: Schema, entries: Iterable[tuple[str, DefaultsEntry]]
) -> Iterator[list[tuple[str, DefaultsEntry, str]]]:
    """Key, entry and section of each; those of one section together where no name is near, or where it is no section."""
    grouped: dict[Any, list[tuple[str, DefaultsEntry, str]]] = {}
    for key, entry in entries:
        section = _section(schema, key)
        is_alone = "." not in key or (schema.is_section(section) and nearest(schema, key))
        grouped.setdefault(key if is_alone else (section, entry.source), []).append((key, entry, section))
    yield from grouped.values()


def _problem(
    schema: Schema, group: list[tuple[str, DefaultsEntry, str]], where: Callable[[DefaultsEntry], str]
) -> ConfigError:
    key, entry, section = group[0]
    takes = open_key(schema, key)
    into = f"A field of the model's or the engine's own belongs in {takes}." if takes else ""
    if len(group) == 1:
        near = nearest(schema, key)
        meant = f"Did you mean {' or '.join(repr(name) for name in near)}?" if near else into
        fix = meant or "--help lists every setting."
        return ConfigError(f"unknown setting{where(entry)}", key=key, got=entry.value, fix=fix)
    names = [name[len(section) + 1 :] for name, _, _ in group]
    listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    what = "settings of it" if schema.is_section(section) else "settings of a section that does not exist"
    return ConfigError(
        f"unknown {what}: {listed}{where(entry)}", key=section, fix=into or "--help lists every setting."
    )


def _section(schema: Schema, key: str) -> str:
    """The first part of a key that names nothing; the section of the last name where all of them are known."""
    parts = key.split(".")
    for cut in range(1, len(parts)):
        section = ".".join(parts[:cut])
        if not schema.is_section(section):
            return section
    return ".".join(parts[:-1])


_LORA = "actor_rollout_ref.actor.lora"
TWINS = (
    ("actor_rollout_ref.actor.grad_clip", "actor_rollout_ref.actor.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
)
"""Two keys of upstream's tree for one thing: set one, or both alike."""
_NOTES = ("_target_", "_partial_", "_convert_", "_recursive_")


class Merge:
    """What the layers say so far.

    Attributes:
        values: raw value of every leaf that somebody set.
        origin: where each of them was set.
        variables: helper values of files that only interpolations read.
        problems: everything that cannot stand.
    """

    def __init__(self, program: Program, layers: Iterable[Layer]):
        self.program, self.schema = program, schema_of(program.root)
        self.values: dict[str, Any] = {}
        self.origin: dict[str, DefaultsEntry] = {}
        self.variables: dict[str, Any] = {}
        self.problems: list[ConfigError] = []
        layers = list(layers)
        self._referenced = _references(layers)
        self._strangers: list[tuple[str, DefaultsEntry]] = []
        for layer in self._without_lora_switch(layers):
            self._add(layer)
        self.problems += unknown_settings(self.schema, self._strangers, where)
        for key in left_open(self.values, self._usual):
            del self.values[key], self.origin[key]
        if program.name == "ppo_trainer":
            self._imply()
        for first, second in TWINS:
            one, two = self.origin.get(first), self.origin.get(second)
            if one is None or two is None or one.source != two.source:
                continue
            a, b = self.values[first], self.values[second]
            if a != _reference(second) and b != _reference(first) and not self._agree(first, a, b):
                self.problems.append(_contradiction(two, one, first))

    def _add(self, layer: Layer) -> None:
        keys = {entry.key for entry in layer}
        settings = [entry for entry in layer if not self._is_choice(entry) and not _says_again(entry, keys)]
        for entry in layer:
            if self._is_choice(entry):
                self._try(self._choose, entry)
        entries: dict[str, DefaultsEntry] = {}
        for entry in settings:
            for key, value in self._try(self._names, entry.key, entry) or []:
                other = entries.get(key)
                if other is not None and other.key != entry.key and not self._agree(key, other.value, value):
                    self.problems.append(_contradiction(other, entry, key))
                entries[key] = DefaultsEntry(entry.key, value, entry.source)
                newer = self.origin.get(key) if entry.key != key else None
                if newer is not None and newer.source == entry.source and not self._agree(key, newer.value, value):
                    notice(
                        newer.key, f"{entry.key}={value} counts, and not {newer.value}, which the same tree holds here"
                    )
                self._put(key, value, entry)

    def _imply(self) -> None:
        for item in implied(self.values, self._usual):
            notice(item.source, item.why)
            self.values[item.key], self.origin[item.key] = item.value, self.origin[item.source]

    def _usual(self, key: str) -> Any:
        leaf = self.schema.leaves.get(key)
        return leaf.default if leaf is not None else None

    def _try(self, step: Any, *args: Any) -> Any:
        try:
            return step(*args)
        except ConfigError as error:
            self.problems.append(error)
            return None

    # ---- group choices -----------------------------------------------------------------------------------------------

    def _is_choice(self, entry: DefaultsEntry) -> bool:
        is_group = entry.key == self.program.engine_group or is_role(self.program, entry.key)
        is_section = is_group or self.schema.is_section(entry.key)
        return is_section and isinstance(entry.value, str) and not entry.delete

    def _choose(self, entry: DefaultsEntry) -> None:
        settings = choose(self.program, entry.key, entry.value)
        if settings is None:
            raise self._not_a_section(entry.key, entry.value)
        for key, value in settings:
            self._put(key, value, entry)

    # ---- names -------------------------------------------------------------------------------------------------------

    def _names(self, key: str, entry: DefaultsEntry, value: Any = ...) -> list[tuple[str, Any]]:
        """The current keys that one entry sets, with their values."""
        value = entry.value if value is ... else value
        if self.schema.split(key) is not None:
            return [(key, value)]
        if self.schema.is_section(key):
            return self._section(key, entry, value)
        if key.rpartition(".")[2] in _NOTES:
            return self._note(key, value)
        tables = self.program.aliases
        heads = {name: longest_prefix(key, table) or "" for name, table in vars(tables).items()}
        kind = max(heads, key=lambda name: len(heads[name]))
        head = heads[kind]
        if not head:
            return self._unknown(key, entry, value)
        if kind == "moved":
            return self._moved(key, head, entry, value)
        if value is not None and kind == "removed":
            raise ConfigError("no longer exists", key=head, got=value, fix=_sentence(tables.removed[head]))
        if value is not None:
            notice(head, tables.ignored[head])
        return []

    def _section(self, key: str, entry: DefaultsEntry, value: Any) -> list[tuple[str, Any]]:
        if entry.delete:
            return [(leaf, None) for leaf in self.schema.every if leaf.startswith(f"{key}.")]
        if value is None and entry.source:
            return []
        if not isinstance(value, dict):
            raise self._not_a_section(key, value)
        return [pair for name, inner in value.items() for pair in self._names(f"{key}.{name}", entry, inner)]

    def _moved(self, key: str, head: str, entry: DefaultsEntry, value: Any) -> list[tuple[str, Any]]:
        moved, targets = self.program.aliases.moved[head], []
        if moved.convert is not None and value is not None:
            value = moved.convert(value)
        for target in moved.targets:
            for name, inner in self._names(target + key[len(head) :], entry, value):
                leaf, inside = self.schema.split(name) or (None, "")
                is_default = inner is None and not entry.delete and leaf is not None and not inside
                if is_default and (entry.source or (leaf is not None and not _nullable(leaf))):
                    continue  # null in a file is the default of an old key, not a value of the new one
                targets.append((name, inner))
        if targets and not moved.silent:
            notice(key, f"is now called {' and '.join(name for name, _ in targets)}")
        return targets

    def _note(self, key: str, value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, str) or value.startswith("verl."):
            return []
        fix = "Remove it; dataset, loop and manager classes of your own have settings of their own (see --help)."
        raise ConfigError("a section's class cannot be replaced", key=key, got=value, fix=fix)

    def _unknown(self, key: str, entry: DefaultsEntry, value: Any) -> list[tuple[str, Any]]:
        if entry.source and key in self._referenced:
            self.variables[key] = entry.value
            return []
        self._strangers.append((key, DefaultsEntry(entry.key, value, entry.source)))
        return []

    def _not_a_section(self, key: str, value: Any) -> ConfigError:
        return ConfigError(
            "is a section, not a setting",
            key=key,
            got=value,
            fix=f"Set what is in it: {', '.join(self.schema.names_in(key)[:8])}, ...",
        )

    # ---- values ------------------------------------------------------------------------------------------------------

    def _put(self, key: str, value: Any, entry: DefaultsEntry) -> None:
        leaf, inside = self.schema.split(key) or (None, "")
        assert leaf is not None, key
        if entry.delete:
            _remove(self.values, leaf.key, inside)
            if leaf.key not in self.values:
                self.origin.pop(leaf.key, None)
            return
        self.origin[leaf.key] = entry
        if inside or (holds_mapping(leaf.type) and isinstance(value, dict)):
            for name in reversed(inside.split(".") if inside else []):
                value = {name: value}
            current = self.values.get(leaf.key, leaf.default)
            value = _deep(current, value) if isinstance(current, dict) else value
        self.values[leaf.key] = value

    def _agree(self, key: str, a: Any, b: Any) -> bool:
        leaf, inside = self.schema.split(key) or (None, "")
        if leaf is None or inside:
            return a == b
        try:
            return convert(a, leaf.type) == convert(b, leaf.type)
        except TypeError:
            return a == b

    def _without_lora_switch(self, layers: list[Layer]) -> list[Layer]:
        """``actor.lora.enabled`` decides whether the rest of that old section counts."""
        switches = [entry for layer in layers for entry in layer if entry.key == f"{_LORA}.enabled"]
        if not switches:
            return layers
        last = switches[-1]
        if str(last.value).lower() in ("false", "none"):
            return [[entry for entry in layer if not entry.key.startswith(f"{_LORA}.")] for layer in layers]
        ranks = (f"{_LORA}.r", "actor_rollout_ref.model.lora_rank")
        if not any(entry.key in ranks for layer in layers for entry in layer):
            fix = "Set actor_rollout_ref.model.lora_rank, e.g. to 16; a rank of 0 switches LoRA off."
            self.problems.append(ConfigError("LoRA needs a rank", key=last.key, got=last.value, fix=fix))
        return [[entry for entry in layer if entry.key != f"{_LORA}.enabled"] for layer in layers]


def where(entry: DefaultsEntry) -> str:
    """The file an entry stands in, for a message; nothing for the command line."""
    return f" (in {entry.source})" if entry.source else ""


def _contradiction(first: DefaultsEntry, second: DefaultsEntry, key: str) -> ConfigError:
    return ConfigError(
        f"two values for one setting{where(second)}: {first.key}={first.value} and {second.key}={second.value}",
        key=key,
        fix=f"Keep {key} and remove the other spelling.",
    )


def _says_again(entry: DefaultsEntry, keys: set[str]) -> bool:
    """Whether a file gives FSDP as the engine of an FSDP section next to the role's choice, as upstream's tree does."""
    role = ENGINE_STRATEGIES.get(entry.key)
    is_usual = entry.value in ("fsdp", "fsdp2") or str(entry.value).endswith(".strategy}")
    return bool(entry.source) and role in keys and is_usual


def _reference(key: str) -> str:
    return f"${{{key}}}"


def _nullable(leaf: Leaf) -> bool:
    try:
        return convert(None, leaf.type) is None
    except TypeError:
        return False


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _references(layers: list[Layer]) -> set[str]:
    text = repr([entry.value for layer in layers for entry in layer])
    return set(re.findall(r"\$\{([\w.]+)\}", text))


def _deep(current: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _deep(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _remove(values: dict[str, Any], key: str, inside: str) -> None:
    if not inside or not isinstance(values.get(key), dict):
        values.pop(key, None)
        return
    head, _, rest = inside.partition(".")
    inner = dict(values[key])
    _remove(inner, head, rest)
    values[key] = inner
