"""``python -m verl.viewer RUN [RUN2 ...]``: look at runs in a browser, while they go on and afterwards."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from verl.errors import ConfigError, VerlError
from verl.serving import loopback, secret
from verl.viewer.api import make_server
from verl.viewer.run import ViewedRun


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; returns the exit status: 0, or 2 after a message."""
    parser = argparse.ArgumentParser(prog="verl view", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (trainer.default_local_dir)")
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1; by default a free one")
    meanings = {"--samples": "trainer.rollout_data_dir", "--metrics": "a metrics file"}
    for flag, meaning in meanings.items():
        more = f"{meaning} outside of the run's folder; once per run, in their order"
        parser.add_argument(flag, type=Path, action="append", default=[], metavar="PLACE", help=more)
    args = parser.parse_args(argv)
    try:
        for flag, values in (("--samples", args.samples), ("--metrics", args.metrics)):
            if len(values) > len(args.runs):
                raise ConfigError(
                    "more of them than runs", key=flag, got=len(values), allowed=f"at most {len(args.runs)}"
                )
        runs = [ViewedRun(*places) for places in zip_longest(args.runs, args.metrics, args.samples)]
        asyncio.run(serve(runs, args.port))
    except VerlError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


async def serve(runs: list[ViewedRun], port: int) -> None:
    """Print the link, and answer until the task is cancelled.

    Raises:
        ConfigError: the port is taken.
    """
    token = secret.new_key()
    server = make_server(runs, token)
    await server.start(loopback(port))
    print(f"http://127.0.0.1:{server.port}/?token={token}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()


if __name__ == "__main__":
    sys.exit(main())
