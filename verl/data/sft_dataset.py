"""Conversations for supervised fine-tuning: token ids with a loss mask that is 1 on what the assistant says.

Beside the column of messages, the older form with a question and an answer column (or fields nested in columns) works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from verl.data.chat_template import ChatTemplate
from verl.data.collate import sft_collate
from verl.data.columns import ConversationColumns, as_flag
from verl.data.files import as_dataset, choose_rows, read_files
from verl.data.lost_text import check_kept
from verl.data.messages import Message, as_tools
from verl.data.overlong import MANY, PART, check_truncation, count_tokens, length_text, measure
from verl.data.settings import read, read_mapping, read_number
from verl.data.turns import TurnFinder
from verl.data.vision.media import RowMedia, refuse_images, retained_places
from verl.data.vision.parts import text_of
from verl.data.vision.processor import Inputs
from verl.errors import ConfigError, DataError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.data.vision.processor import VisionProcessor
    from verl.protocol.tokenizer import Tokenizer

TrainedTurns = Callable[[Sequence[int]], list[int]]
PAD_MODES = ("no_padding", "right")
KEPT_TOKENS = 20_000_000
"""How many encoded tokens a dataset keeps in memory (5 bytes each)."""


@dataclass(frozen=True)
class EncodedRow:
    """The ids (L,) of a row and its loss mask (L,), in small types; its images, where the model takes images."""

    ids: torch.Tensor
    mask: torch.Tensor
    inputs: Inputs | None = None

    @property
    def size(self) -> int:
        """What it takes in memory, in tokens of 5 bytes."""
        return len(self.ids) + sum(tensor.nbytes for tensor in (self.inputs or {}).values()) // 5


class MultiTurnSFTDataset(Dataset):
    """Rows ``input_ids``, ``attention_mask``, ``position_ids``, ``loss_mask``: int64 tensors of shape (L,).

    The loss mask is 1 on the assistants' tokens and the token that ends their turn, 0 on everything the template writes
    around them; see `verl.data.turns`. ``data.pad_mode=right`` pads every row to ``max_length``; with ``no_padding``
    the rows keep their length and `collate` pads a batch to its longest row.

    With a processor, images stand where ``<image>`` does, nothing is trained on them, and each row has
    ``multi_modal_inputs``: what the processor makes of its images, names to tensors; {} without images.

    Args:
        parquet_files: one path or several, of the kinds that `verl.storage.formats` reads.
        tokenizer: a Hugging Face tokenizer with a chat template.
        config: the ``data`` section: a configuration node, a mapping or a namespace.
        processor: of a model that takes images (`load_processor`); None: rows with images are refused.
        max_samples: the number of rows to keep (drawn by ``seed`` if ``shuffle``); -1 keeps all.

    Raises:
        DataError: what is wrong with the files, with file, row and column; a row longer than ``max_length`` with
            ``truncation=error``. A row's turns are located, and refused, when the row is read.
        ModelError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        parquet_files: str | Path | Iterable[str | Path],
        tokenizer: Tokenizer,
        config: SettingsSource,
        processor: VisionProcessor | None = None,
        max_samples: int = -1,
    ):
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.max_length = read_number(config, "max_length", 1024)
        self.truncation = check_truncation(str(read(config, "truncation", "error")), ("error", "left", "right"))
        self.pad_mode = str(read(config, "pad_mode", "no_padding"))
        if self.pad_mode not in PAD_MODES:
            raise ConfigError("unknown way to pad", key="data.pad_mode", got=self.pad_mode, allowed=PAD_MODES)
        self.tools_key = str(read(config, "tools_key", "tools"))
        self.enable_thinking_key = str(read(config, "enable_thinking_key", "enable_thinking"))
        self.enable_thinking_default = read(config, "enable_thinking_default")
        self._template = ChatTemplate(tokenizer, read_mapping(config, "apply_chat_template_kwargs"))
        keep = bool(read(config, "ignore_input_ids_mismatch", False))
        self._turns = TurnFinder(self._template, keep_produced=keep)
        # Encoding a row costs about as much as training on a short one: what fits is kept for the next epochs.
        self._encoded: dict[int, EncodedRow] = {}
        self._room = KEPT_TOKENS
        self._media = RowMedia.of(processor, config)
        self._load(parquet_files, max_samples)
        if bool(read(config, "filter_invalid", False)):
            self._leave_out_invalid()
        elif self.truncation == "error":
            self._refuse_overlong()
        check_kept(self._template, len(self.dataframe), self._messages, self.describe)
        self[0]  # a template whose turns are ambiguous fails here and not in the first step

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        item = int(item)
        if item not in self._encoded:
            encoded = self._encode(item)
            if self._room < encoded.size:
                return self._tensors(encoded)
            self._room -= encoded.size
            self._encoded[item] = encoded
        return self._tensors(self._encoded[item])

    def _encode(self, item: int) -> EncodedRow:
        """A row, truncated."""
        row = self.dataframe[item]
        try:
            messages, arguments = self.build_messages(row, item), self._arguments(row, item)
            self._refuse_huge(messages, arguments, item)
            row = self._turned(messages, arguments, item)
        except DataError as failure:
            raise self._at(failure, item) from failure
        if not row.mask.any():
            notice("data.max_length", f"{self.describe(item)} has no assistant token left after truncation")
        return row

    def _turned(
        self, messages: list[Message], arguments: dict[str, Any], item: int, trained: TrainedTurns = list
    ) -> EncodedRow:
        """A conversation as tokens, truncated; ``trained`` picks from the mask of all turns what is learned."""
        inputs = None
        if self._media is None:
            refuse_images(messages, partial(self.describe, item))
            ids, mask = self._turns.encode(messages, **arguments)
        else:
            seen = self._media.see(messages, partial(self.describe, item))
            ids, mask = self._turns.encode(seen.messages, **arguments)
            ids, mask = self._media.processor.expand_with(ids, seen.pieces, mask)
            inputs = seen.inputs
        mask = trained(mask)
        if len(ids) > self.max_length:
            if self.truncation == "error":
                raise self._too_long(item, len(ids))  # turn by turn, a row may have more tokens than in one piece
            image_ids = frozenset() if self._media is None else self._media.processor.image_token_ids
            places = retained_places(ids, self.max_length, self.truncation, image_ids)
            ids, mask = [ids[place] for place in places], [mask[place] for place in places]
        return EncodedRow(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool), inputs)

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch (B, L) of rows, padded on the right to the longest; the `collate_fn` of a loader of this dataset."""
        return sft_collate(rows, self._pad_token_id())

    def build_messages(self, row: dict[str, Any], item: int) -> list[Message]:
        """The conversation of a row, as plain message dicts; override it to make conversations from other columns."""
        return self._placed(self._columns.messages(row, self.describe(item)), row, item)

    def _messages(self, item: int) -> list[Message]:
        return self.build_messages(self.dataframe[item], item)

    def _placed(self, messages: list[Message], row: dict[str, Any], item: int) -> list[Message]:
        """The messages with the images of the row's column in their places."""
        return messages if self._media is None else self._media.placed(messages, row, partial(self.describe, item))

    def describe(self, item: int) -> str:
        """The file and the row there of item ``item``, for messages."""
        return self._origin.describe(int(self._rows[item])) if len(self._rows) == len(self) else f"item {item}"

    def _load(self, files: Any, max_samples: int) -> None:
        table, self._origin = read_files(
            files,
            cache_dir=read(self.config, "cache_dir"),
            use_shm=bool(read(self.config, "use_shm", False)),
            key="data.train_files",
        )
        self._choose_columns(table)
        shuffle, seed = bool(read(self.config, "shuffle", False)), read(self.config, "seed")
        self._rows = choose_rows(len(table), max_samples, shuffle=shuffle, seed=seed)
        dataset = as_dataset(table)
        self.dataframe = dataset if len(self._rows) == len(dataset) else dataset.select(self._rows)

    def _choose_columns(self, table: pa.Table) -> None:
        self._columns = ConversationColumns(table, self._origin, self.config, sees=self._media is not None)

    def _arguments(self, row: dict[str, Any], item: int) -> dict[str, Any]:
        """The template arguments of a row: its tools, and whether it thinks, where either is given."""
        arguments: dict[str, Any] = {}
        tools = as_tools(row.get(self.tools_key), lambda: f"{self.describe(item)}, column {self.tools_key!r}")
        if tools:
            arguments["tools"] = tools
        thinking = row.get(self.enable_thinking_key)
        thinking = self.enable_thinking_default if thinking is None else thinking
        if thinking is not None:
            place = f"{self.describe(item)}, column {self.enable_thinking_key!r}"
            arguments["enable_thinking"] = as_flag(thinking, place)
        return arguments

    def _leave_out_invalid(self) -> None:
        """Encode every row now, keep those from which something can be learned, and say how many are left out."""
        first, retained = None, []
        for item in range(len(self.dataframe)):
            try:
                self[item]
            except DataError as failure:
                first = first or failure
            else:
                retained.append(item)
        if not retained:
            raise DataError("no row is left to learn from; the first is wrong", key=self._origin.files[0]) from first
        if first is None:
            return
        left = len(self.dataframe) - len(retained)
        notice("data.filter_invalid", f"{left} of {len(self.dataframe)} rows are left out; first: {first}")
        self._rows, self.dataframe = self._rows[retained], self.dataframe.select(retained)
        self._encoded = {new: self._encoded[old] for new, old in enumerate(retained) if old in self._encoded}

    def _refuse_overlong(self) -> None:
        lengths = measure(len(self), self._lengths, description="measuring conversations")
        long = np.flatnonzero(lengths > self.max_length)
        if len(long):
            raise self._too_long(int(long[0]), int(lengths[long[0]]), len(long), int(lengths.max()))

    def _refuse_huge(self, messages: list[Message], arguments: dict[str, Any], item: int) -> None:
        """A row of megabytes is refused before its turns are found, which tokenises all of it."""
        if self.truncation != "error" or sum(len(text_of(message["content"])) for message in messages) <= PART:
            return
        text = self._template.render(messages, **arguments)
        if count_tokens([text], self.max_length, self._template.encode_many) == [MANY]:
            raise self._too_long(item, MANY)

    def _lengths(self, chunk: range) -> list[int]:
        """Tokens of each row. A token stands for at least one byte, so a row of few bytes need not be tokenised."""
        texts, longer = [], []
        for item in chunk:
            row = self.dataframe[item]
            try:
                messages = self.build_messages(row, item)
                texts.append(self._template.render(messages, **self._arguments(row, item)))
                longer.append(self._image_tokens(messages, item))
            except DataError as failure:
                raise self._at(failure, item) from failure
        return self._sizes(texts, longer)

    def _image_tokens(self, messages: list[Message], item: int) -> int:
        """Tokens of the images of a conversation beyond their placeholders."""
        return 0 if self._media is None else self._media.longer(messages, partial(self.describe, item))

    def _sizes(self, texts: list[str], longer: list[int]) -> list[int]:
        """Tokens of each text with its images, at most; exactly where they may be more than allowed."""
        sizes = [len(text.encode()) + more for text, more in zip(texts, longer)]
        long = [n for n, size in enumerate(sizes) if size > self.max_length]
        for n, size in zip(long, count_tokens([texts[n] for n in long], self.max_length, self._template.encode_many)):
            sizes[n] = size if size == MANY else size + longer[n]
        return sizes

    def _too_long(self, item: int, length: int, count: int = 1, longest: int = 0) -> DataError:
        most, limit = max(length, longest), self.max_length
        more = f"; {count} of {len(self)} rows are too long, the longest has {length_text(most, limit)}"
        larger = "" if most == MANY else f"data.max_length={most}, or "
        fault = f"the conversation has {length_text(length, limit)} tokens, more than data.max_length={limit}"
        return DataError(
            fault + (more if count > 1 else ""),
            key=self.describe(item),
            fix=f"Set {larger}data.truncation to left or right.",
        )

    def _tensors(self, row: EncodedRow) -> dict[str, Any]:
        length = len(row.ids)
        tensors = {
            "input_ids": row.ids.long(),
            "attention_mask": torch.ones(length, dtype=torch.int64),
            "position_ids": torch.arange(length),
            "loss_mask": row.mask.long(),
        }
        if self.pad_mode == "right" and length < self.max_length:
            room, fill = (0, self.max_length - length), {"input_ids": self._pad_token_id()}
            pad = torch.nn.functional.pad
            tensors = {name: pad(value, room, value=fill.get(name, 0)) for name, value in tensors.items()}
        return tensors if row.inputs is None else {**tensors, "multi_modal_inputs": row.inputs}

    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad is None else int(pad)

    def _column_of_messages(self) -> str | None:
        return self._columns.messages_key if self._columns.pair is None else None

    def _at(self, failure: DataError, item: int, column: str | None = None) -> DataError:
        """The same error with its row and column, unless it has a place already."""
        column = column or self._column_of_messages()
        key = failure.key or self.describe(item) + (f", column {column!r}" if column else "")
        return DataError(failure.message, key=key, got=failure.got, allowed=failure.allowed, fix=failure.fix)
