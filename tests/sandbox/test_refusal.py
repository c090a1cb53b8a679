"""A machine without a wall: nothing runs, the error names the wall, and weaker isolation has to be asked for by name.

The kernel's answer is forced here, so that these tests say the same on every machine.
"""

from __future__ import annotations

import pytest

from tests.sandbox.modes import OFFERED
from verl.errors import ConfigError, SandboxError
from verl.sandbox import LAYERS, Pool, SandboxRefused, process
from verl.sandbox.inside import walls
from verl.sandbox.kernel import calls, landlock, seccomp
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
            with Pool(1, allow_missing=(layer,), without=(layer,)) as pool:
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
    monkeypatch.setattr(landlock, "abi", refuse)
    monkeypatch.setattr(seccomp, "is_offered", refuse)
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
        seccomp.is_offered()
    seccomp.build.cache_clear()


def test_an_old_landlock_does_not_stand_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    landlock.is_offered(alone=False)
    with pytest.raises(OSError, match="Linux 6"):
        landlock.is_offered(alone=True)


def test_where_no_proc_can_be_mounted_a_program_gets_one_process(monkeypatch: pytest.MonkeyPatch):
    """Containers that hide parts of /proc have namespaces, but processes cannot be counted and weighed in them."""
    spoil = (
        "from verl.sandbox.inside import root; root.mount_processes = lambda: (_ for _ in ()).throw(OSError(1, 'no')); "
    )
    monkeypatch.setattr(process, "BOOT", process.BOOT.replace("main()", spoil + "main()"))
    if "whole" not in OFFERED:
        return
    with Pool(1) as pool:
        assert pool.run("import os\ntry: os.fork()\nexcept PermissionError: print('one')").stdout == "one\n"
        assert pool.run("import os; os.listdir('/proc')").status == "error"
        threads = "import threading; t = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
        assert pool.run(threads).stdout == "thread\n"
        assert pool.run("x = bytearray(10 << 30)").status == "memory"


def test_an_interpreter_that_does_not_start_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "BOOT", "raise SystemExit('no luck')")
    with Pool() as pool, pytest.raises(SandboxError, match="no luck"):
        pool.run("pass")
