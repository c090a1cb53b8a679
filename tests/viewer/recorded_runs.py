"""Folders of runs as this library leaves them, written by its writers, with answers of a hostile model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from verl.journal.file import Journal
from verl.journal.ledger import Ledger
from verl.observability.token_dump import table_of, write_table

HOSTILE = (
    "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    "<svg onload=\"document.title = 'taken'\"></svg> \u202efdp.exe\u202c a\u200bb [x](javascript:alert(1))"
)
"""What the page must show as text; the last part has characters that turn the direction, and one of no width."""
GROUPS, EACH = 3, 3
WORDS = ("The", " sum", " is", " 4", ".")
BEGIN = 1_760_000_000.0
"""Seconds since 1970 at which runs begin; a step takes ten."""


def scores(group: int) -> list[float]:
    """Of the answers to prompt ``group`` of a step: the first ``group`` of them are right."""
    return [1.0 if sample < group else 0.0 for sample in range(EACH)]


class RecordedRun:
    """A run of which each `add_step` writes what a training step leaves behind.

    Args:
        settings: dotted names -> values of its configuration, besides those that all have.
        texts: of the answers of the first group of a step; the last of them is repeated.
    """

    def __init__(self, folder: Path, steps: int = 0, texts: Sequence[str] = (HOSTILE,), bonus: float = 0.0, **settings):
        self.folder, self.texts, self.bonus, self.last = folder, texts, bonus, 0
        folder.mkdir(parents=True)
        config = {
            "trainer": {"experiment_name": folder.name, "rollout_data_dir": str(folder / "samples"),
                        "total_training_steps": 4},
            "data": {"train_batch_size": GROUPS}, "actor_rollout_ref": {"rollout": {"n": EACH}}, **settings,
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        journal = Journal(folder)
        self.journal, self.ledger = journal, Ledger(journal)
        journal.begin([self.ledger])
        for _ in range(steps):
            self.add_step()

    def add_step(self) -> None:
        """Samples, their fate, spans and metrics of the next step; the metrics come last, as in a run."""
        self.last += 1
        step = self.last
        keys = [(f"{step}-{group}", sample) for group in range(GROUPS) for sample in range(EACH)]
        values = [score for group in range(GROUPS) for score in scores(group)]
        filtered, trained = keys[:EACH], keys[EACH:]
        self.ledger.requested(step, 0, keys, rows=[group for group in range(GROUPS) for _ in range(EACH)])
        self.ledger.noted("sampled", step, keys, tokens=[len(WORDS)] * len(keys), finish=["stop"] * len(keys),
                          oldest_version=[step - 1] * len(keys), newest_version=[step] * len(keys))  # fmt: skip
        self.ledger.noted("scored", step, keys, score=values)
        self.ledger.dropped(step, "filtered_group", filtered)
        self.ledger.noted("batch", step, trained)
        self.ledger.trained(step, trained, {})
        self.ledger.end(step)
        at = BEGIN + 10 * step
        for stage, begin, end in (("gen", 0, 6), ("update_actor", 6, 9), ("step", 0, 10)):
            self.journal.write({"event": "span", "step": step, "stage": stage, "thread": "main", "begin": at + begin,
                                "end": at + end})  # fmt: skip
        self._write_samples(step, keys, values)
        metrics = {
            "critic/score/mean": sum(values) / len(values) + self.bonus, "response_length/mean": 5.0 * step,
            "perf/throughput": 100.0 * step, "perf/weights_sent_mb": 2.0, "timing_s/step": 10.0,
        }  # fmt: skip
        if step % 2 == 0:
            metrics["val-core/openai/gsm8k/reward/mean@1"] = step / 10
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": metrics}) + "\n")

    def _write_samples(self, step: int, keys: Sequence[tuple[str, int]], values: Sequence[float]) -> None:
        """Token ``i`` of sample ``s`` has log-prob -(i + s) / 10 for the trainer, and 0.25 more for the sampler."""
        count = len(keys)
        answers = [self.texts[min(sample, len(self.texts) - 1)] if uid.endswith("-0") else "".join(WORDS)
                   for uid, sample in keys]  # fmt: skip
        words = [WORDS if not uid.endswith("-0") else pieces(answer) for (uid, _), answer in zip(keys, answers)]
        lengths = np.array([len(parts) for parts in words])
        place = np.concatenate([np.arange(length) for length in lengths])
        sample = np.repeat([sample for _, sample in keys], lengths)
        trainer = -(place + sample) / 10
        tokens = {
            "token_id": place, "token_text": [part for parts in words for part in parts],
            "mask": (place > 0).astype(np.int8), "version": np.where(place < 2, step - 1, step),
            "sampler_log_prob": trainer + 0.25, "trainer_log_prob": trainer, "advantage": 0.5 - place,
            "entropy": place / 10,
        }  # fmt: skip
        columns = {
            "step": [step] * count, "uid": [uid for uid, _ in keys], "sample": [sample for _, sample in keys],
            "row": [int(uid.rpartition("-")[2]) for uid, _ in keys], "score": list(values),
            "length": lengths.tolist(), "prompt_length": [4] * count, "finish_reason": ["stop"] * count,
            "oldest_version": [step - 1] * count, "newest_version": [step] * count, "clipped": [0.0] * count,
            "reason": ["filtered_group" if uid.endswith("-0") else "" for uid, _ in keys],
            "input": [f"What is 2+2? ({uid.rpartition('-')[2]})" for uid, _ in keys], "output": answers,
            "gts": ["4"] * count,
        }  # fmt: skip
        table = table_of(columns, {"acc": list(values)}, tokens, lengths, np.ones(count, dtype=bool))
        write_table(table, self.folder / "samples" / f"{step}.parquet")


def pieces(text: str) -> list[str]:
    """A text as tokens of at most 7 characters."""
    return [text[i : i + 7] for i in range(0, len(text), 7)]
