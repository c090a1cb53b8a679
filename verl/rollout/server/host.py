"""A sampler in a process of its own, behind HTTP: ``python -m verl.rollout.server.host --port 8000 key=value ...``.

The keys are those of `main_ppo`; ``actor_rollout_ref.rollout.name`` says which engine is hosted. The address is printed
once it is up. Whoever can reach the port can sample and, by a path, load weights: it listens on this machine only
unless ``--host`` says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open

from verl.config import PPOTrainerConfig, replace
from verl.config.loading import read_config
from verl.errors import RolloutError, VerlError
from verl.registry import SAMPLERS
from verl.rollout.base import Sampler
from verl.rollout.hosted import SamplerHost
from verl.rollout.server import own
from verl.rollout.server.process import END_WITH_STDIN
from verl.rollout.server.wire import Message, WireError, read_message, render
from verl.storage import copy_to_local
from verl.weight_sync import chunk_weights

BUCKET_BYTES = 256 << 20
LISTENING = "listening on "


class Host:
    """Answers requests by a sampler; each connection is a task, and its end ends the request on it."""

    def __init__(self, sampler: Sampler, device: str = "cpu"):
        self.sampler, self._host = sampler, SamplerHost(sampler, device)
        self._calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            own.GENERATE: self._generate,
            own.ABORT: self._abort,
            own.UPDATE: self._update,
            own.TAKE: self._take,
            own.SLEEP: self._sleep,
            own.WAKE: self._wake,
            own.INFO: self._info,
            "/health": self._info,
        }

    async def serve(self, host: str, port: int, told: Callable[[str], None]) -> None:
        """Listen for ever; ``told`` gets the address."""
        server = await asyncio.start_server(self._connection, host, port)
        name, number = server.sockets[0].getsockname()[:2]
        told(f"http://{name}:{number}")
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, WireError):
            while (message := await read_message(reader, is_answer=False)) is not None:
                answer = await self._unless_gone(self._answer(message), reader)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()

    async def _unless_gone(self, work: Any, reader: asyncio.StreamReader) -> bytes | None:
        """The answer, or None if whoever asked has gone; then the work is cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.25)
                if reader.at_eof() and not task.done():
                    return None
            return task.result()
        finally:
            task.cancel()

    async def _answer(self, message: Message) -> bytes:
        call = self._calls.get(message.start[1].partition("?")[0])
        if call is None:
            return _raw(404, {"error": f"no such path: {message.start[1]}"})
        try:
            return _raw(200, await call(message.json() if message.body else {}))
        except (VerlError, WireError) as error:
            return _raw(400, {"error": str(error)})
        except Exception as error:  # boundary: one request's failure must not end the host
            return _raw(500, {"error": f"{type(error).__name__}: {error}"})

    async def _generate(self, payload: Any) -> Any:
        return own.completion_json(await self.sampler.generate(own.from_json(payload)))

    async def _abort(self, payload: Any) -> Any:
        wanted = payload.get("request_ids")  # none at all are not everybody's
        if wanted is not None and not isinstance(wanted, list):
            raise RolloutError("names requests", key="request_ids", got=wanted, allowed="a list, or null for all")
        return {"aborted": await self.sampler.abort(wanted)}

    async def _update(self, payload: Any) -> Any:
        folder, version = Path(payload["folder"]), int(payload["version"])
        await self.sampler.update_weights(chunk_weights(tensors_of(folder), BUCKET_BYTES, version), version)
        return {"version": self.sampler.version}

    async def _take(self, payload: Any) -> Any:
        return await self._host.take_weights(str(payload["kind"]), payload["address"], int(payload["version"]))

    async def _sleep(self, payload: Any) -> Any:
        await self.sampler.sleep(int(payload.get("level", 1)))
        return {}

    async def _wake(self, payload: Any) -> Any:
        await self.sampler.wake()
        return {}

    async def _info(self, payload: Any) -> Any:
        return {"version": self.sampler.version, "stats": self.sampler.stats()}


def tensors_of(folder: Path) -> Any:
    """The tensors in a folder's safetensors files, one at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RolloutError("no weights in this folder", key="folder", got=str(folder))
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def make_sampler(config: PPOTrainerConfig, device: str = "cpu") -> Sampler:
    """The sampler that a configuration names."""
    policy = config.actor_rollout_ref
    model = replace(policy.model, path=copy_to_local(policy.model.path, key="actor_rollout_ref.model.path"))
    return SAMPLERS.get(policy.rollout.name).from_config(policy.rollout, model, device=device)


def _raw(status: int, found: Any) -> bytes:
    return render(f"HTTP/1.1 {status} {'OK' if status < 300 else 'Error'}",
                  {"content-type": "application/json"}, json.dumps(found).encode())  # fmt: skip


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m verl.rollout.server.host", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes one that is free")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(END_WITH_STDIN, action="store_true", help="end when the standard input does")
    known, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if known.end_with_stdin:
        threading.Thread(target=_end_with_stdin, name="end with stdin", daemon=True).start()
    try:
        config = cast(PPOTrainerConfig, read_config("ppo_trainer", rest))
        host = Host(make_sampler(config, known.device), known.device)
        asyncio.run(host.serve(known.host, known.port, lambda url: print(f"{LISTENING}{url}", flush=True)))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
