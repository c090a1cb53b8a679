"""A machine without a wall: nothing runs, the error names the wall, and weaker isolation has to be asked for by name.

The kernel's answer is forced here, so that these tests say the same on every machine.
"""

from __future__ import annotations

import re

import pytest

from tests.harness.sandboxes import HERE, OFFERED, arguments
from verl.errors import ConfigError, SandboxError
from verl.sandbox import LAYERS, Limits, Outcome, Pool, SandboxRefused, Session, check, process
from verl.sandbox.inside import walls
from verl.sandbox.kernel import calls, seccomp
from verl.sandbox.layers import refusal


@pytest.mark.parametrize("layer", LAYERS)
def test_a_missing_layer_is_named_and_nothing_runs(layer: str):
    with Pool(without=(layer,)) as pool, pytest.raises(SandboxRefused) as caught:
        pool.run("print('ran')")
    said = str(caught.value)
    assert f"{layer} (left out on purpose)" in said and "these layers of the sandbox: " in said
    assert f"'{layer}'" in said.partition("allow_missing=")[2] and "remote sandbox" in said
    assert isinstance(caught.value, SandboxError)


@pytest.mark.parametrize("layer", LAYERS)
def test_another_concession_is_not_this_one(layer: str):
    others = [name for name in LAYERS if name != layer]
    with Pool(allow_missing=others, without=(layer,)) as pool, pytest.raises(SandboxRefused, match=layer):
        pool.run("print('ran')")


def test_what_was_conceded_runs_and_says_what_is_missing():
    for layer in LAYERS:
        if f"without {layer}" in OFFERED:
            with Pool(1, **arguments(f"without {layer}")) as pool:
                assert pool.prepare()[layer] == "left out on purpose"
                assert pool.run("print('ran')").stdout == "ran\n"


def test_some_protection_must_stay_whatever_is_conceded():
    everything = dict.fromkeys(LAYERS, "no")
    for left in ((), ("landlock",), ("seccomp",)):
        missing = {name: reason for name, reason in everything.items() if name not in left}
        refused = refusal(missing, LAYERS)
        assert refused is not None and "landlock and seccomp must both be there" in str(refused)
    assert refusal({"landlock": "no", "seccomp": "no"}, LAYERS) is None
    assert refusal({"namespaces": "no"}, LAYERS) is None
    assert refusal({}, ()) is None


def test_an_unknown_layer_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"Did you mean 'landlock'\?"):
        Pool(allow_missing=("landlok",))


def test_the_kernels_own_reason_is_told(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(calls, "unshare", refuse)
    monkeypatch.setattr(calls, "syscall", refuse)
    seen: dict[str, str] = {}

    def accept(missing) -> None:
        seen.update(missing)
        raise SandboxRefused("as the caller would")

    with pytest.raises(SandboxRefused):
        walls.raise_outer([], [], accept)
    assert seen == dict.fromkeys(LAYERS, "Operation not permitted")


def test_a_machine_whose_calls_are_not_listed_has_no_filter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    seccomp.build.cache_clear()
    with pytest.raises(OSError, match="riscv64 are not listed"):
        seccomp.build()
    seccomp.build.cache_clear()


@pytest.mark.parametrize("newest", range(8))
def test_without_namespaces_a_kernel_before_6_2_runs_nothing(newest: int):
    given = {"allow_missing": ["namespaces"], "without": ["namespaces"], "newest_landlock": newest}
    with Pool(1, **given) as pool:
        if newest >= 3:
            assert pool.run("print('ran')").stdout == "ran\n"
            return
        with pytest.raises(SandboxRefused, match=r"landlock \((Landlock before|this kernel has no)"):
            pool.run("print('ran')")


def test_a_kernel_without_landlock_runs_nothing_unless_that_is_accepted():
    with Pool(1, newest_landlock=0) as pool, pytest.raises(SandboxRefused, match="this kernel has no Landlock"):
        pool.run("print('ran')")


SPOILT = {
    "an error of ours behind the walls": (
        "from verl.sandbox.inside import walls\n"
        "def enter_program(*_): raise ValueError('byte string too long')\n"
        "walls.enter_program = enter_program\n",
        "ValueError: byte string too long",
    ),
    "an error of the kernel behind the walls": (
        "from verl.sandbox.kernel import seccomp\n"
        "real = seccomp.install\n"
        "import os\n"
        "def install(program):\n"
        "    if os.getpid() == 2: raise OSError(22, 'seccomp: Invalid argument')\n"
        "    real(program)\n"
        "seccomp.install = install\n",
        "seccomp: Invalid argument",
    ),
    "an end without a word": (
        "import os\nfrom verl.sandbox.inside import walls\nwalls.enter_program = lambda *_: os._exit(3)\n",
        "ended before its walls stood (exit code 3)",
    ),
    "a death": (
        "import os\nfrom verl.sandbox.inside import walls\nwalls.enter_program = lambda *_: os.abort()\n",
        "ended before its walls stood (signal 6)",
    ),
    "memory that runs out behind the walls": (
        "from verl.sandbox.inside import walls\nreal = walls.enter_program\n"
        "def enter_program(*given):\n"
        "    real(*given)\n"
        "    bytearray(10 << 30)\n"
        "walls.enter_program = enter_program\n",
        "MemoryError",
    ),
    "a folder that cannot be written": (
        "import os\nfrom verl.sandbox.inside import walls\nreal = walls.enter_program\n"
        "def enter_program(*given):\n"
        "    real(*given)\n"
        "    os.mkdir('main.py')\n"
        "walls.enter_program = enter_program\n",
        "Is a directory",
    ),
    "an error of ours before the fork": (
        "from verl.sandbox.inside import walls\n"
        "def enter_run(*_): raise KeyError('limits')\n"
        "walls.enter_run = enter_run\n",
        "KeyError: 'limits'",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.needs_layers("namespaces", "seccomp")] if "kernel" in name else [])
        for name in SPOILT
    ],
)
def test_whatever_fails_before_the_program_begins_is_trouble_of_the_sandbox(name: str, monkeypatch: pytest.MonkeyPatch):
    """An outcome would be held against the policy, and a kernel that refuses a wall would score all programs 0."""
    spoil, says = SPOILT[name]
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", f"exec({spoil!r}); main()"))
    if "whole" not in OFFERED:
        return
    with Pool(1, **HERE) as pool:
        with pytest.raises(SandboxError, match=re.escape(says)):
            pool.run("print('ran')")
        if "folder" not in name:  # cells have no file
            with pytest.raises(SandboxError, match=re.escape(says)):
                Session(pool).run("1")


@pytest.mark.needs_layers("seccomp")
@pytest.mark.usefixtures("pool")
def test_a_filter_that_the_kernel_refuses_is_a_missing_layer(monkeypatch: pytest.MonkeyPatch):
    spoil = "from verl.sandbox.kernel import seccomp; seccomp.build = lambda pid=None: b'12345678'; "
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", spoil + "main()"))
    with Pool(1, allow_missing=HERE["allow_missing"]) as pool, pytest.raises(SandboxRefused, match="seccomp"):
        pool.run("print('ran')")


def test_a_program_that_does_not_fit_into_its_folder_is_its_own_error():
    with Pool(1, **HERE) as pool:
        outcome = pool.run("x = 1\n" + "#" * (2 << 20), limits=Limits(disk_mb=1))
        assert outcome.status == "error" and ("No space" in outcome.stderr or "too large" in outcome.stderr)


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ([Outcome("error", stderr="ValueError: byte string too long", exit_code=1)], "a right program comes out wrong"),
        ([Outcome("ok", stdout="41\n")], "a right program comes out wrong"),
        ([Outcome("memory")], "a right program comes out wrong"),
        ([Outcome("ok", stdout="42\n"), Outcome("ok", stdout="42\n")], "exit code 3 comes out right"),
    ],
)
def test_a_place_that_judges_wrong_does_not_pass_the_check(outcomes: list[Outcome], says: str):
    with pytest.raises(SandboxError, match=says):
        check(lambda code, stdin: outcomes.pop(0))


def test_this_machine_passes_the_check():
    with Pool(1, **HERE) as pool:
        check(pool.run)


MASKED_PROC = (
    "from verl.sandbox.inside import root; root.mount_processes = lambda: (_ for _ in ()).throw(OSError(1, 'no')); "
)


@pytest.mark.needs_layers("seccomp")
def test_where_no_proc_can_be_mounted_a_program_gets_one_process(monkeypatch: pytest.MonkeyPatch):
    """Containers that hide parts of /proc have namespaces, but processes cannot be counted and weighed in them."""
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", MASKED_PROC + "main()"))
    if "whole" not in OFFERED:
        return
    with Pool(1, **HERE) as pool:
        assert pool.run("import os\ntry: os.fork()\nexcept PermissionError: print('one')").stdout == "one\n"
        assert pool.run("import os; print(os.listdir('/proc'))").stdout in ("", "[]\n")
        threads = "import threading; t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
        assert pool.run(threads).stdout == "thread\n"
        assert pool.run("x = bytearray(10 << 30)").status == "memory"


@pytest.mark.needs_layers("namespaces")
def test_where_no_proc_can_be_mounted_and_no_filter_stands_nothing_is_run(monkeypatch: pytest.MonkeyPatch):
    """A program could start as many processes as it likes, each with memory that nobody counts."""
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", MASKED_PROC + "main()"))
    if "without seccomp" not in OFFERED:
        return
    with (
        Pool(1, **arguments("without seccomp")) as pool,
        pytest.raises(SandboxError, match="nothing bounds a program's processes"),
    ):
        pool.run("print('ran')")


def test_an_interpreter_that_does_not_start_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "BOOT", "raise SystemExit('no luck')")
    with Pool() as pool, pytest.raises(SandboxError, match="no luck"):
        pool.run("pass")
