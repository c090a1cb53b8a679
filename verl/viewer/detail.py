"""One sample as the page shows it: texts, turns, images, and what the trainer and the sampler say of each token."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from verl.json_text import JsonObject, without_nan
from verl.viewer.questions import Row

MOST_CHARACTERS, MOST_TOKENS = 1 << 20, 1 << 16
"""Of a text, and of a response, that are shown unless the request says all."""
TRAJECTORY = "trajectory"


def detail_of(record: JsonObject, shows_all: bool) -> Row:
    """Texts and tokens of a sample.

    Args:
        record: of `StepSamples.record`; empty for a sample without a file.
        shows_all: nothing is cut.
    """
    extra = dict(record.get("extra") or {})
    most = None if shows_all else MOST_CHARACTERS
    texts = {"prompt": str(record.get("input") or ""), "response": str(record.get("output") or "")}
    turns = _turns(extra.pop(TRAJECTORY, None))
    is_cut = not shows_all and any(len(text) > MOST_CHARACTERS for text in [*texts.values(), *(t for _, t in turns)])
    tokens = token_columns(record, None if shows_all else MOST_TOKENS)
    return {
        **{name: text[:most] for name, text in texts.items()},
        "turns": [{"role": role, "text": text[:most]} for role, text in turns],
        "ground_truth": record.get("gts"), "extra": extra, "images": _images(record.get("picture")),
        "cut": is_cut or (tokens is not None and len(tokens["ids"]) < len(record["token_id"])),
        "tokens": tokens,
    }  # fmt: skip


def token_columns(record: JsonObject, most: int | None) -> Row | None:
    """A list per quantity with a value per token, or null where the run has not computed it; None: no token data.

    Tokens that a tool or a user inserted have no log-prob of the sampler and no version: null.
    ``ratio`` is exp(trainer's log-prob - sampler's), ``difference`` the sampler's log-prob minus the trainer's.
    """
    ids = record.get("token_id")
    if ids is None:
        return None

    def values(name: str) -> np.ndarray | None:
        column = record.get(name)
        return None if column is None else np.array(column[:most], dtype=np.float64)

    sampler, trainer = values("sampler_log_prob"), values("trainer_log_prob")
    both = sampler is not None and trainer is not None
    difference = sampler - trainer if both else None  # type: ignore[operator]  # neither is None
    columns = {
        "log_prob": trainer if sampler is None else sampler, "trainer_log_prob": trainer,
        "ratio": None if difference is None else np.exp(np.clip(-difference, -700, 700)),
        "advantage": values("advantage"), "entropy": values("entropy"), "difference": difference,
    }  # fmt: skip
    return {
        "text": _cut(record.get("token_text"), most) or [f"<{token}>" for token in ids[:most]], "ids": ids[:most],
        **{name: None if column is None else without_nan(column.tolist()) for name, column in columns.items()},
        "mask": _cut(record.get("mask"), most), "version": _cut(record.get("version"), most),
        "total": len(ids),
    }  # fmt: skip


def _cut(column: Sequence[object] | None, most: int | None) -> Sequence[object] | None:
    return None if column is None else column[:most]


def _turns(trajectory: object) -> list[tuple[str, str]]:
    """(role, text) of the pieces of a conversation; empty where only the policy speaks."""
    pieces = [piece for piece in trajectory or () if isinstance(piece, dict)] if isinstance(trajectory, list) else []
    turns = []
    for piece in pieces:
        calls = [call for call in piece.get("calls") or () if isinstance(call, dict)]
        answers = "\n".join(f"{call.get('name')}: {call.get('answer')}" for call in calls)
        turns.append((str(piece.get("role")), answers or str(piece.get("text", ""))))
    return turns if len(turns) > 1 else []


def _images(picture: object) -> list[str]:
    if not isinstance(picture, bytes):
        return []
    return [f"data:image/png;base64,{base64.b64encode(picture).decode()}"]
