"""Rules about the devices of a sampler: what one engine takes, and what there is for it.

A replica of the hf engine is one process. vLLM and SGLang share a model among workers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.rules.checks import Problems, caught
from verl.config.schema.bounds import in_range
from verl.config.schema.root import PPOTrainerConfig
from verl.errors import ConfigError, NotBuiltError

OWN_PROCESSES = ("vllm", "sglang")
"""Engines that start the processes of a replica themselves: a run of one process holds one of any size."""
_R = "actor_rollout_ref.rollout"
_T, _P, _E = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size"


@dataclass(frozen=True)
class ReplicaSpec:
    """What one sampling engine takes; its experts lie on the devices that it has anyway."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        pipeline = f" x {self.pipeline} (pipeline)" if self.pipeline > 1 else ""
        data = f" x {self.data} (data)" if self.data > 1 else ""
        return f"{self.tensor} (tensor){pipeline}{data}"


def spec_of(rollout: Any) -> ReplicaSpec:
    """The sizes of one replica."""
    return ReplicaSpec(rollout[_T], rollout[_P], expert=rollout[_E])


def addresses_of(rollout: Any) -> list[str]:
    """Servers that sample and run already: ``server.url`` of the engines that ask servers."""
    if rollout.name not in ("server", "sglang") or not rollout.server.url:
        return []
    named = rollout.server.url
    return [named] if isinstance(named, str) else list(named)


def starts_no_engine(rollout: Any) -> bool:
    """Servers that run already have sizes of their own."""
    return rollout.name == "server" or bool(addresses_of(rollout))


def largest(key: str, rollout: Any) -> str:
    """The size to which a problem with their product is put down."""
    return f"{key}.{_T if rollout[_T] >= rollout[_P] else _P}"


def served_problems(cfg: PPOTrainerConfig) -> Problems:
    """Of a program whose samplers are servers that are started for it, each with devices of its own."""
    rollout, trainer = cfg.actor_rollout_ref.rollout, cfg.trainer
    processes = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    problems = sizes(_R, rollout)
    if problems or processes < 1 or rollout.server.url:
        return problems
    if trainer.nnodes > 1:
        fix = f"Start servers on the other nodes and name all of them: {_R}.name=server {_R}.server.url=[...]."
        message, key = "servers are started on this machine only", "trainer.nnodes"
        return [ConfigError(message, key=key, got=trainer.nnodes, allowed="1", fix=fix)]
    spec = spec_of(rollout)
    needed = spec.devices
    if processes % needed == 0:
        return []
    message = f"{processes} device(s) cannot be shared out to servers of {spec} = {needed}"
    allowed, fix = f"a multiple of {needed}", f"Change it, or {_R}.{_T}."
    return [ConfigError(message, key="trainer.n_gpus_per_node", got=processes, allowed=allowed, fix=fix)]


def on_machine(key: str, rollout: Any, device: str | None, is_local: bool = True) -> Problems:
    """More devices than the one process that samples can see.

    Args:
        key: the rollout section's.
        device: as it is set; null: what there is.
        is_local: this process, which sees all devices of the machine; a worker of a cluster sees one.
    """
    from verl import device as devices  # torch is loaded only once there is something to validate

    needed = spec_of(rollout).devices
    if needed == 1 or rollout.name not in OWN_PROCESSES or starts_no_engine(rollout):
        return []
    if caught(devices.resolve_device, device):
        return []  # another rule reports it
    kind = devices.resolve_device(device)
    there = 1 if not is_local else devices.device_count(kind)
    if kind == "cpu" or needed <= there:  # on a CPU the engine's own processes share it
        return []
    here = f"{there} GPU{'s' if there != 1 else ''}"
    message = f"one engine takes {spec_of(rollout)} = {needed} devices, and the process that builds it has {here}"
    fix = "Make it smaller, or leave it out."
    return [ConfigError(message, key=largest(key, rollout), got=needed, allowed=f"at most {there}", fix=fix)]


def sizes(key: str, rollout: Any) -> Problems:
    """What each parallel size may be by itself, and that of the experts beside the others."""
    problems: Problems = []
    for name in (_T, _P, _E):
        problems += in_range(f"{key}.{name}", rollout[name], "1 or more", rollout[name] >= 1)
    if not problems and rollout.name == "hf" and spec_of(rollout).devices > 1:
        message, named = "the hf engine holds the whole model in one process", largest(key, rollout)
        fix = f"Leave it out, or set {key}.name to vllm or sglang, which share a model out."
        return [ConfigError(message, key=named, got=spec_of(rollout).devices, allowed=[1], fix=fix)]
    if problems or rollout[_E] == 1:
        return problems
    if rollout.name == "sglang":
        return _experts_of_sglang(key, rollout)
    if rollout.name != "vllm" or rollout[_E] == rollout[_T]:
        return problems
    message = (
        f"vLLM splits the experts over all {rollout[_T]} tensor-parallel processes of an engine or to none; over more "
    )
    message += "of them it needs data parallelism inside the sampler, which is not built yet"
    allowed = sorted({1, rollout[_T]})
    fix = f"Set it to one of these, or {key}.{_T} to {rollout[_E]}."
    return [NotBuiltError(message, key=f"{key}.{_E}", got=rollout[_E], allowed=allowed, fix=fix)]


def _experts_of_sglang(key: str, rollout: Any) -> Problems:
    """Groups of its tensor-parallel processes hold the experts."""
    tensor, experts = rollout[_T], rollout[_E]
    if tensor % experts == 0:
        return []
    message = f"SGLang divides the {tensor} tensor-parallel processes of a server into groups for the experts"
    allowed = [n for n in range(1, tensor + 1) if tensor % n == 0]
    return [ConfigError(message, key=f"{key}.{_E}", got=experts, allowed=allowed, fix=f"Change it, or {key}.{_T}.")]
