"""Landlock: what a process and all its descendants may reach in the file system, whatever the file modes say.

Needs Linux 5.13. Later kernels also take away the cutting off of files (6.2), TCP (6.7), device commands (6.10),
abstract sockets and signals to outside processes (6.12). A ruleset requests all that the version has and no
more: a kernel refuses a bit that it does not know. Other walls stand in the same place where it has not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from verl.sandbox.kernel import calls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
READ = READ_FILE | READ_DIR
NEWEST = 7
"""The last version whose additions are used."""
_MAKE_DEVICES = (1 << 6) | (1 << 11)
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_FILES_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_FIELDS_BY_VERSION = {1: 1, 4: 2, 6: 3}
"""64-bit fields of the attributes: files, network, scopes."""
_TCP = 0b11
_SCOPES = 0b11
_NO_LOG = 1
_RULE_PATH_BENEATH = 1
_ASK_VERSION = 1


def version(newest: int = NEWEST) -> int:
    """The version of Landlock that this kernel offers, at most ``newest``. Raises OSError where there is none."""
    offered = min(calls.landlock("create_ruleset", None, 0, _ASK_VERSION), newest)
    if offered < 1:
        raise OSError(errno.EOPNOTSUPP, "this kernel has no Landlock")
    return offered


def offered(alone: bool, newest: int = NEWEST) -> int:
    """`version`; raises OSError also where it must stand ``alone``, without namespaces, and is below 3."""
    kernel_version = version(newest)
    if alone and kernel_version < 3:
        raise OSError(errno.EOPNOTSUPP, "Landlock before Linux 6.2 does not keep files from being cut off")
    return kernel_version


def restrict(read: Sequence[str], write: Sequence[str], devices: Sequence[str], version: int) -> None:
    """Take away everything but reading and executing below ``read``, anything below ``write``, and using ``devices``.

    Cannot be undone. Needs `PR_SET_NO_NEW_PRIVS`. Raises OSError where the kernel does not do it.
    """
    everything = _of(_FILES_BY_VERSION, version)
    size = 8 * _of(_FIELDS_BY_VERSION, version)
    attributes = struct.pack("=QQQ", everything, _TCP, _SCOPES)[:size]
    ruleset = calls.landlock("create_ruleset", ctypes.create_string_buffer(attributes, size), size, 0)
    for path in read:
        _allow(ruleset, path, (READ | EXECUTE) & everything)
    for path in write:
        _allow(ruleset, path, everything & ~_MAKE_DEVICES & ~EXECUTE)
    for path in devices:
        _allow(ruleset, path, (READ_FILE | WRITE_FILE) & everything)
    # A line for each refusal would let a program fill this machine's log.
    calls.landlock("restrict_self", ruleset, _NO_LOG if version >= 7 else 0)
    os.close(ruleset)


def _of(table: dict[int, int], version: int) -> int:
    return table[max(known for known in table if known <= version)]


def _allow(ruleset: int, path: str, access: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, folder))
        calls.landlock("add_rule", ruleset, _RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(folder)
