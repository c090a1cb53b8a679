"""Delayed construction on Ray: a class, its arguments, and the options of the process that will hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray.actor import ActorClass

from verl.errors import WorkerError
from verl.single_controller.base import colocated
from verl.single_controller.base.resources import ClassWithInitArgs, unwrapped


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class for a `RayWorkerGroup`.

    Args:
        cls: the class itself, or what ``ray.remote`` made of it.
        args, kwargs: constructor arguments, used in the worker's process.

    Example:
        >>> critic = RayClassWithInitArgs(cls=CriticWorker, config=config)
        >>> critic.update_options({"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}})
    """

    def __init__(self, cls: Callable[..., Any], *args: Any, **kwargs: Any):
        actor_class = cls if isinstance(cls, ActorClass) else None
        super().__init__(unwrapped(cls), *args, **kwargs)  # the worker's process builds an ordinary object
        self.options: dict[str, Any] = {}
        if actor_class is not None:
            self.options |= actor_class._default_options  # type: ignore[attr-defined]
        self.additional_resource: dict[str, float] = {}

    @classmethod
    def of(cls, class_with_init: ClassWithInitArgs) -> RayClassWithInitArgs:
        """The same, with options; a plain `ClassWithInitArgs` has none."""
        if isinstance(class_with_init, cls):
            return class_with_init
        return cls(class_with_init.cls, *class_with_init.args, **class_with_init.kwargs)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Custom Ray resources that each worker takes besides its device."""
        self.additional_resource = dict(additional_resource)

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Ray's actor options (``runtime_env``, ``num_cpus``, ...); a later one replaces an earlier one."""
        self.options.update(options)

    def plain(self) -> ClassWithInitArgs:
        """Without the options, as it is sent to the worker's process."""
        return ClassWithInitArgs(self.cls, *self.args, **self.kwargs)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """One process that hosts several roles; tagged methods are ``<role>_<method>`` there and rebound by ``spawn``."""
    return _together(class_dict, colocated.colocated_class(class_dict).cls)


def create_colocated_worker_cls_fused(class_dict: Mapping[str, ClassWithInitArgs]) -> RayClassWithInitArgs:
    """As `create_colocated_worker_cls`, but the process has only the roles' own objects and no renamed methods.

    `RayWorkerGroup.fuse` gives the group one attribute per role.
    """
    if not class_dict:
        raise WorkerError("a fused worker needs at least one role")
    name = "Fused" + "".join(role.title().replace("_", "") for role in class_dict)
    return _together(class_dict, type(name, (colocated.ColocatedWorker,), {"class_dict": _plain_dict(class_dict)}))


def _together(class_dict: Mapping[str, ClassWithInitArgs], kind: Any) -> RayClassWithInitArgs:
    kind.class_dict = _plain_dict(class_dict)
    together = RayClassWithInitArgs(kind)
    for role, member in class_dict.items():
        if not isinstance(member, RayClassWithInitArgs):
            continue
        for name, value in member.options.items():
            if together.options.setdefault(name, value) != value:
                raise WorkerError(
                    f"roles that share a process ask for different Ray options {name!r}",
                    got=(together.options[name], value),
                    fix=f"Give {role!r} the same, or a resource pool of its own.",
                )
        together.additional_resource |= member.additional_resource
    return together


def _plain_dict(class_dict: Mapping[str, ClassWithInitArgs]) -> dict[str, ClassWithInitArgs]:
    return {role: RayClassWithInitArgs.of(member).plain() for role, member in class_dict.items()}
