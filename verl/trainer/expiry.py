"""When an elastic instance ends, and whether a step has to be saved before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from verl import env
from verl.metrics import notice

EXPIRY = ("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")
"""Variables in which platforms say when an instance ends, in seconds since 1970; the first that is set counts."""
SAVE_SECONDS = 60.0


def ends_at() -> float | None:
    """Seconds since 1970 at which this machine is taken away; None if its platform does not say so.

    A variable that holds no number is ignored, with one notice.
    """
    for name in EXPIRY:
        value = env.get(name)
        if not value:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if math.isfinite(seconds):
            return seconds
        notice(name, f"this is no time in seconds, so that nothing is saved before the machine ends: {value!r}")
    return None


def should_save_ckpt_esi(
    max_steps_duration: float,
    save_ckpt_duration: float = SAVE_SECONDS,
    redundant_time: float = 0,
    *,
    clock: Callable[[], float] = time.time,
) -> bool:
    """Whether an elastic instance ends before one more step and its save would.

    Args:
        max_steps_duration: seconds of the longest step so far; 0 before there is one.
        save_ckpt_duration: seconds of a save.
        redundant_time: further seconds to spare.
        clock: seconds since 1970.
    """
    until = ends_at()
    if until is None or max_steps_duration <= 0:
        return False
    left = until - clock()
    if left < 0:
        notice("trainer.esi_redundant_time", "the machine's time is over already")
    return left <= max_steps_duration + save_ckpt_duration + redundant_time
