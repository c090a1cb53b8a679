"""``--dry-run``: what is checked before a run, and where it would run; nothing starts, nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.api.methods import Method
from verl.api.start import look_of
from verl.config import load_config
from verl.trainer.command import run_program


def check_run(method: Method, words: Sequence[str]) -> int:
    """Check the settings, the first rows of the data and this machine; returns the exit status."""
    return run_program(lambda: print("\n".join(_lines(method, words))))


def _lines(method: Method, words: Sequence[str]) -> list[str]:
    config: Any = load_config(method.configuration, [*words], look_of(method), defaults=method.defaults)
    lines = [f"{key}: {value}" for key, value in _facts(method, config).items()]
    if method.configuration == "ppo_trainer":
        from verl.config.machine.topology import Topology, added_roles

        lines += str(Topology.of(config, added_roles(config))).splitlines()
    return [*lines, "Settings, data files and this machine agree: the run can start."]


def _facts(method: Method, config: Any) -> dict[str, Any]:
    policy = config.actor_rollout_ref if method.configuration == "ppo_trainer" else config
    trainer = config.trainer
    length = (
        f"{trainer.total_training_steps} steps" if trainer.total_training_steps else f"{trainer.total_epochs} epochs"
    )
    return {
        "model": policy.model.path,
        "training data": config.data.train_files,
        "validation data": config.data.val_files,
        "length": length,
    }
