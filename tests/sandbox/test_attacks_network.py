"""Hostile programs and the network: no connection arrives anywhere, and no socket can be made."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sandbox.attacks import Box


@dataclass
class Listeners:
    """Sockets of this machine that wait for visitors."""

    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    unix_path: str
    abstract_name: str

    def visitors(self) -> list[str]:
        found = []
        for name in ("tcp", "unix", "abstract"):
            try:
                getattr(self, name).accept()[0].close()
                found.append(name)
            except BlockingIOError:
                continue
        try:
            self.udp.recv(10)
            found.append("udp")
        except BlockingIOError:
            return found
        return found


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    folder = Path(tempfile.mkdtemp(prefix="listen-"))
    folder.chmod(0o777)
    name = f"\0canary-{folder.name}"
    made = []
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
        (socket.AF_UNIX, socket.SOCK_STREAM, name),
    ):
        made.append(socket.socket(family, kind))
        made[-1].bind(address)
        made[-1].setblocking(False)
        if kind == socket.SOCK_STREAM:
            made[-1].listen()
    (folder / "socket").chmod(0o777)
    yield Listeners(*made, unix_path=str(folder / "socket"), abstract_name=name)
    for one in made:
        one.close()
    shutil.rmtree(folder)


def test_no_connection_leaves_the_sandbox(box: Box, listeners: Listeners):
    tcp, udp = listeners.tcp.getsockname(), listeners.udp.getsockname()
    make = "import socket; s = socket.socket(socket.AF_{}, socket.SOCK_{}); s.settimeout(0.3); "
    tries = {
        "loopback": f"{make.format('INET', 'STREAM')}s.connect({tcp!r})",
        "loopback by name": f"import socket; socket.create_connection(('localhost', {tcp[1]}), 0.3)",
        "loopback 6": f"{make.format('INET6', 'STREAM')}s.connect(('::1', {tcp[1]}))",
        "udp": f"{make.format('INET', 'DGRAM')}s.sendto(b'x', {udp!r})",
        "metadata service": f"{make.format('INET', 'STREAM')}s.connect(('169.254.169.254', 80))",
        "private": f"{make.format('INET', 'STREAM')}s.connect(('10.0.0.1', 80))",
        "public": f"{make.format('INET', 'STREAM')}s.connect(('1.1.1.1', 53))",
        "name lookup": "import socket; got = socket.getaddrinfo('example.com', 80)",
        "ping": "import socket; s = socket.socket(2, 3, 1); s.sendto(b'x', ('127.0.0.1', 0))",
        "ping socket": "import socket; s = socket.socket(2, 2, 1); s.sendto(b'x' * 16, ('127.0.0.1', 0))",
        "unix": f"{make.format('UNIX', 'STREAM')}s.connect({listeners.unix_path!r})",
        "abstract": f"{make.format('UNIX', 'STREAM')}s.connect({listeners.abstract_name!r})",
        "web": f"import urllib.request; got = urllib.request.urlopen('http://127.0.0.1:{tcp[1]}', timeout=0.3)",
    }
    box.none_gets_through(tries, seconds=20)
    assert listeners.visitors() == []


def test_the_listeners_of_these_tests_do_notice_visitors(listeners: Listeners):
    with socket.create_connection(listeners.tcp.getsockname()), socket.socket(socket.AF_UNIX) as other:
        other.connect(listeners.unix_path)
        assert listeners.visitors() == ["tcp", "unix"]


def test_no_socket_of_any_family_can_be_made(box: Box):
    if "seccomp" in box.missing:
        families = {"packet": (17, 3), "raw": (2, 3)}  # what namespaces alone deny to a process without capabilities
    else:
        families = {str(family): (family, kind) for family in (*range(1, 46),) for kind in (1,)}
        families |= {"netlink": (16, 3), "packet": (17, 3), "vsock": (40, 1), "alg": (38, 5)}
    box.none_gets_through({name: f"import socket; socket.socket({f}, {k})" for name, (f, k) in families.items()})


def test_a_pair_of_sockets_works_because_libraries_use_it(box: Box):
    assert box.run("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))").stdout == "b'x'\n"
    assert box.run("import asyncio; print(asyncio.run(asyncio.sleep(0, 'loop')))").stdout == "loop\n"


def test_no_server_can_be_opened_that_this_machine_could_reach(box: Box):
    code = """
        import socket
        try:
            s = socket.socket(); s.bind(("0.0.0.0", 48123)); s.listen(); s.settimeout(0.3); s.accept()
        except OSError as error:
            print(type(error).__name__)
        """
    outcome = box.run(code, seconds=20)
    assert outcome.stdout in ("PermissionError\n", "TimeoutError\n")
