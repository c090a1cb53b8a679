"""Batch generation: prompts of a file, several answers each, written beside them; a run that was killed goes on.

What is done is kept in a file beside the output, one line per prompt, with the settings it was made with in its first
line. An answer is a function of the prompt's row and the answer's number (with the `hf` engine token for token), so a
run that was interrupted writes what an uninterrupted one would have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data import RLHFDataset
from verl.data.files import read_files
from verl.data.progress import track
from verl.errors import DataError
from verl.metrics import log, notice
from verl.rollout.base import Request, Sampler, SamplingParams

RESPONSES = "responses"
SYNC_EVERY = 64
"""Finished prompts between two times that they are forced to disk."""


@dataclass(frozen=True)
class Job:
    """What is to be generated.

    Args:
        files: of prompts.
        output: the parquet file to write.
        num_samples: answers per prompt.
        in_flight: prompts that are worked on at once.
        prompt_key: column with the prompts.
        max_prompt_length, truncation: what happens to longer ones, as in `RLHFDataset`.
        sampling: of every answer.
        identity: what else the answers depend on (model, engine), for a run that goes on.
    """

    files: str | Sequence[str]
    output: str
    num_samples: int
    in_flight: int
    sampling: SamplingParams
    prompt_key: str = "prompt"
    max_prompt_length: int = 1536
    truncation: str = "left"
    identity: Mapping[str, Any] = None  # type: ignore[assignment]

    def fingerprint(self, rows: int) -> dict[str, Any]:
        """The settings on which the answers depend."""
        return {
            "files": [self.files] if isinstance(self.files, str) else list(self.files),
            "rows": rows,
            "num_samples": self.num_samples,
            "prompt_key": self.prompt_key,
            "max_prompt_length": self.max_prompt_length,
            "truncation": self.truncation,
            "sampling": {**vars(self.sampling), "stop_token_ids": list(self.sampling.stop_token_ids)},
            **(self.identity or {}),
        }


def generate_file(job: Job, sampler: Sampler, tokenizer: Any) -> Path:
    """Answer every prompt and write the output; returns its path.

    Raises:
        DataError: the files of prompts are wrong, or an interrupted run with other settings lies beside the output.
        RolloutError: a prompt was refused, or the engine is lost; what is done so far is kept.
    """
    table, _ = read_files(job.files, required=[job.prompt_key], key="data.path", column_key="data.prompt_key")
    settings = {"prompt_key": job.prompt_key, "max_prompt_length": job.max_prompt_length, "truncation": job.truncation}
    prompts = RLHFDataset(job.files, tokenizer, settings)
    output = Path(job.output)
    done = Finished(output.with_name(f"{output.name}.partial"), job.fingerprint(len(prompts)))
    with done:
        if done.rows:
            log.warning("%s: going on after %d of %d prompts", output, len(done.rows), len(prompts))
        asyncio.run(_answer_all(job, sampler, tokenizer, prompts, done))
    answers = [done.rows[number] for number in range(len(prompts))]
    if RESPONSES in table.column_names:
        notice("data.output_path", f"the column {RESPONSES!r} of the prompts is replaced by the answers")
        table = table.drop_columns([RESPONSES])
    _write(table.append_column(RESPONSES, pa.array(answers, pa.list_(pa.string()))), output)
    done.path.unlink()
    return output


async def _answer_all(job: Job, sampler: Sampler, tokenizer: Any, prompts: RLHFDataset, done: Finished) -> None:
    """All prompts that are not done, ``in_flight`` at a time; the first failure ends the others."""
    left = iter([number for number in range(len(prompts)) if number not in done.rows])
    finished: asyncio.Queue[int | BaseException] = asyncio.Queue()

    async def worker() -> None:
        try:
            for number in left:
                prompt = prompts[number]["raw_prompt_ids"]
                if len(prompt) == job.max_prompt_length and job.truncation != "error":
                    notice("rollout.prompt_length", f"prompt {number} and perhaps others: cut to {len(prompt)} tokens")
                done.add(number, await _answer(job, sampler, tokenizer, prompt, number))
                finished.put_nowait(number)
        except Exception as error:  # boundary: carried over to the one who waits for the rows
            finished.put_nowait(error)

    count = len(prompts) - len(done.rows)
    workers = [asyncio.ensure_future(worker()) for _ in range(min(job.in_flight, count))]
    try:
        for _ in track(range(count), "generating", total=count):
            outcome = await finished.get()
            if isinstance(outcome, BaseException):
                raise outcome
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer(job: Job, sampler: Sampler, tokenizer: Any, prompt: Sequence[int], number: int) -> list[str]:
    """The answers to one prompt as text, without special tokens."""
    requests = [
        Request(f"{number}-{index}", tuple(prompt), job.sampling, uid=f"row {number}", sample_index=index)
        for index in range(job.num_samples)
    ]
    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in requests]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [tokenizer.decode(list(completion.token_ids), skip_special_tokens=True) for completion in found]


class Finished:
    """The answers so far, in memory and in a file that survives a kill at any moment.

    Args:
        path: the file.
        fingerprint: settings that an earlier run must have had for its answers to be taken.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]):
        self.path, self._fingerprint = path, json.loads(json.dumps(fingerprint, default=str))
        self.rows: dict[int, list[str]] = {}
        self._file: Any = None
        self._unsynced = 0

    def __enter__(self) -> Finished:
        kept = list(self._read())
        # What was cut off by a kill goes: the file is written anew up to its last whole line.
        text = "".join(json.dumps(entry) + "\n" for entry in (self._fingerprint, *kept))
        fresh = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._sync()
        self._file.close()

    def add(self, number: int, answers: list[str]) -> None:
        """Keep the answers of a prompt."""
        self.rows[number] = answers
        self._file.write(json.dumps([number, answers]) + "\n")
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def _read(self) -> Iterator[list[Any]]:
        """The entries of an earlier run, whole lines only."""
        if not self.path.exists():
            return
        first, *lines = self.path.read_text(encoding="utf-8").split("\n")
        self._check(first)
        for line in lines:
            with contextlib.suppress(ValueError):
                number, answers = json.loads(line)
                self.rows[number] = answers
                yield [number, answers]

    def _check(self, first: str) -> None:
        try:
            found = json.loads(first)
        except ValueError:
            found = {}
        other = [name for name in self._fingerprint if found.get(name) != self._fingerprint[name]]
        if other:
            raise DataError(
                f"an interrupted run with another setting of {', '.join(other)} lies beside the output",
                key=str(self.path),
                got=found.get(other[0]),
                allowed=str(self._fingerprint[other[0]]),
                fix="Go on with its settings, delete that file, or set another data.output_path.",
            )


def sampling_of(rollout: Any, tokenizer: Any, length: int) -> SamplingParams:
    """How answers of at most ``length`` tokens are sampled, from a rollout section."""
    end = tokenizer.eos_token_id
    return SamplingParams(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=length,
        stop_token_ids=() if end is None else (int(end),),
        ignore_eos=rollout.ignore_eos,
        do_sample=rollout.do_sample,
        seed=rollout.seed,
    )


def model_identity(path: str) -> str:
    """The model's path with a short hash of its configuration, which tells two models at one path apart."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return path
    return f"{path}#{hashlib.sha256(config.read_bytes()).hexdigest()[:12]}"


def _write(table: pa.Table, output: Path) -> None:
    partial = output.with_name(f"{output.name}.writing")
    pq.write_table(table, partial)
    partial.replace(output)
