"""Which columns of a file are read, and what they must hold: the same for a first look at one row and for all rows.

Nothing here loads torch: a wrong column fails in the first seconds of a program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.files import Origin, nearest_column, require_column
from verl.data.messages import MEDIA, Message, as_messages
from verl.data.settings import read
from verl.errors import DataError, NotBuiltError
from verl.json_text import read_json
from verl.metrics import notice
from verl.storage.arrow_types import is_list, is_text

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource

DATA_SOURCE = "data_source"
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
PAIRS = (("prompt", "response"), ("question", "answer"))
"""Two-column forms that are recognised without a setting."""
SIDES = ("chosen", "rejected")
UNPAIRED = ("completion",)
SHAREGPT = (
    "Rewrite them as {{role, content}}: [{{'role': {{'human': 'user', 'gpt': 'assistant'}}.get(m['from'], m['from']), "
    "'content': m['value']}} for m in row[{0!r}]]."
)
FLAGS = {"true": True, "false": False, "1": True, "0": False}


def check_prompts(table: pa.Table, origin: Origin, config: SettingsSource, sees: bool = True) -> None:
    """The columns of prompts: they are there, no prompt is null or empty, and no row has media that nobody reads.

    Args:
        sees: whether the model takes images or videos, as far as it is known.

    Raises:
        DataError: with file, row and column. NotBuiltError: sounds.
    """
    first, columns = origin.files[0], table.column_names
    prompt = str(read(config, "prompt_key", "prompt"))
    require_column(prompt, columns, file=first, key="data.prompt_key")
    source = str(read(config, "reward_fn_key", DATA_SOURCE))
    if source != DATA_SOURCE:
        require_column(source, columns, file=first, key="data.reward_fn_key")
    check_media(table, origin, config, sees)
    _check_prompt_column(table.column(prompt), prompt, origin)


def _check_prompt_column(prompts: pa.ChunkedArray, name: str, origin: Origin) -> None:
    """Refuse null and empty prompts in the full column at once, before any row is read."""
    refuse_sharegpt(prompts.type, name, origin.files[0])
    if is_list(prompts.type):
        length = pc.list_value_length(prompts)
    elif is_text(prompts.type):
        length = pc.utf8_length(pc.utf8_trim_whitespace(prompts))
    else:
        fix = ""
        if pa.types.is_struct(prompts.type) and prompts.type.get_field_index("content") >= 0:
            fix = "Put each message into a list: [{role, content}]."
        allowed = "a list of {role, content}, or a string"
        raise DataError(f"column {name!r} holds {prompts.type}", key=origin.files[0], allowed=allowed, fix=fix)
    bad = pc.fill_null(pc.equal(length, 0), True)
    if pc.any(bad).as_py():
        rows = np.flatnonzero(bad.to_numpy())
        what = "null" if prompts[int(rows[0])].as_py() is None else "empty"
        more = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
        fix = f"Drop such rows before the run: frame[frame[{name!r}].str.len() > 0] in pandas."
        raise DataError(f"column {name!r} is {what}{more}", key=origin.describe(int(rows[0])), fix=fix)


def check_media(table: pa.Table, origin: Origin, config: SettingsSource, sees: bool) -> None:
    """Refuse the first row with images, videos or sounds that nobody would read.

    Such a column has their type, or a name such as ``images``; it is read if ``data.image_key`` or ``data.video_key``
    names it.

    Args:
        sees: whether the model takes images or videos.

    Raises:
        DataError: media for a model that reads only text, or in a column that is not read.
        NotBuiltError: sounds.
    """
    read_as = {str(read(config, f"{kind}_key", f"{kind}s")): kind for kind in (*MEDIA, "audio")}
    for column in table.column_names:
        values, kind = table.column(column), read_as.get(column)
        named = kind is not None or column in MEDIA_COLUMNS
        if pa.types.is_null(values.type) or not (named or _is_media(values.type)) or (sees and kind in MEDIA):
            continue
        rows = np.flatnonzero(_filled(values))
        if not len(rows):
            continue
        key = origin.describe(int(rows[0]))
        if kind == "audio" or column.startswith("audio"):
            fix = f"Drop the column {column!r}, or the rows in which it is filled."
            raise NotBuiltError("rows with audio cannot be used yet: images and videos are read", key=key, fix=fix)
        if kind is not None:
            fault = f"column {column!r} has {kind}s, and the model reads only text: it has no image processor"
            raise DataError(fault, key=key, fix=f"Use a model that sees, or drop the column {column!r}.")
        kind = "video" if column.startswith("video") else "image"
        fault = f"column {column!r} has {kind}s and is not read"
        raise DataError(fault, key=key, fix=f"Set data.{kind}_key={column}, or drop the column.")


def _filled(values: pa.ChunkedArray) -> np.ndarray:
    """(rows,) bool: neither null nor empty."""
    filled = pc.is_valid(values)
    if is_list(values.type):
        filled = pc.greater(pc.list_value_length(values), 0)
    elif is_text(values.type):
        filled = pc.greater(pc.utf8_length(values), 0)
    return pc.fill_null(filled, False).to_numpy()


def _is_media(kind: pa.DataType) -> bool:
    """The form in which `datasets` keeps an image or a sound: {bytes, path}, or a list of them."""
    kind = kind.value_type if is_list(kind) else kind
    if not pa.types.is_struct(kind):
        return False
    fields = {field.name: field.type for field in kind.fields}
    return set(fields) == {"bytes", "path"} and pa.types.is_binary(fields["bytes"])


def refuse_sharegpt(kind: pa.DataType, column: str, file: str) -> None:
    """Messages of the form {from, value} are refused with the line that rewrites them."""
    inner = kind.value_type if is_list(kind) else kind
    if pa.types.is_struct(inner) and {"from", "value"} <= {field.name for field in inner.fields}:
        fault = f"column {column!r} holds messages of ShareGPT, {{from, value}}"
        raise DataError(fault, key=file, fix=SHAREGPT.format(column))


class ConversationColumns:
    """Where the conversations of a file stand: a column of messages, or a question and an answer column.

    Args:
        sees: whether the model takes images or videos, as far as it is known.

    Raises:
        DataError: no such columns, ShareGPT's messages, media that nobody reads. NotBuiltError: sounds.
    """

    def __init__(self, table: pa.Table, origin: Origin, config: SettingsSource, sees: bool = True):
        self.messages_key = str(read(config, "messages_key", "messages"))
        self.pair = self._choose_pair(table.column_names, origin.files[0], config)
        self._fields = [list(read(config, f"{side}_dict_keys", ())) for side in ("prompt", "response")]
        for name in self.pair or [self.messages_key]:
            refuse_sharegpt(table.schema.field(name).type, name, origin.files[0])
        check_media(table, origin, config, sees)

    def messages(self, row: Mapping[str, Any], place: str) -> list[Message]:
        """The conversation of a row; ``place`` names the row in messages."""
        if self.pair is None:
            return as_messages(row[self.messages_key], lambda: f"{place}, column {self.messages_key!r}", media=MEDIA)
        question, answer = (
            _nested(row[column], path, f"{place}, column {column!r}") for column, path in zip(self.pair, self._fields)
        )
        if not question or not isinstance(answer, str):
            fault = "the prompt is empty" if not question else f"the response is not text: {answer!r}"
            raise DataError(fault, key=place)
        turns = [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        return as_messages([*turns, {"role": "assistant", "content": answer}], lambda: place, media=MEDIA)

    def _choose_pair(self, columns: list[str], file: str, config: Any) -> tuple[str, str] | None:
        """The question and the answer column, or None for a column of messages."""
        sides = ("prompt", "response")
        pair = tuple(str(read(config, f"{side}_key", "")) for side in sides)
        if all(pair):
            for column, side in zip(pair, sides):
                require_column(column, columns, file=file, key=f"data.{side}_key")
            return pair[0], pair[1]
        if self.messages_key in columns:
            return None
        for usual in PAIRS:
            if set(usual) <= set(columns):
                prompt, answer = usual
                message = f"there is none named {self.messages_key!r}: {prompt!r} is the prompt, {answer!r} the answer"
                notice("data.messages_key", message)
                return usual
        near = nearest_column(self.messages_key, columns)
        raise DataError(
            f"no column {self.messages_key!r}; the file has: {', '.join(columns)}",
            key=file,
            allowed="a column of messages, or prompt and response, or question and answer",
            fix=f"Set data.messages_key={near}, if that is the column."
            if near
            else "Set data.messages_key to the column of messages, or data.prompt_key and data.response_key to two.",
        )


class PairColumns:
    """Where the pairs of a file stand: a prompt, a better and a worse answer, and perhaps a margin.

    Args:
        sees: whether the model takes images or videos, as far as it is known.
        sides: the answers of a row; `UNPAIRED` for rows with one answer and its label.

    Raises:
        DataError: no such columns, ShareGPT's messages, media that nobody reads. NotBuiltError: sounds.
    """

    def __init__(
        self,
        table: pa.Table,
        origin: Origin,
        config: SettingsSource,
        sees: bool = True,
        sides: tuple[str, ...] = SIDES,
    ):
        self.keys = pair_keys(config)
        columns, first = table.column_names, origin.files[0]
        for side in (*sides, "label") if sides == UNPAIRED else sides:
            require_column(self.keys[side], columns, file=first, key=f"data.{side}_key")
        for name in [self.keys[side] for side in ("prompt", *sides)]:
            if name in columns:
                refuse_sharegpt(table.schema.field(name).type, name, first)
        check_media(table, origin, config, sees)

    def conversation(self, row: Mapping[str, Any], place: str, side: str) -> list[Message]:
        """The prompt with one of its answers."""
        column = self.keys[side]
        where = f"{place}, column {column!r}"
        prompt, answer = row.get(self.keys["prompt"]), row[column]
        before = [] if prompt is None else self._prompt(prompt, place)
        if isinstance(answer, str):
            if not answer.strip():
                raise DataError("the answer is empty", key=where)
            if not before:
                fix = "Set data.prompt_key, or write whole conversations as chat messages."
                raise DataError("an answer that is text needs a prompt", key=where, fix=fix)
            return [*before, {"role": "assistant", "content": answer}]
        after = as_messages(answer, lambda: where, media=MEDIA)
        turns = after if before and after[: len(before)] == before else [*before, *after]
        if not turns or turns[-1]["role"] != "assistant":
            raise DataError("the conversation does not end with a turn of the assistant", key=where)
        return turns

    def margin(self, row: Mapping[str, Any], place: str) -> float:
        """How much better the chosen answer is; 0 where the row does not say."""
        value, column = row.get(self.keys["margin"]), self.keys["margin"]
        try:
            number = float(value or 0.0)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError("not a finite number", key=f"{place}, column {column!r}", got=value)
        return number

    def label(self, row: Mapping[str, object], place: str) -> bool:
        """Whether the answer is desirable."""
        return as_flag(row[self.keys["label"]], f"{place}, column {self.keys['label']!r}")

    def _prompt(self, prompt: Any, place: str) -> list[Message]:
        where = f"{place}, column {self.keys['prompt']!r}"
        if isinstance(prompt, str):
            return as_messages([{"role": "user", "content": prompt}], lambda: where)
        return as_messages(prompt, lambda: where, media=MEDIA)


def pair_keys(config: SettingsSource) -> dict[str, str]:
    """The columns of a pair by what they hold."""
    return {side: str(read(config, f"{side}_key", side)) for side in ("prompt", *SIDES, *UNPAIRED, "margin", "label")}


def as_flag(value: object, where: str) -> bool:
    """A value that is true or false, or the word or number for it; anything else (NaN, too) is a `DataError`."""
    word = str(value).strip().lower()
    if isinstance(value, (bool, int, str)) and word in FLAGS:
        return FLAGS[word]
    raise DataError("neither true nor false", key=where, got=value, allowed="true, false")


def as_object(value: object, where: str, allowed: str = "an object") -> dict[str, Any]:
    """A value that is an object, or JSON text of one as csv files hold it; {} for null."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = read_json(value)
        except ValueError as failure:
            raise DataError(f"cannot be read as JSON: {failure}", key=where, got=value) from failure
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError("not an object", key=where, got=value, allowed=allowed)
    return value


def _nested(value: Any, path: list[str], where: str) -> Any:
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(f"no field {name!r}", key=where, got=value, fix="See data.*_dict_keys.")
        value = value[name]
    return value
