"""Prompts for reinforcement learning: rows of the user's files with their templated, truncated token ids.

Files are read, checked and measured when the dataset is made, so that what is wrong with them is said before anything
is allocated; a row is templated and tokenised when it is read. Padding happens where batches of prompts and
responses are formed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from verl.data.chat_template import ChatTemplate
from verl.data.columns import DATA_SOURCE, as_flag, as_object, check_prompts
from verl.data.files import as_dataset, choose_rows, read_files
from verl.data.filtering import KEY as FILTER_KEY
from verl.data.filtering import filter_of
from verl.data.lost_text import check_kept
from verl.data.messages import MEDIA, Message, as_messages, prune
from verl.data.overlong import MANY, check_truncation, count_tokens, cut_tokens, length_text, measure
from verl.data.settings import read, read_mapping, read_number
from verl.data.special_tokens import without_marks
from verl.data.vision.media import RowMedia, SeenRow, refuse_images, retained_places
from verl.data.vision.parts import text_of
from verl.errors import DataError
from verl.metrics import log, notice
from verl.tools.loading import load_tools

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.data.vision.processor import VisionProcessor
    from verl.protocol.tokenizer import Tokenizer

TRUTH = "an object such as {'style': 'rule', 'ground_truth': '42'}"


class RLHFDataset(Dataset):
    """Prompts with everything a reward needs.

    A row is a dict with ``raw_prompt`` (messages; unless ``return_raw_chat=false``), ``raw_prompt_ids`` (list of int,
    at most ``max_prompt_length``), ``data_source`` (None where the file has none), ``reward_model`` and ``extra_info``
    ({} where missing), ``index`` (``extra_info.index``, else the row's number), ``tools_kwargs``,
    ``interaction_kwargs``, ``need_tools_kwargs``, ``__row__`` (the row's number over all files, which filtering does
    not change), and every other column of the file. ``full_prompts`` (the rendered text) comes with
    ``return_full_prompt``, ``raw_input_ids`` (the contents without template) with ``return_raw_input_ids``.

    With tools (``tool_config_path``, ``function_tool_path``) a prompt is measured with their schemas; the loop that has
    the tools renders it so, ``raw_prompt_ids`` is without them.

    With a processor, images and videos (``image_key``, ``video_key``, parts of messages) stand where ``<image>`` and
    ``<video>`` do, ``raw_prompt_ids`` is as long as the model sees it, and every row has ``multi_modal_data``
    ({images: list of PIL.Image, videos: list of `VideoClip`}) and, unless ``return_multi_modal_inputs=false``,
    ``multi_modal_inputs`` (what the processor makes of them: names to tensors; {} of text alone). Their columns are not
    in the row.

    Rows that ``filter_function`` does not keep are dropped first, then those of ``filter_overlong_prompts``; a notice
    counts each.

    Subclasses may override `build_messages`, or read ``self.dataframe`` (a `datasets.Dataset` of the kept rows).

    Args:
        data_files: one path or several, of the kinds that `verl.storage.formats` reads.
        tokenizer: a Hugging Face tokenizer with a chat template.
        config: the ``data`` section: a configuration node, a mapping or a namespace.
        processor: of a model that sees (`load_processor`); None: rows with images or videos are refused.
        max_samples: the number of rows to keep (drawn by ``seed`` if ``shuffle``); -1 keeps all.

    Raises:
        DataError: what is wrong with the files, with file, row and column; no row left.
        ModelError: the tokenizer has no chat template.
        NotBuiltError: a column with audio that is not empty.
    """

    def __init__(
        self,
        data_files: str | Path | Iterable[str | Path],
        tokenizer: Tokenizer,
        config: SettingsSource,
        processor: VisionProcessor | None = None,
        max_samples: int = -1,
    ):
        self.data_files = [data_files] if isinstance(data_files, (str, Path)) else list(data_files or ())
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self.prompt_key = str(read(config, "prompt_key", "prompt"))
        self.max_prompt_length = read_number(config, "max_prompt_length", 512)
        self.truncation = check_truncation(str(read(config, "truncation", "error")))
        self.filter_overlong_prompts = bool(read(config, "filter_overlong_prompts", False))
        self.return_raw_chat = bool(read(config, "return_raw_chat", True))
        self.return_raw_input_ids = bool(read(config, "return_raw_input_ids", False))
        self.return_full_prompt = bool(read(config, "return_full_prompt", False))
        self.need_tools_kwargs = bool(read(config, "need_tools_kwargs", False))
        self.return_multi_modal_inputs = bool(read(config, "return_multi_modal_inputs", True))
        self._media = RowMedia.of(processor, config)
        self._template = ChatTemplate(tokenizer, read_mapping(config, "apply_chat_template_kwargs"))
        self._template.check_generation()
        tools = load_tools(read(config, "tool_config_path"), read(config, "function_tool_path"))
        self._tools = [tool.get_openai_tool_schema().for_template() for tool in tools.values()]
        self._load()
        self._filter()
        if self.prompt_key in self.dataframe.column_names:  # else the prompts are up to the user's class
            check_kept(self._template, len(self), self._messages, self.describe)
        self._settle_lengths()

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = dict(self.dataframe[int(item)])
        messages = self.build_messages(row, int(item))
        seen = self._see(messages, int(item))
        messages = messages if seen is None else seen.messages
        text = self._render(messages, int(item))
        row.pop(self.prompt_key)
        row["raw_prompt_ids"] = self._ids(text, seen, int(item))
        if not row["raw_prompt_ids"]:
            raise self._empty(int(item))
        row.update(self._media_fields(row, seen))
        if self.return_raw_chat:
            row["raw_prompt"] = messages
        if self.return_full_prompt:
            row["full_prompts"] = without_marks([text])[0]
        if self.return_raw_input_ids:
            row["raw_input_ids"] = self._template.encode_content("\n".join(text_of(m["content"]) for m in messages))
        return {**row, **self._reward_fields(row, int(item))}

    def build_messages(self, row: dict[str, Any], item: int) -> list[Message]:
        """The conversation of a row, as plain message dicts; override it to make prompts from other columns."""

        def where() -> str:
            return f"{self.describe(item)}, column {self.prompt_key!r}"

        messages = as_messages(row[self.prompt_key], where, media=MEDIA)
        return messages if self._media is None else self._media.placed(messages, row, partial(self.describe, item))

    @property
    def has_rows_of_files(self) -> bool:
        """Items are rows of the files; not where a subclass gave ``self.dataframe`` another length."""
        return len(self._rows) == len(self)

    @property
    def row_numbers(self) -> np.ndarray:
        """(len,) int64: ``__row__`` of every item."""
        return self._rows if self.has_rows_of_files else np.arange(len(self))

    def describe(self, item: int) -> str:
        """The file and the row there of item ``item``, for messages; see also `source_of`."""
        return self._origin.describe(int(self._rows[item])) if self.has_rows_of_files else f"item {item}"

    def source_of(self, row: int) -> tuple[str, int]:
        """The file of a ``__row__`` and the row's number in it."""
        return self._origin.locate(int(row))

    def _load(self) -> None:
        table, self._origin = read_files(
            self.data_files,
            required=[self.prompt_key],
            cache_dir=read(self.config, "cache_dir", "~/.cache/verl/rlhf"),
            use_shm=bool(read(self.config, "use_shm", False)),
            key="data.train_files",
            column_key="data.prompt_key",
        )
        check_prompts(table, self._origin, self.config, sees=self._media is not None)
        shuffle, seed = bool(read(self.config, "shuffle", False)), read(self.config, "seed")
        self._rows = choose_rows(len(table), self.max_samples, shuffle=shuffle, seed=seed)
        self.dataframe = as_dataset(table if len(self._rows) == len(table) else table.take(self._rows))

    def _filter(self) -> None:
        """Drop the prompts that the user's function does not want."""
        keep = filter_of(self.config)
        if keep is None:
            return

        def keeps(chunk: range) -> list[int]:
            return [keep(dict(self.dataframe[item]), partial(self.describe, item)) for item in chunk]

        workers = read_number(self.config, "filter_overlong_prompts_workers", 1)
        retained = np.flatnonzero(measure(len(self), keeps, workers=workers, description="filtering prompts"))
        files = ", ".join(self._origin.files)
        if not len(retained):
            raise DataError(f"{FILTER_KEY} keeps none of the {len(self)} prompts", key=files)
        notice(f"{FILTER_KEY} ({files})", f"{len(self) - len(retained)} of {len(self)} prompts were dropped")
        self.dataframe, self._rows = self.dataframe.select(retained), self._rows[retained]

    def _settle_lengths(self) -> None:
        """Drop the prompts that are too long, or refuse them; both need the length of every prompt."""
        if not self.filter_overlong_prompts and self.truncation != "error":
            return
        workers = read_number(self.config, "filter_overlong_prompts_workers", 1)
        lengths = measure(len(self), self._lengths, workers=workers, description="measuring prompts")
        if not lengths.all():
            raise self._empty(int(np.argmin(lengths)), f" ({np.count_nonzero(lengths == 0)} such rows)")
        long = np.flatnonzero(lengths > self.max_prompt_length)
        if not len(long):
            return
        first, longest, limit = self.describe(int(long[0])), int(lengths.max()), self.max_prompt_length
        larger = "" if longest == MANY else f"data.max_prompt_length={longest}, or "
        ways = f"Set {larger}data.truncation to left, right or middle"
        if not self.filter_overlong_prompts:
            raise DataError(
                f"{len(long)} of {len(self)} prompts are longer than data.max_prompt_length={self.max_prompt_length}: "
                f"this, the first, has {length_text(lengths[long[0]], limit)} tokens and the longest has "
                f"{length_text(longest, limit)}",
                key=first,
                fix=f"{ways}, or data.filter_overlong_prompts=true, which drops them.",
            )
        if len(long) == len(self):
            raise DataError(
                f"all {len(self)} prompts are longer than data.max_prompt_length={self.max_prompt_length}; "
                f"the shortest has {length_text(lengths.min(), limit)} tokens",
                key=", ".join(self._origin.files),
                fix="Set data.max_prompt_length higher.",
            )
        retained = np.flatnonzero(lengths <= self.max_prompt_length)
        message = f"{len(long)} of {len(self)} prompts are longer than {self.max_prompt_length} tokens and were dropped"
        notice(f"data.filter_overlong_prompts ({', '.join(self._origin.files)})", message)
        self.dataframe, self._rows = self.dataframe.select(retained), self._rows[retained]
        log.info("%d prompts from %s", len(self), ", ".join(self._origin.files))

    def _messages(self, item: int) -> list[Message]:
        return self.build_messages(dict(self.dataframe[item]), item)

    def _empty(self, item: int, more: str = "") -> DataError:
        fix = "Drop such rows, or look at the chat template and at the characters that the tokenizer knows."
        return DataError(f"the prompt has no token{more}", key=self.describe(item), fix=fix)

    def _lengths(self, chunk: range) -> list[int]:
        columns = self.dataframe[chunk.start : chunk.stop]
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(chunk))]
        tools = {"tools": self._tools} if self._tools else {}
        texts, longer = [], []
        for row, item in zip(rows, chunk):
            messages = self.build_messages(row, item)
            texts.append(self._render(messages, item, **tools))
            longer.append(self._image_tokens(messages, item))
        counts = count_tokens(texts, self.max_prompt_length, self._template.encode_many)
        return [count if count == MANY else count + more for count, more in zip(counts, longer)]

    def _image_tokens(self, messages: list[Message], item: int) -> int:
        """Tokens of a row's images and videos beyond their placeholders."""
        if self._media is None:
            refuse_images(messages, partial(self.describe, item))
            return 0
        return self._media.longer(messages, partial(self.describe, item))

    def _see(self, messages: list[Message], item: int) -> SeenRow | None:
        """The row with its images; None for a model that reads only text."""
        if self._media is None:
            refuse_images(messages, partial(self.describe, item))
            return None
        return self._media.see(messages, partial(self.describe, item))

    def _ids(self, text: str, seen: SeenRow | None, item: int) -> list[int]:
        """The ids of a prompt with its images, truncated; no image is cut."""
        limit, how = self.max_prompt_length, self.truncation
        if seen is None or not seen.inputs:
            return cut_tokens(text, limit, how, self._template.encode_many)
        assert self._media is not None
        processor = self._media.processor
        try:
            ids = processor.expand(self._template.encode(text), seen.pieces)
            places = retained_places(ids, limit, how, processor.image_token_ids)
        except DataError as failure:
            raise DataError(failure.message, key=self.describe(item), fix=failure.fix) from failure
        return [ids[place] for place in places]

    def _media_fields(self, row: dict[str, Any], seen: SeenRow | None) -> dict[str, Any]:
        """What a model that sees and a sampler need of a row's images; the files that they came from leave the row."""
        if seen is None or self._media is None:
            return {}
        for key in (self._media.image_key, self._media.video_key):
            row.pop(key, None)
        inputs = {"multi_modal_inputs": seen.inputs} if self.return_multi_modal_inputs else {}
        return {"multi_modal_data": seen.data, **inputs}

    def _render(self, messages: list[Message], item: int, **arguments: Any) -> str:
        try:
            return self._template.prompt(messages, **arguments)
        except DataError as failure:
            raise DataError(failure.message, key=self.describe(item)) from failure

    def _reward_fields(self, row: dict[str, Any], item: int) -> dict[str, Any]:
        place = self.describe(item)
        extra = as_object(row.get("extra_info"), f"{place}, column 'extra_info'")
        inside = f"{place}, extra_info"
        padded = not isinstance(row.get("extra_info"), str)
        tools, interaction = (
            prune(as_object(extra.get(name), f"{inside}.{name}"), padded and not isinstance(extra.get(name), str))
            for name in ("tools_kwargs", "interaction_kwargs")
        )
        needed = extra.get("need_tools_kwargs")
        needs_tools = self.need_tools_kwargs if needed is None else as_flag(needed, f"{inside}.need_tools_kwargs")
        if needs_tools and not tools:
            notice("data.need_tools_kwargs", f"{place} has no extra_info.tools_kwargs")
        number = int(self._rows[item]) if self.has_rows_of_files else item
        index = extra.get("index")
        return {
            DATA_SOURCE: row.get(DATA_SOURCE),
            "reward_model": as_object(row.get("reward_model"), f"{place}, column 'reward_model'", TRUTH),
            "extra_info": extra,
            "index": number if index is None else index,
            "tools_kwargs": tools,
            "interaction_kwargs": interaction,
            "need_tools_kwargs": needs_tools,
            "__row__": number,
        }
