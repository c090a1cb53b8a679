"""What a request costs the asking process: the client of `verl.serving` beside httpx.

Both ask one loopback server in a process of its own, in turns, with as many requests open at once as the table says;
each answer waits a little at the server, so that they are open together. Processor time of the asking process alone.

    python benchmarks/bench_http_client.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from verl.ports import free_port
from verl.serving.client import Client

OPEN = (1, 16, 256, 1000)
REQUESTS, DELAY = 1000, 0.02
PAYLOAD = {"prompt": list(range(256)), "max_tokens": 64}
Ask = Callable[[], Awaitable[object]]


def serve(port: int, ready: Connection) -> None:
    async def answer(request: Any) -> JSONResponse:
        body = await request.json()
        await asyncio.sleep(DELAY)
        return JSONResponse({"tokens": body["prompt"]})

    async def main() -> None:
        app = Starlette(routes=[Route("/generate", answer, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_keep_alive=60))
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        ready.send(True)
        await running

    asyncio.run(main())


async def cost(ask: Ask, open_at_once: int, requests: int) -> tuple[float, float]:
    """Processor milliseconds per request, and requests per second."""
    left = requests

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await ask()

    clock, start = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(open_at_once)))
    return 1e3 * (time.process_time() - start) / requests, requests / (time.perf_counter() - clock)


async def measure(url: str, rounds: int) -> None:
    ours = Client(url)
    theirs = httpx.AsyncClient(limits=httpx.Limits(max_connections=1000, max_keepalive_connections=1000), timeout=600)
    askers: dict[str, Ask] = {
        "verl.serving": lambda: ours.ask("POST", "/generate", PAYLOAD, timeout=600),
        "httpx": lambda: theirs.post(f"{url}/generate", json=PAYLOAD),
    }
    print("| open at once | client | CPU ms per request: median (least to most) | requests/s | httpx / verl.serving |")
    print("| ---: | --- | --- | ---: | ---: |")
    for open_at_once in OPEN:
        requests = min(REQUESTS, max(100, 4 * open_at_once))
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in askers}
        for _ in range(rounds):
            for name, ask in askers.items():
                seen[name].append(await cost(ask, open_at_once, requests))
        middle = {name: statistics.median(spent for spent, _ in runs) for name, runs in seen.items()}
        for name, runs in seen.items():
            spent, rate = sorted(s for s, _ in runs), statistics.median(r for _, r in runs)
            apart = f"{middle['httpx'] / middle['verl.serving']:.1f}" if name == "httpx" else ""
            print(f"| {open_at_once} | {name} | {middle[name]:.2f} ({spent[0]:.2f} to {spent[-1]:.2f}) "
                  f"| {rate:.0f} | {apart} |", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    context, port = multiprocessing.get_context("spawn"), free_port()
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(port, there), daemon=True)
    process.start()
    here.recv()
    try:
        asyncio.run(measure(f"http://127.0.0.1:{port}", rounds))
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
