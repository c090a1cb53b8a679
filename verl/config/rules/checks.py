"""What settings must be together, as data: a row says when it speaks, about which setting, and what to change.

A row belongs to the class of a section and is judged wherever that section stands; one that compares sections belongs
to the class of a program. Its texts are filled in with settings of the section by name (``{lr}``,
``{data.train_batch_size}``), ``{key}`` (the full key of the setting), ``{got}`` (its value) and ``{at}`` (the section).
What one setting may be by itself (``within``) and what it has no effect without (``needs``) stand at its declaration. A check
is a function that returns problems, each one line that says what to change.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from verl import env, registry
from verl.config.schema.node import ConfigNode, Leaf, follows_another, schema_of, was_typed
from verl.config.schema.root import PPOTrainerConfig, uses_critic
from verl.config.schema.tree import in_range
from verl.errors import ConfigError, NotBuiltError, suggest
from verl.metrics import notice
from verl.registry import Registry

LARGEST_SEED = 2**32 - 1  # of numpy's generators
Problems = list[ConfigError]
Check = Callable[[Any], Problems]


def collect(rules: Iterable[Check], cfg: ConfigNode) -> None:
    """Run every rule and raise all problems together; a single one is raised as it is."""
    problems = [problem for rule in (*rules, _seeds) for problem in rule(cfg)]
    raise_all([problem for problem in problems if not _is_echo(problem, problems, cfg)])


def _seeds(cfg: Any) -> Problems:
    """Numbers that every generator takes, also with a step or a rank added to them."""
    problems: Problems = []
    for key in schema_of(type(cfg)).leaves:
        if key.endswith("seed"):
            seed = reduce(lambda node, name: node[name], key.split("."), cfg)
            problems += in_range(key, seed, f"0 to {LARGEST_SEED}", seed is None or 0 <= seed <= LARGEST_SEED)
    return problems


def _is_echo(problem: ConfigError, problems: Problems, cfg: Any) -> bool:
    """The same problem at a setting that only follows the one where it was made."""
    leaf = schema_of(type(cfg)).leaves.get(str(problem.key))
    if leaf is None or leaf.follows is None:
        return False
    return any(other.key == leaf.follows and other.got == problem.got for other in problems)


def caught(check: Callable[..., Any], *arguments: Any) -> Problems:
    """The error that a check raises, as a list."""
    try:
        check(*arguments)
    except ConfigError as error:
        return [error]
    return []


def known_name(registry: Registry, key: str, name: str, instead: str) -> Problems:
    """A name that the registry does not have; ``instead`` is what to write where it is known but not built yet."""
    problems = caught(registry.check, name)
    return [
        type(error)(
            error.message,
            key=key,
            got=name,
            allowed=error.allowed,
            fix=instead if isinstance(error, NotBuiltError) else error.fix,
        )
        for error in problems
    ]


def divisors_of(number: int) -> list[int]:
    """The sizes into which a number of processes, heads or layers can be cut."""
    return [size for size in range(1, number + 1) if number % size == 0]


def uneven(key: str, size: int, count: object, what: str, parts: str = "processes") -> Problems:
    """A refusal unless what a model has (heads, layers, experts) divides evenly; none where its number is not known."""
    if not isinstance(count, int) or count < 1 or count % size == 0:
        return []
    message = f"the model's {count} {what} cannot be split evenly over {size} {parts}"
    return [ConfigError(message, key=key, got=size, allowed=divisors_of(count), fix="Set it to one of these.")]


def is_remote(path: str) -> bool:
    """A URL of any kind, which is not looked up here."""
    return "://" in path


def missing_files(key: str, files: Any, hint: str = "") -> Problems:
    """Local paths of a file setting that are no files, each with the nearest names in its folder."""
    problems: Problems = []
    for name in [files] if isinstance(files, str) else list(files or []):
        path = Path(env.expand(name))
        if is_remote(name) or (name and path.is_file()):
            continue
        problems.append(_no_file(key, name, path, hint))
    return problems


def _no_file(key: str, name: str, path: Path, hint: str) -> ConfigError:
    if not name:
        return ConfigError("an empty path", key=key, got=name, fix=hint or "Name a file.")
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_file())
        fix = f"It holds: {', '.join(inside[:8])}." if inside else "It holds no file."
        return ConfigError("this is a folder; name the files in it", key=key, got=name, fix=fix)
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else None
    near = f"The folder {str(path.parent)!r} does not exist either." if names is None else suggest(path.name, names)
    return ConfigError("no such file", key=key, got=name, fix=f"{near} {hint}".strip())


def missing_folder(key: str, path: str) -> Problems:
    """A local path that is no folder, with the nearest names in its folder."""
    folder = Path(env.expand(path))
    if is_remote(path) or folder.is_dir():
        return []
    names = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
    return [ConfigError("no such folder", key=key, got=path, fix=suggest(folder.name, names))]


def looks_local(path: str) -> bool:
    """A path of this machine rather than a name on a hub."""
    return path.startswith(("/", ".", "~", "$")) or Path(path).exists() or path.count("/") > 1


def bad_model_folder(key: str, path: str, hint: str = "") -> Problems:
    """A path that looks local must be a folder with a config.json; hub names pass unseen."""
    if is_remote(path) or not looks_local(path):
        return []
    folder = Path(env.expand(path))
    missing = missing_folder(key, path)
    if missing:
        fix = f"{missing[0].fix} {hint}".strip()
        return [ConfigError("no such model folder", key=key, got=path, fix=fix)]
    if not (folder / "config.json").exists():
        message = "this folder is not a Hugging Face model: it has no config.json"
        return [ConfigError(message, key=key, got=path, fix=hint)]
    return []


ELSEWHERE = {"volcengine_ml_platform": "Install volcengine_ml_platform from Volcengine's index"}
"""Packages that PyPI does not have; there, the name is free for anybody's code."""


def missing_package(key: str, name: str, package: str) -> Problems:
    """A named thing whose package is not installed."""
    if importlib.util.find_spec(package) is not None:
        return []
    return [
        ConfigError(
            f"{name!r} needs the package {package!r}, which is not installed",
            key=key,
            fix=f"{ELSEWHERE.get(package, f'pip install {package}')}, or take {name!r} out of {key}.",
        )
    ]


Text = str | Callable[[Any], str]
NOTICE = "notice"
_OFF: tuple[Any, ...] = (None, False, "", 0, -1, [], {})
_USES = {"critic": uses_critic, "reward.reward_model": lambda cfg: cfg.reward.reward_model.enable}
"""Sections of an RL run whose settings are judged only where it uses them."""


@dataclass(frozen=True)
class Rule:
    """One row.

    Args:
        name: of the setting at fault, below the section; a function of the section where it is one of several.
        says: what is wrong, or why the setting has no effect; a function of the section where numbers are computed.
        when: of the section: whether the row speaks.
        fix, allowed: see `verl.errors.VerlError`.
        kind: `ConfigError`, `NotBuiltError`, or `NOTICE`.
        shows: whether an error shows the value.
    """

    name: Text
    says: Text
    when: Callable[[Any], Any]
    fix: Text = ""
    allowed: Any = None
    kind: type[ConfigError] | str = ConfigError
    shows: bool = True


Table = Mapping[type, tuple[Rule, ...]]


class _Words(dict[str, Any]):
    """What a text is filled in with."""

    def __init__(self, node: Any, at: str, name: Text):
        name = name(node) if callable(name) else name
        key = f"{at}.{name}".removeprefix(".")
        super().__init__(at=at, key=key, got=value_at(node, name))
        self.node = node

    def __missing__(self, name: str) -> Any:
        return self.node[name]

    def fill(self, text: object) -> Any:
        if callable(text):
            return text(self.node)
        return text.format_map(self) if isinstance(text, str) else text


def value_at(node: Any, key: str) -> Any:
    """The value of a setting by its dotted name below a section."""
    return reduce(lambda section, name: section[name], key.split("."), node) if key else node


def problems_of_rows(table: Table) -> Callable[[Any], list[ConfigError]]:
    """A rule of the validation: every error of the rows."""
    return lambda cfg: [_error(row, words) for row, words in _speaking(table, cfg) if row.kind != NOTICE]


def tell(table: Table, cfg: ConfigNode) -> None:
    """Every notice of the rows."""
    for row, words in _speaking(table, cfg):
        if row.kind == NOTICE:
            notice(words["key"], words.fill(row.says))


def out_of_bounds(cfg: ConfigNode) -> list[ConfigError]:
    """Settings that are by themselves not what they may be."""
    leaves = schema_of(type(cfg)).leaves.items()
    bounded = [(key, leaf) for key, leaf in leaves if leaf.within and _is_used(cfg, key)]
    return [
        problem for key, leaf in bounded for bound in leaf.within for problem in bound.problems(key, value_at(cfg, key))
    ]


def tell_without_effect(cfg: ConfigNode) -> None:
    """A notice of every changed setting whose switch is off."""
    for key, leaf in schema_of(type(cfg)).leaves.items():
        if leaf.needs and _is_changed(cfg, leaf) and _is_used(cfg, key) and not _is_on(cfg, leaf.needs):
            notice(key, f"has no effect without {leaf.needs}")


def _speaking(table: Table, cfg: Any) -> Iterator[tuple[Rule, _Words]]:
    for at, cls in {"": type(cfg), **schema_of(type(cfg)).sections}.items():
        rows = [row for owner, of_owner in table.items() if issubclass(cls, owner) for row in of_owner]
        if rows and _is_used(cfg, at):
            node = value_at(cfg, at)
            yield from ((row, _Words(node, at, row.name)) for row in rows if row.when(node))


def _error(row: Rule, words: _Words) -> ConfigError:
    assert not isinstance(row.kind, str)
    got = words["got"] if row.shows else None
    return row.kind(
        words.fill(row.says), key=words["key"], got=got, allowed=words.fill(row.allowed), fix=words.fill(row.fix)
    )


def _is_used(cfg: Any, key: str) -> bool:
    if not isinstance(cfg, PPOTrainerConfig):
        return True
    return all(uses(cfg) for section, uses in _USES.items() if f"{key}.".startswith(f"{section}."))


def _is_changed(cfg: Any, leaf: Leaf) -> bool:
    """Typed, or not the default; null says nothing, and a path is expanded, so it never looks like its default."""
    section, _, name = leaf.key.rpartition(".")
    node = value_at(cfg, section)
    if node[name] is None or was_typed(node, name):
        return node[name] is not None
    return leaf.follows is None and not (leaf.path and leaf.default) and node[name] != leaf.default


def _is_on(cfg: Any, switch: str) -> bool:
    key, _, values = switch.partition("=")
    value = value_at(cfg, key.partition(",")[0])
    return str(value).lower() in re.split(", | or ", values.lower()) if values else value not in _OFF


def tell_names(section: str, names: list[str], why: str) -> None:
    """One notice for settings of a section that have no effect."""
    if names:
        others = f"; nor have {', '.join(names[1:])}" if names[1:] else ""
        notice(f"{section}.{names[0]}", why + others)


def set_names(node: ConfigNode) -> list[str]:
    """Leaves of a section and of those in it that are set: typed, or not the default and following nothing."""
    usual, names = type(node)(), []
    for name, field in type(node).__dataclass_fields__.items():
        if field.metadata.get("section") is not None:
            names += [f"{name}.{inner}" for inner in set_names(node[name])]
        elif was_typed(node, name) or (node[name] != usual[name] and not follows_another(node, name)):
            names.append(name)
    return names


MOST = 12
"""Problems that one message lists; the number of the others is said."""
_SWITCHES = ("enable", "enabled", "name", "strategy")
"""Last names of settings that switch a feature on: the best one to name it by."""
_ENGINE = (registry.ENGINES, "Leave it out (auto) to train on one device, and with it the settings of that engine.")
_SCHEDULE = (registry.SCHEDULES, "Leave it out to sample and train in turn.")
_DEVICE = "trainer.device"
CHOICES = {
    "actor_rollout_ref.actor.strategy": _ENGINE,
    "engine.strategy": _ENGINE,
    "actor_rollout_ref.rollout.name": (registry.SAMPLERS, "Set actor_rollout_ref.rollout.name=hf."),
    "rollout.name": (registry.SAMPLERS, "Set rollout.name=hf."),
    "trainer.v1.trainer_mode": _SCHEDULE,
}
"""Settings that decide which code a run is, with the names there are and what to do without: where one is not built,
nothing else matters."""


def raise_all(problems: Iterable[ConfigError]) -> None:
    """Nothing, the one error, or one error with a line for each; a NotBuiltError if every one of them is.

    Where an engine, a sampler or a schedule is not built, the message holds that alone, and how much else there is.
    """
    unique = list({str(problem): problem for problem in problems}.values())
    if not unique:
        return
    deciding = [problem for problem in unique if is_deciding(problem)]
    shown = (deciding or _by_feature(unique))[:MOST]
    left = len(unique) - len(shown) if deciding else len(_by_feature(unique)) - len(shown)
    if len(shown) == 1 and not left:
        raise shown[0]
    kind = NotBuiltError if all(isinstance(problem, NotBuiltError) for problem in deciding or unique) else ConfigError
    error = kind("\n".join(_lines(shown, left, bool(deciding))))
    error.problems = tuple(unique)
    raise error


def is_deciding(problem: ConfigError) -> bool:
    """Whether it says that the engine, sampler or schedule of a run is not built."""
    return isinstance(problem, NotBuiltError) and problem.key in (*CHOICES, _DEVICE)


def not_built_choices(values: Mapping[str, Any]) -> list[NotBuiltError]:
    """Engines, samplers and schedules that are known and not built.

    Args:
        values: of every setting of a program, by key.
    """
    problems = []
    for key, (names, fix) in CHOICES.items():
        name = values.get(key)
        if name in names.planned():
            message = f"the {names.kind} {name!r} is not built yet"
            problems.append(NotBuiltError(message, key=key, got=name, allowed=names.names(), fix=fix))
    if str(values.get(_DEVICE)).startswith("npu"):
        fix = "Set trainer.device=cuda, or leave it out to take what there is."
        message = "Ascend NPUs are not built yet"
        problems.append(NotBuiltError(message, key=_DEVICE, got=values[_DEVICE], allowed="cpu, cuda", fix=fix))
    return problems


def _lines(shown: list[ConfigError], left: int, decided: bool) -> list[str]:
    others = f"{left} more problem{'s' if left > 1 else ''}"
    if decided and len(shown) == 1:
        return [str(shown[0]), f"({others} of these settings may go with it.)"]
    head = "This cannot run:" if decided else f"{len(shown) + left} settings cannot stand:"
    tail = "may go with them" if decided else f"{'are' if left > 1 else 'is'} not listed"
    return [head, *(f"  - {problem}" for problem in shown), *([f"  ({others} {tail}.)"] if left else [])]


def _by_feature(problems: list[ConfigError]) -> list[ConfigError]:
    """The settings of a feature that is not built as one problem, at the place of the first."""
    rows: dict[object, list[ConfigError]] = {}
    for problem in problems:
        feature = problem.feature if isinstance(problem, NotBuiltError) else ""
        rows.setdefault(feature or id(problem), []).append(problem)
    return [_together(row) for row in rows.values()]


def _together(problems: list[ConfigError]) -> ConfigError:
    """One of them, that which switches the feature on where there is one, with the number of the others."""
    switch = next((problem for problem in problems if str(problem.key).rpartition(".")[2] in _SWITCHES), problems[0])
    if len(problems) == 1:
        return switch
    others = f"{len(problems) - 1} more setting{'s' if len(problems) > 2 else ''} of it"
    fix = f"{switch.fix} The same holds for {others}."
    return type(switch)(switch.message, key=switch.key, got=switch.got, allowed=switch.allowed, fix=fix)


INSTEAD: dict[str, str] = {
    "second factors of adapters that do not start at zero": "Leave it out: training starts exactly from the base.",
    "adapters of another dtype than the model's": "Leave it out: actor_rollout_ref.actor.megatron.dtype is that of both.",
    "adapters that the sampler shards": "Set actor_rollout_ref.rollout.engine_kwargs.vllm.fully_sharded_loras=true.",
    "a context-parallel size by row length": "Set context_parallel_size, which all rows share: Megatron-Core gives "
    "rows groups of their own only in Transformer Engine's attention.",
    "Megatron's settings of the Muon optimizer": "Set optimizer=Muon; override_optimizer_config takes momentum, nesterov, "
    "ns_steps, ns_coefficients, eps and adjust_lr_fn.",
    "profiling on Ascend": "Leave it out; global_profiler.tool=torch shows what the host does.",
    "the msprobe precision debugger": "Leave it out.",
    "a command after profiling": "Leave it out; recordings are in global_profiler.save_path.",
    "chat templates by function": "Set actor_rollout_ref.model.custom_chat_template, or a class with its own "
    "build_messages as data.custom_cls.",
    "replay of rollouts by the transfer queue's trainer": "Set skip.rollout, with the same settings.",
    "replay of rollouts by the asynchronous trainer": "Set skip.rollout, with the same settings.",
    "a sampler of batches of your own": "Leave it out; trainer.v1.trainer_mode takes a schedule of your own.",
    "moving devices between sampling and training": "Leave it out; trainer and rollout pools keep their sizes.",
    "the Prometheus endpoint": "Leave it out: servers that actor_rollout_ref.rollout.server.url names answer /metrics "
    "themselves (SGLang with --enable-metrics), and trainer.logger=[console,file,prometheus] serves the run's metrics.",
    "validation by samplers of the trainers": "Leave it out: the samplers validate.",
}
"""What works today, by the feature that is missing."""


ROLLOUT_ENGINES = ("actor_rollout_ref.rollout.name", "rollout.name")
"""The setting on which it depends whether some others are followed, as the programs call it."""


def for_engine(leaf: Leaf, engine: object) -> Leaf:
    """The leaf as it is with this rollout engine: one that the engine follows is neither refused nor without effect."""
    return replace(leaf, planned=None, no_effect=None) if engine in leaf.engines else leaf


def check_choices(leaf: Leaf, value: object) -> ConfigError | None:
    """An error if the value, or an element of a list, is outside the declared set."""
    if leaf.choices is None or value is None:
        return None
    wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in leaf.choices]
    if not wrong:
        return None
    return ConfigError("no such choice", key=leaf.key, got=wrong[0], allowed=list(leaf.choices))


def check_built(leaf: Leaf, value: object, usual: list[Any]) -> ConfigError | None:
    """An error that names the feature, unless the value is what the leaf would be anyway."""
    if leaf.planned is None or value in usual:
        return None
    default, engines = usual[0], " or ".join(leaf.engines)
    above = leaf.key.partition("rollout.")[0]
    problem = NotBuiltError(
        f"not built for this sampler: {leaf.planned}" if engines else f"not built yet: {leaf.planned}",
        key=leaf.key,
        got=value,
        allowed="null" if default is None else f"{default!r}",
        fix=f"It works with {above}rollout.name={engines}." if engines else INSTEAD.get(leaf.planned, "Leave it out."),
    )
    problem.feature = leaf.planned
    return problem


def tell_no_effect(leaf: Leaf, value: object, usual: list[Any], on_command_line: bool) -> None:
    """One notice for a setting that changes nothing; a file may repeat what the leaf would be anyway, unremarked."""
    if leaf.no_effect is not None and (on_command_line or value not in usual):
        notice(leaf.key, f"has no effect: {leaf.no_effect}")
