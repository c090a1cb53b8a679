"""Runs programs that a model wrote, where they can do no harm: not to files, network, processes, nor to the reward.

`run` and `Pool` start a program in a sandbox made of the kernel's own walls and return an `Outcome`; `Pool.run_cases`
judges it on tests. Where the machine does not offer a wall, nothing runs, and the error says what is missing.
"""

from verl.sandbox.judge import judge, same_text, same_value
from verl.sandbox.layers import LAYERS, SandboxRefused
from verl.sandbox.limits import CallCase, Limits, StdinCase
from verl.sandbox.outcome import CaseResult, Outcome
from verl.sandbox.pool import Pool
from verl.sandbox.remote import RemoteSandbox
from verl.sandbox.session import Session
from verl.sandbox.shared import default_pool, run, run_cases

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
    "default_pool",
    "judge",
    "run",
    "run_cases",
    "same_text",
    "same_value",
]
