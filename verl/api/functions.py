"""A reward function of a script or a notebook as a file that other processes load.

Scorers are processes: they cannot see what a notebook or ``__main__`` defined, and running a script a second time would
start its training again. So the function's source is written to a file of the run, with the imports, functions and
constants of its module that it names. A function of an importable module stays where it is.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from verl.errors import RewardError

Reward = Callable[..., Any] | str | Path
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
FIX = "Write the function in a file, and give that: reward='my_reward.py:my_function'."


def reward_settings(reward: Reward, file: Path) -> dict[str, Any]:
    """The settings of ``reward.custom_reward_function`` that name a function.

    Args:
        reward: a function, or a file or module with a function's name behind a colon (``my_reward.py:score``); a
            `functools.partial` with keywords gives ``reward_kwargs``.
        file: where the source of a function is written that no other process could import.

    Raises:
        RewardError: a function without a source of its own (a lambda, a builtin), or one that names what has no source.
    """
    if isinstance(reward, str | Path):
        path, _, name = str(reward).partition(":")
        return {"path": path, **({"name": name} if name else {})}
    kwargs: dict[str, Any] = {}
    inner: Any = reward
    while isinstance(inner, functools.partial):
        if inner.args:
            raise RewardError("a partial of a reward function binds keywords only", got=inner.func, fix=FIX)
        inner, kwargs = inner.func, {**inner.keywords, **kwargs}
    fn = inspect.unwrap(inner) if callable(inner) else inner
    if not isinstance(fn, FunctionType):
        raise RewardError("a reward is a function, or a file with one", got=fn, fix=FIX)
    further = {"reward_kwargs": kwargs} if kwargs else {}
    module, name = sys.modules.get(fn.__module__), fn.__name__
    if module is not None and is_importable(module) and getattr(module, name, None) is fn:
        return {"path": module.__file__, "name": name, **further}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source_file(fn), encoding="utf-8")
    return {"path": str(file), "name": name, **further}


def is_importable(module: ModuleType) -> bool:
    """Whether another process may run the module's file: neither a script that was started nor a notebook."""
    return module.__name__ != "__main__" and bool(getattr(module, "__file__", None))


def source_file(fn: FunctionType) -> str:
    """A file that defines the function and everything that it names.

    Raises:
        RewardError: it, or something that it names, has no source.
    """
    parts: dict[str, str] = {}
    imports: set[str] = set()
    _collect(fn, fn.__name__, imports, parts, [])
    head = "from __future__ import annotations\n\n" + "".join(sorted(imports))
    return head + "\n\n" + "\n\n".join(parts.values())


def _collect(fn: FunctionType, name: str, imports: set[str], parts: dict[str, str], above: list[str]) -> None:
    """Add what a function names, then the function itself."""
    text = _text(fn, name)
    chain = [*above, name]
    for used in sorted(_free_names(fn, text)):
        if used in parts or used in chain:
            continue
        is_known, value = _value(fn, used)
        if not is_known:
            continue  # a builtin, or a NameError that the user's own call would raise, too
        if isinstance(value, ModuleType):
            imports.add(f"import {used}\n" if value.__name__ == used else f"import {value.__name__} as {used}\n")
        elif isinstance(value, FunctionType) and not _is_elsewhere(value):
            _collect(value, used, imports, parts, chain)
        elif _is_elsewhere(value):
            imports.add(f"from {value.__module__} import {value.__qualname__} as {used}\n")
        elif _is_constant(value):
            parts[used] = f"{used} = {value!r}\n"
        else:
            raise RewardError(
                f"{fn.__name__} uses {used}, a {type(value).__name__} of this program that another process cannot see",
                got=used,
                fix=FIX,
            )
    parts[name] = text


def _text(fn: FunctionType, name: str) -> str:
    try:
        text = textwrap.dedent(inspect.getsource(fn))
        defined = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise RewardError(f"{name} has no source that could be written to a file: {error}", fix=FIX) from error
    if not isinstance(defined, ast.FunctionDef | ast.AsyncFunctionDef):
        raise RewardError("a lambda cannot be written to a file", got=name, fix=f"Define it with def. {FIX}")
    if defined.name != name:
        text += f"\n\n{name} = {defined.name}\n"
    return text


def _free_names(fn: FunctionType, text: str) -> set[str]:
    """Names that a function takes from its surroundings, those of its decorators and defaults among them.

    A local variable may have the name of a global one, so its bytecode is read. Annotations are not evaluated.
    """
    (defined,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    arguments = defined.args
    header = [*defined.decorator_list, *arguments.defaults, *(value for value in arguments.kw_defaults if value)]
    names = {node.id for part in header for node in ast.walk(part) if isinstance(node, ast.Name)}
    return names | set(fn.__code__.co_freevars) | _globals_of(fn.__code__)


def _globals_of(code: CodeType) -> set[str]:
    """Global names that a code object and those inside of it load."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _value(fn: FunctionType, name: str) -> tuple[bool, Any]:
    """Whether a name means something in the function's surroundings, and what."""
    if name in fn.__code__.co_freevars and fn.__closure__ is not None:
        try:
            return True, fn.__closure__[fn.__code__.co_freevars.index(name)].cell_contents
        except ValueError:  # not bound yet
            return False, None
    if name in fn.__globals__ and not hasattr(builtins, name):
        return True, fn.__globals__[name]
    return False, None


def _is_elsewhere(value: Any) -> bool:
    """Whether another process can import a function or class by its name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    return module is not None and module.__name__ != "__main__" and getattr(module, name, None) is value


def _is_constant(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(_is_constant(key) and _is_constant(inner) for key, inner in value.items())
    return type(value) in CONSTANTS and not (isinstance(value, float) and not math.isfinite(value))  # repr: nan
