"""One role's folder inside a checkpoint: what a worker writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from verl.checkpoint.files import FileRecord, records_of, to_json, write_synced
from verl.checkpoint.state import SECTIONS, EngineState, prefixed
from verl.checkpoint.tensors import read_tensors, write_tensors
from verl.errors import CheckpointError, ConfigError, suggest
from verl.json_text import read_json

HFWriter = Callable[[Path, "Iterable[tuple[str, Tensor]] | None"], "Mapping[str, FileRecord] | None"]
"""Writes a Hugging Face folder with these weights (None: everything but the weights).

May return the records of files that it has synced, by name.
"""

CONTENTS = (*SECTIONS, "hf_model")
DEFAULT_CONTENTS = SECTIONS
SCALARS = "extra.json"


def write_part(
    folder: Path,
    state: EngineState,
    contents: Sequence[str] = DEFAULT_CONTENTS,
    hf: HFWriter | None = None,
    point: Callable[[str], None] = lambda name: None,
) -> dict[str, FileRecord]:
    """Write a role's state.

    Weights go into ``huggingface/``, once, in their own dtype: the same files serve a resume and ``from_pretrained``.
    ``hf_model`` therefore adds nothing to ``model``. Without ``hf`` they go into ``model.safetensors``.

    Args:
        contents: of model, optimizer, extra, hf_model (``actor.checkpoint.save_contents``).
        point: told where the work stands.

    Returns:
        Records of all files in ``folder``, by name relative to it; the disk has them.
    """
    check_contents(contents)
    folder.mkdir(parents=True, exist_ok=True)
    with_weights = "model" in contents or "hf_model" in contents
    wanted = [s for s in SECTIONS if s in contents or (s == "model" and with_weights)]
    records: dict[str, FileRecord] = {}
    if hf is not None:
        known = hf(folder / "huggingface", state.section("model").items() if with_weights else None)
        records |= {f"huggingface/{name}": record for name, record in (known or {}).items()}
        point("huggingface")
    for section in wanted:
        tensors = state.section(section)
        if tensors and not (section == "model" and hf is not None):
            name = f"{section}.safetensors"
            records[name] = write_tensors(folder / name, tensors, partial(_tell, point, name))
            point(name)
    scalars = {section: state.scalars[section] for section in wanted if section in state.scalars}
    write_synced(folder / SCALARS, to_json(scalars, f"{folder.name}/{SCALARS}"))
    return records_of(folder, records)


def read_part(folder: Path, contents: Sequence[str] = DEFAULT_CONTENTS) -> EngineState:
    """Read a role's state, only the sections in ``contents``.

    Raises:
        CheckpointError: a section was not saved, or a file is damaged.
    """
    check_contents(contents)
    if not folder.is_dir():
        raise CheckpointError("the checkpoint holds no such role", got=folder.name, allowed=_roles(folder.parent))
    try:
        scalars = read_json((folder / SCALARS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"this file cannot be read: {error}", got=str(folder / SCALARS)) from error
    wanted = [s for s in SECTIONS if s in contents or (s == "model" and "hf_model" in contents)]
    tensors: dict[str, Tensor] = {}
    for section in wanted:
        if section not in scalars:
            raise CheckpointError(
                f"the checkpoint holds no {section!r} of {folder.name!r}",
                key="load_contents",
                got=list(contents),
                allowed=sorted(scalars),
                fix="Leave it out of load_contents, or save it next time.",
            )
        tensors |= prefixed(section, _section(folder, section))
    return EngineState(tensors, {section: scalars[section] for section in wanted})


def check_contents(contents: Sequence[str]) -> None:
    """Raise `ConfigError` at a name that is not one of `CONTENTS`."""
    for name in contents:
        if name not in CONTENTS:
            raise ConfigError(
                "unknown content of a checkpoint",
                key="save_contents",
                got=name,
                allowed=CONTENTS,
                fix=suggest(name, CONTENTS),
            )


def _tell(point: Callable[[str], None], name: str, size: int) -> None:
    point(f"{name}:{size}")


def _section(folder: Path, section: str) -> Mapping[str, Tensor]:
    own = folder / f"{section}.safetensors"
    if own.is_file():
        return read_tensors(own)
    if section != "model":
        return {}
    files = sorted((folder / "huggingface").glob("*model*.safetensors"))  # the model's own, or its adapter's
    if not files:
        raise CheckpointError("the checkpoint holds no weights", got=str(folder))
    merged: dict[str, Tensor] = {}
    for file in files:
        tensors = read_tensors(file)
        twice = next((name for name in tensors if name in merged), None)
        if twice is not None:
            raise CheckpointError(f"two files hold the weight {twice}", got=str(file.parent))
        merged |= tensors
    return merged


def _roles(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
