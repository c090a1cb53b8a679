"""Ports for servers that start a little later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from verl.ports import RANGE, free_port


def test_the_system_gives_a_chosen_port_to_no_connection():
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert RANGE[1] < 32768
    if first_of_connections >= 32768:
        assert all(RANGE[0] <= free_port() < first_of_connections for _ in range(100))


def test_ports_differ_and_leave_the_random_numbers_alone():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    assert len({free_port() for _ in range(100)}) > 90
    assert random.random() == expected


def test_a_port_in_use_is_passed_over_and_a_full_range_is_an_error():
    with socket.socket() as holder:
        holder.bind(("", 0))
        held = holder.getsockname()[1]
        with pytest.raises(OSError, match=f"no free port from {held} to {held}"):
            free_port((held, held))
