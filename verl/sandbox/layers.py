"""The walls of the sandbox by name, and the refusal to run where the kernel does not offer one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl.errors import ConfigError, SandboxError, suggest

LAYERS = ("namespaces", "landlock", "seccomp")
"""namespaces: user, mount, pid, network and ipc, together. landlock: access to files. seccomp: allowed system calls."""


class SandboxRefused(SandboxError):
    """This machine's kernel does not offer a layer of the sandbox, and nobody said that it may run without."""


def check_names(allow_missing: Iterable[str]) -> tuple[str, ...]:
    """The layers that may be missing, checked by name."""
    names = tuple(allow_missing)
    for name in names:
        if name not in LAYERS:
            raise ConfigError(
                "not a layer of the sandbox", key="allow_missing", got=name, allowed=LAYERS, fix=suggest(name, LAYERS)
            )
    return names


def refusal(missing: Mapping[str, str], allow_missing: Iterable[str]) -> SandboxRefused | None:
    """Why a sandbox without these layers (name: reason) must not run; None where it may.

    Opting in weakens, it does not abolish: against each danger at least one wall must stay.
    """
    unwanted = [name for name in missing if name not in set(allow_missing)]
    if unwanted:
        listed = "; ".join(f"{name} ({missing[name]})" for name in unwanted)
        names = ", ".join(repr(name) for name in LAYERS if name in missing)
        return SandboxRefused(
            f"no program is run: this machine does not offer these layers of the sandbox: {listed}",
            fix="Use a machine or container that offers them (user namespaces: sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns=0, a container's seccomp profile), a remote sandbox "
            f"(sandbox_fusion url), or accept weaker isolation by name: allow_missing=[{names}].",
        )
    if "namespaces" in missing and len(missing) > 1:
        left = ", ".join(name for name in LAYERS if name not in missing) or "limits"
        return SandboxRefused(
            f"no program is run: with nothing but {left} it could reach this machine's files, network or processes",
            key="allow_missing",
            allowed="without namespaces, landlock and seccomp must both be there",
            fix="Use a remote sandbox (sandbox_fusion url) instead.",
        )
    return None
