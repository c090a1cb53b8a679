"""Hostile programs and files: nothing of this machine can be read, and nothing outside the temporary folder written."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.attacks import Box
from verl.sandbox import Limits, Pool, Session

CHECKOUT = Path(__file__).resolve().parents[2]
SECRET = "canary-7c1f"


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file that every user of this machine may read and write, in a folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="canary-"))
    folder.chmod(0o777)
    file = folder / "secret.txt"
    file.write_text(SECRET)
    file.chmod(0o666)
    yield file
    shutil.rmtree(folder)


def test_no_file_of_this_machine_can_be_read(box: Box, canary: Path):
    paths = [
        str(canary), "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/self/environ", "/proc/1/environ",
        f"/proc/{os.getpid()}/environ", "/proc/self/maps", "/proc/kcore", "/sys/kernel/notes",
        str(CHECKOUT / "README.md"), str(CHECKOUT / "pyproject.toml"), str(CHECKOUT / "verl/__init__.py"),
        *(os.path.expanduser(name) for name in ("~/.ssh/id_rsa", "~/.bashrc", "~root/.bashrc")), "/dev/mem", "/dev/vda",
        "/dev/sda", "/dev/kmsg", "/dev/tty", "/dev/ptmx",
    ]  # fmt: skip
    box.none_gets_through({path: f"got = open({path!r}, 'rb').read(20)" for path in paths})


def test_no_folder_of_this_machine_can_be_listed(box: Box, canary: Path):
    paths = [str(canary.parent), "/etc", "/home", "/sys", "/proc", "/var", "/usr/bin", "/boot"]
    interpreter = Path(sys.executable).resolve().name  # where it lies in /usr/bin, it lies there alone
    look = "import os; got = [name for name in os.listdir({!r}) if name != {!r}]; assert got"
    box.none_gets_through({path: look.format(path, interpreter) for path in paths})
    # Without Landlock the empty root can be listed, and in it the folders that lead to installed packages.
    found = box.attempts({path: f"import os; got = os.listdir({path!r})" for path in ("/", str(CHECKOUT))})
    assert all(not said.startswith("through") or "landlock" in box.missing for said in found.values())
    assert "'etc'" not in found["/"] and "README.md" not in found[str(CHECKOUT)]


def test_nothing_outside_the_temporary_folder_can_be_written(box: Box, canary: Path):
    folder = canary.parent
    tries = {
        "overwrite": f"open({str(canary)!r}, 'w').write('x')",
        "append": f"open({str(canary)!r}, 'a').write('x')",
        "create": f"open({str(folder / 'new')!r}, 'w').write('x')",
        "truncate": f"import os; os.truncate({str(canary)!r}, 0)",
        "remove": f"import os; os.remove({str(canary)!r})",
        "rename": f"import os; os.rename({str(canary)!r}, 'mine')",
        "mode": f"import os; os.chmod({str(canary)!r}, 0)",
        "folder": f"import os; os.mkdir({str(folder / 'dir')!r})",
        "in the root": "open('/new', 'w').write('x')",
        "in the library": "import json, os; open(os.path.join(os.path.dirname(json.__file__), 'x.py'), 'w')",
        "in a package": "import site, sys; open(sys.path[-1] + '/evil.pth', 'w').write('import os')",
        "shared memory": "open('/dev/shm/x', 'w').write('x')",
        "the checkout": f"open({str(CHECKOUT / 'verl/evil.py')!r}, 'w').write('x')",
        "proc": "open('/proc/sys/kernel/hostname', 'w').write('x')",
        "proc of self": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    }
    box.none_gets_through(tries)
    assert canary.read_text() == SECRET and [path.name for path in folder.iterdir()] == ["secret.txt"]
    assert not (CHECKOUT / "verl/evil.py").exists()


def test_links_and_dots_lead_nowhere(box: Box, canary: Path):
    path = str(canary)
    tries = {
        "symbolic link": f"import os; os.symlink({path!r}, 'link'); got = open('link').read()",
        "link to the root": f"import os; os.symlink('/', 'root'); got = open('root' + {path!r}).read()",
        "hard link": f"import os; os.link({path!r}, 'hard'); got = open('hard').read()",
        "dots": f"got = open('../../../..' + {path!r}).read()",
        "folder by descriptor": f"import os; d = os.open('/', os.O_PATH); got = os.open({path[1:]!r}, 0, dir_fd=d)",
        "dots by descriptor": f"import os; d = os.open('.', 0); got = os.open('../..' + {path!r}, 0, dir_fd=d)",
        "write by link": f"import os; os.symlink({path!r}, 'out'); open('out', 'w').write('x')",
        "proc root": f"got = open('/proc/1/root' + {path!r}).read()",
        "proc folder": f"got = open('/proc/self/cwd/../..' + {path!r}).read()",
        "proc descriptor": "got = open('/proc/1/fd/0').read(1)",
        "change of root": f"import os; os.chroot('.'); got = open({path!r}).read()",
        "change of folder": f"import os; os.chdir({str(canary.parent)!r}); got = open('secret.txt').read()",
    }
    box.none_gets_through(tries)
    assert canary.read_text() == SECRET


def test_set_user_id_bits_and_devices_give_nothing(box: Box):
    tries = {
        "device": "import os, stat; os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(8, 0)); got = open('disk', 'rb')",
        "character device": "import os, stat; os.mknod('mem', 0o666 | stat.S_IFCHR, os.makedev(1, 1))",
        "user": "import os; os.setuid(0) or os.setresuid(0, 0, 0); got = os.getuid()",
        "group": "import os; os.setgid(0) or os.setgroups([0]); got = os.getgid()",
        "owner": "import os; open('f', 'w'); os.chown('f', 4321, 4321)",
        "executable of its own": """
            import os, shutil, subprocess, sys
            shutil.copy(sys.executable, 'python'); os.chmod('python', 0o4755)
            got = subprocess.run(['./python', '-c', 'import os; print(os.geteuid())'], capture_output=True, check=True)
            """,
    }
    found = box.attempts(tries)
    through = {name for name, said in found.items() if said.startswith("through")}
    if "landlock" in box.missing:  # nothing forbids to execute its own file, and it is not given more rights for it
        assert through <= {"executable of its own"} and "b'0" not in found["executable of its own"]
    elif "seccomp" in box.missing or box.missing == ():
        assert not through
    if "namespaces" in box.missing:
        through.discard("user"), through.discard("group")
    assert not through - {"executable of its own"}


def test_programs_leave_nothing_for_the_next_one(box: Box):
    box.run("open('note', 'w').write('x'); open('/tmp/note', 'w').write('x')")
    assert box.run("import os; print(os.listdir('.'))").stdout == "['main.py']\n"


def test_the_temporary_folder_is_gone_from_this_machine_afterwards(box: Box, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other runs of this machine have folders of their own
    made = box.run("import os; open('big', 'wb').write(b'x' * 1000000); print(os.path.getsize('big'))")
    assert made.stdout == "1000000\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs_layers("namespaces")
def test_two_sessions_do_not_see_each_others_files(pool: Pool):
    with Session(pool, Limits()) as one, Session(pool, Limits()) as other:
        one.run("open('/tmp/mine', 'w').write('x')")
        assert one.run("open('/tmp/mine').read()").stdout == "'x'\n"
        assert "FileNotFoundError" in other.run("open('/tmp/mine').read()").stderr


def test_code_and_input_of_the_caller_are_not_in_the_programs_memory_as_files(box: Box):
    """The program's own text is in its folder; no other file of the run is open or lies about."""
    code = """
        import os
        def is_open(fd):
            try:
                os.fstat(fd)
            except OSError:
                return False
            return True
        print([fd for fd in range(1024) if is_open(fd)])
        """
    assert box.run(code).stdout == "[0, 1, 2, 3]\n"
