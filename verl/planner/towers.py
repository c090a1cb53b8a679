"""Parameters of vision towers with their projectors, by family of the model."""

from __future__ import annotations

from verl.errors import ModelError
from verl.json_text import JsonObject


def parameters(family: str, vision: JsonObject, hidden: int) -> int:
    """Parameters of a tower.

    Args:
        family: ``model_type`` of the model.
        vision: its ``vision_config``.
        hidden: width of the language model.

    Raises:
        ModelError: the family has no layout here, or a field is missing.
    """
    if family not in TOWERS:
        raise ModelError("the planner has no layout of this vision tower", key="model_type", got=family,
                         allowed=sorted(TOWERS))  # fmt: skip
    return TOWERS[family](vision, hidden)


def _number(vision: JsonObject, name: str) -> int:
    value = vision.get(name)
    if not isinstance(value, int):
        raise ModelError("the planner needs this field of config.json", key=f"vision_config.{name}", got=value)
    return value


def _dense(inputs: int, outputs: int) -> int:
    """A matrix with its bias."""
    return inputs * outputs + outputs


def _patches(vision: JsonObject, width: int) -> int:
    channels = vision.get("in_channels", vision.get("in_chans", vision.get("num_channels", 3)))
    return width * int(channels) * int(vision.get("temporal_patch_size", 2)) * _number(vision, "patch_size") ** 2


def _merged(vision: JsonObject, width: int) -> int:
    return width * int(vision.get("spatial_merge_size", 2)) ** 2


def _qwen2(vision: JsonObject, hidden: int) -> int:
    width, joined = _number(vision, "embed_dim"), _merged(vision, _number(vision, "embed_dim"))
    wide = int(width * float(vision.get("mlp_ratio", 4)))
    layer = 4 * width + _dense(width, 3 * width) + _dense(width, width) + _dense(width, wide) + _dense(wide, width)
    merger = 2 * width + _dense(joined, joined) + _dense(joined, hidden)
    return _patches(vision, width) + _number(vision, "depth") * layer + merger


def _qwen2_5(vision: JsonObject, hidden: int) -> int:
    width, wide = _number(vision, "hidden_size"), _number(vision, "intermediate_size")
    joined = _merged(vision, width)
    attention = _dense(width, 3 * width) + _dense(width, width)
    layer = 2 * width + attention + 2 * _dense(width, wide) + _dense(wide, width)
    merger = width + _dense(joined, joined) + _dense(joined, int(vision.get("out_hidden_size", hidden)))
    return _patches(vision, width) + _number(vision, "depth") * layer + merger


def _qwen3(vision: JsonObject, hidden: int) -> int:
    width, wide = _number(vision, "hidden_size"), _number(vision, "intermediate_size")
    joined = _merged(vision, width)
    attention = _dense(width, 3 * width) + _dense(width, width)
    layer = 4 * width + attention + _dense(width, wide) + _dense(wide, width)
    merger = _dense(joined, joined) + _dense(joined, int(vision.get("out_hidden_size", hidden)))
    deep = vision.get("deepstack_visual_indexes")
    mergers = merger + 2 * width + (merger + 2 * joined) * len(deep if isinstance(deep, list) else (8, 16, 24))
    positions = _number(vision, "num_position_embeddings") * width
    return _patches(vision, width) + width + positions + _number(vision, "depth") * layer + mergers


def _siglip(vision: JsonObject, hidden: int) -> int:
    width, wide = _number(vision, "hidden_size"), _number(vision, "intermediate_size")
    patch = _number(vision, "patch_size")
    patches = (_number(vision, "image_size") // patch) ** 2
    embedding = _dense(int(vision.get("num_channels", 3)) * patch**2, width) + patches * width
    attention, mlp = 4 * _dense(width, width), _dense(width, wide) + _dense(wide, width)
    pooled = width + attention + 2 * width + mlp if vision.get("vision_use_head", True) else 0
    layers = _number(vision, "num_hidden_layers") * (4 * width + attention + mlp)
    return embedding + layers + 2 * width + pooled + width * hidden + width


TOWERS = {"qwen2_vl": _qwen2, "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "gemma3": _siglip}
