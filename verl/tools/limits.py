"""Limits of a run on calls to a service, where several processes run agent loops: each keeps to its share."""

from __future__ import annotations

from verl import env

PROCESSES = "VERL_AGENT_LOOP_PROCESSES"
"""The variable that says how many processes run agent loops; one where it is unset."""


def shared_by(processes: int) -> None:
    """Say how many processes run agent loops, before this one makes its tools."""
    env.set_value(PROCESSES, str(processes))


def share_of(limit: int) -> int:
    """How many of a run's calls this process may have in flight: its part of ``limit``, and at least one.

    Example:
        >>> shared_by(4)
        >>> share_of(10), share_of(3)
        (2, 1)
    """
    return max(1, limit // env.get_int(PROCESSES, 1))
