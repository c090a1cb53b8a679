"""One role's folder inside a checkpoint: what a worker writes and reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from verl.checkpoint.files import FileRecord, checked_json_text, records_of, write_synced
from verl.checkpoint.shard_files import StoredTensors, shard_files, shard_metadata, shard_name
from verl.checkpoint.state import SECTIONS, EngineState
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
HUGGINGFACE = "huggingface"
INDEX = "model.safetensors.index.json"


def prepare_part(folder: Path) -> None:
    """Make a role's folder, without the shards of an earlier save: of another number of ranks they would stay.

    Before `write_part`, by one rank where several write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("optimizer*.safetensors", "model.safetensors"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
    prepare_weights(folder / HUGGINGFACE)


def prepare_weights(folder: Path) -> None:
    """Remove the weights of an earlier save from a Hugging Face folder, if there are any."""
    for pattern in ("model*.safetensors", INDEX):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def write_part(
    folder: Path,
    state: EngineState,
    contents: Sequence[str] = DEFAULT_CONTENTS,
    hf: HFWriter | None = None,
    point: Callable[[str], None] = lambda name: None,
) -> dict[str, FileRecord]:
    """Write a role's state; where several ranks save together, each its own part of it.

    Weights go into ``huggingface/``, once, in their own dtype: the same files serve a resume and ``from_pretrained``.
    ``hf_model`` therefore adds nothing to ``model``. Without ``hf`` they go into ``model.safetensors``.

    Args:
        contents: of model, optimizer, extra, hf_model (``actor.checkpoint.save_contents``).
        point: called with the progress of the write.

    Returns:
        Records of this rank's files, by name relative to ``folder``; the disk has them.
    """
    check_contents(contents)
    folder.mkdir(parents=True, exist_ok=True)
    with_weights = "model" in contents or "hf_model" in contents
    sections = [s for s in SECTIONS if s in contents or (s == "model" and with_weights)]
    records: dict[str, FileRecord] = {}
    if hf is not None:
        written = write_hf(folder / HUGGINGFACE, state, hf, point, with_weights)
        records |= {f"{HUGGINGFACE}/{name}": record for name, record in written.items()}
    for section in sections:
        tensors = state.section(section)
        sharded = section == "optimizer" and state.num_ranks > 1 and section in state.scalars
        if (tensors or sharded) and not (section == "model" and hf is not None):
            name = shard_name(section, state.rank, state.num_ranks if sharded else 1)
            boxes = {name: state.shards[full] for name in tensors if (full := f"{section}/{name}") in state.shards}
            metadata = shard_metadata(state.rank, state.num_ranks, boxes) if sharded else None
            records[name] = write_tensors(folder / name, tensors, partial(_tell, point, name), metadata)
            point(name)
    if state.rank:
        return records
    scalars = {section: state.scalars[section] for section in sections if section in state.scalars}
    write_synced(folder / SCALARS, checked_json_text(scalars, f"{folder.name}/{SCALARS}"))
    return records_of(folder, records, besides=_files_of_others(state))


def write_hf(
    folder: Path,
    state: EngineState,
    hf: HFWriter,
    point: Callable[[str], None] = lambda name: None,
    with_weights: bool = True,
) -> dict[str, FileRecord]:
    """Write a Hugging Face folder: every rank the weights of its state, and the first one everything else.

    Returns:
        Records of this rank's files as far as it has them, by name relative to ``folder``.
    """
    records: dict[str, FileRecord] = {}
    together, weights = state.files if with_weights else None, state.section("model")
    if together is not None:
        folder.mkdir(parents=True, exist_ok=True)
        by_file: dict[str, dict[str, Tensor]] = {}
        for name in weights:
            by_file.setdefault(together.names[name], {})[name] = weights[name]
        for file, tensors in by_file.items():
            records[file] = write_tensors(folder / file, tensors, partial(_tell, point, file))
    if state.rank == 0:
        written = hf(folder, weights.items() if with_weights and together is None else None)
        records |= written or {}
        if together is not None and len(set(together.names.values())) > 1:
            write_synced(folder / INDEX, together.index())
        point(HUGGINGFACE)
    return records


def _files_of_others(state: EngineState) -> set[str]:
    """Names of the files that other ranks write."""
    mine = state.section("model")
    files = {} if state.files is None else state.files.names
    weights = {f"{HUGGINGFACE}/{file}" for name, file in files.items() if name not in mine}
    return weights | {shard_name("optimizer", rank, state.num_ranks) for rank in range(1, state.num_ranks)}


def read_part(folder: Path, contents: Sequence[str] = DEFAULT_CONTENTS) -> EngineState:
    """Open a role's state, only the sections in ``contents``; values are read on access.

    Raises:
        CheckpointError: a section was not saved, or a file is missing or damaged.
    """
    check_contents(contents)
    if not folder.is_dir():
        raise CheckpointError("the checkpoint holds no such role", got=folder.name, allowed=_roles(folder.parent))
    try:
        scalars = read_json((folder / SCALARS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"this file cannot be read: {error}", got=str(folder / SCALARS)) from error
    sections = [s for s in SECTIONS if s in contents or (s == "model" and "hf_model" in contents)]
    tensors = StoredTensors()
    for section in sections:
        if section not in scalars:
            raise CheckpointError(
                f"the checkpoint holds no {section!r} of {folder.name!r}",
                key="load_contents",
                got=list(contents),
                allowed=sorted(scalars),
                fix="Leave it out of load_contents, or save it next time.",
            )
        files = shard_files(folder, section)
        if section == "model" and not files:
            tensors.add_whole(section, _weights(folder / HUGGINGFACE))
        else:
            tensors.add(section, files)
    return EngineState(tensors, {section: scalars[section] for section in sections})


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


def _weights(folder: Path) -> Mapping[str, Tensor]:
    files = sorted(folder.glob("*model*.safetensors"))  # the model's own, or its adapter's
    if not files:
        raise CheckpointError("the checkpoint holds no weights", got=str(folder.parent))
    _refuse_missing(files)
    merged: dict[str, Tensor] = {}
    for file in files:
        tensors = read_tensors(file, small=0)
        twice = next((name for name in tensors if name in merged), None)
        if twice is not None:
            raise CheckpointError(f"two files hold the weight {twice}", got=str(file.parent))
        merged |= tensors
    return merged


def _refuse_missing(files: Sequence[Path]) -> None:
    """Raise `CheckpointError` where the index of a folder names a file that is not there."""
    index = files[0].parent / INDEX
    if not index.is_file():
        return
    try:
        named = set(read_json(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"this file cannot be read: {error}", got=str(index)) from error
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise CheckpointError(f"{missing[0]} is missing, which the index names", got=str(index.parent))


def _roles(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
