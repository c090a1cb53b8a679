"""What is asked of Landlock, held against each version of the kernel's interface: no more than that version knows.

The kernels are written here from include/uapi/linux/landlock.h of each release; they answer as the real ones do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

import pytest

from verl.sandbox.kernel import calls, landlock

# version: (release, bytes of the attributes, bits for files, bits for the network, scopes, flags of restrict_self)
KERNELS = {
    1: ("5.13", 8, 0x1FFF, 0, 0, 0),
    2: ("5.19", 8, 0x3FFF, 0, 0, 0),
    3: ("6.2", 8, 0x7FFF, 0, 0, 0),
    4: ("6.7", 16, 0x7FFF, 3, 0, 0),
    5: ("6.10", 16, 0xFFFF, 3, 0, 0),
    6: ("6.12", 24, 0xFFFF, 3, 3, 0),
    7: ("6.15", 24, 0xFFFF, 3, 3, 7),
}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1, 2, 4, 8, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


class Kernel:
    """Landlock's three calls as a kernel of one version answers them."""

    def __init__(self, version: int):
        self.version = version
        _, self.size, self.files, self.network, self.scopes, self.flags = KERNELS[version]
        self.handled: tuple[int, int, int] | None = None
        self.rules: dict[str, int] = {}
        self.restricted: int | None = None

    def landlock(self, step: str, *arguments) -> int:
        return getattr(self, step)(*arguments)

    def create_ruleset(self, attributes, size: int, flags: int) -> int:
        if flags == 1:
            assert attributes is None and size == 0
            return self.version
        data = ctypes.string_at(attributes, size)
        if any(data[self.size :]):
            raise OSError(errno.E2BIG, "a field that this kernel has not")
        values = struct.unpack("=QQQ", data[: self.size].ljust(24, b"\0"))
        if any(value & ~known for value, known in zip(values, (self.files, self.network, self.scopes), strict=True)):
            raise OSError(errno.EINVAL, "a bit that this kernel has not")
        self.handled = values
        return os.open("/dev/null", os.O_RDONLY)

    def add_rule(self, _ruleset: int, kind: int, rule, flags: int) -> int:
        assert (kind, flags) == (1, 0) and self.handled is not None
        access, folder = struct.unpack("=Qi", ctypes.string_at(rule, 12))
        if not access or access & ~self.handled[0]:
            raise OSError(errno.EINVAL, "a bit that the rules do not handle")
        path = os.readlink(f"/proc/self/fd/{folder}")
        if not os.path.isdir(path) and access & ~OF_FILES:
            raise OSError(errno.EINVAL, "a bit of folders for a file")
        self.rules[path] = access
        return 0

    def restrict_self(self, _ruleset: int, flags: int) -> int:
        if flags & ~self.flags:
            raise OSError(errno.EINVAL, "a flag that this kernel has not")
        self.restricted = flags
        return 0


def restricted(monkeypatch: pytest.MonkeyPatch, tmp_path, kernel: Kernel) -> Kernel:
    monkeypatch.setattr(calls, "landlock", kernel.landlock)
    readable, writable = tmp_path / "read", tmp_path / "write"
    readable.mkdir(), writable.mkdir()
    (tmp_path / "file").write_text("")
    paths = [str(readable), str(tmp_path / "file")]
    landlock.restrict(paths, [str(writable)], ["/dev/null"], landlock.version())
    return kernel


@pytest.mark.parametrize("version", KERNELS)
def test_every_kernel_takes_what_is_asked_of_it_and_is_asked_for_all_it_has(version: int, monkeypatch, tmp_path):
    kernel = restricted(monkeypatch, tmp_path, Kernel(version))
    assert kernel.handled == (kernel.files, kernel.network, kernel.scopes), "everything that can be taken away"
    assert kernel.restricted is not None
    assert kernel.rules[str(tmp_path / "read")] == EXECUTE | READ_FILE | READ_DIR
    assert kernel.rules[str(tmp_path / "file")] == EXECUTE | READ_FILE
    assert kernel.rules["/dev/null"] == READ_FILE | WRITE_FILE
    written = kernel.rules[str(tmp_path / "write")]
    assert written & (WRITE_FILE | READ_FILE | READ_DIR) == WRITE_FILE | READ_FILE | READ_DIR
    assert not written & EXECUTE and not written & (1 << 6 | 1 << 11), "no programs and no devices of its own"
    assert bool(written & TRUNCATE) is (version >= 3)


@pytest.mark.parametrize("version", KERNELS)
def test_what_it_refuses_is_kept_out_of_the_machines_audit_log_where_it_can_be(version: int, monkeypatch, tmp_path):
    """From version 7 on a kernel writes a line for each refusal: a program could fill the log of the machine."""
    assert restricted(monkeypatch, tmp_path, Kernel(version)).restricted == (1 if version >= 7 else 0)


def test_a_later_kernel_is_asked_for_what_version_seven_has(monkeypatch, tmp_path):
    kernel = Kernel(7)
    kernel.version = 12
    assert restricted(monkeypatch, tmp_path, kernel).handled == (0xFFFF, 3, 3)


@pytest.mark.parametrize("newest", range(8))
def test_a_version_can_be_pretended_and_never_one_that_is_not_there(newest: int, monkeypatch):
    monkeypatch.setattr(calls, "landlock", Kernel(5).landlock)
    if newest == 0:
        with pytest.raises(OSError, match="no Landlock"):
            landlock.version(newest)
    else:
        assert landlock.version(newest) == min(newest, 5)


@pytest.mark.parametrize("version", KERNELS)
def test_only_a_version_that_guards_against_cutting_files_off_stands_alone(version: int, monkeypatch):
    monkeypatch.setattr(calls, "landlock", Kernel(version).landlock)
    assert landlock.offered(alone=False) == version
    if version >= 3:
        assert landlock.offered(alone=True) == version
    else:
        with pytest.raises(OSError, match=r"Linux 6\.2"):
            landlock.offered(alone=True)
