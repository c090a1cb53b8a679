"""A LoRA adapter that arrives alone, merged here into the sampler's own weights.

Merged, sampling is as fast as without an adapter, and the weights are those that the trainer would have sent. The price
is a second copy of the weights that the adapter changes: those of the base, unless the trainer's are in this process.
Where products read copies in another layout (`projections`), the merged weights are freed once those are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedModel

from verl.device import give_memory_back
from verl.errors import ModelError
from verl.models import lora
from verl.models.lora import LoraSettings
from verl.weight_sync import WeightChunk, WeightInventory
from verl.weight_sync.chunks import taking
from verl.weight_sync.inventory import can_share


class AdapterBuffer:
    """Where the factors of an adapter arrive.

    Args:
        model: with the weights of the base.
        settings: of the adapter, as the trainer has them.
        shares: the model's parameters that the adapter leaves alone may become the trainer's.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, shares: bool = False):
        self._shares = shares
        with torch.device("meta"):
            self._blueprint = type(model)(model.config)
        lora.add_adapter(self._blueprint, settings, seed=0)
        shapes = dict(self._blueprint.named_parameters())
        names = lora.adapter_names(self._blueprint)
        self._factors = {name: torch.empty(shapes[name].shape, device=model.device) for name in names}
        self._inventory = WeightInventory({names[name]: factor for name, factor in self._factors.items()})
        owners = sorted({name.partition(".lora_")[0] for name in names})
        weights, changed = dict(model.named_parameters()), {n: lora.adapted_weight(self._blueprint, n) for n in owners}
        if absent := sorted(set(changed.values()) - set(weights)):
            raise ModelError(
                f"the sampler's {type(model).__name__} has no {absent[0]}, which the adapter changes",
                key="actor_rollout_ref.model.lora.merge",
                fix="Set it to true, so that merged weights are sent, or name other modules in target_modules.",
            )
        self._weights, self._owners = weights, {name: owner for owner, name in changed.items()}
        self._base: dict[str, torch.Tensor] = {}
        self._is_merged = False

    def receive(self, chunks: Iterable[WeightChunk], version: int) -> int:
        """Take a full adapter and merge it; returns the number of bytes received."""
        num_bytes = self._inventory.receive(self._after_base(chunks), version)
        self.keep_base()
        self._merge()
        return num_bytes

    def free_merged(self) -> None:
        """Free the merged weights, which `restore_merged` can make again."""
        if not self._is_merged:
            return
        for name in self._owners:
            storage = self._weights[name].untyped_storage()
            if storage.resizable() and storage.nbytes() == self._weights[name].nbytes:
                storage.resize_(0)
        self._is_merged = False
        give_memory_back(self._weights[next(iter(self._owners))].device.type)

    def restore_merged(self) -> None:
        """Merge once more after `free_merged`."""
        if self._base and not self._is_merged:
            self._merge()

    def _merge(self) -> None:
        """Base and adapter -> the model's weights."""
        for name, owner in self._owners.items():
            parts = {part: factor for part, factor in self._factors.items() if part.startswith(f"{owner}.lora_")}
            target = self._weights[name]
            if target.untyped_storage().nbytes() == 0:
                target.untyped_storage().resize_(target.nbytes)
            # A live base may be wider; what is sent is rounded before it is merged, and so is this.
            base = self._base[name].to(target.dtype)
            (merged,) = lora.merge_adapter(self._blueprint, {name: base, **parts}).values()
            target.detach().copy_(merged)
        self._is_merged = True

    def _after_base(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The adapter's part of a stream; what comes before it, the trainer's base, is used in place."""
        with taking(chunks) as stream:
            for chunk in stream:
                if not chunk.is_live:
                    yield chunk
                    continue
                for name, value in chunk.tensors:
                    target = self._weights.get(name)
                    if target is None or (target.shape, target.device) != (value.shape, value.device):
                        continue
                    if name in self._owners:
                        self._base[name] = value
                    elif self._shares and can_share(target, value):
                        target.data = value

    def keep_base(self) -> None:
        """Copy what the adapter changes and is not the trainer's, before it changes for the first time."""
        for name in self._owners:
            if name not in self._base:
                self._base[name] = self._weights[name].detach().clone()

    def changes_all_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the next adapter contains all of these."""
        targets = {id(self._weights[name]) for name in self._owners}
        return all(id(tensor) in targets for tensor in tensors)
