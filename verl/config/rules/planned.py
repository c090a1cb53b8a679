"""Settings that are known but not built yet, and settings without effect: their errors and notices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verl.config.schema.leaves import Leaf
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

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
