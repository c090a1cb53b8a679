"""Ports that are chosen now and opened a little later, by this process or another one.

In between, the system must give the port to no other process. For port 0 it gives one of those from which it serves
every connection of the machine, so these are left out, and so are those that Ray gives to its workers.
"""

from __future__ import annotations

import random
import socket

RANGE = (20000, 32767)
"""Above Ray's workers (10002 to 19999), below what Linux gives to connections (from 32768)."""


def free_port(ports: tuple[int, int] | None = None) -> int:
    """A port that is free at the moment, different from call to call.

    Args:
        ports: take it from this range (first, last), for instance one that a firewall lets through.

    Raises:
        OSError: all are in use.
    """
    first, last = ports or RANGE
    count = last + 1 - first
    start = random.SystemRandom().randrange(count)  # leaves the run's random numbers alone
    for port in (first + (start + i) % count for i in range(count)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {first} to {last}")
