"""A first look at the files of a run: kind, columns and first row, before torch is loaded.

What needs all rows (lengths, a null further down) is checked when the data set is made. Files that do not exist
are left to the check of the settings, which names everything that is wrong with them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from verl.data.columns import SIDES, UNPAIRED, ConversationColumns, PairColumns, check_prompts
from verl.data.files import Origin, check_files, looks_like_hub_name
from verl.data.messages import MEDIA, as_messages
from verl.data.settings import read
from verl.errors import DataError
from verl.storage import expand, is_remote
from verl.storage.formats import first_rows

if TYPE_CHECKING:
    from verl.config.schema.node import ConfigNode

SPLITS = ("train_files", "val_files")


def look_at_prompts(config: ConfigNode) -> None:
    """The prompts of `main_ppo`.

    Args:
        config: the whole configuration of the program; its section ``data`` names the files.
    """
    _look(config.data, SPLITS, _prompts)


def look_at_questions(config: ConfigNode) -> None:
    """The prompts of `main_generation`; arguments as above."""
    _look(config.data, ("path",), _prompts)


def look_at_conversations(config: ConfigNode) -> None:
    """The conversations of `sft_trainer`; arguments as above."""
    _look(config.data, SPLITS, _conversations)


def look_at_pairs(config: ConfigNode) -> None:
    """The pairs of `dpo_trainer` and `rm_trainer`; arguments as above."""
    dpo = read(config, "dpo")
    sides = UNPAIRED if dpo is not None and read(dpo, "loss_type") == "kto" else SIDES
    _look(config.data, SPLITS, partial(_pairs, sides=sides))


def _look(data: Any, names: tuple[str, ...], check: Callable[[pa.Table, Origin, Any], None]) -> None:
    custom = read(data, "custom_cls")
    if custom is not None and read(custom, "path"):
        return  # what the files mean is up to the user's dataset class
    for name in names:
        for path in _present(read(data, name), f"data.{name}"):
            table = first_rows(Path(expand(path)))
            if table is not None:
                check(table, Origin((path,), (0,)), data)


def _present(files: Any, key: str) -> Iterator[str]:
    """The local files that are there, each of a kind that is read; a name of the hub is refused."""
    for path in [files] if isinstance(files, str) else list(files or ()):
        text = str(path).removeprefix("file://")
        if text and not is_remote(text) and (Path(expand(text)).exists() or looks_like_hub_name(text)):
            check_files(text, key)
            yield text


def _prompts(table: pa.Table, origin: Origin, data: Any) -> None:
    check_prompts(table, origin, data)
    name = str(read(data, "prompt_key", "prompt"))
    as_messages(table.column(name)[0].as_py(), lambda: f"{origin.describe(0)}, column {name!r}", media=MEDIA)


def _conversations(table: pa.Table, origin: Origin, data: Any) -> None:
    columns = ConversationColumns(table, origin, data)
    if bool(read(data, "filter_invalid", False)):
        return  # a bad row is left out
    messages = columns.messages(table.slice(0, 1).to_pylist()[0], origin.describe(0))
    if not any(message["role"] == "assistant" for message in messages):
        place = origin.describe(0) + ("" if columns.pair else f", column {columns.messages_key!r}")
        raise DataError("the conversation has no assistant message, so there is nothing to learn", key=place)


def _pairs(table: pa.Table, origin: Origin, data: Any, sides: tuple[str, ...]) -> None:
    columns = PairColumns(table, origin, data, sides=sides)
    if bool(read(data, "filter_invalid", False)):
        return
    row = table.slice(0, 1).to_pylist()[0]
    for side in sides:
        columns.conversation(row, origin.describe(0), side)
    (columns.label if sides == UNPAIRED else columns.margin)(row, origin.describe(0))
