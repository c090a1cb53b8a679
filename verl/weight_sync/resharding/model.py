"""What is moved: the weights of a model as templates, one per distinct shape, with the axis along which each is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from verl.errors import ConfigError

LAYER, FIRST, LAST, ENDS = "layer", "first", "last", "first and last"
PLACES = (LAYER, FIRST, LAST, ENDS)


@dataclass(frozen=True)
class Weight:
    """One weight, or one per layer and expert, under its Hugging Face name.

    Args:
        name: with ``{layer}`` and ``{expert}`` where there is one each.
        shape: of the whole weight.
        cut: the axis along which tensor parallelism cuts it; null: every rank holds all of it.
        units: pieces of that axis that stay whole, as KV heads; where there are fewer than ranks, peers
            hold the same one.
        place: the stages that hold it.
        experts: how many of it a layer has; 0: it is not part of an expert.
        itemsize: bytes per element.
        uneven: the last pieces may be shorter, where ranks do not divide the axis (vocabularies).
        only: the layers that have it; null: all.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    units: int | None = None
    place: str = LAYER
    experts: int = 0
    itemsize: int = 2
    uneven: bool = False
    only: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ConfigError("unknown place of a weight", key=self.name, got=self.place, allowed=PLACES)
        if self.cut is not None and not 0 <= self.cut < len(self.shape):
            raise ConfigError("the weight has no such axis", key=self.name, got=self.cut, allowed=f"{self.shape}")

    @property
    def num_bytes(self) -> int:
        """Bytes of one whole weight."""
        return math.prod(self.shape) * self.itemsize

    def bounds(self, ranks: int) -> tuple[int, tuple[int, ...]]:
        """The axis and the borders of the pieces on ``ranks`` tensor-parallel ranks.

        Raises:
            ConfigError: the axis, or its units, cannot be divided that way.
        """
        if self.cut is None or ranks == 1:
            return 0, (0, self.shape[0])
        rows, pieces = self.shape[self.cut], ranks
        if self.units is not None and self.units < ranks:
            pieces = self.units
        padded = -(-rows // pieces) * pieces if self.uneven else rows
        if padded % pieces or ranks % pieces or (self.units is not None and self.units % pieces):
            raise ConfigError(
                f"{self.units or padded} {'heads' if self.units else 'rows'} cannot be divided among this many ranks",
                key=self.name,
                got=ranks,
                allowed=[n for n in range(1, (self.units or padded) + 1) if (self.units or padded) % n == 0][:12],
            )
        step = padded // pieces
        return self.cut, tuple(min(rows, step * piece) for piece in range(pieces + 1))


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model.

    Raises:
        ConfigError: a template of a layer without ``{layer}`` in its name.
    """

    weights: Sequence[Weight]
    layers: int

    def __post_init__(self) -> None:
        for weight in self.weights:
            if (weight.place == LAYER) != ("{layer}" in weight.name):
                raise ConfigError("weights of layers, and only they, have {layer} in their names", key=weight.name)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model."""
        return sum(w.num_bytes * max(w.experts, 1) * self._copies(w) for w in self.weights)

    def _copies(self, weight: Weight) -> int:
        if weight.place != LAYER:
            return 1
        return self.layers if weight.only is None else len(weight.only)


def decoder(
    *,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    key_value_heads: int,
    vocabulary: int,
    head_dim: int | None = None,
    tied: bool = False,
    bias: bool = False,
    experts: int = 0,
    itemsize: int = 2,
) -> ModelWeights:
    """The weights of a Llama- or Qwen-like decoder; ``experts`` gated MLPs per layer instead of one where given."""
    dim = head_dim or hidden // heads
    start = "model.layers.{layer}."
    attention = [
        ("self_attn.q_proj", heads * dim, heads),
        ("self_attn.k_proj", key_value_heads * dim, key_value_heads),
        ("self_attn.v_proj", key_value_heads * dim, key_value_heads),
    ]
    weights = [Weight("model.embed_tokens.weight", (vocabulary, hidden), 0, place=ENDS if tied else FIRST)]
    for name, rows, units in attention:
        weights.append(Weight(f"{start}{name}.weight", (rows, hidden), 0, units=units))
        if bias:
            weights.append(Weight(f"{start}{name}.bias", (rows,), 0, units=units))
    weights.append(Weight(f"{start}self_attn.o_proj.weight", (hidden, heads * dim), 1, units=heads))
    mlp = f"{start}mlp.experts.{{expert}}." if experts else f"{start}mlp."
    for name, shape, cut in (
        ("gate_proj", (intermediate, hidden), 0),
        ("up_proj", (intermediate, hidden), 0),
        ("down_proj", (hidden, intermediate), 1),
    ):
        weights.append(Weight(f"{mlp}{name}.weight", shape, cut, experts=experts))
    if experts:
        weights.append(Weight(f"{start}mlp.gate.weight", (experts, hidden)))
    weights += [Weight(f"{start}{name}.weight", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm")]
    weights.append(Weight("model.norm.weight", (hidden,), place=LAST))
    if not tied:
        weights.append(Weight("lm_head.weight", (vocabulary, hidden), 0, place=LAST))
    return ModelWeights(tuple(_with_itemsize(weight, itemsize) for weight in weights), layers)


def _with_itemsize(weight: Weight, itemsize: int) -> Weight:
    return Weight(**{**vars(weight), "itemsize": itemsize})
