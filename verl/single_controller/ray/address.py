"""Which cluster a run belongs to, and whether it answers, found out in seconds.

Ray's own client waits for minutes at an address where nothing answers, so an address is tried before it is used.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl import env
from verl.errors import ConfigError
from verl.metrics import notice
from verl.single_controller.ray import security

ADDRESS = "RAY_ADDRESS"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What every gRPC client says first: the preface and an empty SETTINGS frame; the server answers with its own."""
_TRY_SECONDS = 2.0


def find_address(ray_init: Mapping[str, Any] | None = None) -> str | None:
    """The address of a running cluster; None means that a cluster of this process's own has to be started.

    Sources, in this order: ``ray_kwargs.ray_init.address``, ``RAY_ADDRESS``, ``ray start`` on this machine. The address
    ``local`` is none; ``auto`` is whatever ``ray start`` left.
    """
    named = (ray_init or {}).get("address") or env.get(ADDRESS)
    if named not in (None, "auto"):
        return None if named == "local" else str(named)
    recorded = started_here()
    if recorded is None and named == "auto":
        raise ConfigError(
            "no cluster was started on this machine",
            key=ADDRESS,
            got="auto",
            fix="Run `ray start --head` first, or name the address of a running cluster.",
        )
    if recorded is None or named == "auto" or answers(recorded):
        return recorded
    notice("ray", f"the cluster that `ray start` left at {recorded} is gone; this run starts its own")
    return None


def started_here() -> str | None:
    """The address that ``ray start`` recorded on this machine; the cluster may be gone."""
    folder = env.get("RAY_TMPDIR") or env.get("TMPDIR") or "/tmp"
    record = Path(folder) / "ray" / "ray_current_cluster"
    return record.read_text().strip() or None if record.is_file() else None


def answers(address: str, seconds: float = _TRY_SECONDS) -> bool:
    """Whether a gRPC server listens there."""
    host, port = _host_port(address)
    try:
        with socket.create_connection((host, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            connection.sendall(_HTTP2_GREETING)
            frame = connection.recv(9)
    except OSError:
        return False
    return len(frame) == 9 and frame[3] == 4


def wait_for_cluster(address: str, seconds: float) -> None:
    """Wait until a cluster answers there and find out whether it wants a token.

    Raises:
        ConfigError: nothing answers within ``seconds``, or the cluster wants a token that this machine has not.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            "a Ray client address cannot run a training job",
            key=ADDRESS,
            got=address,
            fix="Start the run on a machine of the cluster and name the cluster's own address (host:6379).",
        )
    deadline = time.monotonic() + seconds
    while not answers(address, min(_TRY_SECONDS, seconds)):
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"no Ray cluster answers within {seconds:g} s",
                key=ADDRESS,
                got=address,
                fix="Is `ray start --head --port=...` running there, is it this port, and does the network let it "
                "through? Without an address this run starts its own cluster.",
            )
        time.sleep(0.2)
    _authenticate(address)


def _authenticate(address: str) -> None:
    if _accepted(address):
        if not security.mode_was_chosen():
            notice(
                security.MODE,
                f"the cluster at {address} asks for no token: any process that reaches its ports can run code on it. "
                "Start its nodes with RAY_AUTH_MODE=token",
            )
        return
    if not security.mode_was_chosen() and security.has_token():
        security.use_token()
        if _accepted(address):
            return
    raise ConfigError(
        f"the Ray cluster at {address} refuses this machine's token" if security.has_token() else
        f"the Ray cluster at {address} asks for a token and this machine has none",
        key=security.TOKEN_PATH,
        got=str(security.token_file()),
        fix="Copy ~/.ray/auth_token from the head node to the same place here (or set RAY_AUTH_TOKEN) and set "
        "RAY_AUTH_MODE=token.",
    )  # fmt: skip


def _accepted(address: str) -> bool:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import AuthenticationError

    host, port = _host_port(address)
    try:
        GcsClient(address=f"{host}:{port}")
    except AuthenticationError:
        return False
    return True


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("not an address", key=ADDRESS, got=address, allowed="host:port, auto, local")
    return host.strip("[]"), int(port)
