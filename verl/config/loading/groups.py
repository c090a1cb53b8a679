"""Programs by name, the group choices (``model_engine=megatron``) that stand for a few settings each, and ``--help``.

Upstream composes its tree from groups; here the tree is whole, so a choice that means our default changes nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from verl.config.loading.aliases import EVALUATION_ALIASES, GENERATION_ALIASES, PPO_ALIASES, SFT_ALIASES, Aliases
from verl.config.schema.node import ConfigNode, Leaf, schema_of
from verl.errors import ConfigError, suggest

_ENGINES = ("dp", "fsdp", "fsdp2", "megatron", "torchtitan", "veomni", "automodel", "mlite")
_ROLES = {
    "actor": "actor_rollout_ref.actor.strategy",
    "ref": "actor_rollout_ref.ref.strategy",
    "critic": "critic.strategy",
}
_OUR_DEFAULTS = (
    "rollout", "hf_model", "data", "legacy_data", "reward", "reward_manager", "rollout_correction", "reward_loop",
    "legacy_reward_impl", "distillation", "transfer_queue", "profiler", "rollout_skip", "dp_reward_model",
    "dp_reward_loop", "prometheus", "npu_profile",
)  # fmt: skip


COMPOSED_ENGINE = "fsdp"
"""What a tree that Hydra composes of the library's files calls ``auto``: code of recipes knows upstream's names alone."""


def is_role(program: Program, key: str) -> bool:
    """Whether a group of upstream's tree chooses the engine of a role."""
    return program.name == PPO.name and key in _ROLES


@dataclass(frozen=True)
class Program:
    """What one entry point reads: its tree, its old spellings, and the choices that stand for settings.

    Args:
        tree: the root class of its settings, or module and name of that class, which is imported where it is read.
    """

    name: str
    tree: str | type[ConfigNode]
    aliases: Aliases
    engine_group: str
    strategies: tuple[str, ...]
    neutral_groups: tuple[str, ...] = ()

    @property
    def root(self) -> type[ConfigNode]:
        """The root class of its settings."""
        if not isinstance(self.tree, str):
            return self.tree
        module, _, name = self.tree.partition(":")
        return vars(importlib.import_module(f"verl.config.schema.{module}"))[name]


PPO = Program("ppo_trainer", "root:PPOTrainerConfig", PPO_ALIASES, "model_engine", tuple(_ROLES.values()))
GENERATION = Program("generation", "generation:GenerationConfig", GENERATION_ALIASES, "model_engine", ())
EVALUATION = Program("evaluation", "generation:EvaluationConfig", EVALUATION_ALIASES, "model_engine", ())
SFT = Program("sft_trainer", "sft:SFTTrainerConfig", SFT_ALIASES, "engine", ("engine.strategy",), ("optim", "model"))
DPO = Program("dpo_trainer", "sft:DPOTrainerConfig", SFT_ALIASES, "engine", ("engine.strategy",), ("optim", "model"))
RM = Program("rm_trainer", "sft:RMTrainerConfig", SFT_ALIASES, "engine", ("engine.strategy",), ("optim", "model"))

NAMES: dict[str, tuple[Program, str]] = {
    "ppo_trainer": (PPO, "dp"),
    "ppo_megatron_trainer": (PPO, "megatron"),
    "sft_trainer": (SFT, "dp"),
    "dpo_trainer": (DPO, "dp"),
    "rm_trainer": (RM, "dp"),
    "generation": (GENERATION, "dp"),
    "evaluation": (EVALUATION, "dp"),
    "sft_trainer_engine": (SFT, "dp"),
}
"""Configuration names, upstream's included: the program and the engine each one means."""


def program_of(name: str) -> tuple[Program, str]:
    """The program behind a configuration name, and its engine choice."""
    if name not in NAMES:
        raise ConfigError("unknown configuration", got=name, allowed=list(NAMES), fix=suggest(name, NAMES))
    return NAMES[name]


def choose(program: Program, group: str, option: str) -> list[tuple[str, str]] | None:
    """The settings that a group choice stands for; None if it is no choice of this program."""
    if group == program.engine_group:
        if option not in _ENGINES:
            raise ConfigError(
                "unknown engine", key=group, got=option, allowed=list(_ENGINES), fix=suggest(option, _ENGINES)
            )
        return [] if option == "dp" else [(key, option) for key in program.strategies]
    if group in program.neutral_groups and option in (*_ENGINES, *_OUR_DEFAULTS):
        return []
    group = group.rpartition(".")[2] if group.startswith("actor_rollout_ref.") else group
    engine = option.removesuffix(f"_{group}")
    if program.name == PPO.name and group in _ROLES and engine in (*_ENGINES, "${model_engine}"):
        return [] if engine in ("dp", "${model_engine}") else [(_ROLES[group], engine)]
    return [] if option in _OUR_DEFAULTS else None


def usage(program: Program) -> str:
    """The help text of a program."""
    schema = schema_of(program.root)
    built = [leaf for leaf in schema.leaves.values() if leaf.planned is None]
    lines = [
        "Settings are given as key=value; lists as key=[a,b]; ~key resets one to its default.",
        "",
        "  --config-path DIR --config-name NAME   a YAML file over the defaults (the command line wins over it)",
        "  --cfg job                              print the resolved configuration and leave",
        "  --help                                 print this and leave",
        "",
        *(line(leaf) for leaf in built),
        "",
        f"{len(schema.every) - len(built)} more settings are known and belong to features that are not built yet.",
    ]
    return "\n".join(lines) + "\n"


def line(leaf: Leaf) -> str:
    """A setting with its default, meaning and choices."""
    value = "null" if leaf.default is None else str(leaf.default)
    choices = f" ({', '.join(str(choice) for choice in leaf.choices)})" if leaf.choices else ""
    return f"{leaf.key}={value}  {leaf.meaning}{choices}"
