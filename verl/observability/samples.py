"""Completions for people: a panel in the terminal, JSON lines on disk, tables in trackers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import DataError, printable
from verl.json_text import without_nan
from verl.observability.tracker import Sample
from verl.observability.tracking import Tracking, current_tracking

if TYPE_CHECKING:
    from rich.panel import Panel

SHOWN_CHARACTERS = 600


def sample_panel(samples: Sequence[Sample], title: str) -> Panel:
    """A rich panel with prompt, response, score and ground truth of each sample; long texts are cut in the middle."""
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for i, sample in enumerate(samples):
        if i:
            text.append("\n")
        text.append(printable(shorten((sample.question or sample.prompt).strip())), style="dim")
        for role, said in sample.turns or [("", sample.response)]:
            text.append(f"\n  {printable(role)}  " if role else "  →  ", style="bold")
            text.append(printable(shorten(said.strip())))
        if sample.score is not None:
            text.append(f"   score {sample.score:g}", style="green" if sample.score > 0 else "red")
        if sample.ground_truth is not None:
            text.append(printable(f"   expected {sample.ground_truth}"), style="dim")
    return Panel(text, title=title, title_align="left", expand=False)


def shorten(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """The text, or its beginning and its end where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    side = limit // 2
    return f"{text[:side]} …({len(text) - 2 * side} characters)… {text[-side:]}"


def dump_generations(
    folder: str | Path,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    reward_extra_infos: Mapping[str, Sequence[Any]] | None = None,
    key: str = "trainer.rollout_data_dir",
) -> Path:
    """Write ``<folder>/<step>.jsonl``: a line per sample with input, output, gts, score, step and every extra value.

    The file appears whole or not at all.

    Args:
        key: the setting that names the folder, for the message.

    Raises:
        DataError: two columns have different lengths, or the folder cannot be written.
    """
    columns: dict[str, Sequence[Any]] = {"input": inputs, "output": outputs, "gts": gts, "score": scores}
    columns["step"] = [step] * len(inputs)
    columns |= {k: v for k, v in (reward_extra_infos or {}).items() if k not in columns}
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError("the columns of a generation dump must have one length", got=lengths)
    folder = Path(folder)
    path, fresh = folder / f"{step}.jsonl", folder / f"{step}.jsonl.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Half a letter of a model's call cannot be written in UTF-8; as JSON's own escape it can.
        with fresh.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for row in zip(*columns.values()):
                file.write(json_line(dict(zip(columns, row))) + "\n")
        fresh.replace(path)
    except OSError as error:
        raise DataError(f"the samples cannot be written: {error}", key=key, got=str(folder)) from error
    return path


def json_line(value: object) -> str:
    """A value of Python, numpy or torch as JSON in one line; NaN and infinities are null."""
    return json.dumps(without_nan(value), ensure_ascii=False, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    """numpy scalars and arrays, tensors: as Python values; anything else as its text."""
    return without_nan(value.tolist()) if hasattr(value, "tolist") else str(value)


class ValidationGenerationsLogger:
    """Upstream's name for sending validation completions to the trackers of this process.

    Args:
        project_name, experiment_name: accepted as upstream does; the open `Tracking` knows both.
    """

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None):
        self.project_name, self.experiment_name = project_name, experiment_name

    def log(self, loggers: Tracking | Iterable[str], samples: Iterable[Sample | Sequence[Any]], step: int) -> None:
        """Send samples (or input, output, score) to a `Tracking`, or to the named trackers of the one opened last."""
        rows = [s if isinstance(s, Sample) else Sample(str(s[0]), str(s[1]), float(s[2])) for s in samples]
        if isinstance(loggers, Tracking):
            loggers.log_samples("val/generations", rows, step)
            return
        tracking = current_tracking()
        if tracking is not None:
            tracking.log_samples("val/generations", rows, step, backend=list(loggers))
