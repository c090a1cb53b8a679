"""Hostile programs and the kernel: system calls that could open a door are refused, and Python tricks gain nothing."""

from __future__ import annotations

import json
import os
import platform

import pytest

from tests.sandbox.attacks import Box
from verl.sandbox import Limits, Pool
from verl.sandbox.kernel.numbers import ARCHITECTURES, NUMBERS

# name = number on x86_64 / on aarch64, from the kernel's headers.
REFUSED = """
ptrace=101/117 process_vm_readv=310/270 process_vm_writev=311/271 kcmp=312/272 bpf=321/280 unshare=272/97
setns=308/268 mount=165/40 umount2=166/39 pivot_root=155/41 chroot=161/51 swapon=167/224 swapoff=168/225
reboot=169/142 sethostname=170/161 setdomainname=171/162 init_module=175/105 finit_module=313/273
delete_module=176/106 kexec_load=246/104 kexec_file_load=320/294 add_key=248/217 request_key=249/218
keyctl=250/219 perf_event_open=298/241 userfaultfd=323/282 io_uring_setup=425/425 io_uring_enter=426/426
io_uring_register=427/427 socket=41/198 connect=42/203 bind=49/200 listen=50/201 accept=43/202 accept4=288/242
setsockopt=54/208 open_by_handle_at=304/265 name_to_handle_at=303/264 fanotify_init=300/262
inotify_init1=294/26 quotactl=179/60 acct=163/89 settimeofday=164/170 clock_settime=227/112 adjtimex=159/171
clock_adjtime=305/266 setuid=105/146 setgid=106/144 setreuid=113/145 setresuid=117/147 setgroups=116/159
capset=126/91 personality=135/92 mknodat=259/33 fchownat=260/54 pidfd_open=434/434 pidfd_getfd=438/438
pidfd_send_signal=424/424 process_madvise=440/440 memfd_create=319/279 memfd_secret=447/447 shmget=29/194
shmat=30/196 shmctl=31/195 semget=64/190 msgget=68/186 mq_open=240/180 mbind=237/235 migrate_pages=256/238
move_pages=279/239 sched_setaffinity=203/122 sched_setscheduler=144/119 setpriority=141/140 syslog=103/116
vhangup=153/58 lookup_dcookie=212/18 landlock_create_ruleset=444/444 landlock_add_rule=445/445
landlock_restrict_self=446/446 seccomp=317/277 open_tree=428/428 move_mount=429/429 fsopen=430/430
fsmount=432/432 mount_setattr=442/442 setxattr=188/5 rt_sigqueueinfo=129/138 rt_tgsigqueueinfo=297/240
flock=73/32 setsid=112/157 sendmsg=46/211 recvmsg=47/212 mlockall=151/230 mlock2=325/284 sync=162/81 syncfs=306/267
"""
NEED_CAPABILITIES = """
mount umount2 pivot_root chroot setns reboot init_module kexec_load setgroups sethostname swapon settimeofday acct bpf
open_by_handle_at
"""
COLUMN = {"x86_64": 0, "aarch64": 1}


def numbers_here() -> dict[str, int]:
    entries = (entry.split("=") for entry in REFUSED.split())
    return {name: int(both.split("/")[COLUMN[platform.machine()]]) for name, both in entries}


CALL = """
import ctypes, errno, json
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in %r.items():
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    found[name] = errno.errorcode.get(ctypes.get_errno(), "ok") if result == -1 else "through"
print(json.dumps(found))
"""


def test_the_list_of_the_filter_and_the_list_of_this_test_have_no_call_in_common():
    refused = {entry.split("=")[0] for entry in REFUSED.split()}
    assert len(refused) >= 40
    for machine in ARCHITECTURES:
        assert not refused & NUMBERS[machine].keys()


def test_ninety_dangerous_system_calls_are_refused_by_number(box: Box):
    if "seccomp" in box.missing:
        wanted = {name: numbers_here()[name] for name in NEED_CAPABILITIES.split()}
    else:
        wanted = numbers_here()
    outcome = box.run(CALL % wanted)
    assert outcome.ok, outcome
    found = json.loads(outcome.stdout)
    assert len(found) == len(wanted)
    if "seccomp" in box.missing:
        assert "through" not in found.values()
    else:
        assert set(found.values()) == {"EPERM"}, {name: said for name, said in found.items() if said != "EPERM"}


@pytest.mark.needs_layers("seccomp")
def test_a_call_that_no_kernel_has_yet_is_refused_too(pool: Pool):
    code = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(999), ctypes.get_errno())"
    assert pool.run(code).stdout == "-1 1\n"


@pytest.mark.needs_layers("seccomp")
def test_the_numbers_of_another_machine_end_the_program(pool: Pool):
    if platform.machine() != "x86_64":
        assert "x86_64" in ARCHITECTURES
        return
    x32 = "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(0x40000000 + 39), ctypes.get_errno())"
    assert pool.run(x32).stdout == "-1 38\n"
    # mov eax, 20 (getpid in 32-bit numbers); int 0x80; ret
    int80 = """if True:
        import ctypes, mmap
        memory = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
        memory.write(bytes([0xB8, 20, 0, 0, 0, 0xCD, 0x80, 0xC3]))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        print("through", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
        """
    outcome = pool.run(int80)
    assert "through" not in outcome.stdout and outcome.status == "crash"


def test_no_namespace_can_be_made(box: Box):
    flags = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "ipc": 0x8000000}
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    call = "import ctypes; l = ctypes.CDLL(None, use_errno=True); r = l.syscall({}, ctypes.c_long({}), 0, 0, 0, 0)\n"
    check = "if r == 0: __import__('os')._exit(9)\nif r < 0: raise OSError(ctypes.get_errno(), 'no')\n"
    tries = {name: call.format(clone, flag | 17) + check for name, flag in flags.items()}
    if "seccomp" in box.missing:
        tries.pop("user")  # a user namespace of its own gives it nothing that is not already its own
    box.none_gets_through(tries)


def test_processes_of_this_machine_cannot_be_signalled_or_traced(box: Box):
    tries = {}
    for pid in {os.getpid(), os.getppid()} - {1}:  # in there 1 is the program's own init
        tries[f"signal {pid}"] = f"import os; os.kill({pid}, 9)"
        tries[f"probe {pid}"] = f"import os; os.kill({pid}, 0)"
    for pid in (os.getpid(), os.getppid(), 1):
        tries[f"trace {pid}"] = (
            "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
            f"if l.ptrace(16, {pid}, 0, 0) < 0: raise OSError(ctypes.get_errno(), 'no')"
        )
        tries[f"limits {pid}"] = f"import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))"
    if "seccomp" in box.missing:
        tries.pop("limits 1")  # its own init; a program that breaks it has no outcome, and no score
    tries["own parent"] = "import os, signal; assert os.getppid() > 1; os.kill(os.getppid(), 9)"
    tries["memory of the parent"] = "got = open('/proc/%d/mem' % __import__('os').getppid(), 'rb').read(1)"
    box.none_gets_through(tries)
    assert box.run("print('still served')").stdout == "still served\n"


def test_killing_everything_it_can_reach_ends_only_itself(box: Box):
    outcome = box.run("import os; os.kill(-1, 9)")
    assert outcome.status in ("crash", "error")
    outcome = box.run("import os, signal; os.killpg(0, 9)")
    assert outcome.status in ("crash", "error")
    assert box.run("print('still served')").stdout == "still served\n"


def test_the_first_process_of_the_run_cannot_be_killed_stopped_or_read(pool: Pool):
    code = """if True:
        import os, signal
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD):
            try:
                os.kill(1, number)
            except OSError:
                pass
        print("after")
        """
    assert pool.run(code).stdout == "after\n"


@pytest.mark.needs_layers("namespaces")
def test_privileges_cannot_be_gained_by_executing_files(pool: Pool):
    code = """if True:
        import subprocess, sys
        got = subprocess.run([sys.executable, "-c", "import os; print(os.getuid(), os.geteuid())"], capture_output=True)
        print(got.stdout.decode().strip())
        import ctypes
        print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))
        """
    assert pool.run(code).stdout == "1000 1000\n1\n"


def test_limits_cannot_be_raised_again(box: Box):
    code = """
        import resource
        for name in ("AS", "NPROC", "FSIZE", "NOFILE", "CORE"):
            kind = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(kind)[1]
            try:
                resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            except (OSError, ValueError):
                continue
            if hard != resource.RLIM_INFINITY:
                print(name, "was raised")
        """
    assert box.run(code).stdout == ""


def test_python_tricks_find_no_way_out(box: Box):
    tries = {
        "subclasses": """
            found = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen']
            import subprocess
            assert subprocess.Popen(['/bin/cat', '/etc/passwd'], stdout=-1).communicate()[0]
            """,
        "file by codecs": "import codecs; got = codecs.open('/etc/passwd').read()",
        "file by loader": "import importlib.machinery as m; m.SourceFileLoader('p', '').get_data('/etc/passwd')",
        "file by c": "import ctypes; l = ctypes.CDLL(None); assert l.open(b'/etc/passwd', 0) >= 0",
        "map of memory": "import mmap, os; got = mmap.mmap(os.open('/etc/passwd', os.O_RDONLY), 10)",
        "shell": "import os; assert os.system('cat /etc/passwd') == 0",
        "library of its own": "import ctypes; got = ctypes.CDLL('/tmp/evil.so')",
        "sockets of the keeper": """
            import gc, socket
            for thing in gc.get_objects():
                if isinstance(thing, socket.socket) and thing.fileno() > 2:
                    thing.send(b'x'); got = thing
            got
            """,
        "pickle that calls": """
            import pickle
            class Evil:
                def __reduce__(self):
                    return (open, ('/etc/passwd',))
            got = pickle.loads(pickle.dumps(Evil())).read()
            """,
    }
    found = box.attempts(tries, seconds=20)
    through = {name: said for name, said in found.items() if said.startswith("through")}
    assert not through, through


def test_modules_that_one_program_spoils_are_whole_for_the_next(pool: Pool):
    pool.run("import builtins, json, math; builtins.print = None; json.dumps = None; math.sqrt = lambda x: 0")
    assert pool.run("import json, math; print(json.dumps([math.sqrt(4)]))").stdout == "[2.0]\n"


@pytest.mark.parametrize("module", ["verl.sandbox.inside.watch", "verl.sandbox.inside.init", "verl.sandbox.verdicts"])
def test_spoiling_our_own_modules_changes_nothing_outside(pool: Pool, module: str):
    code = (
        f"import sys\nmodule = sys.modules.get({module!r})\n"
        "for name in list(vars(module or object)):\n"
        "    try:\n        setattr(module, name, None)\n    except Exception:\n        pass\n"
        "raise SystemExit(5)"
    )
    assert pool.run(code).exit_code == 5
    assert pool.run("print('whole')", limits=Limits(seconds=5)).stdout == "whole\n"
