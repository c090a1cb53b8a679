"""The program's own process: runs what a model wrote, as a script, for one call of a function, or cell by cell.

Everything here happens behind the walls, in the same interpreter as the hostile code, and nothing it says is believed:
the report that it writes holds a returned value or the name of an exception, and no verdict.
"""

from __future__ import annotations

import ast
import atexit
import errno
import importlib.util
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from verl.sandbox import frames

REPORT_FD = 3
CELLS_FD = 4
_FILE = "main.py"


def prepare_case(code: str, case: Mapping[str, Any]) -> Callable[[], NoReturn]:
    """One case: the whole program with this standard input, or one call of a function that it defines.

    What fails here is the sandbox's fault, and in what is returned the program's own.
    """
    sys.argv = [_FILE]
    try:
        with open(_FILE, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        return partial(_finish, partial(_fail, error))  # the program is larger than its folder
    if case.get("function") is None:
        return lambda: _finish(lambda: _load("__main__"))
    return lambda: _finish(lambda: _call(_load("solution"), case))


def prepare_cells() -> Callable[[], NoReturn]:
    """Cells arrive one by one and share their variables; each is answered by one report."""
    return _run_cells


def _run_cells() -> NoReturn:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [_FILE]
    for cell in frames.read(CELLS_FD):
        code = _guarded(partial(_run_cell, cell["code"], cell["number"], module.__dict__))
        _flush()
        _report({"cell": cell["number"], "exit": code})
    os._exit(0)


def _fail(error: OSError) -> NoReturn:
    raise error


def _load(name: str) -> types.ModuleType:
    """The program as a module; its file is real, so that tracebacks show its lines."""
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(_FILE))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call(module: types.ModuleType, case: Mapping[str, Any]) -> None:
    name = case["function"]
    function = getattr(module, name, None)
    if function is None and isinstance(solution := getattr(module, "Solution", None), type):
        function = getattr(solution(), name, None)
    if not callable(function):
        raise NameError(f"the program defines no function {name!r}")
    value = function(*case["arguments"], **case["keywords"])
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name} returned a {type(value).__name__}, which is not a plain value: {error}") from None
    _report({"value": text})


def _run_cell(code: str, number: int, variables: dict[str, Any]) -> None:
    """Run a cell; where its last statement is an expression, show its value as an interactive interpreter does."""
    place = f"<cell {number}>"
    linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
    tree = ast.parse(code, place)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    # What a model wrote is run here and nowhere else: this process is behind all walls, and of it only text goes out.
    exec(compile(tree, place, "exec"), variables)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), place, "eval"), variables)
        if value is not None:
            print(repr(value))


def _guarded(step: Callable[[], object]) -> int:
    """The exit code that a Python program with this body would have; what it raises goes to standard error."""
    try:
        step()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # the boundary at which a program's own error becomes text
        _report({"raised": type(error).__name__, "memory": isinstance(error, MemoryError)})
        _show(error)
        return 1
    return 0


def _finish(step: Callable[[], object]) -> NoReturn:
    """Run to the end as an interpreter does: other threads, exit functions, buffers."""
    code = _guarded(step)
    _guarded(threading._shutdown)  # type: ignore[attr-defined]
    _guarded(atexit._run_exitfuncs)
    _flush()
    os._exit(code)


def _show(error: BaseException) -> None:
    """A traceback that begins with the program's own frames."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    traceback.print_exception(type(error), error.with_traceback(trace), trace, file=sys.stderr)


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen importlib")


def _report(message: Mapping[str, Any]) -> None:
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(REPORT_FD, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the program
            continue
