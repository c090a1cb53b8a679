"""Many problems as one message that a person reads to its end, and what is said of features that are not built.

What decides comes first and alone, a feature is one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from verl import registry
from verl.config.schema.leaves import Leaf
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

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
    fix = f"{switch.fix} The same goes for {others}."
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
    "a command after profiling": "Leave it out; recordings lie in global_profiler.save_path.",
    "chat templates by function": "Set actor_rollout_ref.model.custom_chat_template, or a class with its own "
    "build_messages as data.custom_cls.",
    "replay of rollouts by the transfer queue's trainer": "Set skip.rollout, with the same settings.",
    "replay of rollouts by the asynchronous trainer": "Set skip.rollout, with the same settings.",
    "a sampler of batches of your own": "Leave it out; trainer.v1.trainer_mode takes a schedule of your own.",
    "moving devices between sampling and training": "Leave it out; trainer and rollout pools keep their sizes.",
    "validation by samplers of the trainers": "Leave it out: the samplers validate.",
}
"""What works today, by the feature that is missing."""


ROLLOUT_ENGINES = ("actor_rollout_ref.rollout.name", "rollout.name")
"""The setting on which it depends whether some others are followed, as the programs call it."""


def for_engine(leaf: Leaf, engine: Any) -> Leaf:
    """The leaf as it is with this rollout engine: one that the engine follows is neither refused nor without effect."""
    return replace(leaf, planned=None, no_effect=None) if engine in leaf.engines else leaf


def check_choices(leaf: Leaf, value: Any) -> ConfigError | None:
    """An error if the value, or an element of a list, is outside the declared set."""
    if leaf.choices is None or value is None:
        return None
    wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in leaf.choices]
    if not wrong:
        return None
    return ConfigError("no such choice", key=leaf.key, got=wrong[0], allowed=list(leaf.choices))


def check_built(leaf: Leaf, value: Any, usual: list[Any]) -> ConfigError | None:
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


def tell_no_effect(leaf: Leaf, value: Any, usual: list[Any], on_command_line: bool) -> None:
    """One notice for a setting that changes nothing; a file may repeat what the leaf would be anyway, unremarked."""
    if leaf.no_effect is not None and (on_command_line or value not in usual):
        notice(leaf.key, f"has no effect: {leaf.no_effect}")
