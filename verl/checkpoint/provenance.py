"""What decided a run: its settings and the content of the files that these name, kept in each of its checkpoints.

A run that resumes from a checkpoint is compared with the run that saved it. What changes the mathematics has to be
accepted by name (``trainer.resume_changed=accept``); the rest is a notice. A setting that is not known to be harmless
counts as mathematics.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.loading.configuration import to_yaml
from verl.config.loading.secrets import hide
from verl.config.schema.node import ConfigNode, schema_of, to_dict
from verl.errors import CheckpointError, ConfigError
from verl.json_text import read_json
from verl.metrics import notice

CONFIG, PROVENANCE = "config.yaml", "provenance.json"
KEY = "trainer.resume_changed"
SAMPLE = 1 << 20
"""Bytes at the beginning and at the end of a large file that stand for its content."""
MOST_READ, MOST_FILES, LEAST_SAMPLE = 128 << 20, 4096, 4 << 10
"""Bytes of a folder that are read, files of it that are opened, and what is read at each end of one in any case."""
LENGTHS = ("trainer.total_training_steps", "trainer.total_epochs")
HARMLESS = (
    # where a run is, what it writes, how long it is
    r"trainer\.(?!seed$|critic_warmup$|ref_update_freq$|v1\.)",
    r"(.*\.)?(global_)?profiler\.|ray_kwargs\.|transfer_queue\.|skip\.rollout\.(?!action$)|(.*\.)?checkpoint\.",
    # what validates
    r"data\.val_|data\.validation_|.*\.val_kwargs\.",
    r".*(num_workers|num_cpus|nccl_timeout|cache_dir|use_shm|while_sampling)$",
    r".*(max_[rt]pm|max_concurrent|estimated_tokens_per_request)$",
    # how a sampler does what it does
    r".*rollout\.(mode|gpu_memory_utilization|max_num_seqs|max_num_batched_tokens|enforce_eager|free_cache_engine)$",
    r".*rollout\.(load_format|enable_chunked_prefill|enable_prefix_caching|disable_log_stats|cudagraph_capture_sizes)$",
    r"actor_rollout_ref\.hybrid_engine$|.*rollout\.(nnodes|n_gpus_per_node|standalone_gpu_memory_utilization)$",
    r".*rollout\.max_replacements$|.*rollout\.(engine_kwargs|checkpoint_engine|server|agent\.num_workers|prometheus|trace)",
)
LAST_BITS = (
    # how work is cut and placed, on which results depend in their last bits alone
    r".*micro_batch_size(_per_gpu)?$|.*max_token_len(_per_gpu)?$|.*use_dynamic_bsz$|.*balance_(dp_token|batch)$",
    r".*strategy$|.*parallel_(size|degree)$|.*_offload$|.*offload_policy$|.*gradient_checkpointing.*|.*activation_offload$",
    r"(actor_rollout_ref\.)?model\.(use_remove_padding|use_liger|use_fused_kernels|fused_kernel_options\.|tiled_mlp\.)",
    r".*fsdp_config\.(?!.*dtype|mixed_precision|.*seed|full_determinism)|engine\.(?!.*dtype|mixed_precision|.*seed)",
    r".*rollout\.name$|trainer\.device$",
)
_FUNCTION_IN_FILE = re.compile(r"^(.+\.py):\w+$")
_HARMLESS, _LAST_BITS = (re.compile("|".join(f"(?:{one})" for one in part)) for part in (HARMLESS, LAST_BITS))


def is_harmless(key: str) -> bool:
    """Whether a setting changes no result of a run, or only where sums run in another order."""
    return _HARMLESS.match(key) is not None or _LAST_BITS.match(key) is not None


def keeps_bits(key: str) -> bool:
    """Whether a setting changes no bit of a result."""
    return is_harmless(key) and _LAST_BITS.match(key) is None


@dataclass(frozen=True)
class Change:
    """A setting, or the content behind it, that is not what it was."""

    key: str
    was: Any
    now: Any
    harmless: bool
    why: str = ""

    def __str__(self) -> str:
        return f"{self.key}: was {self.was!r}, is {self.now!r}{self.why}"


@dataclass(frozen=True)
class Provenance:
    """See the module.

    Args:
        settings: dotted key -> value, without secrets.
        content: dotted key of a file or folder, or ``<key>: <file>`` of a file that it imports ->
            digest of what is there.
        places: what a resumed run writes into: the names of its metrics file and the like.
        yaml: the configuration for people; empty where it was read back.
    """

    settings: Mapping[str, Any]
    content: Mapping[str, str]
    places: Mapping[str, str] = field(default_factory=dict)
    yaml: str = ""

    @classmethod
    def of(cls, config: ConfigNode) -> Provenance:
        """Of a run that begins."""
        schema = schema_of(type(config))
        raw = dict(_flat(to_dict(config), schema.leaves))
        settings = dict(_flat(hide(to_dict(config)), schema.leaves))
        named = [key for key, leaf in schema.leaves.items() if leaf.path and not is_harmless(key)]
        functions = {key: m[1] for key, value in raw.items() if (m := _FUNCTION_IN_FILE.match(str(value)))}
        raw |= functions
        named += [key for key in functions if key not in named and not is_harmless(key)]
        content = {key: _digest_of_all(raw.get(key)) for key in named}
        for key in named:
            for module in _imported(raw.get(key)):
                content[f"{key}: {os.path.relpath(module, Path(raw[key]).parent)}"] = _digest_of_all(str(module))
        digests = {key: digest for key, digest in content.items() if digest}
        return cls(json.loads(json.dumps(settings)), digests, yaml=to_yaml(config))

    @classmethod
    def read(cls, folder: Path) -> Provenance | None:
        """Of the run that saved a checkpoint; None where the checkpoint is older than this.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not (folder / PROVENANCE).is_file():
            return None
        try:
            record = read_json((folder / PROVENANCE).read_text(encoding="utf-8"))
            return cls(dict(record["settings"]), dict(record["content"]), dict(record["places"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"its {PROVENANCE} is damaged", got=str(folder)) from error

    def files(self, places: Mapping[str, str]) -> dict[str, str]:
        """Name -> text of what a checkpoint keeps."""
        content = {"settings": self.settings, "content": self.content, "places": dict(places)}
        return {CONFIG: self.yaml, PROVENANCE: json.dumps(content, indent=1) + "\n"}

    def changes(self, before: Provenance) -> Iterator[Change]:
        """What differs from an earlier run, in the order of the settings; a setting it did not know is left out."""
        for key, now in self.settings.items():
            was = before.settings.get(key, now)
            digest, other = self.content.get(key), before.content.get(key)
            if digest is not None and other is not None and digest != other:
                yield Change(key, f"{was} with the content {other}", f"{now} with the content {digest}", False)
            elif was != now and key in LENGTHS and (schedules := _schedules_of_the_length(self.settings)):
                yield Change(key, was, now, False, f" ({', '.join(schedules)}: the schedule depends on the length)")
            elif was != now:
                yield Change(key, was, now, is_harmless(key) or (digest is not None and digest == other))
        for name in sorted((self.content.keys() & before.content.keys()) - self.settings.keys()):
            if self.content[name] != before.content[name]:
                yield Change(name, f"the content {before.content[name]}", f"the content {self.content[name]}", False)


def check_resume(now: Provenance, folder: Path, accept: bool) -> Mapping[str, str]:
    """Tell what differs from the run that saved a checkpoint, before anything of it is loaded.

    Args:
        accept: ``trainer.resume_changed`` is ``accept``.

    Returns:
        The places of that run.

    Raises:
        ConfigError: something differs that changes the mathematics.
    """
    before = Provenance.read(folder)
    if before is None:
        notice(KEY, f"{folder} holds no copy of its run's configuration, so what has changed since then is not known")
        return {}
    changes = list(now.changes(before))
    harmless = [f"\n  - {change}" for change in changes if change.harmless or accept]
    serious = [f"\n  - {change}" for change in changes if not change.harmless]
    if serious and not accept:
        raise ConfigError(
            f"the run that saved {folder} differs from this one in what decides the results:{''.join(serious)}",
            key=KEY,
            fix="Give the settings of before, or trainer.resume_changed=accept to go on all the same, or another "
            "trainer.default_local_dir (or trainer.resume_mode=disable) for a run of its own.",
        )
    if harmless:
        end = ", which was accepted" if serious else " in what changes no result"
        notice(KEY, f"the run that saved {folder} differs from this one{end}:{''.join(harmless)}")
    return before.places


def check_replay(now: Provenance, recorded: Provenance, place: Path, more: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse a replay that would have other bits than the recorded run.

    Args:
        place: of the record.
        more: what else differs -> what it was and is.

    Raises:
        ConfigError: naming every setting that differs and is not known to keep all bits.
    """
    changes = [change for change in now.changes(recorded) if not (change.harmless and keeps_bits(change.key))]
    differs = [*map(str, changes), *(f"{name}: was {was!r}, is {it!r}" for name, (was, it) in more.items())]
    if differs:
        listed = "".join(f"\n  - {difference}" for difference in differs)
        raise ConfigError(f"the run recorded in {place} differs from this one in what decides its bits:{listed}",
            key="trainer.replay_from", fix="Give the settings of before.")  # fmt: skip


def _flat(value: Any, opaque: Container[str], key: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted keys; a mapping of the user is one setting: a new key in it is a change."""
    if isinstance(value, Mapping) and value and key not in opaque:
        for name, inner in value.items():
            yield from _flat(inner, opaque, f"{key}.{name}".removeprefix("."))
    else:
        yield key, value


def _schedules_of_the_length(settings: Mapping[str, Any]) -> list[str]:
    """The sections of optimizers whose learning rate at a step depends on how long the run is."""
    ends = ".lr_warmup_steps_ratio"
    sections = [key.removesuffix(ends) for key in settings if key.endswith(ends)]
    return [section for section in sections if _depends_on_length(partial(_read, settings, section))]


def _read(settings: Mapping[str, Any], section: str, name: str) -> Any:
    return settings.get(f"{section}.{name}")


def _depends_on_length(read: Callable[[str], Any]) -> bool:
    if (read("total_training_steps") or 0) > 0:
        return False
    warms_up = (read("lr_warmup_steps") or 0) <= 0 < (read("lr_warmup_steps_ratio") or 0)
    falls = read("lr_decay_style") not in (None, "constant", "inverse_square_root") and read("lr_decay_steps") is None
    return warms_up or falls or read("lr_scheduler_type") not in (None, "constant")


def _digest_of_all(value: Any) -> str:
    """Of a path or several; empty where one is not on this machine.

    It notices a file more or less, another name or size, and another byte at the beginning or the end of a file, where
    the headers of weights stand; not a byte in the middle of a large file. What is read does not grow with the folder.
    """
    paths = [Path(str(path)) for path in (value if isinstance(value, list) else [value] if value else [])]
    if not paths or not all(path.exists() for path in paths):
        return ""
    total = hashlib.sha256()
    for path in paths:
        files = [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
        sizes = [file.stat().st_size for file in files]
        sample = SAMPLE
        if sum(min(size, 2 * SAMPLE) for size in sizes) > MOST_READ:
            sample = max(LEAST_SAMPLE, min(SAMPLE, MOST_READ // (2 * len(files))))
        for number, (file, size) in enumerate(zip(files, sizes)):
            content = _digest(file, size, sample) if number < MOST_FILES else str(size).encode()
            total.update(file.relative_to(path).as_posix().encode() + b"\0" + content)
    return total.hexdigest()[:16]


def _imported(path: Any) -> list[Path]:
    """The files that a Python file imports from its folder and the packages there, directly or through one another."""
    if not isinstance(path, str) or not path.endswith(".py"):
        return []
    file, files = Path(path), [Path(path)]
    for importer in files:  # the loop extends it
        try:
            nodes = list(ast.walk(ast.parse(importer.read_bytes())))
        except (OSError, SyntaxError, ValueError):
            continue  # loading the file reports it
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, inside = getattr(node, "level", 0), getattr(node, "module", None) or ""
                base = [file.parent, *importer.parents][: level + 1][-1] if level else file.parent
                names = [f"{inside}.{alias.name}".lstrip(".") for alias in node.names]
                files += [module for name in names for module in _files_of(base, name) if module not in files]
    return files[1:]


def _files_of(base: Path, name: str) -> list[Path]:
    """Those that an import of a dotted name runs, of the ones below a folder."""
    parts = name.split(".")
    places = [base.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    return [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]


def _digest(file: Path, size: int, sample: int) -> bytes:
    with open(file, "rb") as opened:
        digest = hashlib.sha256(f"{size}:".encode() + opened.read(sample))
        if size > sample:
            opened.seek(max(sample, size - sample))
            digest.update(opened.read(sample))
    return digest.digest()
