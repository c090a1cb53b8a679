"""Rules about the devices of a sampler: what one engine takes, and what there is for it.

The hf engine is held by several workers together. vLLM and SGLang make workers of their own: each process of a run
builds its own engine, and on several processes each of them has one device.
"""

from __future__ import annotations

from typing import Any

from verl.config.checks import Problems, caught, in_range
from verl.config.root import PPOTrainerConfig
from verl.errors import ConfigError, NotBuiltError

_R = "actor_rollout_ref.rollout"
_T, _P, _E = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"
_WORKERS_OF_ITS_OWN = ("vllm", "sglang")
_MORE = "Change it, or the number of processes (trainer.nnodes, trainer.n_gpus_per_node)."


def problems(cfg: PPOTrainerConfig) -> Problems:
    """Engines that a run's processes cannot build; what the machine has is another rule's, `on_machine`."""
    rollout, processes = cfg.actor_rollout_ref.rollout, _processes(cfg)
    found = sizes(_R, rollout)
    if found or processes < 1:
        return found
    if rollout.name == "hf":
        return _together(rollout, processes)
    if _starts_no_engine(rollout) or devices_of(rollout) == 1 or processes == 1:
        return []
    needed = devices_of(rollout)
    share = f"{processes} devices would make {processes // needed} such engines"
    if processes % needed:
        share = f"{processes} devices cannot be shared out to such engines either"
    return [
        NotBuiltError(
            f"each of the {processes} processes builds an engine of its own on its one device, and "
            f"{_product(rollout)} = {needed} devices; {share}, which is not built yet",
            key=_largest(_R, rollout),
            got=needed,
            allowed=[1],
            fix=f"Leave it out, or set {_R}.name=hf, which {_T} processes hold together.",
        )
    ]


def served_problems(cfg: PPOTrainerConfig) -> Problems:
    """The same where servers sample that are started for it, each with devices of its own."""
    rollout, processes = cfg.actor_rollout_ref.rollout, _processes(cfg)
    found = sizes(_R, rollout)
    if found or processes < 1 or rollout.server.url:
        return found
    if cfg.trainer.nnodes > 1:
        fix = f"Start servers on the other nodes and name all of them: {_R}.name=server {_R}.server.url=[...]."
        message, key = "servers are started on this machine only", "trainer.nnodes"
        return [ConfigError(message, key=key, got=cfg.trainer.nnodes, allowed="1", fix=fix)]
    needed = devices_of(rollout)
    if processes % needed == 0:
        return []
    message = f"{processes} device(s) cannot be shared out to servers of {_product(rollout)} = {needed}"
    allowed = f"a multiple of {needed}"
    return [ConfigError(message, key="trainer.n_gpus_per_node", got=processes, allowed=allowed, fix=_MORE)]


def on_machine(key: str, rollout: Any, device: str | None, is_local: bool = True) -> Problems:
    """More devices than the one process that samples can see.

    Args:
        key: the rollout section's.
        device: as it is set; null: what there is.
        is_local: this process, which sees all devices of the machine; a worker of a cluster sees one.
    """
    from verl import device as devices  # torch is loaded only once there is something to validate

    needed = devices_of(rollout)
    if needed == 1 or rollout.name not in _WORKERS_OF_ITS_OWN or _starts_no_engine(rollout):
        return []
    if caught(devices.resolve_device, device):
        return []  # said already
    kind = devices.resolve_device(device)
    there = 1 if not is_local else devices.device_count(kind)
    if kind == "cpu" or needed <= there:  # on a CPU the engine's own processes share it
        return []
    here = f"{there} GPU{'s' if there != 1 else ''}"
    message = f"one engine takes {_product(rollout)} = {needed} devices, and the process that builds it has {here}"
    fix = "Make it smaller, or leave it out."
    return [ConfigError(message, key=_largest(key, rollout), got=needed, allowed=f"at most {there}", fix=fix)]


def one_process(key: str, rollout: Any) -> Problems:
    """A program that samples in one process, which cannot hold an hf engine together with others."""
    size = rollout[_T]
    if rollout.name != "hf" or size == 1:
        return []
    message = "the hf engine is held by as many processes together, and this program has one"
    return [ConfigError(message, key=f"{key}.{_T}", got=size, allowed=[1], fix="Leave it out.")]


def sizes(key: str, rollout: Any) -> Problems:
    """What each parallel size may be by itself, and that of the experts beside the others."""
    found: Problems = []
    for name in (_T, _P, _E):
        found += in_range(f"{key}.{name}", rollout[name], "1 or more", rollout[name] >= 1)
    if found or rollout.name != "vllm" or rollout[_E] in (1, rollout[_T]):
        return found
    message = (
        f"vLLM deals the experts to all {rollout[_T]} tensor-parallel processes of an engine or to none; over more "
    )
    message += "of them it needs data parallelism inside the sampler, which is not built yet"
    allowed = sorted({1, rollout[_T]})
    fix = f"Set it to one of these, or {key}.{_T} to {rollout[_E]}."
    return [NotBuiltError(message, key=f"{key}.{_E}", got=rollout[_E], allowed=allowed, fix=fix)]


def devices_of(rollout: Any) -> int:
    """Of one engine."""
    return int(rollout[_T] * rollout[_P])


def _processes(cfg: PPOTrainerConfig) -> int:
    return cfg.trainer.nnodes * (cfg.trainer.n_gpus_per_node or 1)


def _starts_no_engine(rollout: Any) -> bool:
    """Servers that run already have sizes of their own."""
    return rollout.name == "server" or (rollout.name == "sglang" and bool(rollout.server.url))


def _product(rollout: Any) -> str:
    pipeline = f" x {rollout[_P]} (pipeline)" if rollout[_P] > 1 else ""
    return f"{rollout[_T]} (tensor){pipeline}"


def _largest(key: str, rollout: Any) -> str:
    return f"{key}.{_T if rollout[_T] >= rollout[_P] else _P}"


def _together(rollout: Any, processes: int) -> Problems:
    """Processes that sample together with the hf engine; whether the model's heads divide is seen when it is read."""
    size = rollout[_T]
    if processes % size == 0:
        return []
    return [
        ConfigError(
            f"a group that samples together must divide the number of processes, {processes}",
            key=f"{_R}.{_T}",
            got=size,
            allowed=[n for n in range(1, processes + 1) if processes % n == 0],
            fix=_MORE,
        )
    ]
