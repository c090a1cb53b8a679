"""Loading the sampler's model, and taking new weights into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.errors import ModelError, RolloutError
from verl.models import export_weights, load_weights
from verl.models.lora import LoraSettings
from verl.models.weights import views_on_disk
from verl.rollout.hf import quantized
from verl.rollout.hf.adapter import AdapterBuffer
from verl.weight_sync import WeightChunk, WeightInventory
from verl.weight_sync.chunks import taking


class SamplerWeights:
    """The weights of a sampler's model as a place where new ones arrive.

    Args:
        adapter: of which nothing but the factors arrives; the weights that are there are its base.
        quantization: the format in which the model's linear layers are kept from here on; None: as they are.
        shares: the model's parameters may become the trainer's, where those arrive.
        shares_base: what an adapter is merged with may be the trainer's; it needs no place in the model.

    Raises:
        ModelError: to be quantized, and a weight of its files is not a single tensor.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: LoraSettings | None = None,
        quantization: str | None = None,
        shares: bool = False,
        shares_base: bool = False,
    ):
        self.model, self._shares = model, shares
        self.num_bytes = 0
        self._adapter = None if adapter is None else AdapterBuffer(model, adapter, shares)
        self.shares_base = shares_base and adapter is not None
        targets = _targets(model)
        # A family may keep weights in another form than files do: those are collected, then converted.
        self._inventory = None if targets is None else WeightInventory(targets)
        if quantization is not None:
            self._inventory = _quantized(model, quantization, targets)
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def receive(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Take a full stream; raises `RolloutError` and leaves mixed weights if it is incomplete."""
        if self._adapter is not None:
            self.num_bytes += self._adapter.receive(chunks, version)
            return
        if self._inventory is not None:
            self.num_bytes += self._inventory.receive(chunks, version, self._shares)
            return
        weights: dict[str, torch.Tensor] = {}
        ended = False
        with taking(chunks) as stream:
            for chunk in stream:
                if chunk.version != version:
                    raise RolloutError("a chunk of another version arrived", got=chunk.version, allowed=f"{version}")
                # Copies: a transport uses a chunk's memory again for the next one.
                weights.update((name, tensor.clone()) for name, tensor in chunk.tensors)
                self.num_bytes += chunk.num_bytes
                ended = chunk.last
        if not ended:
            raise RolloutError("the stream of weights was interrupted", key=f"version {version}")
        load_weights(self.model, weights)

    @property
    def is_shared(self) -> bool:
        """Whether the weights are the trainer's parameters."""
        return self._inventory is not None and bool(self._inventory.shared)

    def check(self) -> None:
        """Raise `RolloutError` where the weights are the trainer's, and it has changed them since they were sent."""
        if self._inventory is not None and any(one._version != count for one, count in self._inventory.shared):
            raise RolloutError(
                "the trainer has changed the weights that this sampler shares with it, and sent no new version",
                fix="Call update_weights after each update, or sample with a copy: trainer_mode other than sync.",
            )

    def free_merged(self) -> None:
        """The sampler's products read copies from here on: free the weights that an adapter was merged into."""
        if self._adapter is not None:
            self._adapter.free_merged()

    def restore_merged(self) -> None:
        """Undo `free_merged`, before the model's parameters are read."""
        if self._adapter is not None:
            self._adapter.restore_merged()

    def release(self) -> None:
        """Free the memory of all weights that will be sent again; their content is lost."""
        if self._emptied or self.is_shared:
            return
        if self._adapter is not None:
            self._adapter.keep_base()
        storages: dict[int, list[torch.Tensor]] = {}
        for tensor in self.model.state_dict(keep_vars=True).values():
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        gone = [
            tensors[0].untyped_storage()
            for tensors in storages.values()
            if self._adapter is None or self._adapter.changes_all_of(tensors)
        ]
        self._emptied = [(storage, storage.nbytes()) for storage in gone if storage.resizable()]
        for storage, _ in self._emptied:
            storage.resize_(0)

    def restore(self) -> bool:
        """Undo `release` with undefined contents; returns whether there was anything to undo."""
        emptied, self._emptied = self._emptied, []
        for storage, num_bytes in emptied:
            storage.resize_(num_bytes)
        return bool(emptied)


def _quantized(model: PreTrainedModel, kind: str, targets: dict[str, torch.Tensor] | None) -> WeightInventory:
    """Quantize the model; where weights under the names of ``targets`` arrive then."""
    if targets is None:
        raise ModelError(
            f"weights of {type(model).__name__} lie otherwise in memory than in files: they cannot be rounded",
            key=quantized.KEY,
            got=kind,
            fix="Leave it out.",
        )
    names = {(t.data_ptr(), t.numel()): name for name, t in targets.items()}
    before = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantized.quantize_sampler(model, kind)
    takers = {}
    for name, layer in quantized.quantized_layers(model):
        weight = before[name.removesuffix(".weight")]
        takers[names[weight.data_ptr(), weight.numel()]] = layer.take
    # Without memory of their own: the weights that were there before are freed with `before`.
    empty = {name: torch.empty_like(targets[name], device="meta") for name in takers}
    return WeightInventory({**targets, **empty}, takers)


def _targets(model: PreTrainedModel) -> dict[str, torch.Tensor] | None:
    """Hugging Face name, of tied weights each -> the memory of the weight; None where no single tensor holds it."""
    targets = dict(model.state_dict(keep_vars=True))
    if {name for name, _ in export_weights(model)} <= set(targets):
        return targets
    views = views_on_disk(model)
    if views is None:
        return None
    places = {(view.data_ptr(), view.numel()) for view in views.values()}
    return views | {name: t for name, t in targets.items() if (t.data_ptr(), t.numel()) in places}
