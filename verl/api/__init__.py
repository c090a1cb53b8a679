"""The door from Python: functions that start programs, and the `Run` that they return; loaded at their first use."""

from importlib import import_module
from typing import Any

_START = ("dpo", "resume", "reward_model", "sft", "train")
_MODULES = {
    "Run": "run",
    "open_run": "run",
    "evaluate": "answers",
    "generate": "answers",
    **dict.fromkeys(_START, "start"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"verl.api.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'verl.api' has no attribute {name!r}")
