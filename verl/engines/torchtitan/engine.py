"""The TorchTitan backend: its models, sharded by FSDP2 and tensor parallelism.

Rows, micro-batches, losses, clipping, checkpoints and the export of weights are those of the FSDP2 engine, whose
sharded tensors (`DTensor`) TorchTitan's models have too; here are the model, its meshes, and what tensor-parallel ranks
share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from verl import device as devices
from verl.config.node import key_of
from verl.config.torchtitan import features_not_built
from verl.distributed import Ranks
from verl.distributed.shards import own_box
from verl.engines import sharding
from verl.engines.base import Engine
from verl.engines.forward import TokenForward
from verl.engines.fsdp2 import FSDP2Engine
from verl.engines.rows import MicroBatch
from verl.engines.sequence_parallel import sequence_peers
from verl.engines.settings import PassSettings, recompute_activations
from verl.engines.torchtitan.model import build, family_of, selected
from verl.engines.torchtitan.parallel import TitanSizes
from verl.errors import NotBuiltError
from verl.protocol.sharding import ShardSpec


class TitanForward(TokenForward):
    """A pass over a model whose head is shared by vocabulary."""

    def _possible(self, passes: PassSettings) -> PassSettings:
        return passes  # its attention is ours (`modules`)

    def _logits(self, micro: MicroBatch) -> Tensor:
        with devices.autocast(self.device, self.dtype), selected(self.head, micro.positions):
            logits = self._run(micro).logits
        # All tensor-parallel ranks take the same loss of the complete logits, so each has its part of the gradient.
        return (logits.full_tensor() if isinstance(logits, DTensor) else logits).squeeze(0)

    def _run(self, micro: MicroBatch) -> Any:
        return self.model(micro.input_ids, position_ids=micro.position_ids, attention_plan=micro.attention)


class TorchTitanEngine(FSDP2Engine):
    """A dense Llama or Qwen3 over data x tensor parallel processes, in TorchTitan's modules.

    Args:
        model, optim, kind, grad_clip, total_training_steps, device, seed: as for `FSDP2Engine`.
        engine: the ``torchtitan`` section.

    Raises:
        ConfigError: TorchTitan is not installed; sizes that do not divide processes or heads.
        NotBuiltError: a family, a kind of parallelism or of model that this engine has not yet.
    """

    @classmethod
    def section(cls, fsdp: Any, megatron: Any, torchtitan: Any = None) -> Any:
        return torchtitan

    def _introduce(self, model: Any, engine: Any, kind: str, grad_clip: float | None, device: str) -> None:
        super()._introduce(model, engine, kind, grad_clip, device)
        self.recompute = recompute_activations(model.enable_gradient_checkpointing, device)
        refused = {} if kind == "causal_lm" else {"path": "a value model"}
        for name, what in (refused | features_not_built(model)).items():
            raise NotBuiltError(
                f"{what} is not built yet on TorchTitan's models",
                key=key_of(model, name),
                fix="Leave it out, or set strategy=fsdp2.",
            )

    # ---- building ----------------------------------------------------------------------------------------------

    def _peers(self, engine: Any) -> Ranks:
        self.num_sequence_ranks = 1
        self.sizes = TitanSizes.of(engine, self.ranks, self.device)
        return sequence_peers(self.ranks, self.sizes.tensor)

    def _lay_out(self, engine: Any) -> None:
        self.reshard, self.compiles = engine.reshard_after_forward, bool(engine.use_torch_compile)
        self.engine_section = engine
        self.layout = sharding.ShardingLayout(self.sizes.mesh, self.device, self.dtype)
        self.experts, self.sync_once = None, False

    def _cut(self, model: Any) -> nn.Module:
        config = model.config
        family_of(config)
        self.sizes.check(config, self.engine_section)
        self.cuts = {}
        rotary = type(model.model.rotary_emb)(config)  # with values, which the model on meta has not
        return build(
            model,
            rotary,
            self.sizes,
            self.device,
            self.dtype,
            self.layout.home,
            reshard=self.reshard,
            offload=self.layout.offload,
            recompute=self.recompute,
            compiles=self.compiles,
        )

    def _wants_compiling(self, engine: Any) -> bool:
        return False  # TorchTitan compiles them, before they are sharded

    def _make_forward(self, *args: Any, **kwargs: Any) -> TokenForward:
        return TitanForward(*args, **kwargs)

    def _held(self) -> str:
        pieces = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        own = sum(p.to_local().nbytes for p in pieces)
        return f"{own} of {sum(p.nbytes for p in self.blueprint.parameters())} bytes of weights"

    def _total_norm(self, grads: list[Tensor]) -> Tensor:
        """Every rank sums its pieces; a piece that several ranks have alike counts once."""
        own = sum((_piece(g).double().square().sum() / _copies(g) for g in grads), torch.zeros((), dtype=torch.float64))
        return self.ranks.sum(own).sqrt().float().to(self.device)

    # ---- weights and state -------------------------------------------------------------------------------------

    def _box(self, tensor: Tensor, name: str) -> tuple[ShardSpec, Tensor]:
        return own_box(tensor)

    def _put(self, whole: Tensor, target: Tensor, name: str) -> None:
        """Rank 0's values go to every rank, one weight at a time, and each keeps its box."""
        if self.is_first:
            values = whole.to(self.device, target.dtype)
        else:
            values = torch.empty(whole.shape, device=self.device, dtype=target.dtype)
        values = self.ranks.broadcast(values)
        spec, local = own_box(target)
        with torch.no_grad():
            local.copy_(values[spec.slices])

    def _pieces_beside(self, source: Engine) -> list[tuple[Tensor, Tensor]] | None:
        return super()._pieces_beside(source) if isinstance(source, TorchTitanEngine) else None


def _piece(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor) -> int:
    """Ranks that have the same piece."""
    assert isinstance(tensor, DTensor), "every weight of a TorchTitan model is sharded"
    count = 1
    for number, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            count *= tensor.device_mesh.size(number)
    return count
