"""`RayHandle`: a handle on an object in another process, and how a plain object gets there."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl import env
from verl.single_controller.base.handle import Handle
from verl.single_controller.base.resources import ClassWithInitArgs
from verl.single_controller.base.worker import DEVICE_VARIABLES
from verl.single_controller.ray import failures, transfer
from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
from verl.single_controller.ray.fleet import Fleet
from verl.single_controller.ray.launch import REGISTER_SECONDS, Recipe, launch
from verl.single_controller.ray.resource_pool import Slot


class RayHandle(Handle):
    """Async methods of the object run beside each other in its process's event loop; plain ones one at a time.

    Calls that are not awaited one after the other begin in any order.

    Cancelling a call cancels the async method that it runs; a plain method that has begun goes on and nobody hears its
    result. A handle may be sent to other processes.

    Args:
        actor: the host.
        target: role of a colocated worker, or empty.
        fleet: the object's process, where this process started it; kept alive by the handle.
    """

    def __init__(
        self, actor: Any, target: str = "", name: str = "", timeout: float | None = None, fleet: Fleet | None = None
    ):
        super().__init__(name, timeout)
        self._actor, self._target, self._fleet = actor, target, fleet

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._actor, self._target, self.name, self.timeout)

    def close(self) -> None:
        """Stop the object's process; calls in flight fail."""
        if self._fleet is not None:
            self._fleet.close()
        else:
            ray.kill(self._actor, no_restart=True)

    async def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ((args, kwargs),) = transfer.share([(args, kwargs)])
        return await self._answer(self._actor.request.remote([self._target, method], *args, **kwargs))

    async def _iterate(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AsyncIterator[Any]:
        key = f"{method}#{uuid.uuid4().hex}"
        ((args, kwargs),) = transfer.share([(args, kwargs)])
        await self._answer(self._actor.open_stream.remote(key, [self._target, method], *args, **kwargs))
        try:
            while True:
                there, item = await self._answer(self._actor.next_item.remote(key))
                if not there:
                    return
                yield item
        finally:
            self._actor.close_stream.remote(key)

    async def _answer(self, reference: Any) -> Any:
        try:
            return await reference
        except RayError as error:
            exception, cause = failures.meaning(error, with_note=False)
            raise exception from cause
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise


def host_object(
    class_with_init: ClassWithInitArgs,
    name: str = "",
    *,
    timeout: float | None = None,
    max_concurrency: int = 1,
    slot: Slot | None = None,
    share: float = 1.0,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
    detached: bool = False,
    register_seconds: float = REGISTER_SECONDS,
) -> RayHandle:
    """Build a plain object in a process of its own, for instance a sampler or a scorer.

    Args:
        class_with_init: what to build; with options if it is a `RayClassWithInitArgs`.
        name: for messages, logs and the seed.
        timeout: of the handle's calls.
        max_concurrency: how many plain methods may run at once; async methods are not counted.
        slot: its place in a pool (`RayResourcePool.slots`); None leaves it to Ray.
        share: part of the slot's device that it takes.
        seed: the run's; plain methods draw from generators seeded with it, the name and 0.
        environment: more environment variables.
        detached: the object outlives this process.
        register_seconds: how long the process may take to come up.
    """
    ray_cls = RayClassWithInitArgs.of(class_with_init)
    recipe = Recipe(
        role=name or ray_cls.cls.__name__,
        class_with_init=ray_cls,
        hosting=host_beside,
        seed=seed,
        share=share,
        detached=detached,
        environment=environment or {},
        register_seconds=register_seconds,
        num_threads=max_concurrency,
        behind_handle=True,
    )
    fleet, _ = launch(recipe, [slot])
    return RayHandle(fleet.members[0].actor, "", fleet.members[0].name, timeout, fleet)


def host_beside(class_with_init: ClassWithInitArgs, name: str) -> RayHandle:
    """As `host_object`, on this process's node and with its devices, which the two use in turn."""
    here = ray.get_runtime_context().get_node_id()
    ray_cls = RayClassWithInitArgs.of(class_with_init)
    ray_cls.update_options({"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)})
    devices = {variable: value for variable in DEVICE_VARIABLES if (value := env.get(variable))}
    return host_object(ray_cls, name, environment=devices)
