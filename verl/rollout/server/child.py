"""A sampler in a child process of a worker, behind a handle.

The process is `verl.rollout.server.host`; it ends with this one. It reads its sections of the configuration from a file
that only this user can read, because a command line is seen by everybody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from verl.config import to_dict
from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import RolloutError
from verl.outcomes import on_error, run_now
from verl.rollout.base import Completion, Request, Sampler
from verl.rollout.hosted import WeightIntake
from verl.rollout.lost import EngineLostError
from verl.rollout.server import own
from verl.rollout.server.client import HttpClient, reason
from verl.rollout.server.pictures import PictureSender
from verl.rollout.server.process import TRANSPORT, HostProcess
from verl.single_controller.base.handle import Handle

ANSWER_SECONDS = 24 * 3600.0
"""The process is watched; how long an answer takes is its own affair."""
FILE = "sampler.yaml"
CALLS = {
    Sampler.abort.__qualname__: (own.ABORT, ("request_ids",)),
    Sampler.sleep.__qualname__: (own.SLEEP, ("level",)),
    Sampler.wake.__qualname__: (own.WAKE, ()),
    WeightIntake.status.__qualname__: (own.INFO, ()),
    WeightIntake.take_weights.__qualname__: (own.TAKE, ("kind", "address", "version")),
}
"""Path of a method, and the names of its arguments."""


def host_process(
    rollout: RolloutConfig,
    model: HFModelConfig,
    device: str,
    name: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    key: str | None = None,
    count: int = 1,
) -> HostProcess:
    """A host with these sections of the configuration.

    Args:
        arguments: of its command line.
        environment: added to this process's.
        key: that several hosts share; None makes one.
        count: of hosts that divide this process's threads among them.
    """
    sections = {"actor_rollout_ref": {"rollout": to_dict(rollout), "model": to_dict(model)}}
    variables = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count)), **(environment or {})}
    return HostProcess(arguments, device, name, (FILE, json.dumps(sections)), key, variables)


class ChildHandle(Handle):
    """The handle on a sampler and its `WeightIntake` in a child process.

    Args:
        rollout, model: sections of the configuration.
        device: of the sampler.
        transport: by which its weights come.

    Raises:
        EngineLostError: it did not come up.
    """

    def __init__(self, rollout: RolloutConfig, model: HFModelConfig, device: str, transport: str):
        super().__init__("the sampler's process")
        # Its own sampler is an ordinary one in its process: the transport is between that process and this one.
        plain = dataclasses.replace(rollout, checkpoint_engine=type(rollout.checkpoint_engine)())
        self.process = host_process(plain, model, device, self.name, [TRANSPORT, transport])
        with on_error(lambda _: self.process.close()):
            run_now(self.process.wait_until_up(rollout.server.max_start_wait_time))
        self._client = HttpClient(self.process.url, key=self.process.key)
        self._pictures = PictureSender(partial(self._ask, own.SHOW))

    async def _invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method == Sampler.generate.__qualname__:
            return await self._generate(*args, **kwargs)
        if method not in CALLS:
            raise RolloutError("no call of a sampler in a child process", got=method, allowed=sorted(CALLS))
        path, names = CALLS[method]
        result = await self._ask(path, {**dict(zip(names, args)), **kwargs})
        return int(result["aborted"]) if path == own.ABORT else result

    def close(self) -> None:
        """End the process."""
        self.process.close()

    async def _generate(self, request: Request) -> Completion:
        completion = await self._pictures.exchange(request, own.request_json(request), partial(self._ask, own.GENERATE))
        ids = tuple(completion["token_ids"])
        return Completion(
            request.id,
            ids,
            tuple(completion["log_probs"]),
            completion["finish_reason"],
            tuple(completion["token_versions"]),
            num_preempted=int(completion["num_preempted"]),
            is_interrupted=bool(completion["is_interrupted"]),
        )

    async def _ask(self, path: str, payload: Any) -> Any:
        try:
            answer = await self._client.ask("GET" if path == own.INFO else "POST", path, payload, ANSWER_SECONDS)
        except EngineLostError as error:
            if not await self._has_ended():
                raise
            raise EngineLostError(self.process.exit_report) from error
        content = answer.json()
        if answer.status >= 300:
            raise RolloutError(reason(answer))
        return content

    async def _has_ended(self) -> bool:
        """Connections break a moment before the process exits."""
        for _ in range(20):
            if not self.process.is_alive:
                return True
            await asyncio.sleep(0.05)
        return False
