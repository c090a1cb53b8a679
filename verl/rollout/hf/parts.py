"""A sampler's model of which this process holds a part: cut by transformers' tensor-parallel plan, read in slices.

The ranks of a tensor group share heads, the inner width of MLPs and experts, and the vocabulary. Each holds its part
only, from the first byte on; what they exchange happens inside the model's modules, so the runners need not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.distributed import Ranks
from verl.errors import ModelError, NotBuiltError
from verl.models.hollow import compute_loose, replace_parameters
from verl.models.slices import SlicedFolder
from verl.models.tensor_parallel import Cutter
from verl.models.weights import named_tensors, names_on_disk, views_on_disk
from verl.rollout.hf.runner import vocab_size
from verl.weight_sync.resharding import ModelWeights, Weight
from verl.weight_sync.resharding.model import FIRST, LAYER

KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
Load = Callable[[], PreTrainedModel]
_LAYER, _EXPERT = re.compile(r"(?<=\.)layers\.(\d+)(?=\.)"), re.compile(r"(?<=\.)experts\.(\d+)(?=\.)")


@dataclass(frozen=True)
class Part:
    """This rank's part of a model.

    Args:
        model: with this rank's parts of the weights, and with hooks that exchange what modules need of the others.
        peers: the ranks that hold the model together, in the order of its parts.
        weights: Hugging Face name -> the whole weight and how it is cut.
    """

    model: PreTrainedModel
    peers: Ranks
    weights: Mapping[str, Weight]

    def span(self, name: str) -> tuple[int, int, int]:
        """Axis, begin and end of this rank's part of a weight."""
        axis, bounds = self.weights[name].bounds(self.peers.size)
        piece = self.peers.rank * (len(bounds) - 1) // self.peers.size
        return axis, bounds[piece], bounds[piece + 1]

    def of(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a weight that came whole; a part stays as it is."""
        if name not in self.weights or tuple(value.shape) != self.weights[name].shape:
            return value
        axis, low, high = self.span(name)
        return value.narrow(axis, low, high - low)

    def joined(self, logits: Tensor) -> Tensor:
        """(..., this rank's part of the vocabulary) -> (..., V), the same bits on all ranks."""
        vocabulary = vocab_size(self.model)
        if logits.shape[-1] == vocabulary:  # a head that the plan does not cut
            return logits
        missing = -(-vocabulary // self.peers.size) - logits.shape[-1]  # the last ranks may have fewer rows
        own = nn.functional.pad(logits, (0, missing)) if missing else logits
        return torch.cat(self.peers.gather(own.contiguous()), dim=-1)[..., :vocabulary]

    @property
    def views(self) -> dict[str, Tensor]:
        """Hugging Face name -> this rank's memory of the weight."""
        return _views(self.model)


def cut_weights(load: Load, size: int) -> dict[str, Weight]:
    """Hugging Face name -> the whole weight and how ``size`` ranks share it; nothing is allocated.

    Args:
        load: makes the model without values (on ``meta``).

    Raises:
        ConfigError: the family has no tensor-parallel plan, or heads or widths do not divide.
        NotBuiltError: the plan cuts something in a way that is not known here.
    """
    whole, first = load(), load()
    cutter = _cut(first, Ranks(0, size))
    parts, uneven = _shapes(first), _uneven(first, cutter)
    return {name: _weight(name, t, parts[name], size, name in uneven, whole) for name, t in _shapes(whole).items()}


def templates(weights: Mapping[str, Weight]) -> ModelWeights:
    """The same as the planner of weight transfers wants it: one entry for all layers and experts of one kind."""
    layers: dict[Weight, set[int]] = {}
    experts: dict[Weight, int] = {}
    for name, weight in weights.items():
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        template = _LAYER.sub("layers.{layer}", name, count=1)
        template = _EXPERT.sub("experts.{expert}", template, count=1)
        kind = _renamed(weight, template, LAYER if layer else FIRST)
        layers.setdefault(kind, set()).add(int(layer[1]) if layer else 0)
        experts[kind] = max(experts.get(kind, 0), int(expert[1]) + 1 if expert else 0)
    depth = max((max(found) + 1 for kind, found in layers.items() if kind.place == LAYER), default=1)
    made = []
    for kind, found in layers.items():
        only = tuple(sorted(found)) if kind.place == LAYER and len(found) < depth else None
        made.append(Weight(**{**vars(kind), "only": only, "experts": experts[kind]}))
    return ModelWeights(tuple(made), depth)


def empty_part(load: Load, peers: Ranks, device: str) -> Part:
    """This rank's part, its values undefined.

    Raises:
        ConfigError, NotBuiltError: see `cut_weights`.
        NotBuiltError: weights of a file that are no regular part of one in memory; buffers that the family fills while
            it is constructed.
    """
    weights, model = cut_weights(load, peers.size), load()
    _cut(model, peers)
    _materialise(model, device)
    part = Part(model.eval(), peers, weights)
    head: Any = model.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, logits: part.joined(logits))
    for name, view in part.views.items():
        axis, low, high = part.span(name)
        assert view.shape[axis] == high - low, name
    return part


@torch.no_grad()
def read_folder(part: Part, path: str) -> None:
    """Fill a part with its slices of a folder's safetensors.

    Raises:
        ModelError: the folder holds other weights than the model's.
    """
    with SlicedFolder.opened(path) as folder:
        for name, view in part.views.items():
            wanted = part.weights[name].shape
            if folder.shape(name) != wanted:
                raise ModelError(
                    f"the weight {name} has another shape", got=str(folder.shape(name)), allowed=str(wanted)
                )
            view.copy_(folder.read(name, *part.span(name)))


def _cut(model: PreTrainedModel, peers: Ranks) -> Cutter:
    cutter = Cutter(model, peers, KEY, peers, repeats=True)
    cutter.run()
    return cutter


def _shapes(model: PreTrainedModel) -> dict[str, Tensor]:
    return names_on_disk(model, {name: tensor.detach() for name, tensor in named_tensors(model).items()})


def _uneven(model: PreTrainedModel, cutter: Cutter) -> set[str]:
    """Names of vocabularies: the last ranks may have fewer rows of them, or none."""
    words = {id(m.weight) for m in (_embedding(model), model.get_output_embeddings()) if m is not None}
    return {name for name, tensor in named_tensors(model).items() if id(tensor) in words and name in cutter.cuts}


def _weight(name: str, whole: Tensor, part: Tensor, size: int, uneven: bool, model: PreTrainedModel) -> Weight:
    axes = [a for a in range(whole.dim()) if whole.shape[a] != part.shape[a]]
    cut = axes[0] if axes else None
    pieces = size if cut is None or uneven else whole.shape[cut] // part.shape[cut]
    units, size_of = pieces if pieces < size else None, model.dtype.itemsize
    return Weight(name, tuple(whole.shape), cut, units=units, place=FIRST, itemsize=size_of, uneven=uneven)


def _renamed(weight: Weight, name: str, place: str) -> Weight:
    return Weight(**{**vars(weight), "name": name, "place": place})


def _embedding(model: PreTrainedModel) -> Any:
    return model.get_input_embeddings()


def _views(model: PreTrainedModel) -> dict[str, Tensor]:
    found = views_on_disk(model)
    if found is None:
        raise NotBuiltError(
            f"sampling with {type(model).__name__} on several ranks is not built yet: its weights in files are no "
            "parts of those in memory",
            key=KEY,
            fix="Set it to 1.",
        )
    return found


def _materialise(model: PreTrainedModel, device: str) -> None:
    """Memory for the parameters; buffers as the family itself computes them."""
    unknown = compute_loose(model, device)
    if unknown:
        raise NotBuiltError(
            f"sampling with {type(model).__name__} on several ranks is not built yet: nothing says how to compute "
            f"{unknown[0]} without the whole model",
            key=KEY,
            fix="Set it to 1.",
        )

    def empty(_: str, parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)

    replace_parameters(model, empty)
