"""Runs programs that a model wrote, where they can do no harm: not to files, network, processes, nor to the reward.

`Pool.run` starts a program in a sandbox made of the kernel's own walls and returns an `Outcome`; `Pool.run_cases`
judges it on tests. Where the machine does not offer a wall, nothing runs, and the error says what is missing.

Names are loaded on first use: the processes inside the sandbox import this package too, every run is a
fork of them, and a fork takes the longer the more is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.sandbox.layers import LAYERS, SandboxRefused
    from verl.sandbox.limits import CallCase, Limits, StdinCase
    from verl.sandbox.outcome import CaseResult, Outcome
    from verl.sandbox.pool import Pool
    from verl.sandbox.remote import RemoteSandbox
    from verl.sandbox.session import Session
    from verl.sandbox.shared import default_pool
    from verl.sandbox.trial import check
    from verl.sandbox.verdicts import judge, same_text, same_value

__all__ = [
    "LAYERS",
    "CallCase",
    "CaseResult",
    "Limits",
    "Outcome",
    "Pool",
    "RemoteSandbox",
    "SandboxRefused",
    "Session",
    "StdinCase",
    "check",
    "default_pool",
    "judge",
    "same_text",
    "same_value",
]

_HOMES = {
    "layers": ("LAYERS", "SandboxRefused"),
    "limits": ("CallCase", "Limits", "StdinCase"),
    "outcome": ("CaseResult", "Outcome"),
    "pool": ("Pool",),
    "remote": ("RemoteSandbox",),
    "session": ("Session",),
    "shared": ("default_pool",),
    "trial": ("check",),
    "verdicts": ("judge", "same_text", "same_value"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"verl.sandbox.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'verl.sandbox' has no attribute {name!r}")
