"""Loads a user's Python file or module; every error names the file and the line."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from verl import env
from verl.errors import ConfigError, RewardError
from verl.registry import load_module


def load_user_code(path: str, key: str) -> ModuleType:
    """The module in a ``.py`` file, or ``pkg://my_pkg.my_mod`` from the import path.

    Args:
        key: the configuration key that named it; errors repeat it.

    Raises:
        RewardError: it is missing, is not Python, or fails while it is run.
    """
    file = Path(env.expand(path)).resolve()
    if file.is_dir():
        raise RewardError("this is a folder, a Python file is expected", key=key, got=path)
    try:
        return load_module(path)
    except ConfigError as error:
        raise RewardError(error.message, key=key, got=error.got, allowed=error.allowed, fix=error.fix) from error
    except (Exception, SystemExit) as error:  # boundary: the user's code
        what = path if path.startswith("pkg://") else file
        raise RewardError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}{_line_of(error, file)}",
            key=key,
            fix=_hint(error, file),
        ) from error


def _line_of(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})" if error.lineno else ""
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == str(file) else line
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _hint(error: BaseException, file: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and (file.parent / f"{error.name}.py").is_file():
        return f"{error.name}.py is next to it: put {file.parent} on PYTHONPATH."
    if isinstance(error, ImportError) and "relative import" in str(error):
        return f"The file is loaded by itself: import without the dots, with {file.parent} on PYTHONPATH."
    return ""
