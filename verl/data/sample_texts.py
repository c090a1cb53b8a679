"""Samples for people and dumps: their text, and what else there is of conversations: turns, tool calls, rewards, masks.

An image of a prompt is named once, not written as its hundreds of placeholders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from verl.data.vision.images import describe_image, thumbnails
from verl.data.vision.videos import describe_clip
from verl.protocol import DataProto
from verl.protocol.fields import TRAJECTORY_NUMBER
from verl.protocol.tokenizer import Tokenizer

IMAGES = "multi_modal_data"
RECORD = "trajectory"
"""Column that loops with several turns write: one entry per piece of the conversation."""
COLUMNS = ("tool_call_counts", "tool_rewards", "turn_scores", "reward_scores", "ended")
NUM_TOKENS, FINISH = "response_tokens", "response_finish_reason"
"""Columns of a dump: tokens of a response, why it ended. Reward functions use ``length`` and ``finish_reason``."""
OPENING_WORDS = 2
"""Most words with which a template opens an answer: ``assistant <think>``."""


class SampleTexts:
    """Decodes prompts and responses.

    Args:
        tokenizer: of the policy.
        processor: of the policy; None for a model that reads only text.
    """

    def __init__(self, tokenizer: Tokenizer, processor: Any = None):
        self.tokenizer, self.processor = tokenizer, processor

    def of(self, batch: DataProto) -> tuple[list[str], list[str]]:
        """(prompts, responses) of a batch without special tokens; ``[image 56x56]`` stands for an image.

        Videos are ``[video 8x56x56]``: frames, width and height.
        """
        sides = batch.tensors["prompts"], batch.tensors["responses"]
        shown = self._media(batch)
        if not any(image or clips for image, clips in shown):
            decode = self.tokenizer.batch_decode
            prompts, responses = (decode(side, skip_special_tokens=True) for side in sides)
            return prompts, responses
        prompts, responses = [], []
        for prompt, response, (images, clips) in zip(*(side.tolist() for side in sides), shown):
            left = self._named(images, clips)
            prompts.append(self._text(prompt, left))
            responses.append(self._text(response, left))
        return prompts, responses

    def questions(self, batch: DataProto, prompts: Sequence[str]) -> list[str | None]:
        """What a person wants to read of each prompt: its last user message, and what was put behind it.

        The lines that a template writes before it (a system message, roles, earlier turns) and the opening of the
        answer are left out.

        Args:
            prompts: the texts of `of`.

        Returns:
            None for a prompt without messages, or whose template does not write the message as it is.
        """
        rows = batch.non_tensor_batch.get("raw_prompt", [None] * len(prompts))
        return [_question(messages, prompt) for messages, prompt in zip(rows, prompts)]

    def columns(self, batch: DataProto) -> dict[str, list[Any]]:
        """``images`` and ``videos`` of each row, as sizes (and a digest), for a dump; neither where no row has any."""
        made: dict[str, list[Any]] = {}
        shown = self._media(batch)
        kinds: dict[str, Callable[[Any], str]] = {"images": describe_image, "videos": describe_clip}
        for number, (name, describe) in enumerate(kinds.items()):
            of_rows = [media[number] for media in shown]
            descriptions = {id(one): describe(one) for row in of_rows for one in row}
            if descriptions:
                made[name] = [[descriptions[id(one)] for one in row] for row in of_rows]
        return made

    def pictures(self, batch: DataProto, count: int) -> list[bytes | None]:
        """Thumbnails of images and frames of the first rows (`Sample.picture`); None for the others, and for text."""
        return self.picture_maker(batch, np.arange(len(batch)) < count)()

    def picture_maker(self, batch: DataProto, rows: np.ndarray) -> Callable[[], list[bytes | None]]:
        """A function that makes what `pictures` returns for these rows (B,) bool, in any thread.

        Rows that show the same image objects share a thumbnail.
        """
        media = [shown if chosen else ((), ()) for shown, chosen in zip(self._media(batch), rows)]
        frames = [[*images, *(frame for clip in clips for frame in clip["frames"])] for images, clips in media]
        return partial(_shared_thumbnails, frames)

    def _media(self, batch: DataProto) -> list[tuple[Sequence[Any], Sequence[Any]]]:
        """Images and videos of each row."""
        if self.processor is None or IMAGES not in batch.non_tensor_batch:
            return [((), ())] * len(batch)
        rows = [seen or {} for seen in batch.non_tensor_batch[IMAGES]]
        return [(seen.get("images") or (), seen.get("videos") or ()) for seen in rows]

    def _named(self, images: Sequence[Any], clips: Sequence[Any]) -> dict[str, Iterator[tuple[str, list[int]]]]:
        """Of each kind: what is written for one, and the ids that it has."""
        pieces = self.processor.pieces(images, clips)
        names = {"image": [f"image {i.width}x{i.height}" for i in images], "video": list(map(describe_clip, clips))}
        return {kind: iter(list(zip(names[kind], pieces[kind]))) for kind in names}

    def _text(self, ids: list[int], left: dict[str, Iterator[tuple[str, list[int]]]]) -> str:
        """The ids as text, with a name for each image or video whose ids they hold."""
        waiting: dict[str, Any] = {kind: next(them, None) for kind, them in left.items()}
        parts: list[str] = []
        start = at = 0
        while at < len(ids):
            here = [k for k, one in waiting.items() if one and ids[at] == one[1][0]]
            kind = next((k for k in here if ids[at : at + len(waiting[k][1])] == waiting[k][1]), None)
            if kind is None:
                at += 1
                continue
            name, piece = waiting[kind]
            parts += [self.tokenizer.decode(ids[start:at], skip_special_tokens=True), f"[{name}]"]
            start = at = at + len(piece)
            waiting[kind] = next(left[kind], None)
        for kind, one in waiting.items():
            left[kind] = itertools.chain([one] if one else [], left[kind])
        return "".join([*parts, self.tokenizer.decode(ids[start:], skip_special_tokens=True)])


def _shared_thumbnails(rows: Sequence[Sequence[Image.Image]]) -> list[bytes | None]:
    """Of each row's images; None for a row without any."""
    made: dict[tuple[int, ...], bytes] = {}
    names = [tuple(map(id, images)) for images in rows]
    for name, images in zip(names, rows):
        if images and name not in made:
            made[name] = thumbnails(images)
    return [made.get(name) for name in names]


def _question(messages: Any, prompt: str) -> str | None:
    user_turns = [m.get("content") for m in messages or () if isinstance(m, dict) and m.get("role") == "user"]
    question = user_turns[-1].strip() if user_turns and isinstance(user_turns[-1], str) else ""
    at = prompt.rfind(question) if question else -1
    if at < 0:
        return None
    behind = prompt[at + len(question) :].split()
    return question if len(behind) <= OPENING_WORDS else prompt[at:]


def conversation_columns(batch: DataProto) -> dict[str, list[Any]]:
    """Columns for a dump, one entry per row; nothing for a batch of single turns.

    ``mask_runs`` is the response mask as [value, number of tokens] one after the other: 1 is trained on, 0 is what
    tools and users said (or all of a row that was masked out).
    """
    batch_columns = batch.non_tensor_batch
    if RECORD not in batch_columns:
        return {}
    columns = {name: list(batch_columns[name]) for name in COLUMNS if name in batch_columns}
    columns["num_turns"] = list(batch_columns["__num_turns__"])
    there = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :].bool()
    columns["mask_runs"] = [runs(mask[kept]) for mask, kept in zip(batch.tensors["response_mask"], there)]
    columns[RECORD] = list(batch_columns[RECORD])
    return columns


def ends_of(batch: DataProto) -> dict[str, list[object]]:
    """Columns for a dump: tokens of each response, why it ended, and its number among those of its sample."""
    lengths = batch.tensors["attention_mask"][:, -batch.tensors["responses"].shape[1] :].sum(-1).tolist()
    columns = {FINISH: "finish_reason", TRAJECTORY_NUMBER: TRAJECTORY_NUMBER}
    there = {name: list(batch.non_tensor_batch[of]) for name, of in columns.items() if of in batch.non_tensor_batch}
    return {NUM_TOKENS: lengths, **there}


def turns_of(record: list[dict[str, Any]] | None) -> list[tuple[str, str]]:
    """(role, text) of the pieces of one row's conversation after its prompt; empty where only the policy speaks."""
    first = next((i for i, entry in enumerate(record or ()) if entry["role"] == "assistant"), 0)
    turns = [(str(entry["role"]), _text(entry)) for entry in (record or ())[first:]]
    return turns if len(turns) > 1 else []


def turns_of_rows(columns: dict[str, list[Any]], count: int) -> list[list[tuple[str, str]]]:
    """`turns_of` each of ``count`` rows."""
    return [turns_of(record) for record in columns.get(RECORD, [None] * count)]


def _text(entry: dict[str, Any]) -> str:
    calls = [f"{call['name']}: {call['answer']}" for call in entry.get("calls", ())]
    return "\n".join(calls) or str(entry.get("text", ""))


def add_columns(columns: dict[str, list[Any]], new: dict[str, list[Any]], before: int, count: int) -> None:
    """Append the columns of ``count`` more rows to those of ``before`` rows; what a side does not have is None."""
    for name in {*columns, *new}:
        column = columns.setdefault(name, [None] * before)
        column += new.get(name, [None] * count)


def runs(mask: torch.Tensor) -> list[list[int]]:
    """A mask (T,) as [value, length] of each stretch of equal values."""
    return [[int(value), len(list(same))] for value, same in itertools.groupby(mask.tolist())]
