"""The rendezvous store of a process group: it listens on the address that was named and on no other one.

Torch's store listens on every interface without a secret: any host that reaches it can rewrite what ranks read
there, the addresses of the other ranks among it. So the socket is bound here and passed on. gloo listens on the
address to which the name of the machine resolves; here it is given the interface on which the others are met.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

from verl import env
from verl.errors import EngineError
from verl.metrics import notice

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def meet(
    host: str, port: int, world_size: int, is_first: bool, timeout: timedelta, waits: bool = True
) -> dist.TCPStore:
    """The store of a group; the first process holds it.

    Args:
        host: address of the first process's machine, which it listens on alone.
        port: 0 takes a free one (``.port`` of the result).
        waits: return only when all are there.

    Raises:
        OSError: the first process cannot listen there.
        RuntimeError: the others were not met in time.
    """
    if not is_first:
        return dist.TCPStore(host, port, world_size, False, timeout, waits)
    listener = _bound(host, port)
    number = int(listener.getsockname()[1])
    return dist.TCPStore(host, number, world_size, True, timeout, waits, master_listen_fd=listener.detach())


def _bound(host: str, port: int) -> socket.socket:
    """A socket on the first address of a name."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise EngineError("the address at which processes meet is unknown here", got=host) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"rank 0 cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def address_towards(host: str, port: int = 9) -> str:
    """The address of this machine that has the way to another one; loopback where the other one is this machine.

    Raises:
        OSError: there is no way.
    """
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an address, as ``eth0``; None if none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return "lo" if address.startswith("127.") else None


def keep_gloo_on(host: str) -> None:
    """Let gloo listen where the others are met, unless ``GLOO_SOCKET_IFNAME`` says otherwise."""
    if env.get(GLOO_INTERFACE):
        return
    try:
        name = interface_of(address_towards(host))
    except OSError:
        name = None
    if name is None:
        notice(GLOO_INTERFACE, f"no interface of this machine has the way to {host}: gloo listens where the name does")
        return
    env.set_value(GLOO_INTERFACE, name)


def gloo_group(store: dist.Store, rank: int, world_size: int, host: str, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A gloo group beside whatever groups the process is in, on the address that has the way to ``host``."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's types leave it out
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return dist.ProcessGroupGloo(store, rank, world_size, options)
