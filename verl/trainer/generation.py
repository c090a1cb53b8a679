"""Batch generation: prompts of a file with several answers each; a killed run resumes.

Finished prompts are kept in a file next to the output, one line per prompt, with the run's settings in its first line.
An answer is a function of the prompt's row and the answer's number (with the `hf` engine token for token), so a run
that was interrupted writes what an uninterrupted one would have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.schema.rollout import RolloutConfig
from verl.data import RLHFDataset
from verl.data.files import read_files
from verl.data.progress import track
from verl.errors import DataError, RolloutError
from verl.json_text import read_json
from verl.metrics import log, notice
from verl.outcomes import on_error
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.base import Request, Sampler, SamplingParams
from verl.rollout.lost import EngineLostError

if TYPE_CHECKING:
    from verl.data.vision.processor import VisionProcessor

RESPONSES = "responses"
SYNC_EVERY = 64
"""Finished prompts between two times that they are forced to disk."""


@dataclass(frozen=True)
class Job:
    """A batch-generation job.

    Args:
        files: of prompts.
        output: the parquet file to write.
        num_samples: answers per prompt.
        in_flight: prompts that are worked on at once.
        prompt_key: column with the prompts.
        images: for a model that sees, the settings of prompts' images (`verl.config.schema.data.ImageDataConfig`).
        max_prompt_length, truncation: what happens to longer ones, as in `RLHFDataset`.
        sampling: of every answer.
        identity: what else the answers depend on (model, engine), checked on resume.
        files_key, length_key: the settings of ``files`` and ``max_prompt_length``, for messages.
    """

    files: str | Sequence[str]
    output: str
    num_samples: int
    in_flight: int
    sampling: SamplingParams
    prompt_key: str = "prompt"
    images: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_length: int = 1536
    truncation: str = "left"
    identity: Mapping[str, Any] = None  # type: ignore[assignment]
    files_key: str = "data.path"
    length_key: str = "rollout.prompt_length"

    def fingerprint(self, table: pa.Table) -> dict[str, Any]:
        """The settings on which the answers depend.

        Args:
            table: the prompts, of which it holds a hash: answers must not go to other prompts of the same file.
        """
        digest = hashlib.sha256()
        read = [name for name in (self.prompt_key, self.images.get("image_key")) if name in table.column_names]
        for batch in table.select(read).to_batches(max_chunksize=1024 if len(read) == 1 else 16):
            digest.update(json.dumps(batch.to_pylist(), default=_of_bytes).encode())
        return {
            "files": [self.files] if isinstance(self.files, str) else list(self.files),
            "rows": len(table),
            "prompts": digest.hexdigest()[:12],
            "num_samples": self.num_samples,
            "prompt_key": self.prompt_key,
            "max_prompt_length": self.max_prompt_length,
            "truncation": self.truncation,
            **({"images": dict(self.images)} if self.images else {}),
            "sampling": {**vars(self.sampling), "stop_token_ids": list(self.sampling.stop_token_ids)},
            **(self.identity or {}),
        }


def generate_file(job: Job, sampler: Sampler, tokenizer: Tokenizer, processor: VisionProcessor | None = None) -> Path:
    """Answer every prompt and write the output; returns its path.

    Args:
        processor: of a model that takes images (`verl.data.load_processor`).

    Raises:
        DataError: the files of prompts are wrong, the output cannot be written, or an interrupted run next to it has
            other settings.
        RolloutError: a prompt was refused (it is named), or the engine is lost; finished prompts are kept.
    """
    table, _ = read_files(job.files, required=[job.prompt_key], key=job.files_key, column_key="data.prompt_key")
    settings = {"prompt_key": job.prompt_key, "max_prompt_length": job.max_prompt_length, "truncation": job.truncation}
    prompts = RLHFDataset(job.files, tokenizer, {**job.images, **settings}, processor)
    output = Path(job.output)
    if output.is_dir():
        raise DataError("a folder has this name", key="data.output_path", got=str(output))
    partial = output.with_name(f"{output.name}.partial")
    with Finished(partial, job.fingerprint(table), len(prompts), job.num_samples) as done:
        if done.rows:
            log.warning("%s: going on after %d of %d prompts", output, len(done.rows), len(prompts))
        asyncio.run(_answer_all(job, sampler, tokenizer, prompts, done))
        answers = [done.rows[number] for number in range(len(prompts))]
        if RESPONSES in table.column_names:
            notice("data.output_path", f"the column {RESPONSES!r} of the prompts is replaced by the answers")
            table = table.drop_columns([RESPONSES])
        _write(table.append_column(RESPONSES, pa.array(answers, pa.list_(pa.string()))), output)
        partial.unlink(missing_ok=True)
    return output


async def _answer_all(job: Job, sampler: Sampler, tokenizer: Tokenizer, prompts: RLHFDataset, done: Finished) -> None:
    """All prompts that are not done, ``in_flight`` at a time; the first failure ends the others."""
    left = iter([number for number in range(len(prompts)) if number not in done.rows])
    finished: asyncio.Queue[int | BaseException] = asyncio.Queue()

    async def worker() -> None:
        try:
            for number in left:
                row = prompts[number]
                prompt = row["raw_prompt_ids"]
                if len(prompt) == job.max_prompt_length and job.truncation != "error":
                    notice(job.length_key, f"prompt {number} and perhaps others: cut to {len(prompt)} tokens")
                done.add(number, await _answer(job, sampler, tokenizer, row, number))
                finished.put_nowait(number)
        except RolloutError as error:
            finished.put_nowait(error if isinstance(error, EngineLostError) else _of_row(error, number))
        except Exception as error:  # boundary: raised in the caller that waits for the rows
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


async def _answer(job: Job, sampler: Sampler, tokenizer: Tokenizer, row: Mapping[str, Any], number: int) -> list[str]:
    """The answers to one prompt as text, without special tokens; they share its images."""
    prompt = Request(
        id="",
        token_ids=tuple(row["raw_prompt_ids"]),
        sampling=job.sampling,
        images=(row.get("multi_modal_data") or {}).get("images") or None,
        videos=(row.get("multi_modal_data") or {}).get("videos") or None,
        multi_modal_inputs=row.get("multi_modal_inputs") or None,
        uid=f"row {number}",
    )
    requests = [replace(prompt, id=f"{number}-{index}", sample_index=index) for index in range(job.num_samples)]
    tasks = [asyncio.ensure_future(sampler.generate(request)) for request in requests]
    try:
        completions = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [tokenizer.decode(list(completion.token_ids), skip_special_tokens=True) for completion in completions]


def _of_bytes(value: Any) -> str:
    """What JSON cannot say: of the file of an image a digest."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def _of_row(error: RolloutError, number: int) -> RolloutError:
    """A refusal with the prompt that it concerns."""
    message = f"prompt {number} of the file was refused: {error.message}"
    return type(error)(message, key=error.key, got=error.got, allowed=error.allowed, fix=error.fix)


class Finished:
    """The answers so far, in memory and in a file that survives a kill at any moment.

    Its first line holds the settings, each other line the number and the answers of a prompt. Lines that a kill or a
    disk damaged are left out, and their prompts are answered again.

    Args:
        path: the file.
        fingerprint: settings that an earlier run must have had for its answers to be taken.
        num_prompts, num_samples: of the job.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], num_prompts: int, num_samples: int):
        self.path, self._fingerprint = path, json.loads(json.dumps(fingerprint, default=str))
        self._num_prompts, self._num_samples = num_prompts, num_samples
        self.rows: dict[int, list[str]] = {}
        self._file: Any = None
        self._unsynced = 0

    def __enter__(self) -> Finished:
        """Load the answers of an earlier run.

        Raises:
            DataError: the file cannot be written, another run writes it, or it is a run's with other settings.
        """
        with writing(self.path):
            self._file = self.path.open("a+b")
        with on_error(lambda _: self._file.close()):
            self._claim()
            self._take()
        return self

    def __exit__(self, *error: object) -> None:
        with writing(self.path):
            self._sync()
            self._file.close()
            if not self.rows:  # there is nothing to resume from
                self.path.unlink(missing_ok=True)

    def add(self, number: int, answers: list[str]) -> None:
        """Keep the answers of a prompt."""
        self.rows[number] = answers
        self._write([number, answers])
        self._unsynced += 1
        if self._unsynced >= SYNC_EVERY:
            self._sync()

    def _claim(self) -> None:
        """Two runs that add to one file would answer everything twice."""
        try:
            # The run that adds to the file, from its first answer to its end.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            fix = "Wait for it, or set another data.output_path."
            raise DataError("another running job writes this file", key=str(self.path), fix=fix) from error
        except OSError:  # this file system has no locks
            return

    def _take(self) -> None:
        self._file.seek(0)
        first, *lines = self._file.read().split(b"\n")
        entries = [self._entry(line) for line in lines if line]
        self.rows = dict(entry for entry in entries if entry is not None)
        if not self.rows:
            self._file.truncate(0)
            self._write(self._fingerprint)
            return
        self._check(first)
        if damaged := entries.count(None):
            log.warning("%s: %d damaged lines are left out, their prompts are answered again", self.path, damaged)
        if lines[-1]:  # truncated by a kill: start on a new line
            self._file.write(b"\n")

    def _entry(self, line: bytes) -> tuple[int, list[str]] | None:
        """Number and answers of a prompt; None if the line holds something else."""
        try:
            number, answers = read_json(line)
        except (ValueError, TypeError):
            return None
        is_text = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
        is_known = type(number) is int and 0 <= number < self._num_prompts
        return (number, answers) if is_text and is_known and len(answers) == self._num_samples else None

    def _check(self, first: bytes) -> None:
        try:
            settings = read_json(first)
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise DataError(
                "an interrupted run is stored next to the output, and the line with its settings is damaged",
                key=str(self.path),
                fix="Delete that file, or set another data.output_path.",
            )
        other = [name for name in self._fingerprint if settings.get(name) != self._fingerprint[name]]
        if other:
            raise DataError(
                f"an interrupted run with another setting of {', '.join(other)} is stored next to the output",
                key=str(self.path),
                got=settings.get(other[0]),
                allowed=str(self._fingerprint[other[0]]),
                fix="Go on with its settings, delete that file, or set another data.output_path.",
            )

    def _write(self, entry: Any) -> None:
        """Write through to the system, which keeps it if this process is killed; `_sync` covers a machine crash."""
        with writing(self.path):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raise `DataError` where the system does not let a file be written."""
    try:
        yield
    except OSError as error:
        fix = "Set data.output_path to a file in a folder that can be written and has room."
        raise DataError(
            f"cannot be written: {error.strerror}", key="data.output_path", got=str(file), fix=fix
        ) from error


def sampling_of(rollout: RolloutConfig, tokenizer: Tokenizer, length: int) -> SamplingParams:
    """How answers of at most ``length`` tokens are sampled, from a rollout section."""
    end = tokenizer.eos_token_id
    return SamplingParams(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=length,
        repetition_penalty=rollout.repetition_penalty,
        stop_token_ids=() if end is None else (int(end),),
        ignore_eos=rollout.ignore_eos,
        do_sample=rollout.do_sample,
        seed=rollout.seed,
    )


def model_identity(path: str) -> str:
    """The model's path with a short hash of its configuration and of its weights' sizes and times of change.

    So a run does not resume with weights that a training has since written to the same path.
    """
    config = Path(path) / "config.json"
    if not config.is_file():
        return path
    digest = hashlib.sha256(config.read_bytes())
    for file in sorted(Path(path).glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return f"{path}#{digest.hexdigest()[:12]}"


def _write(table: pa.Table, output: Path) -> None:
    draft = output.with_name(f"{output.name}.writing")
    with writing(output):
        pq.write_table(table, draft)
        draft.replace(output)
