"""Token authentication of the cluster: whoever reaches Ray's ports could otherwise run code on every node.

A cluster that we start always asks for a token. A cluster that we join is asked whether it does; the token of this
machine is only sent to one that wants it.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from verl import env
from verl.metrics import notice

MODE = "RAY_AUTH_MODE"
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


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
    notice(MODE, "token authentication is off: whoever reaches the ports of this cluster can run code on it")


def use_token() -> None:
    """Authenticate from now on, also where Ray is loaded already and has read its settings."""
    env.set_value(MODE, "token")
    from ray._raylet import Config  # type: ignore[attr-defined]  # Ray's own way to read its environment again

    Config.initialize("")


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
