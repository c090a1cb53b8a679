"""Which devices an engine of several processes gets: those of all ranks of its replica, in the order of their ranks.

A rank of a cluster sees one device. The engine that the leader of a replica starts sees those of all of them: its own
launcher starts a process per device, which takes its device by its number among the visible ones. Nothing here looks at
a device, so that a machine without any can check it.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl import env
from verl.distributed import Ranks
from verl.errors import RolloutError
from verl.single_controller.base.worker import DEVICE_VARIABLES

_OF_KIND = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def of_rank(local_rank: int) -> str:
    """The name of the device of this process's rank: its only visible one, else the one with the rank's number.

    Args:
        local_rank: among the ranks of its node.

    Raises:
        RolloutError: fewer devices are visible than ranks use.
    """
    variable = _variable()
    names = [] if variable is None else (env.get(variable) or "").split(",")
    if len(names) == 1:
        return names[0]
    if names and local_rank >= len(names):
        raise RolloutError(
            "a rank has no device", key=str(variable), got=",".join(names), allowed=f"more than {local_rank} devices"
        )
    return names[local_rank] if names else str(local_rank)


def of_replica(ranks: Ranks, local_rank: int, each: int) -> list[str]:
    """The devices of the ranks of this rank's replica, in their order. Collective: all ranks call it.

    Args:
        ranks: of the pool, which ``each`` consecutive ones divide into replicas.
        local_rank: as in `of_rank`.
    """
    first = ranks.rank - ranks.rank % each
    return [str(name) for name in ranks.exchange(of_rank(local_rank))[first : first + each]]


def shown(devices: Sequence[str], needed: int, kind: str) -> dict[str, str]:
    """The environment of a process that starts an engine over these devices; empty where nothing is to be shown.

    Args:
        devices: of the ranks of the replica, in their order; empty: what the process sees already.
        needed: how many the engine uses.
        kind: ``cpu`` has no devices to show.

    Raises:
        RolloutError: they are not as many as the engine uses, or two ranks have the same one.
    """
    if kind == "cpu" or not devices:
        return {}
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if len(devices) != needed:
        message = f"an engine of {needed} devices cannot use those of {len(devices)} ranks"
        raise RolloutError(message, key=key, got=",".join(devices), allowed=f"{needed} devices")
    twice = sorted({name for name in devices if list(devices).count(name) > 1})
    if twice:
        message = "ranks of one replica have the same device, of which an engine uses one per process"
        raise RolloutError(message, key=key, got=",".join(devices), fix="Give every rank a device of its own.")
    return {_variable() or _OF_KIND.get(kind, DEVICE_VARIABLES[0]): ",".join(devices)}


def _variable() -> str | None:
    """The variable that names this process's visible devices; None if none is set."""
    return next((name for name in DEVICE_VARIABLES if env.get(name)), None)
