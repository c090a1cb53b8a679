"""Samples with their tokens as a parquet file per step, for `verl.viewer`; a thread writes them.

``<step>.parquet`` has a row per sample. Its short columns come first in every row group, and give a reader an index
without the texts. The columns of `TOKENS` have a list per sample, one value per token of the response (what tools
and users said is masked); the list is null where the sample was not drawn. The file appears complete or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.metrics import notice
from verl.observability.samples import json_line

KEY, LIMIT = "trainer.rollout_data_tokens", "trainer.rollout_data_max_bytes"
SLOW = f"{KEY}, speed"
LEFT_OUT = "rollout_data/steps_without_tokens"
"""Metric: steps so far whose tokens were not written."""
FORMAT = b"1"
"""In the metadata of each file, under ``verl.samples``."""
SHORT = {
    "step": pa.int32(), "uid": pa.string(), "sample": pa.int32(), "row": pa.int64(), "score": pa.float64(),
    "length": pa.int32(), "prompt_length": pa.int32(), "finish_reason": pa.string(), "oldest_version": pa.int32(),
    "newest_version": pa.int32(), "clipped": pa.float32(), "reason": pa.string(),
}  # fmt: skip
"""Columns of a sample -> type. ``clipped`` is the share of trained tokens whose ratio of trainer to sampler is outside
of the clip range, ``reason`` why the sample was not trained on (`verl.journal.account.REASONS`), empty if it was."""
LONG = {"input": pa.large_string(), "output": pa.large_string(), "gts": pa.string(), "extra": pa.string(),
        "picture": pa.binary()}  # fmt: skip
"""Texts; ground truth and further values as JSON."""
FLOATS = ("sampler_log_prob", "trainer_log_prob", "advantage", "entropy")
TOKENS = {
    "token_id": pa.int32(), "token_text": pa.dictionary(pa.int32(), pa.string()), "mask": pa.int8(),
    "version": pa.int32(), **dict.fromkeys(FLOATS, pa.float32()),
}  # fmt: skip
"""Columns with a list per sample -> type of its values. A text that needs several tokens is at the first of them."""
TOKENS_PER_GROUP, ROWS_PER_GROUP = 1 << 18, 512
"""Most tokens and rows of a row group, the part of a file that is read to show a sample."""
WAITING = 2
"""Steps that may wait for the thread; a further one is written without tokens."""
BROKEN = "\ufffd"


class Pieces:
    """The text of each token, looked up once; tokens that hold a part of a character are decoded with their neighbours.

    Args:
        decode: ids -> text, of the tokenizer.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._texts: list[str] = []
        self._number = np.full(1, -1, dtype=np.int32)
        self._broken: list[bool] = []
        self._joined: dict[tuple[int, ...], int] = {}
        self._rest = self._add("")
        self._anchor: list[int] = []
        self._before = ""

    def _add(self, text: str) -> int:
        self._texts.append(text)
        self._broken.append(BROKEN in text)
        return len(self._texts) - 1

    def of(self, ids: np.ndarray, ends: np.ndarray) -> pa.DictionaryArray:
        """The texts (N,) of ids (N,) int, in rows that end at ``ends`` (B,).

        Texts of single tokens are kept for the next call; those of several are too many for that.
        """
        if len(ids) and ids.max() >= len(self._number):
            self._number = np.append(self._number, np.full(int(ids.max()) + 1 - len(self._number), -1, dtype=np.int32))
        present = np.flatnonzero(np.bincount(ids, minlength=1)) if len(ids) else ids
        self._find_anchor(present.tolist())
        for token in present[self._number[present] < 0].tolist():
            self._number[token] = self._add(self._text_of((token,)))
        mark = len(self._texts)
        numbers = self._number[ids]
        places = np.flatnonzero(np.array(self._broken)[numbers])
        if len(places):
            breaks = np.flatnonzero((np.diff(places) > 1) | np.isin(places[1:], ends)) + 1
            for run in np.split(places, breaks):
                numbers[run] = self._rest
                numbers[run[0]] = self._text_of_run(tuple(ids[run].tolist()))
        used = np.unique(numbers)
        texts = pa.array([self._texts[number] for number in used.tolist()], pa.string())
        del self._texts[mark:], self._broken[mark:]
        self._joined.clear()
        return pa.DictionaryArray.from_arrays(np.searchsorted(used, numbers).astype(np.int32), texts)

    def _find_anchor(self, tokens: list[int]) -> None:
        """Take a token with a text as the one behind which others are decoded: a decoder of SentencePiece drops the
        space at the beginning of a text, and most of its tokens begin with one."""
        for token in tokens if not self._anchor else ():
            text = self._decode([token])
            if text.strip() and BROKEN not in text:
                self._anchor, self._before = [token], text
                return

    def _text_of(self, ids: tuple[int, ...]) -> str:
        text = self._decode([*self._anchor, *ids])
        is_behind = text.startswith(self._before)  # else the two have become one character
        return text[len(self._before) :] if is_behind else self._decode(list(ids))

    def _text_of_run(self, run: tuple[int, ...]) -> int:
        if run not in self._joined:
            self._joined[run] = self._add(self._text_of(run))
            self._broken[-1] = False  # it stays as it is
        return self._joined[run]


def table_of(
    columns: Mapping[str, Sequence[object]],
    extra: Mapping[str, Sequence[object]],
    tokens: Mapping[str, np.ndarray | pa.Array],
    lengths: np.ndarray,
    drawn: np.ndarray,
) -> pa.Table:
    """A step's samples as a table.

    Args:
        columns: of `SHORT` and `LONG`, B values each; what is missing becomes null.
        extra: further values by name, B each.
        tokens: of `TOKENS`: the values of the drawn rows one after the other.
        lengths: (B,) tokens of each row.
        drawn: (B,) bool: rows that have their tokens.
    """
    rows: list[str | None] = [json_line(dict(zip(extra, values))) for values in zip(*extra.values())]
    rows = rows or [None] * len(drawn)
    arrays: dict[str, pa.Array] = {}
    for name, kind in {**SHORT, **LONG}.items():
        values: Sequence[object] = rows if name == "extra" else columns.get(name, [None] * len(drawn))
        if name == "gts":
            values = [None if value is None else json_line(value) for value in values]
        arrays[name] = pa.array([_typed(value, kind) for value in values], kind)
    ends = np.cumsum(np.where(drawn, lengths, 0))
    offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32), mask=np.append(~drawn, False))
    for name, kind in TOKENS.items():
        if name in tokens:
            arrays[name] = pa.ListArray.from_arrays(offsets, pa.array(tokens[name]).cast(kind))
    schema = pa.schema([(name, array.type) for name, array in arrays.items()], {b"verl.samples": FORMAT})
    return pa.Table.from_arrays(list(arrays.values()), schema=schema)


def _typed(value: object, kind: pa.DataType) -> object:
    """A value of a column; None where it is no such value, as a data set may have anything for a row's number."""
    item = getattr(value, "item", None)
    value = value if item is None else item()
    if value is None:
        return None
    if pa.types.is_integer(kind):
        return value if type(value) is int else None
    if pa.types.is_floating(kind):
        return float(value)  # type: ignore[arg-type]  # else it is an error, which is reported
    if isinstance(value, bytes):
        return value
    return str(value).encode(errors="backslashreplace").decode()  # a model may have written a part of a character


class TokenDump:
    """Writes tables of steps behind the run's back.

    Args:
        folder: of the run's samples.
        most_bytes: of all parquet files in it, beyond which the oldest ones are deleted; None: no bound.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None):
        self._folder, self._most = folder, most_bytes
        # Python waits for the thread of a pool before it ends: the last steps of a run are written.
        self._thread = ThreadPoolExecutor(1, "verl-token-dump")
        self._waiting: list[Future[None]] = []
        self._sizes: dict[int, int] | None = None  # bytes of each step's file; the thread alone reads and writes it
        self._late = self._failed = 0

    def put(self, step: int, make: Callable[[], pa.Table]) -> None:
        """Have a step written; ``make`` is called in the thread. It never waits: where the disk is too slow for the
        run, the step has no file, which is counted."""
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= WAITING:
            self._late += 1
            notice(SLOW, f"tokens are written more slowly than steps come: those of step {step}, and maybe of later "
                   f"steps, are left out; {LEFT_OUT} counts them. Lower {KEY}, or use a faster disk")  # fmt: skip
            return
        future = self._thread.submit(self._write, step, make)
        future.add_done_callback(partial(self._report, step))
        self._waiting.append(future)

    @property
    def left_out(self) -> int:
        """Steps so far without a file: the disk was too slow, or an error occurred."""
        return self._late + self._failed

    def close(self) -> None:
        """Return once all is written."""
        self._thread.shutdown()
        if self.left_out:
            notice(LEFT_OUT, f"{self.left_out} steps of this run have no tokens in {self._folder}")

    def _write(self, step: int, make: Callable[[], pa.Table]) -> None:
        write_table(make(), self._place(step))
        try:
            self._bound(step)
        except OSError as error:
            notice(f"{LIMIT}, deleting", f"the oldest files of {self._folder} cannot be deleted, and more will come: "
                   f"{type(error).__name__}: {error}. Delete them, or set {KEY}=0")  # fmt: skip

    def _report(self, step: int, future: Future[None]) -> None:
        """A file that cannot be written is counted, with a notice of the first: it must not end the run."""
        error = future.exception()
        if error is not None:
            self._failed += 1
            notice(KEY, f"the tokens of step {step} are not written: {type(error).__name__}: {error}. {LEFT_OUT} "
                   f"counts such steps. Free the disk, or set {KEY}=0")  # fmt: skip

    def _bound(self, latest: int) -> None:
        if self._most is None:
            return
        if self._sizes is None:  # a folder of many steps is listed once: on a network disk that takes seconds
            self._sizes = self._listed()
        self._sizes[latest] = self._place(latest).stat().st_size
        while sum(self._sizes.values()) > self._most:
            step = min(self._sizes)
            self._place(step).unlink(missing_ok=True)
            del self._sizes[step]
            notice(LIMIT, f"{self._folder} reached the bound: the tokens of step {step} are deleted, as will be those "
                   "of the next oldest steps; the JSON lines stay")  # fmt: skip

    def _listed(self) -> dict[int, int]:
        """Step -> bytes of its file."""
        places = [place for place in self._folder.iterdir() if re.fullmatch(r"\d+\.parquet", place.name)]
        return {int(place.stem): place.stat().st_size for place in places}

    def _place(self, step: int) -> Path:
        return self._folder / f"{step}.parquet"


def write_table(table: pa.Table, path: Path) -> None:
    """Write it in row groups that a reader may take one at a time; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".parquet.part")
    lengths = np.nan_to_num(table["length"].to_numpy(zero_copy_only=False).astype(float))
    floats = [f"{name}.list.element" for name in FLOATS if name in table.column_names]
    unlike = (*FLOATS, "score", "clipped", "output")  # most of their values differ: a dictionary only slows a reader
    others = [name for name in table.column_names if name not in unlike]
    repeated = [f"{name}.list.element" if name in TOKENS else name for name in others]
    with pq.ParquetWriter(part, table.schema, compression="zstd", use_dictionary=repeated,
                          use_byte_stream_split=floats) as writer:  # fmt: skip
        begin = 0
        while begin < len(table) or begin == 0:
            fits = int(np.searchsorted(np.cumsum(lengths[begin : begin + ROWS_PER_GROUP]), TOKENS_PER_GROUP, "right"))
            writer.write_table(table.slice(begin, max(1, fits)))
            begin += max(1, fits)
    part.replace(path)
