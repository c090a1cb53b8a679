"""A sampler in a separate process, behind HTTP: ``python -m verl.rollout.server.host --port 8000 key=value ...``.

The keys are those of `main_ppo`; ``actor_rollout_ref.rollout.name`` says which engine is hosted. Every request needs
the host's key, and the host proves to its clients that it knows it. What it loads is not a request's to say: weights
come from its own folder, or by the transport that its command line names.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import hmac
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from safetensors import safe_open

from verl import env
from verl.config import PPOTrainerConfig, replace
from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, RolloutError, VerlError
from verl.json_text import JsonObject
from verl.registry import SAMPLERS
from verl.rollout.base import Sampler
from verl.rollout.hosted import WeightIntake
from verl.rollout.server import own
from verl.rollout.server.pictures import LACKS, MOST_BYTES, NAME, PictureStore
from verl.rollout.server.process import ANNOUNCE, END_WITH_STDIN, KEY, TRANSPORT
from verl.rollout.server.weights import version_of
from verl.rollout.threaded import threaded
from verl.serving import ApiError, Handle, HttpRequest, HttpResponse, Server, loopback, secret, unix
from verl.storage import copy_to_local
from verl.weight_sync import chunk_weights

BUCKET_BYTES = 256 << 20
LISTENING = "listening on "
EVERYWHERE = ("0.0.0.0", "::")
BODIES = {own.SHOW: MOST_BYTES}
"""Clients refuse larger images before they send them."""


class Host:
    """Answers requests by a sampler; the end of a connection ends the request on it.

    Args:
        key: what every request has to show.
        transport: by which weights may come; None takes them from ``weights_dir`` alone.
        weights_dir: where clients put new weights, a folder for each version.
    """

    def __init__(
        self, sampler: Sampler, key: str, device: str = "cpu", transport: str | None = None, weights_dir: str = ""
    ):
        self.sampler, self.key, self.transport = sampler, key, transport
        self.weights_dir, self._intake = Path(weights_dir), WeightIntake(sampler, device)
        self._pictures, self._fields = PictureStore(), list(sampler.picture_fields)

    async def serve(self, on: socket.socket, ready: Callable[[str], None], names: tuple[str, ...] = ()) -> None:
        """Serve until stopped.

        Args:
            on: where; see `verl.serving`.
            ready: gets the address.
            names: what else requests may call this machine.
        """
        calls: dict[str, Callable[[Any], Awaitable[Any]]] = {
            own.GENERATE: self._generate,
            own.SCORE: self._score,
            own.SHOW: self._show,
            own.ABORT: self._abort,
            own.UPDATE: self._update,
            own.TAKE: self._take,
            own.SLEEP: self._sleep,
            own.WAKE: self._wake,
        }
        routes: dict[tuple[str, str], Handle] = {("POST", path): answering(call) for path, call in calls.items()}
        routes |= {("GET", path): answering(self._info) for path in (own.INFO, "/health")}
        expected = self.key.encode()
        server = Server(
            routes,
            authorize=lambda token: True if hmac.compare_digest(token.encode(), expected) else None,
            names=names,
            key=self.key,
            bodies=BODIES,
        )
        await server.start(on)
        ready(server.address)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()

    async def _generate(self, payload: Any) -> Any:
        pictures = self._pictures.of(payload.pop(NAME)) if NAME in payload else {}
        if pictures is None:
            return {LACKS: self._fields}
        return own.completion_json(await self.sampler.generate(own.from_json(payload, pictures)))

    async def _score(self, payload: JsonObject) -> JsonObject:
        return own.scores_json(await self.sampler.score(own.score_from_json(payload)))

    async def _show(self, payload: Any) -> Any:
        await self._pictures.add(payload)
        return {}

    async def _abort(self, payload: Any) -> Any:
        request_ids = payload.get("request_ids")  # null aborts all requests, an empty list none
        if request_ids is not None and not isinstance(request_ids, list):
            raise RolloutError("names requests", key="request_ids", got=request_ids, allowed="a list, or null for all")
        return {"aborted": await self.sampler.abort(request_ids)}

    async def _update(self, payload: Any) -> Any:
        version = number(payload, "version")
        folder = version_of(self.weights_dir, version)
        if not folder.is_dir():
            raise RolloutError("no weights in this folder", key="folder", got=str(folder))
        await self.sampler.update_weights(chunk_weights(folder_tensors(folder), BUCKET_BYTES, version), version)
        return {"version": self.sampler.version}

    async def _take(self, payload: Any) -> Any:
        kind = payload.get("kind")
        if self.transport is None or kind != self.transport:
            allowed = [self.transport or "none, weights come from its folder"]
            raise RolloutError("this host does not take weights by it", key="kind", got=kind, allowed=allowed)
        return await self._intake.take_weights(self.transport, payload["address"], number(payload, "version"))

    async def _sleep(self, payload: Any) -> Any:
        await self.sampler.sleep(number(payload, "level") if "level" in payload else 1)
        return {}

    async def _wake(self, payload: Any) -> Any:
        await self.sampler.wake()
        return {}

    async def _info(self, payload: Any) -> Any:
        info = {"version": self.sampler.version, "stats": self.sampler.stats()}
        return {**info, "weights_dir": str(self.weights_dir), "logprobs_mode": self.sampler.logprobs_mode}


def answering(call: Callable[[Any], Awaitable[Any]]) -> Handle:
    """The handler of a call; what the sampler refuses is a client error."""

    async def handle(request: HttpRequest) -> HttpResponse:
        payload = request.json()
        if not isinstance(payload, dict):
            raise ApiError(400, f"not a request: the body must be a JSON object, this is a {type(payload).__name__}")
        try:
            return HttpResponse(await call(payload))
        except VerlError as error:
            raise ApiError(400, str(error)) from error

    return handle


def number(payload: JsonObject, name: str) -> int:
    """An integer of a payload.

    Raises:
        RolloutError: it is none.
    """
    value = payload.get(name)
    if type(value) is not int:
        raise RolloutError("not a whole number", key=name, got=value)
    return value


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
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


def machine_names(host: str) -> tuple[str, ...]:
    """What clients on other machines call this one, if it listens for them."""
    if host not in EVERYWHERE:
        return (f"[{host}]" if ":" in host else host, socket.gethostname())
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = [entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries
             if entry.family in families]  # fmt: skip
    return (socket.gethostname(), *(f"[{name}]" if ":" in name else name for name in addresses))


def _own_folder(below: str | None) -> str:
    """A private folder of this host, deleted with it."""
    if below is not None and not Path(below).is_dir():
        raise ConfigError("no such folder", key="--weights-dir", got=below)
    folder = tempfile.mkdtemp(prefix="verl-host-", dir=below)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _key(folder: str) -> str:
    """The key that the environment holds; without one a new key, in a file that only this user can read."""
    key = env.get(KEY)
    if key is not None:
        return key
    made, file = secret.new_key(), Path(folder) / "key"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(made)
    print(f"the key is in {file}", flush=True)
    return made


def _end_with_stdin() -> None:
    # Past Python's buffer: its lock, held by this thread, would abort the process at its end.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _leave(*_: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _announce(address: str, pipe: int | None) -> None:
    print(f"{LISTENING}{address}", flush=True)
    if pipe is not None:
        with open(pipe, "w") as out:
            out.write(f"{address}\n")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m verl.rollout.server.host", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port; 0 takes one that is free")
    parser.add_argument("--socket", help="path of a unix socket, in place of a port")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights-dir", help="where to make the folder for new weights, which clients must see, too")
    parser.add_argument(TRANSPORT, help="by which weights may come, beside that folder")
    parser.add_argument(ANNOUNCE, type=int, help="file descriptor of an open pipe that receives the address")
    parser.add_argument(END_WITH_STDIN, action="store_true", help="end when the standard input does")
    known, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _leave)
    if known.end_with_stdin:
        threading.Thread(target=_end_with_stdin, name="end with stdin", daemon=True).start()
    try:
        config = cast(PPOTrainerConfig, read_config("ppo_trainer", rest))
        on = unix(known.socket) if known.socket else loopback(known.port, known.host)
        if known.socket:
            atexit.register(Path(known.socket).unlink, missing_ok=True)
        folder = _own_folder(known.weights_dir)
        host = Host(threaded(make_sampler(config, known.device)), _key(folder), known.device, known.transport, folder)
        names = () if known.socket else machine_names(known.host)
        asyncio.run(host.serve(on, lambda address: _announce(address, known.announce), names))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
