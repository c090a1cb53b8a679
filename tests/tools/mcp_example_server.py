"""A small MCP server that the tests start: ``python mcp_example_server.py [http PORT]``."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("example")


@server.tool()
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


@server.tool()
def who() -> str:
    """The number of this process, and a secret that the parent's environment may hold."""
    return f"{os.getpid()} {os.environ.get('CANARY', 'no canary')} {os.environ.get('GIVEN', 'nothing given')}"


@server.tool()
def fail() -> str:
    """Always an error."""
    raise ValueError("it cannot be done")


@server.tool()
def sleep(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def die() -> str:
    """Ends the server in the middle of the call."""
    print("the end is near", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def shout(count: int) -> str:
    """Writes much to standard error."""
    for _ in range(count):
        sys.stderr.write("x" * 1_000_000)
    return "shouted"


@server.tool()
def much(count: int) -> str:
    """A long text."""
    return "x" * count


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
