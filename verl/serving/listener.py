"""Sockets that are bound here, so that no other process can have taken the name of one before."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from verl import env
from verl.errors import ConfigError

LONGEST = 107
"""Bytes of a path that a unix socket may have."""


def loopback(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    """A socket on one address of this machine; port 0 takes a free one.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken or no port.
    """
    if port not in range(65_536):  # getaddrinfo takes the rest of a division
        raise ConfigError("no port has this number", key="--port", got=port, allowed="0 to 65535, 0 for a free one")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"cannot listen there: {error.strerror}", key="--host", got=host) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()  # from here on no other process can
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen there: {error.strerror}", key="--port", got=f"{host}:{port}") from error
    return listener


def unix(path: str | Path) -> socket.socket:
    """A unix socket of mode 0600 in a folder that only this user can enter.

    Raises:
        ConfigError: others may enter the folder, another file has that name, or the path is too long.
    """
    place = Path(path)
    folder = place.parent
    there = folder.stat() if folder.is_dir() else None
    if there is None or there.st_uid != os.geteuid() or there.st_mode & 0o077:
        raise ConfigError(
            "a unix socket is made in a folder that only this user can enter",
            key="--socket",
            got=str(place),
            fix=f"mkdir -m 700 {folder}" if there is None else f"chmod 700 {folder}",
        )
    if len(os.fsencode(place)) > LONGEST:
        raise ConfigError("the path is too long", key="--socket", got=str(place), allowed=f"{LONGEST} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(place))
        place.chmod(0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen there: {error.strerror}", key="--socket", got=str(place)) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """As clients name it: ``http://host:port``, or ``unix:/path``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def private_folder(prefix: str) -> Path:
    """A new folder that only this user can enter, with room for the path of a unix socket in it.

    Raises:
        ConfigError: every place for temporary files has too long a path.
    """
    places = (tempfile.gettempdir(), env.get("XDG_RUNTIME_DIR"), "/tmp")
    for place in places:
        room = LONGEST - len(prefix) - len("/12345678/socket")
        if place and len(os.fsencode(place)) <= room and os.access(place, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    raise ConfigError("the path is too long for a unix socket", key="TMPDIR", got=places[0], allowed=f"{room} bytes")
