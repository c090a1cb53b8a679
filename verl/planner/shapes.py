"""Sizes of a model from its complete configuration: parameters, KV cache and operations, without loading it.

Counts are those of transformers' classes of `FAMILIES`; `tests/planner/test_shapes.py` builds them and compares.
Operations follow `verl.models.flops`: a multiply-add counts two, embeddings are free, causality is not credited.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from verl.errors import ModelError, suggest
from verl.json_text import JsonObject

Linear = tuple[int, int]
"""Inputs and outputs of a matrix."""


@dataclass(frozen=True)
class _Family:
    """How a family differs from Llama.

    Args:
        qkv_bias, out_bias, mlp_bias: the field that switches biases on; ``always`` or empty.
        norms: of a layer, each as wide as the model.
        head_norm: queries and keys are normalised per ``head`` or over all heads (``width``).
        head_norm_field: the field that switches this on; empty where it always is.
        mixture: layout of its experts: ``mixtral``, ``qwen``, ``deepseek``, ``gpt_oss``; empty without.
        latent: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
        fused: queries, keys and values are one matrix, gate and up another.
    """

    qkv_bias: str = ""
    out_bias: str = ""
    mlp_bias: str = ""
    norms: int = 2
    head_norm: str = ""
    head_norm_field: str = ""
    mixture: str = ""
    latent: bool = False
    fused: bool = False


_LLAMA = _Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN2 = _Family(qkv_bias="always")
_QWEN3 = _Family("attention_bias", "attention_bias", head_norm="head")
_QWEN3_MOE = _Family("attention_bias", "attention_bias", head_norm="head", mixture="qwen")
_OLMO2 = _Family("attention_bias", "attention_bias", head_norm="width")
_GEMMA3 = _Family("attention_bias", "attention_bias", norms=4, head_norm="head")
_LATENT = _Family("attention_bias", "attention_bias", mixture="deepseek", latent=True)
FAMILIES = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "mistral": _Family(),
    "ministral3": _Family(),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "gemma": _Family("attention_bias", "attention_bias"),
    "gemma2": _Family("attention_bias", "attention_bias", norms=4),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": _Family(fused=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "glm4": _Family("attention_bias", norms=4, fused=False),
    "mixtral": _Family(mixture="mixtral"),
    "qwen2_moe": _Family("qkv_bias", mixture="qwen"),
    "qwen3_moe": _QWEN3_MOE,
    "glm4_moe": _Family("attention_bias", head_norm="head", head_norm_field="use_qk_norm", mixture="deepseek"),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gpt_oss": _Family("attention_bias", "attention_bias", mixture="gpt_oss"),
}
"""``model_type`` of a config.json -> its layout."""


@dataclass(frozen=True)
class LayerShape:
    """One layer.

    Args:
        attention: its matrices.
        mlp: matrices that every token meets: of the dense feed-forward part, of shared experts, and the router.
        expert: those of one routed expert.
        experts: how many there are.
        active: how many a token meets.
        vectors: parameters of norms and biases.
        expert_vectors: biases of one expert.
        scores: heads times the width of a query.
        mixed: heads times the width of a value.
        stored: widths of all keys and values that attention reads.
        cache: values that the KV cache holds per token; of latent attention the compressed ones.
        norms: how many are as wide as the model.
        normed: widths of normalised queries and keys.
        inner: width of the dense feed-forward part, or of the shared experts.
        window: tokens that attention sees; None where it is the whole context.
    """

    attention: tuple[Linear, ...]
    mlp: tuple[Linear, ...]
    vectors: int
    scores: int
    mixed: int
    stored: int
    cache: int
    norms: int
    normed: int = 0
    inner: int = 0
    window: int | None = None
    expert: tuple[Linear, ...] = ()
    experts: int = 0
    active: int = 0
    expert_vectors: int = 0

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Of all routed experts."""
        return self.experts * (_weights(self.expert) + self.expert_vectors)

    @functools.cached_property
    def parameters(self) -> int:
        return _weights(self.attention) + _weights(self.mlp) + self.vectors + self.expert_parameters

    @functools.cached_property
    def active_weights(self) -> int:
        """Weights of the matrices that one token meets."""
        return _weights(self.attention) + _weights(self.mlp) + self.active * _weights(self.expert)

    def context(self, length: float) -> float:
        """Tokens that attention sees in a sequence of this length."""
        return length if self.window is None else min(length, self.window)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Args:
        family: ``model_type``.
        hidden: width of the residual stream.
        heads, kv_heads: of attention; the cache of latent attention is one head.
        vocabulary: rows of the embedding.
        tied: the head is the embedding.
        blocks: the layers.
        vision: parameters of the vision tower with its projector; 0 without.
        scalar: the head gives one number per token (critic, reward model).
    """

    family: str
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    blocks: tuple[LayerShape, ...]
    vision: int = 0
    scalar: bool = False

    @classmethod
    def from_config(cls, config: JsonObject, vision: int = 0) -> ModelShape:
        """From the fields of a transformers configuration, its defaults included (``to_dict``).

        Args:
            vision: parameters of the vision tower with its projector.

        Raises:
            ModelError: the family is not in `FAMILIES`, or a field is missing; its name is in the text.
        """
        facts = _Facts(config, "")
        family = str(facts.get("model_type", ""))
        text = facts.section("text_config") if "text_config" in facts.values else facts
        layout = FAMILIES.get(str(text.get("model_type", family)), FAMILIES.get(family))
        if layout is None:
            fix = suggest(family, FAMILIES) + " Name a model of one of these families; its sizes then stand in."
            raise ModelError("the planner has no layout of this family", key="model_type", got=family,
                             allowed=sorted(FAMILIES), fix=fix.strip())  # fmt: skip
        hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
        return cls(
            family=family,
            hidden=hidden,
            heads=heads,
            kv_heads=1 if layout.latent else text.number("num_key_value_heads", heads),
            vocabulary=text.number("vocab_size"),
            tied=bool(facts.get("tie_word_embeddings", text.get("tie_word_embeddings"))),
            blocks=tuple(_block(text, layout, layer) for layer in range(text.number("num_hidden_layers"))),
            vision=vision,
        )

    def with_scalar_head(self) -> ModelShape:
        """The same model with one number per token."""
        return replace(self, tied=False, scalar=True)

    @functools.cached_property
    def layers(self) -> int:
        return len(self.blocks)

    @functools.cached_property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden

    @functools.cached_property
    def head(self) -> int:
        """Parameters of a head of its own; 0 where it is the embedding."""
        return self.hidden if self.scalar else 0 if self.tied else self.embedding

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        return max(block.parameters for block in self.blocks)

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts; 0 of a dense model."""
        return sum(block.expert_parameters for block in self.blocks)

    @functools.cached_property
    def parameters(self) -> int:
        """All, with the vision tower; tied embeddings count once."""
        layers = sum(block.parameters for block in self.blocks)
        return layers + self.embedding + self.head + self.hidden + self.vision

    @functools.cached_property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: the active experts, and the head."""
        return sum(block.active_weights for block in self.blocks) + (self.head or self.embedding)

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA adapter of a rank on all linear layers of the blocks (routed experts excepted)."""
        return sum(rank * (i + o) for block in self.blocks for i, o in (*block.attention, *block.mlp))

    def cache_bytes(self, length: float, value_bytes: float = 2) -> float:
        """Bytes of the KV cache of one sequence of this length; a layer with a window holds no more than the window."""
        return value_bytes * sum(block.cache * block.context(length) for block in self.blocks)

    def flops_per_token(self, length: float) -> float:
        """Operations of a forward pass per token of a sequence of this length; training takes three times those."""
        attention = sum(2.0 * (block.scores + block.mixed) * block.context(length) for block in self.blocks)
        return 2.0 * self.active_parameters + attention


class _Facts:
    """Fields of a config.json, which are there or are named in an error."""

    def __init__(self, values: JsonObject, section: str):
        self.values, self._section = values, section

    def get(self, name: str, default: object = None) -> object:
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            fix = "Take the config.json of a complete model." if value is None else ""
            problem = "the planner needs this field of config.json" if value is None else "this is no count"
            raise ModelError(problem, key=self._section + name, got=value, fix=fix)
        return value

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return name == "always" or (bool(name) and bool(self.get(name)))

    def section(self, name: str) -> _Facts:
        value = self.values[name]
        if not isinstance(value, Mapping):
            raise ModelError("this is no section", key=name, got=value)
        return _Facts(value, f"{name}.")


def _weights(linears: tuple[Linear, ...]) -> int:
    return sum(inputs * outputs for inputs, outputs in linears)


def _head_dim(text: _Facts, layout: _Family) -> int:
    if layout.latent:
        return text.number("qk_nope_head_dim") + text.number("qk_rope_head_dim")
    return text.number("head_dim", text.number("hidden_size") // text.number("num_attention_heads"))


def _block(text: _Facts, layout: _Family, layer: int) -> LayerShape:
    hidden = text.number("hidden_size")
    block = (_latent if layout.latent else _attention)(text, layout)
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != text.number("num_hidden_layers"):
        raise ModelError("this lists another number of layers", key="layer_types", got=len(kinds),
                         allowed=str(text.number("num_hidden_layers")))  # fmt: skip
    if isinstance(kinds, list) and kinds[layer] == "sliding_attention":
        block = replace(block, window=text.number("sliding_window"))
    if layout.mixture and _is_sparse(text, layout, layer):
        return _mixture(text, layout, block)
    width = text.number("intermediate_size")
    biases = (2 * width + hidden) * text.on(layout.mlp_bias)
    return replace(block, mlp=_gated(hidden, width, layout.fused), inner=width, vectors=block.vectors + biases)


def _gated(hidden: int, width: int, fused: bool = False) -> tuple[Linear, ...]:
    up = ((hidden, 2 * width),) if fused else ((hidden, width), (hidden, width))
    return (*up, (width, hidden))


def _attention(text: _Facts, layout: _Family) -> LayerShape:
    """A layer with its norms and without a feed-forward part."""
    hidden, heads, dim = text.number("hidden_size"), text.number("num_attention_heads"), _head_dim(text, layout)
    query, key = heads * dim, text.number("num_key_value_heads", heads) * dim
    vectors = (query + 2 * key) * text.on(layout.qkv_bias) + hidden * text.on(layout.out_bias)
    normed = 0
    if layout.head_norm and (not layout.head_norm_field or text.on(layout.head_norm_field)):
        normed = query + key
        vectors += 2 * dim if layout.head_norm == "head" else normed
    if layout.mixture == "gpt_oss":
        vectors += heads  # attention sinks
    first = ((hidden, query + 2 * key),) if layout.fused else ((hidden, query), (hidden, key), (hidden, key))
    return LayerShape(
        attention=(*first, (query, hidden)),
        mlp=(),
        vectors=vectors + layout.norms * hidden,
        scores=query,
        mixed=query,
        stored=2 * key,
        cache=2 * key,
        norms=layout.norms,
        normed=normed,
    )


def _latent(text: _Facts, layout: _Family) -> LayerShape:
    """The same of latent attention, whose cache holds compressed keys and values and one rotated key."""
    hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
    query, mixed = heads * _head_dim(text, layout), heads * text.number("v_head_dim")
    rank, rotated = text.number("kv_lora_rank"), text.number("qk_rope_head_dim")
    narrow = text.number("q_lora_rank", 0)
    queries = ((hidden, narrow), (narrow, query)) if narrow else ((hidden, query),)
    up = (rank, heads * text.number("qk_nope_head_dim") + mixed)
    biases = (narrow + rank + rotated + hidden) * text.on(layout.qkv_bias)
    return LayerShape(
        attention=(*queries, (hidden, rank + rotated), up, (mixed, hidden)),
        mlp=(),
        vectors=narrow + rank + biases + layout.norms * hidden,
        scores=query,
        mixed=mixed,
        stored=query + mixed,
        cache=rank + rotated,
        norms=layout.norms,
        normed=narrow + rank,
    )


def _is_sparse(text: _Facts, layout: _Family, layer: int) -> bool:
    if layout.mixture == "deepseek":
        return layer >= text.number("first_k_dense_replace", 0)
    dense = text.get("mlp_only_layers", ())
    is_dense = isinstance(dense, list) and layer in dense
    return not is_dense and (layer + 1) % text.number("decoder_sparse_step", 1) == 0


def _mixture(text: _Facts, layout: _Family, block: LayerShape) -> LayerShape:
    """The layer with its router, its shared and its routed experts."""
    hidden = text.number("hidden_size")
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = text.number(next((name for name in names if text.get(name)), names[0]))
    narrow = layout.mixture in ("qwen", "deepseek")
    width = text.number("moe_intermediate_size" if narrow else "intermediate_size")
    shared = text.number("shared_expert_intermediate_size", 0) if layout.mixture == "qwen" else 0
    if layout.mixture == "deepseek":
        shared = width * text.number("n_shared_experts", 0)
    gate = ((hidden, 1),) if shared and layout.mixture == "qwen" else ()
    always = (_gated(hidden, shared) if shared else ()) + gate + ((hidden, experts),)
    has_bias = layout.mixture == "gpt_oss"
    return replace(
        block,
        mlp=always,
        inner=shared,
        vectors=block.vectors + experts * has_bias,
        expert=_gated(hidden, width),
        experts=experts,
        active=text.number("num_experts_per_tok"),
        expert_vectors=(2 * width + hidden) * has_bias,
    )
