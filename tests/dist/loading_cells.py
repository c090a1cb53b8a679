"""What every rank of a group does to see how a sharded engine loads a model: its values, and the memory it takes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.dist.engine_cells import plain, sharded, shared_model
from verl.distributed import Ranks
from verl.metrics import notices, reset_notices
from verl.models.slices import SlicedFolder
from verl.models.weights import named_tensors
from verl.workers.part import ModelPart, load_part, save_part

LARGE = {"hidden": 256, "layers": 16, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LORA = {"model": {"lora_rank": 3, "target_modules": ["q_proj", "down_proj"]}}
KINDS = {
    "tied": ("qwen2", "causal_lm", {"tie_word_embeddings": True}, {}, {}),
    "mixture in half precision": ("qwen3_moe", "causal_lm", EXPERTS, {"model_dtype": "bf16"}, {}),
    "shared experts": ("qwen3_moe", "causal_lm", EXPERTS, {"expert_parallel_size": 2}, {}),
    "new value head and adapter": ("qwen2", "value", {}, {}, LORA),
    "replicated on the host": ("gemma2", "causal_lm", {}, {"fsdp_size": 1, "offload_policy": True}, {}),
}
"""Family, kind, configuration, settings of the engine, other sections."""
M_MMAP_THRESHOLD, SMALL, USUAL = -3, 1 << 16, 1 << 25


def same_bits_as_plain(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Kind -> names of tensors that differ from the plain engine's; what was told while loading."""
    reset_notices()
    found: dict[str, Any] = {}
    for name, (family, kind, config, engine, sections) in KINDS.items():
        path = shared_model(ranks, folder, family, **config)
        ours = sharded(path, kind, engine=engine, **sections)
        tensors = {name: tensor for unit in ours._units() for name, tensor in unit.items()}
        if ranks.is_first:
            own = {"model_dtype": engine["model_dtype"]} if "model_dtype" in engine else {}
            expected = named_tensors(plain(path, kind, engine=own, **sections).model)
            assert set(tensors) == set(expected)
            found[name] = [n for n, t in tensors.items() if t.dtype != expected[n].dtype or not t.equal(expected[n])]
    return {"different": found, "told": [key for key in notices() if key.startswith("model ")]}


def memory_of_loading(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Bytes of the model; of safetensors and of a folder in another format: read by this rank, held by it at most.

    Then what saving the weights and loading them again takes beyond the engine's own memory.
    """
    path = shared_model(ranks, folder, "qwen2", **LARGE)
    ranks.on_first(lambda: _other_format(path))
    sharded(shared_model(ranks, folder, "qwen2", tie_word_embeddings=True), trains=False)  # imports are no model
    found: dict[str, Any] = {}
    for name, where in (("slices", path), ("whole", path.with_name("other"))):
        reset_notices()
        ranks.barrier()
        with _bytes_read() as read, _peak_memory() as peak:
            engine = sharded(where, trains=False)
        found[name] = {"read": sum(read), "peak": peak[0], "told": notices().get(f"model {where}", "")}
    part = ModelPart(engine)
    for name, work in (("saved", save_part), ("loaded", load_part)):
        ranks.barrier()
        with _peak_memory() as peak:
            work(part, str(folder / f"large-{ranks.size}"), ("model",))
        found[name] = peak[0]
    layer = sum(p.nbytes for name, p in engine.blueprint.named_parameters() if ".layers.3." in name)
    return {**found, "model": sum(p.nbytes for p in engine.blueprint.parameters()), "layer": layer}


def _other_format(path: Path) -> None:
    from safetensors.torch import load_file

    other = path.with_name("other")
    if not other.exists():
        other.mkdir()
        for file in path.glob("*.json"):
            (other / file.name).write_bytes(file.read_bytes())
        torch.save(load_file(path / "model.safetensors"), other / "pytorch_model.bin")


@contextmanager
def _bytes_read() -> Iterator[list[int]]:
    """Within the block, how many bytes each read of a part of a file gave."""
    found: list[int] = []
    box: Callable[..., Any] = SlicedFolder.box

    def counted(self: SlicedFolder, *args: Any) -> Any:
        value = box(self, *args)
        found.append(value.nbytes)
        return value

    SlicedFolder.box = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        SlicedFolder.box = box  # type: ignore[method-assign]


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Bytes of this process's own memory (pages of files do not count) beyond those at the start, at most."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)  # what is freed is given back, so that it does not count
    start, done, peak = _own_memory(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _own_memory() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, USUAL)


def _own_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def doors(ranks: Ranks, folder: Path) -> list[str]:
    """The addresses on which this rank listens, those of the group and its subgroups."""
    found = psutil.Process().net_connections("inet")
    return sorted({entry.laddr.ip for entry in found if entry.status == psutil.CONN_LISTEN})
