"""Where a reward function runs, and how a call that takes too long is stopped.

inline    in the caller's thread, no limit: the built-in scorers, which are bounded in time on any input.
builtin   that, and threads for the built-in scorers that wait for a process which compares formulas or runs programs.
process   in child processes that are killed: every function that another process can load, so every function from a
          file. Stops anything: endless loops, regular expressions that never end, ``sys.exit``, a crash.
thread    in threads of this process: functions that exist only here (a lambda, a method). A call that takes too long is
          given up and its thread replaced, and a Python exception is raised inside it. C code that keeps the
          interpreter to itself (a regular expression that never ends) cannot be stopped this way.
loop      in an event loop of its own: async functions, all samples at once. A function that blocks the loop is given
          up together with the loop.
"""

from verl.rewards.runners.base import InlineRunner, Runner
from verl.rewards.runners.builtin import BuiltinRunner
from verl.rewards.runners.loop import LoopRunner
from verl.rewards.runners.process import ProcessRunner
from verl.rewards.runners.thread import ThreadRunner

__all__ = ["BuiltinRunner", "InlineRunner", "LoopRunner", "ProcessRunner", "Runner", "ThreadRunner"]
