"""`RayHandle`: a handle on an object in another process, and how a plain object gets there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from verl.single_controller.base.handle import Handle
from verl.single_controller.base.resources import ClassWithInitArgs
from verl.single_controller.ray import failures, transfer
from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
from verl.single_controller.ray.fleet import Fleet
from verl.single_controller.ray.launch import REGISTER_SECONDS, LaunchPlan, launch
from verl.single_controller.ray.resource_pool import ProcessSlot

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class RayHandle(Handle):
    """Async methods of the object run concurrently in its process's event loop; plain ones one at a time.

    Calls that are not awaited one after the other begin in any order.

    Cancelling a call cancels the async method that it runs; a plain method that has begun runs to its end and its
    result is dropped. A handle may be sent to other processes.

    Args:
        actor: the host.
        target: role of a colocated worker, or empty.
        fleet: the object's process, where this process started it; kept alive by the handle.
    """

    def __init__(
        self,
        actor: ActorHandle,
        target: str = "",
        name: str = "",
        timeout: float | None = None,
        fleet: Fleet | None = None,
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
        transfer.count_calls([(args, kwargs)])
        ((args, kwargs),) = transfer.share([(args, kwargs)])
        answer = await self._answer(self._actor.request.remote([self._target, method], *args, **kwargs))
        transfer.count_results(answer)
        return answer

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
    slot: ProcessSlot | None = None,
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
    recipe = LaunchPlan(
        role=name or ray_cls.cls.__name__,
        class_with_init=ray_cls,
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
