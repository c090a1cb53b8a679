"""``data.filter_function``: a function of the user's that says of each row whether its prompt is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.settings import read
from verl.errors import ConfigError, DataError
from verl.rewards.user_file import load_user_code

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource

KEY = "data.filter_function"


def filter_of(config: SettingsSource) -> Callable[[dict[str, Any], Callable[[], str]], bool] | None:
    """The filter of the ``data`` section, called with a row and with what describes its place; None without one.

    Raises:
        ConfigError: no such function in the file.
        RewardError: the file cannot be loaded.
    """
    section = read(config, "filter_function")
    path = None if section is None else read(section, "path")
    if not path:
        return None
    name = str(read(section, "name", "keep_prompt"))
    keep = vars(load_user_code(str(path), f"{KEY}.path")).get(name)
    if not callable(keep):
        raise ConfigError(f"{path} has no such function", key=f"{KEY}.name", got=name)

    def checked(row: dict[str, Any], place: Callable[[], str]) -> bool:
        try:
            answer = keep(row)
        except Exception as error:  # boundary: the user's code
            raise DataError(
                f"{name} in {path} failed on this row: {type(error).__name__}: {error}",
                key=place(),
                fix=f"Make it return true or false for every row, or leave {KEY} out.",
            ) from error
        if not isinstance(answer, (bool, np.bool_)):
            raise DataError(f"{name} in {path} must return true (keep the prompt) or false", key=place(), got=answer)
        return bool(answer)

    return checked
