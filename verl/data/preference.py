"""Answers that were judged, in pairs or alone: token ids with a mask that is 1 on each answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from verl.data.collate import sft_collate
from verl.data.columns import SIDES, UNPAIRED, PairColumns, pair_keys
from verl.data.messages import Message
from verl.data.overlong import measure
from verl.data.settings import read
from verl.data.sft_dataset import EncodedRow, MultiTurnSFTDataset
from verl.errors import DataError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.data.vision.processor import VisionProcessor
    from verl.protocol.tokenizer import Tokenizer


class PreferenceDataset(MultiTurnSFTDataset):
    """Rows of ``chosen``, ``rejected`` (each as a row of `MultiTurnSFTDataset`), ``margin`` () and ``index`` ().

    Columns: ``chosen`` and ``rejected`` hold a text, or chat messages; ``prompt`` holds a text or chat messages and may
    be left out where both sides are whole conversations. A column ``margin`` (a number) is used where there is one.
    The loss mask is 1 on the last turn of the assistant, with the token that ends it.

    Args:
        as for `MultiTurnSFTDataset`, with ``data.{prompt,chosen,rejected,margin}_key`` and ``data.filter_invalid``.

    Raises:
        DataError: with file, row and column: both answers are the same, an answer is empty, or a row is longer than
            ``max_length``; with ``data.filter_invalid=true`` such rows are left out and counted in a notice.
    """

    sides: tuple[str, ...] = SIDES
    unit = "pairs"
    """What a row is, for messages."""

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: Tokenizer,
        config: SettingsSource,
        processor: VisionProcessor | None = None,
        max_samples: int = -1,
    ):
        self._keys = pair_keys(config)
        self._pairs: dict[int, dict[str, Any]] = {}
        super().__init__(parquet_files, tokenizer, config, processor, max_samples)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = int(self._kept[int(item)])
        if row not in self._pairs:
            values = self.dataframe[row]
            sides = {side: self._encode_side(values, row, side) for side in self.sides}
            pair: dict[str, Any] = {side: self._tensors(encoded) for side, encoded in sides.items()}
            _share_images(pair)
            pair |= self._judgement(values, row)
            pair["index"] = torch.tensor(row)
            size = sum(encoded.size for encoded in sides.values())
            if self._room < size:
                return pair
            self._room -= size
            self._pairs[row] = pair
        return self._pairs[row]

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tensors (2 n, L): chosen and rejected in turn, padded on the right to the longest; ``margin`` (2 n,)."""
        return preference_collate(rows, self._pad_token_id())

    def _judgement(self, values: Mapping[str, object], row: int) -> dict[str, torch.Tensor]:
        return {"margin": torch.tensor(self._pairs_of.margin(values, self.describe(row)))}

    def describe(self, item: int) -> str:
        return self._origin.describe(int(self._rows[item]))

    def _load(self, files: Any, max_samples: int) -> None:
        super()._load(files, max_samples)
        self._kept = np.arange(len(self.dataframe))
        self._check_rows(bool(read(self.config, "filter_invalid", False)))

    def _choose_columns(self, table: pa.Table) -> None:
        self._pairs_of = PairColumns(table, self._origin, self.config, self._media is not None, self.sides)

    def _column_of_messages(self) -> None:
        """Each error names the column of its side."""

    def _conversation(self, row: dict[str, Any], item: int, side: str) -> list[Message]:
        return self._placed(self._pairs_of.conversation(row, self.describe(item), side), row, item)

    def _messages(self, item: int) -> list[Message]:
        sides = [self._conversation(self.dataframe[item], item, side) for side in self.sides]
        return [message for messages in sides for message in messages]

    def _refuse_overlong(self) -> None:
        """`_check_rows` does it, for both sides of a pair."""

    def _check_rows(self, leave_out: bool) -> None:
        lengths = measure(len(self.dataframe), self._pair_lengths, description=f"measuring {self.unit}")
        problems: dict[int, DataError] = {}
        for row in range(len(self.dataframe)):
            try:
                self._check_row(row, int(lengths[row]))
            except DataError as error:
                if not leave_out:
                    raise
                problems[row] = error
        if problems:
            first = next(iter(problems.values()))
            left_out = f"{len(problems)} of {len(self.dataframe)} {self.unit} are left out"
            notice("data.filter_invalid", f"{left_out}; first: {first}")
            self._kept = np.array([row for row in range(len(self.dataframe)) if row not in problems], dtype=int)
        if not len(self._kept):
            raise DataError(f"no {self.unit} are left to learn from", key=self._origin.files[0])

    def _check_row(self, row: int, length: int) -> dict[str, torch.Tensor]:
        values = self.dataframe[row]
        first, *others = (self._conversation(values, row, side) for side in self.sides)
        if first in others:
            fix = "Set data.filter_invalid=true to leave such rows out."
            raise DataError("the chosen and the rejected answer are the same", key=self.describe(row), fix=fix)
        judgement = self._judgement(values, row)
        if length == 0:  # the template refuses it with its error
            for side in self.sides:
                self._encode_side(values, row, side)
        if length > self.max_length and self.truncation == "error":
            raise self._too_long(row, length)
        return judgement

    def _leave_out_invalid(self) -> None:
        """`_check_rows` has done it."""

    def _pair_lengths(self, chunk: range) -> list[int]:
        """Tokens of the longest answer of each row; 0 where a row is broken, for which `_check_row` raises."""
        texts: list[str] = []
        longer: list[int] = []
        count = len(self.sides)
        for row in chunk:
            values = self.dataframe[row]
            try:
                sides = [self._conversation(values, row, side) for side in self.sides]
                rendered = [self._template.render(turns, **self._arguments(values, row)) for turns in sides]
                counts = [self._image_tokens(turns, row) for turns in sides]
            except DataError:
                rendered, counts = [""] * count, [0] * count
            texts += rendered
            longer += counts
        sizes = self._sizes(texts, longer)
        return [max(sizes[count * n : count * (n + 1)]) for n in range(len(chunk))]

    def _encode_side(self, row: dict[str, Any], item: int, side: str) -> EncodedRow:
        try:
            encoded = self._turned(self._conversation(row, item, side), self._arguments(row, item), item, last_run)
        except DataError as failure:
            raise self._at(failure, item, self._keys[side]) from failure
        if not encoded.mask.any():
            key = f"{self.describe(item)}, column {self._keys[side]!r}"
            raise DataError("the answer has no token left after truncation", key=key, fix="Raise data.max_length.")
        return encoded


class UnpairedDataset(PreferenceDataset):
    """Rows of ``completion`` (as a row of `MultiTurnSFTDataset`), ``label`` () bool, true if desirable, ``index`` ().

    Columns: ``prompt`` and ``completion`` as the sides of a pair; ``label`` says true or false. Errors are those of
    `PreferenceDataset`; labels that are all the same give a notice.
    """

    sides = UNPAIRED
    unit = "answers"

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tensors (2 n, L), padded on the right: row 2 i is row i, row 2 i + 1 its prompt with the answer of the row
        before it (of the last one for the first); ``label`` and ``index`` (2 n,).

        Raises:
            DataError: one row has no answer to another prompt.
        """
        if len(rows) < 2:
            fix = "Change data.train_batch_size, or the number of rows (data.val_max_samples)."
            raise DataError("a batch of one row has no mismatched answer, of which KTO needs some", got=1, fix=fix)
        answers = [row["completion"] for row in rows]
        before = [answers[-1], *answers]
        others = [_with_answer_of(row, other, self.max_length) for row, other in zip(answers, before)]
        batch = sft_collate([row for two in zip(answers, others) for row in two], self._pad_token_id())
        for name in ("label", "index"):
            batch[name] = torch.stack([row[name] for row in rows]).repeat_interleave(2)
        return batch

    def _judgement(self, values: Mapping[str, object], row: int) -> dict[str, torch.Tensor]:
        return {"label": torch.tensor(self._pairs_of.label(values, self.describe(row)))}

    def _check_rows(self, leave_out: bool) -> None:
        self._labels: set[bool] = set()
        super()._check_rows(leave_out)
        if len(self._labels) == 1:
            only = "desirable" if self._labels.pop() else "undesirable"
            notice(
                "data.label_key",
                f"all {len(self._kept)} answers of {self._origin.files[0]} are {only}, and KTO compares both kinds",
            )

    def _check_row(self, row: int, length: int) -> dict[str, torch.Tensor]:
        judgement = super()._check_row(row, length)
        self._labels.add(bool(judgement["label"]))
        return judgement


def _with_answer_of(
    row: dict[str, torch.Tensor], other: dict[str, torch.Tensor], max_length: int
) -> dict[str, torch.Tensor]:
    """A row (L,) up to its first trained token, and from there on the other one, as far as ``max_length`` tokens go."""
    starts = [int(one["loss_mask"].nonzero()[0]) for one in (row, other)]
    parts = {
        name: torch.cat([row[name][: starts[0]], other[name][starts[1] :]])[:max_length]
        for name in ("input_ids", "attention_mask", "loss_mask")
    }
    parts["position_ids"] = (parts["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**row, **parts}


def _share_images(pair: dict[str, Any]) -> None:
    """Both answers hold the same object where they have the same images: it is kept and sent once."""
    chosen, rejected = (pair.get(side, {}).get("multi_modal_inputs") for side in SIDES)
    if not chosen or not rejected or chosen.keys() != rejected.keys():
        return
    if all(torch.equal(chosen[name], rejected[name]) for name in chosen):
        pair["rejected"]["multi_modal_inputs"] = chosen


def last_run(mask: Sequence[int]) -> list[int]:
    """The mask with only its last run of ones left: the last turn of the assistant."""
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    start = end
    while start and mask[start - 1]:
        start -= 1
    return [int(start <= place < end) for place in range(len(mask))]


def preference_collate(rows: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Any]:
    """Pairs to rows: 2 i is the chosen answer of pair i, 2 i + 1 the rejected one; `margin` and `index` for both."""
    batch = sft_collate([row[side] for row in rows for side in SIDES], pad_token_id)
    for name in ("margin", "index"):
        batch[name] = torch.stack([row[name] for row in rows]).repeat_interleave(2)
    return batch
