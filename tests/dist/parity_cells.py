"""Every way to lay out a model over ranks beside the plain engine: which there are, why the others do not exist, and
how far each is from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist.engine_cells import loss_of, order_of, plain, sharded, share, shared_model, whole_gradient
from tests.dist.expert_cells import MIXTURE
from tests.harness.engines import gradients, ragged_batch, relative_error
from verl.distributed import Ranks
from verl.engines.torch_engine import TorchEngine
from verl.models import lora

SIZES = (1, 2, 4)
FAMILIES = {"dense": ("qwen3", {}), "mixture": ("qwen3_moe", MIXTURE)}
ROWS = 6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OUTPUTS = ("log_probs", "entropy")


@dataclass(frozen=True, order=True)
class Layout:
    """One cell of the matrix.

    Args:
        ranks: processes. family: `FAMILIES`. packed: rows without padding. adapter: LoRA instead of all weights.
        sp, ep: peers that share sequences, experts.
    """

    ranks: int
    family: str
    packed: bool
    adapter: bool
    sp: int
    ep: int

    def __str__(self) -> str:
        words = [f"{self.ranks} ranks", self.family, "packed" if self.packed else "padded"]
        words += ["LoRA" if self.adapter else "full"]
        return " ".join([*words, *(f"{name} 2" for name in ("sp", "ep") if getattr(self, name) == 2)])

    @property
    def absence(self) -> str | None:
        """Why this cell does not exist; None where it does."""
        if self.ranks == 1 and 2 in (self.sp, self.ep):
            return "one process has nobody to share with"
        if self.ep == 2 and self.family == "dense":
            return "a dense model has no experts"
        if self.sp == 2 and not self.packed:
            return "sequences are cut where rows are packed: Ulysses needs use_remove_padding, and padded is refused"
        return None


def layouts() -> Iterator[Layout]:
    """All cells, also those that do not exist."""
    flags = (True, False), (False, True), (1, 2), (1, 2)
    for ranks, family in itertools.product(SIZES, FAMILIES):
        for packed, adapter, sp, ep in itertools.product(*flags):
            yield Layout(ranks, family, packed, adapter, sp, ep)


@dataclass(frozen=True)
class Beside:
    """The cell of a layout: relative errors of outputs, loss and gradient, on rank 0."""

    layout: Layout

    @property
    def __name__(self) -> str:
        return str(self.layout)

    def __call__(self, ranks: Ranks, folder: Path) -> dict[str, float]:
        how, batch = self.layout, ragged_batch(rows=ROWS, seed=1)
        family, config = FAMILIES[how.family]
        path = shared_model(ranks, folder, family, **config)
        sizes = {"ulysses_sequence_parallel_size": how.sp, "expert_parallel_size": how.ep}
        model = {"use_remove_padding": how.packed, **adapter_settings(how.adapter)}
        engine = sharded(path, engine=sizes, model=model)
        take_adapter(engine, how.adapter)
        mine = share(ranks, batch)
        found = engine.infer(mine, OUTPUTS, temperature=0.9, micro_batch_size=2)
        answers = ranks.exchange({name: values.tolist() for name, values in found.items()})
        loss, gradient = gradients(engine, mine, loss_of("causal_lm"), whole_gradient, micro_batch_size=2)
        if not ranks.is_first:
            return {}
        outputs, expected_loss, expected = reference(path, how.adapter)
        order = order_of(ranks, batch)
        whole = {name: torch.tensor([row for answer in answers for row in answer[name]]) for name in OUTPUTS}
        return {
            **{name: relative_error(whole[name], outputs[name][order]) for name in OUTPUTS},
            "loss": abs(loss - expected_loss) / abs(expected_loss),
            "gradient": relative_error(gradient, expected),
        }


@cache
def reference(path: Path, adapter: bool) -> tuple[dict[str, Tensor], float, Tensor]:
    """What the plain engine gives for the whole batch at once, padded: outputs, loss, gradient."""
    engine = plain(path, model={"use_remove_padding": False, **adapter_settings(adapter)})
    take_adapter(engine, adapter)
    batch = ragged_batch(rows=ROWS, seed=1)
    return (engine.infer(batch, OUTPUTS, temperature=0.9), *gradients(engine, batch, loss_of("causal_lm")))


def adapter_settings(adapter: bool) -> dict[str, Any]:
    return {"lora_rank": 4, "lora_alpha": 8, "target_modules": ATTENTION} if adapter else {}


def take_adapter(engine: TorchEngine, adapter: bool) -> None:
    """Load an adapter that changes something; a new one changes nothing, and its first factor has no gradient."""
    if not adapter:
        return
    shapes = {name: p.shape for name, p in engine.blueprint.named_parameters()}
    generator = torch.Generator().manual_seed(7)
    names = sorted(lora.adapter_names(engine.blueprint).items())
    engine.load_weights({disk: 0.2 * torch.randn(shapes[name], generator=generator) for name, disk in names})
