"""How a worker puts an object into a process of its own: the runtime that the worker runs in says how, if it can."""

from __future__ import annotations

from collections.abc import Callable

from verl.single_controller.base.handle import Handle
from verl.single_controller.base.resources import ClassWithInitArgs

Hosting = Callable[[ClassWithInitArgs, str], Handle]
"""``hosting(class_with_init, name)``: the object is built on this node, with this process's devices."""

_hosting: Hosting | None = None


def set_hosting(make: Hosting | None) -> None:
    """Called by a runtime in the processes of its workers."""
    global _hosting
    _hosting = make


def hosting() -> Hosting | None:
    """None where processes have to be started by hand."""
    return _hosting
