"""Who may speak to the cluster: any process that reaches Ray's ports could otherwise run code on every node.

A cluster that we start listens on loopback, keeps its sockets in a folder of this user's alone, and asks for a token. A
cluster that we join is probed for it; the token of this machine is only sent to one that wants it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl import env
from verl.errors import ConfigError
from verl.metrics import notice
from verl.storage.fetch import NotPrivateError, make_private_folder

MODE = "RAY_AUTH_MODE"
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_LONGEST_SOCKET = 107  # bytes of a path that the kernel takes
_IN_SESSION = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.0")


def mode_was_chosen() -> bool:
    """Whether the shell (or an earlier start in this process) said how clusters authenticate."""
    return env.get(MODE) is not None


def has_token() -> bool:
    """Whether this machine holds a token."""
    return env.get(TOKEN) is not None or token_file().is_file()


def token_file() -> Path:
    """Where Ray looks for the token: ``RAY_AUTH_TOKEN_PATH``, else ``~/.ray/auth_token``."""
    return Path(env.expand(env.get(TOKEN_PATH) or "~/.ray/auth_token"))


def demand_token() -> None:
    """Start clusters with token authentication unless the shell chose otherwise; makes a token where there is none."""
    if not mode_was_chosen():
        use_token()
    if str(env.get(MODE)).lower() == "token":
        if not has_token():
            _write_token(token_file())
        _check_permissions(token_file())
        return
    notice(MODE, "token authentication is off: any process that reaches the ports of this cluster can run code on it")


def use_token() -> None:
    """Authenticate from now on, also where Ray is loaded already and has read its settings."""
    env.set_value(MODE, "token")
    from ray._raylet import Config  # type: ignore[attr-defined]  # Ray's own way to read its environment again

    Config.initialize("")


def folder_for_files() -> str:
    """The folder for sockets and logs of a cluster of this run's own, inside one that no other user can enter.

    Ray makes every folder 0777. Ours is where Ray's would be: in ``RAY_TMPDIR``, else ``TMPDIR``, else ``/tmp``; in
    ``/tmp`` also where the path of a socket in ``TMPDIR`` would be longer than the kernel allows.

    Raises:
        ConfigError: another user has taken the name, or others may enter the folder.
    """
    place = env.get("RAY_TMPDIR") or env.get("TMPDIR") or "/tmp"
    needed = len(os.fsencode(f"{place}/verl-{os.geteuid()}/ray")) + _IN_SESSION
    if needed > _LONGEST_SOCKET and not env.get("RAY_TMPDIR"):
        place = "/tmp"
    try:
        return str(make_private_folder(Path(place)) / "ray")
    except NotPrivateError as refused:
        raise ConfigError(
            str(refused),
            key="RAY_TMPDIR",
            got=place,
            fix=f"Remove it, or ask an administrator to: rm -rf {refused.folder}. Or name another folder.",
        ) from None


@contextmanager
def on_loopback() -> Iterator[None]:
    """What Ray starts within listens on 127.0.0.1 only: one machine needs no more.

    Ray has this for macOS and no setting for Linux; a node address that the user set still counts.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def forbid_implicit_start() -> None:
    """Let a call without a connection raise `ray.exceptions.RaySystemError` instead of starting a cluster.

    Ray's default is to start one. A thread that outlives a run by one call would then leave a cluster behind, without a
    token and on every interface, and the start of the next run would fail.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _write_token(file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))


def _check_permissions(file: Path) -> None:
    if not file.is_file():
        return  # the token came from a variable
    readable = [folder.stat().st_mode & 0o011 for folder in file.parents]
    if file.stat().st_mode & 0o044 and all(readable):
        notice(TOKEN_PATH, f"other users of this machine may read the cluster's token; run `chmod 600 {file}`")
