"""How many modules of the library a reader passes from a step to its first token."""

from __future__ import annotations

import inspect
import sys
import threading

from tests.harness.runs import prepare, train
from verl.rollout.hf.draw import draw_tokens
from verl.trainer.ppo.schedules import ScheduleRun

MODULES = 78
"""Held: lower it when there are fewer. One is the finder of upstream's paths, where torch imports lazily on the way."""


def test_a_step_enters_few_modules_until_its_first_token(workplace):
    prepare()
    begins, ends = ScheduleRun.step.__code__, inspect.unwrap(draw_tokens).__code__
    entered, is_counted = set[str](), [False]

    def profile(frame, event, arg):
        if event != "call":
            return
        code = frame.f_code
        is_counted[0] = code is begins or (is_counted[0] and code is not ends)
        module = frame.f_globals.get("__name__", "")
        if is_counted[0] and module.startswith("verl.") and code.co_name != "<module>":
            entered.add(module)

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert {"verl.trainer.ppo.stream", "verl.agent_loop.manager", "verl.rollout.hf.sampler"} <= entered
    assert len(entered) <= MODULES, sorted(entered)
