"""One run as the page sees it: its files are read again when they change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from verl.errors import DataError
from verl.journal.account import REASONS
from verl.journal.columns import Lineage
from verl.journal.gantt import by_role, of_steps, role_of, work_of_roles
from verl.journal.spans import Span
from verl.observability.metrics_log import VALIDATION, MetricsLog
from verl.viewer.detail import detail_of
from verl.viewer.folder import RunFolder, setting_text
from verl.viewer.questions import Question, Row
from verl.viewer.samples import EXCERPT, READ_SECONDS, Matches, SampleIndex

EVENTS = {"save_checkpoint": "checkpoint", "testing": "validation"}
"""Stages that are events of a run."""
MOST_EXPORTED, EXPORTED_CHARACTERS = 20_000, 10_000
"""Samples of an exported file, and characters of each of their texts."""
MOST_SPANS = 20_000
"""Of an answer; fewer steps are to be chosen beyond."""


class ViewedRun:
    """A run's folder with what was read of it.

    Args:
        metrics, samples: places outside of the folder, where the run has them there.
    """

    def __init__(self, folder: Path, metrics: Path | None = None, samples: Path | None = None):
        self.folder = RunFolder(folder, metrics, samples)
        self.log, self.index = MetricsLog(), SampleIndex()
        self.lineage = Lineage(self.index.uids, self.index.finishes, self.index.reasons)

    @property
    def name(self) -> str:
        return self.folder.path.name

    def refresh(self, samples: bool = False, complete: bool = False) -> ViewedRun:
        """Take in what is on the disk now.

        Args:
            samples: also its samples and its journal, as far as they can be read in a second.
            complete: all of them, however long it takes.
        """
        self.folder.refresh()
        with self._noticed("the metrics"):
            self.log.refresh(self.folder.metrics_file())
        while samples:
            self.lineage.refresh(self.folder.path, self.folder.allowed, READ_SECONDS)
            with self._noticed("the samples"):
                self.index.refresh(self.folder.samples_folder(), self.folder.allowed)
            samples = complete and not self.is_complete
        return self

    @contextmanager
    def _noticed(self, what: str) -> Iterator[None]:
        """An error of the disk is a notice of this run: the other runs of the page are shown nevertheless."""
        try:
            yield
        except OSError as error:
            self.folder.notices[what] = f"{what} cannot be read: {error}"

    @property
    def is_complete(self) -> bool:
        """Whether all files are in the index."""
        return self.lineage.is_complete and not self.index.pending

    def changed(self) -> str:
        """A text that is another one when there is something new."""
        state, _ = self.folder.state(self.log.last_step)
        return f"{self.log.position}.{self.index.version}.{self.lineage.version}.{state}"

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Of all samples."""
        return self.index.build(self.lineage)

    def about(self) -> Row:
        """The row of the list of runs."""
        last = self.log.last_step
        state, why = self.folder.state(last)
        notices = [*self.folder.notices.values(), *self.index.notices.values()]
        return {
            "name": self.name, "folder": str(self.folder.path), "state": state, "why": why, "last_step": last,
            "total_steps": self.folder.total_steps, "metrics": len(self.log.names), "samples": self.index.kind,
            "notices": [*notices, *filter(None, [self.log.notice, self.lineage.notice])],
            "indexed": self.indexed(), "changed": self.changed(),
        }  # fmt: skip

    def indexed(self) -> dict[str, int]:
        """How many files of samples are in the index, of all; the rest follows with the next requests."""
        of = self.index.files + self.index.pending + (not self.lineage.is_complete)
        return {"files": self.index.files, "of": of}

    @property
    def samples_per_step(self) -> int | None:
        """Answers that a step samples by the configuration; None: not known."""
        config = self.folder.config
        prompts, each = config.get("data.train_batch_size"), config.get("actor_rollout_ref.rollout.n", 1)
        return prompts * each if isinstance(prompts, int) and isinstance(each, int) else None

    # ---- samples -----------------------------------------------------------------------------------------------

    def page(self, matches: Matches, first: int, size: int) -> Row:
        """Rows of a table of samples."""
        rows = matches.rows[first : first + size]
        described = self.index.described(self.columns, rows)
        for row, text in zip(described, self.index.texts(self.columns, rows, "output", EXCERPT)):
            row["excerpt"] = text
        made = {"total": len(matches.rows), "rows": described, "indexed": self.indexed()}
        return {**made, "searched": {"files": matches.searched, "of": matches.files}} if matches.files else made

    def exported(self, question: Question) -> list[Row]:
        """All samples that pass the filters, with the beginning of their texts.

        Raises:
            DataError: they are too many for a file, or a parameter has no such value.
        """
        rows = self.index.matches(question, self.columns, math.inf).rows
        question.end()
        if len(rows) > MOST_EXPORTED:
            raise DataError("too many samples for a file", key="what", got=len(rows), allowed=f"up to {MOST_EXPORTED}",
                            fix="Filter more.")  # fmt: skip
        described = self.index.described(self.columns, rows)
        for name, of in (("prompt", "input"), ("response", "output")):
            for row, text in zip(described, self.index.texts(self.columns, rows, of, EXPORTED_CHARACTERS)):
                row[name] = text
        return described

    def sample(self, identity: str, shows_all: bool) -> Row:
        """One sample with its tokens, and what the ledger has of it.

        Raises:
            NoSuchThing: there is none.
        """
        columns = self.columns
        row = self.index.row_of(identity, columns)
        (described,) = self.index.described(columns, np.array([row]))
        number = int(columns["ledger"][row])
        ledger = self.lineage.facts(number) if number >= 0 else None
        meaning = REASONS.get(described["reason"] or "")
        record = self.index.record(columns, row)
        return {**described, "meaning": meaning, **detail_of(record, shows_all), "ledger": ledger}

    def tokens(self, question: Question) -> list[Row]:
        """A row per token of a sample, with all quantities that the run has of it.

        Raises:
            NoSuchThing: there is no such sample.
            DataError: it has no token data, or a parameter has no such value.
        """
        identity = question.text("id")
        question.end()
        tokens = self.sample(identity, shows_all=True)["tokens"]
        if tokens is None:
            raise DataError("this sample has no token data", key="id", got=identity,
                            fix="trainer.rollout_data_tokens writes them.")  # fmt: skip
        columns = {name: values for name, values in tokens.items() if isinstance(values, list)}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def same_prompt(self, identity: str, first: int, size: int) -> Row:
        """The samples of the same row of the data over all steps; of the same group where the row is not known.

        Raises:
            NoSuchThing: there is no such sample.
        """
        columns = self.columns
        row = self.index.row_of(identity, columns)
        name = "row" if columns["row"][row] >= 0 else "uid"
        rows = np.flatnonzero(columns[name] == columns[name][row])
        return self.page(Matches(rows[np.argsort(columns["step"][rows], kind="stable")]), first, size)

    # ---- time --------------------------------------------------------------------------------------------------

    def gantt(self, question: Question) -> Row:
        """The stages of some steps by role; times in seconds since the first of them.

        Raises:
            DataError: none of these steps is in the journal.
        """
        last = question.count("last", self.lineage.last_step)
        first = question.count("first", max(1, last - 4))
        question.end()
        if not self.lineage.spans:
            return {"spans": [], "seconds": 0.0}
        spans = of_steps(self.lineage.spans, first, last)
        begin = min(span.begin for span in spans)
        rows = [
            {"role": role, "name": span.stage, "step": span.step, "thread": span.thread,
             "begin": span.begin - begin, "end": span.end - begin}
            for role, work in by_role(spans).items() for span in work
        ]  # fmt: skip
        made = {"spans": rows[:MOST_SPANS], "seconds": max(span.end for span in spans) - begin}
        return {**made, "left_out": len(rows) - MOST_SPANS} if len(rows) > MOST_SPANS else made

    def system(self) -> Row:
        """Busy and idle seconds of each role, its last stage, and the watchdog's stacks."""
        spans, rows = self.lineage.spans, []
        begin = min((span.begin for span in spans), default=0.0)
        work = work_of_roles(spans) if spans else {}
        for role, stages in by_role(spans).items():
            busy, idle = work[role]
            last = max(stages, key=lambda span: span.end)
            rows.append({"role": role, "busy": busy, "idle": idle, "step": last.step, "name": last.stage,
                         "time": last.end - begin})  # fmt: skip
        return {"roles": rows, "stacks": self.folder.stacks()}

    def events(self) -> list[Row]:
        """Checkpoints, validations, restarts and notices, in the order of time; null: not known."""
        spans = self.lineage.spans
        begin = min((span.begin for span in spans), default=0.0)
        made = [self._event(span, begin) for span in spans if span.stage in EVENTS]
        made += [
            {"step": step, "time": None, "kind": "restart", "text": f"the run went on after step {step}"}
            for step in self.lineage.restarts
        ]
        state, why = self.folder.state(self.log.last_step)
        if state in ("failed", "stopped"):
            made.append({"step": self.log.last_step, "time": None, "kind": "notice", "text": f"{state}: {why}"})
        made.sort(key=lambda event: (event["step"] or 0, event["time"] or 0.0))
        notices = [{"step": None, "time": None, "kind": "notice", "text": text} for text in self.about()["notices"]]
        return made + notices

    def _event(self, span: Span, begin: float) -> Row:
        kind = EVENTS[span.stage]
        text = f"{role_of(span.stage)}, {span.end - span.begin:.1f} s"
        if kind == "validation":
            values = self.log.at(span.step, VALIDATION)
            text += "".join(f"; {name} {value:.4g}" for name, value in list(values.items())[:3])
        return {"step": span.step, "time": span.begin - begin, "kind": kind, "text": text}


def setting_rows(runs: list[ViewedRun]) -> list[Row]:
    """Settings with the value of each run; of several runs those that differ. None: the run has no such setting."""
    configs = [run.folder.config for run in runs]
    names = sorted({name for config in configs for name in config})
    rows = [{"key": name, "values": [setting_text(c[name]) if name in c else None for c in configs]} for name in names]
    return [row for row in rows if len(runs) == 1 or len(set(row["values"])) > 1]
