"""Rules about the machine a run starts on: its devices, files, models and installed packages."""

from __future__ import annotations

from typing import Any

from verl import env, registry
from verl.config.checks import Problems, bad_model_folder, caught, in_range, known_name, missing_files, missing_package
from verl.config.node import ConfigNode
from verl.config.root import PPOTrainerConfig, uses_critic
from verl.config.sft import SFTTrainerConfig
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notice

_GPUS, _NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "swanlab": "swanlab"}
_MODEL_HINT = "Set it to a folder with a Hugging Face model, or to a name on the hub."


def trackers(cfg: Any) -> Problems:
    """Trackers that do not exist, or whose package is not installed."""
    key, found = "trainer.logger", []
    for name in cfg.trainer.logger:
        unknown = known_name(registry.TRACKERS, key, name, f"Take {name!r} out of {key}.")
        package = _PACKAGES.get(name)
        found += unknown or (missing_package(key, name, package) if package else [])
    return found


def hardware(cfg: PPOTrainerConfig) -> Problems:
    """More GPUs than exist, a device that is not there, more processes than one."""
    return _devices(cfg.trainer) or _processes(cfg.trainer, cfg.trainer.runtime)


def sft_hardware(cfg: SFTTrainerConfig) -> Problems:
    """The same for a supervised run."""
    return _devices(cfg.trainer) or _processes(cfg.trainer, None)


def _devices(trainer: Any) -> Problems:
    from verl import device  # torch is loaded only once there is something to validate

    wanted, nodes = trainer.n_gpus_per_node, trainer.nnodes
    found = in_range(_NODES, nodes, "1 or more", nodes >= 1)
    found += in_range(_GPUS, wanted, "1 or more, or null for what there is", wanted is None or wanted >= 1)
    found += caught(device.resolve_device, trainer.device)
    if found:
        return found
    kind = device.resolve_device(trainer.device)
    there = 0 if kind == "cpu" else device.device_count(kind)
    if trainer.device == "cpu" or wanted is None or wanted <= max(there, 1):
        _tell_devices(trainer, kind, there)
        return []
    return [_too_many(wanted, nodes, there)]


def _too_many(wanted: int, nodes: int, there: int) -> ConfigError:
    asked = f"{wanted} GPUs" if nodes == 1 else f"{nodes} nodes ({_NODES}) with {wanted} GPUs each"
    here = "no GPU" if there == 0 else f"{there} GPU{'s' if there > 1 else ''}"
    on = "on CPU" if there == 0 else "on one GPU"
    return ConfigError(
        f"{asked} are asked for, and this machine has {here}",
        key=_GPUS,
        got=wanted,
        allowed=f"1 to {there}" if there > 1 else "1",
        fix=f"Set {_GPUS}=1 {_NODES}=1 to run {on} in this process.",
    )


def _tell_devices(trainer: Any, kind: str, there: int) -> None:
    if trainer.n_gpus_per_node and trainer.device is None and kind == "cpu" and trainer.nnodes == 1:
        notice(_GPUS, "this machine has no GPU, so the run uses the CPU")
    if trainer.n_gpus_per_node is None and there > 1:
        notice(_GPUS, f"not set: the run uses 1 of {there} GPUs, since runs of several processes are not built yet")


def _processes(trainer: Any, runtime: str | None) -> Problems:
    processes = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    if runtime != "ray" and processes == 1:
        return []
    gpus = 1 if trainer.n_gpus_per_node is None else trainer.n_gpus_per_node
    one = "" if processes == 1 else f"{_NODES}=1 {_GPUS}=1"
    local = "" if runtime is None else "trainer.runtime=local"
    return [
        NotBuiltError(
            "a run of several processes or on a Ray cluster is not built yet"
            if runtime is not None
            else "a supervised run of several processes is not built yet",
            key="trainer.runtime" if processes == 1 else _NODES if trainer.nnodes > 1 else _GPUS,
            got=runtime if processes == 1 else f"{trainer.nnodes} node(s) with {gpus} process(es) each",
            fix=f"Set {' '.join(part for part in (one, local) if part)} to run in this process.",
        )
    ]


def files(cfg: PPOTrainerConfig) -> Problems:
    """Data, reward and agent files that are missing, and model folders that are none."""
    data, reward = cfg.data, cfg.reward
    found = _data_files(data, data.custom_cls.path)
    for key, path in (
        ("data.custom_cls.path", data.custom_cls.path),
        ("reward.custom_reward_function.path", reward.custom_reward_function.path),
        ("reward.reward_manager.module.path", reward.reward_manager.module.path),
    ):
        found += missing_files(key, path)
    model = cfg.actor_rollout_ref.model.path
    found += bad_model_folder("actor_rollout_ref.model.path", model, _MODEL_HINT)
    if uses_critic(cfg) and cfg.critic.model.path != model:
        found += bad_model_folder("critic.model.path", cfg.critic.model.path, _MODEL_HINT)
    return found


def sft_files(cfg: SFTTrainerConfig) -> Problems:
    """The same for a supervised run."""
    found = _data_files(cfg.data, cfg.data.custom_cls.path)
    found += missing_files("data.custom_cls.path", cfg.data.custom_cls.path)
    return found + bad_model_folder("model.path", cfg.model.path, _MODEL_HINT)


def _data_files(data: ConfigNode, custom: str | None) -> Problems:
    if not data.train_files:
        return [
            ConfigError("no training files are given", key="data.train_files", fix="Name a file or a list of files.")
        ]
    if custom is not None:
        return []  # what the names mean is up to the user's dataset class
    hint = ""
    if data.train_files == _default_files(data):
        make = "python -m verl.data.prepare.gsm8k --help"
        hint = f"This is the default path: set data.train_files, or make the file (`{make}`)."
    return missing_files("data.train_files", data.train_files, hint) + missing_files("data.val_files", data.val_files)


def _default_files(data: ConfigNode) -> str:
    return env.expand(str(type(data).__dataclass_fields__["train_files"].default))
