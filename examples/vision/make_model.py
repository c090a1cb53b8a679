"""Builds a small vision-language model from nothing: a trained tokenizer, a chat template, a processor and a Qwen-VL.

python examples/vision/make_model.py outputs/vision/base

The folder has what a published model's folder has, so everything that takes one takes this: weights, tokenizer, chat
template, ``preprocessor_config.json``. At its usual size it has 2.3 million parameters, and learns the tasks of
``make_data.py`` in minutes on a processor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.modeling_utils import PreTrainedModel

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS)
CHAT_TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ said(message['content']) }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    *("What colour is the disc?", "How many discs are there?", "Which digit is this?", "Look at it.", "red", "green"),
    *("blue", "yellow", "system\n", "user\n", "assistant\n", "tool\n"),
)
"""What the tasks say; each word of it becomes one token."""
CAMERA = '<tool_call>\n{"name": "camera", "arguments": {}}\n</tool_call>'
"""A call of the tool in ``camera.py``; with ``--camera`` it is one token."""
FAMILIES = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
"""``model_type``, and the class that transformers gives its processor."""
PATCH, MERGE = 14, 2


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has tokens, and a word of the tasks is one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *VISION_TOKENS],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    family: str = "qwen2_5_vl",
    *,
    hidden: int = 128,
    layers: int = 4,
    vision_layers: int = 4,
    heads: int = 4,
    kv_heads: int = 4,
    tied: bool = True,
    seed: int = 0,
) -> PreTrainedModel:
    """A randomly initialised model of one of `FAMILIES`.

    Args:
        hidden: width of the language model and of the vision tower.
        layers, vision_layers: of the language model, of the tower.
        heads, kv_heads: attention heads of both; key and value heads of the language model.
        tied: the output head shares the embedding's weights; an adapter can change a head that does not.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION_TOKENS))
    axis = hidden // heads // 2  # rotary frequencies of one head, divided over time, height and width
    sections = [axis - 2 * (3 * axis // 8), 3 * axis // 8, 3 * axis // 8]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {**rope, "mrope_interleaved": True} if family == "qwen3_vl" else rope,
    }
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=_vision(family, hidden, vision_layers, heads),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=tied,
    )
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def _vision(family: str, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """The tower's settings; each family has other names for its width."""
    common = {"depth": layers, "num_heads": heads, "patch_size": PATCH, "spatial_merge_size": MERGE}
    common |= {"temporal_patch_size": 2, "in_channels": 3}
    if family == "qwen2_vl":
        return {**common, "embed_dim": hidden, "hidden_size": hidden, "mlp_ratio": 2}
    sizes = {**common, "hidden_size": hidden, "intermediate_size": 2 * hidden, "out_hidden_size": hidden}
    if family == "qwen3_vl":
        return {**sizes, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, layers - 1]}
    return {**sizes, "window_size": 4 * PATCH * MERGE, "fullatt_block_indexes": [layers - 1]}


def write_model(folder: str | Path, family: str = "qwen2_5_vl", *, camera: bool = False, **sizes: Any) -> Path:
    """A complete folder: weights, configuration, tokenizer, chat template and processor.

    Args:
        camera: a call of the camera is one token.
        sizes: of `build_model`.
    """
    folder = Path(folder)
    tokenizer = train_tokenizer()
    if camera:
        tokenizer.add_tokens([AddedToken(CAMERA, normalized=False, special=False)])
    build_model(tokenizer, family, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": FAMILIES[family],
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a new small vision-language model with its processor.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen2_5_vl")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--untied", action="store_true", help="give the output head separate weights")
    parser.add_argument("--camera", action="store_true", help="make a call of the tool in camera.py one token")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = {"hidden": arguments.hidden, "tied": not arguments.untied, "seed": arguments.seed}
    write_model(arguments.folder, arguments.family, camera=arguments.camera, **sizes)
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
