"""The judges of a run: their servers, the GPUs of these, and their address in the configuration of those who score.

They live on the controller's machine, where reward functions run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from verl import device as devices
from verl.agent_loop.judges import KEY, Judges
from verl.config import PPOTrainerConfig, replace
from verl.config.schema.root import starts_judges
from verl.errors import ConfigError, NotBuiltError
from verl.protocol import DataProto
from verl.trainer.placement import topology_of
from verl.workers.scoring import judge_tokenizer

Reward = Callable[[DataProto], dict[str, Any]]
"""Scores samples."""


def judges_of(config: PPOTrainerConfig) -> Judges | None:
    """The judges that a run starts, whose address is known; None where it starts none."""
    if not starts_judges(config):
        return None
    model = config.reward.reward_model
    return Judges(model, lambda: judge_tokenizer(model), config.trainer.hang_seconds)


def with_address(config: PPOTrainerConfig, judges: Judges | None) -> PPOTrainerConfig:
    """The configuration of those who score; the run's configuration, which trackers and files get, has no address."""
    if judges is None:
        return config
    return replace(config, **{f"{KEY}.rollout.server.url": f"http://{judges.address}"})


class JudgedReward:
    """A reward manager that raises `EngineLostError` once its judge was given up: what that did not score is masked."""

    def __init__(self, manager: Reward, judges: Judges):
        self._manager, self._judges = manager, judges
        self.label = getattr(manager, "label", type(manager).__name__)

    def __call__(self, samples: DataProto) -> dict[str, object]:
        scored = self._manager(samples)
        self._judges.check()
        return scored


def start_judges(judges: Judges, config: PPOTrainerConfig, device: str) -> None:
    """Start the servers of a run and return once they answer.

    Raises:
        ConfigError: the machine has too few GPUs.
        NotBuiltError: another accelerator.
        EngineLostError: a server did not come up.
    """
    if device not in ("cpu", "cuda"):
        message, fix = "servers of a judge on this device", f"Start one yourself and set {KEY}.rollout.name=server."
        raise NotBuiltError(message, key="trainer.device", got=device, allowed=["cpu", "cuda"], fix=fix)
    judges.start(device, [] if device == "cpu" else gpus_of_judges(config, judges.count, judges.resources))


def gpus_of_judges(config: PPOTrainerConfig, count: int, resources: ExitStack) -> list[str]:
    """The GPUs of each server, as CUDA_VISIBLE_DEVICES names them.

    With ``enable_resource_pool`` they are those that the workers do not have: on Ray it reserves them on this machine.
    Without, servers share the first ones with the workers.

    Args:
        resources: its closing gives back what was reserved.

    Raises:
        ConfigError: the machine has too few, or all are in use.
    """
    model = config.reward.reward_model
    each, topology = model.rollout.tensor_model_parallel_size, topology_of(config)
    if model.enable_resource_pool and topology.runtime == "ray":
        from verl.single_controller.ray.reserved import reserve_gpus  # loads Ray

        seconds = config.trainer.ray_wait_register_center_timeout
        reserved = reserve_gpus(count * each, f"{KEY}.n_gpus_per_node", seconds)
        resources.callback(reserved.release)
        names = reserved.names
    else:
        names = devices.visible_gpus()
        first = topology.processes if model.enable_resource_pool else 0
        if len(names) < first + count * each:
            raise ConfigError(
                f"{count} server(s) of {each} GPU(s) each do not fit: {first} are the workers'",
                key=f"{KEY}.n_gpus_per_node" if first else f"{KEY}.rollout.data_parallel_size",
                allowed=f"{len(names)} GPU(s) in all",
                fix="Make it smaller.",
            )
        names = names[first:]
    return [",".join(names[number * each : (number + 1) * each]) for number in range(count)]
