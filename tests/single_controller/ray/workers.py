"""Worker classes for the tests on Ray; a module of its own, so that worker processes can import it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import numpy as np
import torch
from tensordict import TensorDict

from verl.protocol import DataProto
from verl.single_controller.base import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class UserError(Exception):
    """An exception that only the user's code knows; its constructor does not take what pickle would give it."""

    def __init__(self, code: int, *, hint: str):
        super().__init__(f"code {code}: {hint}")
        self.code = code


class PlainUserError(ValueError):
    pass


class Dice(Worker):
    """Has a method for every dispatch mode."""

    def __init__(self, sides: int = 6):
        super().__init__()
        self.sides = sides
        self.first = torch.rand(1).item()
        self.set_dispatch_collect("pairs", self.rank // 2, self.rank % 2 == 0)

    @register(Dispatch.ONE_TO_ALL)
    def throw(self) -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> tuple:
        return self.rank, self.world_size, self.info.local_rank, self.info.local_world_size, self.info.role, self.first

    @register(Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        return torch.get_num_threads()

    @register(Dispatch.ONE_TO_ALL)
    def add(self, value: int, more: int = 0) -> int:
        return self.rank * 100 + value + more

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first(self, value: list) -> tuple:
        return self.rank, value

    @register(Dispatch.ALL_TO_ALL)
    def each_its_own(self, value: int) -> int:
        return self.rank * 100 + value

    @register(Dispatch.DP_COMPUTE)
    def one_each(self, value: int) -> int:
        return self.rank * 100 + value

    @register(Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        uid = np.array([f"{u}@{self.rank}" for u in data.non_tensor_batch["uid"]], dtype=object)
        return DataProto.from_dict(
            tensors={"y": data.batch["x"] * 2 + self.rank},
            non_tensors={"uid": uid},
            meta_info={"scale": data.meta_info["scale"]},
        )

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": data.batch["x"] * 2})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def halve_tensordict(self, data: TensorDict) -> TensorDict:
        return TensorDict({"x": data["x"] / 2}, batch_size=data.batch_size)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> float:
        return float(data.batch["x"].sum())

    @register(make_nd_compute_dataproto_dispatch_fn("pairs"))
    def on_mesh(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"y": data.batch["x"] + 1000 * self.rank})

    @register(Dispatch.ONE_TO_ALL)
    def weights(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() * (self.rank + 1) for name, tensor in tensors.items()}

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, on_rank: int, kind: str = "key") -> None:
        if self.rank == on_rank:
            if kind == "odd":
                raise UserError(7, hint="cannot be copied")
            raise PlainUserError("the user's own error") if kind == "user" else KeyError("missing")

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self) -> None:
        raise KeyError("later")

    @register(Dispatch.ONE_TO_ALL)
    def fail_while_others_wait(self, until: str) -> None:
        """Rank 1 fails; the others wait for a file."""
        if self.rank == 1:
            raise PlainUserError("gone before the collective")
        while not os.path.exists(until):
            time.sleep(0.01)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scribble(self, data: DataProto) -> DataProto:
        data.batch["x"].mul_(3)
        return data

    @register(Dispatch.ONE_TO_ALL)
    def die(self, rank: int, seconds: float = 30.0) -> None:
        if self.rank == rank:
            print("these are the last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)


class Answerer:
    """What a worker holds for others."""

    async def double(self, number: int) -> int:
        return 2 * number


class Holding(Worker):
    """Its async methods are those of an object that it holds."""

    def endpoints(self) -> dict[type, object]:
        return {Answerer: Answerer()}

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number: int) -> int:
        return number + 1


class Friendly(Dice):
    """With async methods: its process has an event loop."""

    def __init__(self, sides: int = 6):
        super().__init__(sides)
        self.begun, self.cancelled, self.met = 0, 0, 0
        self.seen: list[int] = []

    @register(Dispatch.ONE_TO_ALL)
    async def throw_async(self) -> float:
        before = torch.rand(1).item()
        await asyncio.sleep(0)
        return before

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def note(self, number: int) -> None:
        self.seen.append(number)

    async def generate(self) -> None:
        """Ends when it is cancelled."""
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def meet(self, others: int) -> None:
        """Ends once so many calls of it are running."""
        self.met += 1
        while self.met < others:
            await asyncio.sleep(0.001)

    def forget(self) -> None:
        self.seen.clear()

    def state(self) -> dict:
        return {"begun": self.begun, "cancelled": self.cancelled, "seen": list(self.seen)}


class Broken(Worker):
    def __init__(self):
        super().__init__()
        raise PlainUserError("no model here")


class Counter:
    """A plain class, not a worker."""

    def __init__(self, start: int = 0):
        self.value = start

    def add(self, amount: int) -> int:
        time.sleep(0.02)
        self.value += amount
        return self.value

    def draw(self) -> float:
        return torch.rand(1).item()

    async def slow(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    def fail(self) -> None:
        raise PlainUserError("of a plain object")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
