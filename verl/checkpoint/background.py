"""Writing a role's files during training: copy first, write the copy from a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from verl.checkpoint.files import FileRecord
from verl.checkpoint.part import DEFAULT_CONTENTS, HFWriter, write_part
from verl.checkpoint.state import EngineState
from verl.outcomes import thread_outcome


class PartInWork(Protocol):
    """A role's files that are still being written, here or in a worker."""

    def poll(self) -> Mapping[str, FileRecord] | None:
        """The records once everything is on the disk, None before; raises the error of a write that failed."""

    def wait(self) -> Mapping[str, FileRecord]:
        """The same, after waiting for it."""


class BackgroundPart:
    """Saves what one rank writes of a role in the background, one save at a time.

    The copy's memory is kept from save to save.

    Example:
        >>> part = BackgroundPart()
        >>> part.start(folder, engine.state(), hf=engine.hf_writer(tokenizer))  # returns after the copy
        >>> train(); records = part.wait()
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._records: Future[Mapping[str, FileRecord]] = Future()
        self._records.set_result({})

    def start(
        self,
        folder: Path,
        state: EngineState,
        contents: Sequence[str] = DEFAULT_CONTENTS,
        hf: HFWriter | None = None,
        point: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Copy ``state`` and return; what it was copied from may change from here on."""
        wait([self._records])
        work = partial(write_part, folder, self._snapshot(state, contents), contents, hf, point)
        self._records = thread_outcome(work, f"checkpoint-{folder.name}", daemon=True)

    def poll(self) -> Mapping[str, FileRecord] | None:
        return self.wait() if self._records.done() else None

    def wait(self) -> Mapping[str, FileRecord]:
        return self._records.result()

    def _snapshot(self, state: EngineState, contents: Sequence[str]) -> EngineState:
        """Copies in memory that is reused: fresh memory is several times slower than the copy itself."""
        sections = {*contents, *(("model",) if "hf_model" in contents else ())}
        selected = state.only(sections)
        copies: dict[str, Tensor] = {}
        for name, tensor in selected.tensors.items():
            if name in selected.fresh:  # nothing else refers to this memory: it is a copy
                copies[name] = tensor
                continue
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[name] = buffer
            copies[name] = buffer.copy_(tensor.detach())
        return selected.having(copies, dict(selected.scalars))
