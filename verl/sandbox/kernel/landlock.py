"""Landlock: what a process and all its descendants may reach in the file system, whatever the file modes say.

Needs Linux 5.13. Newer kernels also take away TCP (6.7), abstract sockets and signals to outside processes (6.12);
both are used where they are there, and other walls stand in the same place where they are not.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

from verl.sandbox.kernel import calls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_ALL_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
READ = READ_FILE | READ_DIR
_MAKE_DEVICES = (1 << 6) | (1 << 11)
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | (1 << 14) | (1 << 15)
_TCP = 0b11
_SCOPES = 0b11
_RULE_PATH_BENEATH = 1
_VERSION = 1


def abi() -> int:
    """The version of Landlock that this kernel offers. Raises OSError where there is none."""
    return calls.landlock("create_ruleset", None, 0, _VERSION)


def is_offered(alone: bool) -> None:
    """Raises OSError where the kernel has no Landlock; ``alone``, without namespaces, where its version is below 3."""
    if abi() < 3 and alone:
        raise OSError(0, "Landlock before Linux 6.2 does not keep files from being cut off")


def restrict(read: Sequence[str], write: Sequence[str], devices: Sequence[str]) -> None:
    """Take away everything but reading and executing below ``read``, anything below ``write``, and using ``devices``.

    Cannot be undone. Needs `PR_SET_NO_NEW_PRIVS`.
    """
    version = abi()
    everything = _ALL_BY_ABI[max(known for known in _ALL_BY_ABI if known <= version)]
    attributes = struct.pack("=QQQ", everything, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = calls.landlock("create_ruleset", ctypes.create_string_buffer(attributes, size), size, 0)
    for path in read:
        _allow(ruleset, path, (READ | EXECUTE) & everything)
    for path in write:
        _allow(ruleset, path, everything & ~_MAKE_DEVICES & ~EXECUTE)
    for path in devices:
        _allow(ruleset, path, (READ_FILE | WRITE_FILE) & everything)
    calls.landlock("restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, folder))
        calls.landlock("add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(folder)
