"""Reading a finished checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import Manifest
from verl.checkpoint.part import DEFAULT_CONTENTS, read_part
from verl.checkpoint.state import EngineState
from verl.errors import CheckpointError
from verl.json_text import read_json

TRAINER = "trainer.json"


class CheckpointReader:
    """A step folder, as `find_checkpoint` gives it.

    Example:
        >>> reader = CheckpointReader(find_checkpoint(root))
        >>> engine.load_state(reader.load("actor")); state = reader.trainer_state()

    Raises:
        CheckpointError: the folder is no finished checkpoint.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)

    @property
    def step(self) -> int:
        """The global step after which it was saved."""
        return self.manifest.step

    @property
    def parts(self) -> tuple[str, ...]:
        """The roles in it."""
        return self.manifest.parts

    def load(self, part: str, contents: Sequence[str] = DEFAULT_CONTENTS) -> EngineState:
        """A role's state.

        Raises:
            CheckpointError: no such role or section, or a damaged file.
        """
        return read_part(self.folder / part, contents)

    def trainer_state(self) -> dict[str, Any]:
        """What the controller saved."""
        try:
            return read_json((self.folder / TRAINER).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"this file cannot be read: {error}", got=str(self.folder / TRAINER)) from error
