"""Rules about a run that torchrun starts: how many processes there are is its word, not the configuration's."""

from __future__ import annotations

from verl import env
from verl.config.rules.checks import Problems
from verl.config.schema.sft import SFTTrainerConfig
from verl.errors import ConfigError

_GPUS = "trainer.n_gpus_per_node"


def processes(cfg: SFTTrainerConfig) -> Problems:
    """More processes than were started, or a backend that has no use for them."""
    trainer, started = cfg.trainer, env.get_int("WORLD_SIZE", 1)
    needed = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    if needed > started:
        per_node = trainer.n_gpus_per_node or 1
        nodes = f"--nnodes={trainer.nnodes} " if trainer.nnodes > 1 else ""
        return [
            ConfigError(
                f"{needed} processes are requested, and {started} {'was' if started == 1 else 'were'} started",
                key=_GPUS if trainer.nnodes == 1 else "trainer.nnodes",
                got=per_node if trainer.nnodes == 1 else trainer.nnodes,
                fix=f"Start them with torchrun {nodes}--nproc_per_node={per_node} -m verl.trainer.sft_trainer ..., "
                "or leave it out.",
            )
        ]
    problems = _one_device_each(cfg)
    if problems:
        return problems
    if started > 1 and cfg.engine.strategy == "plain":
        return [
            ConfigError(
                f"the plain engine trains in one process, and {started} were started",
                key="engine.strategy",
                got="plain",
                fix="Leave it out, or set it to fsdp2.",
            )
        ]
    return []


def _one_device_each(cfg: SFTTrainerConfig) -> Problems:
    from verl import device  # torch is loaded only once there is something to validate

    here, kind = env.get_int("LOCAL_WORLD_SIZE", 1), device.resolve_device(cfg.trainer.device)
    there = here if kind == "cpu" else device.device_count(kind)
    if here <= there:
        return []
    return [
        ConfigError(
            f"torchrun started {here} processes on this machine, which has {there} GPU{'s' if there > 1 else ''}",
            key="--nproc_per_node",
            got=here,
            allowed=f"1 to {there}",
            fix="Or set trainer.device=cpu.",
        )
    ]
