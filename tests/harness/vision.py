"""Models that see, and rows with images: pictures of different sizes, their patches, as many placeholders."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.protocol import DataProto

TILED = ("gemma3", "internvl", "idefics3", "smolvlm")
GLM = ("glm4v", "glm4v_moe")
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *GLM, *TILED)
WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *GLM, "internvl")
MARKS = (3, 4)
"""Ids of what begins and ends an image (`examples/vision/make_model.py`)."""
TILE, TILE_TOKENS = 28, 4
"""Pixels of an edge, and tokens, of the small models' tiles."""
TEXT = 7
"""The first token id that is neither special nor a placeholder."""


def pictures(sizes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Image.Image]:
    """Noise of these heights and widths in pixels."""
    generator = np.random.default_rng(seed)
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def processed(images: Sequence[Image.Image], folder: Any) -> dict[str, Tensor]:
    """What the image processor of a folder makes of one row's images."""
    from transformers import AutoImageProcessor

    if not images:
        return {}
    made = AutoImageProcessor.from_pretrained(folder)(images=list(images), return_tensors="pt")
    return {name: value for name, value in made.items() if name not in ("num_crops", "num_patches", "rows", "cols")}


def num_tiles(inputs: Mapping[str, Tensor]) -> int:
    """Of all images of a row, in families whose images come in tiles; Idefics3 has an axis of rows in front."""
    return len(inputs["pixel_values"].flatten(0, -4)) if inputs else 0


def clip(frames: int, height: int, width: int, seed: int = 0, fps: float = 2.0) -> dict[str, Any]:
    """A video of noise, every frame of which is shown."""
    shown = pictures([(height, width)] * frames, seed)
    return {"frames": shown, "indices": list(range(frames)), "fps": fps, "total": frames}


def shown_clips(
    folder: Any, sizes: Sequence[tuple[int, ...]], text: Sequence[int], seed: int = 0
) -> tuple[dict[str, Tensor], list[int]]:
    """Inputs and prompt of a row with pictures and videos: text, each between marks, then text.

    Videos have other rates, so that their frames are at other distances.
    """
    from verl.data.vision.processor import load_processor

    processor = load_processor(folder)
    assert processor is not None
    media: list[Any] = []
    for number, size in enumerate(sizes):
        clips = len(size) == 3
        media.append(clip(*size, seed=seed + number, fps=1.0 + seed % 3) if clips else pictures([size], seed)[0])
    inputs, pieces = processor.process(media)
    waiting = {kind: iter(ids) for kind, ids in pieces.items()}
    tokens = list(text)
    for size in sizes:
        kind = "video" if len(size) == 3 else "image"
        begin, end = MARKS
        if kind == "video" and "GLM" in type(processor.wrapped).__name__.upper():
            begin, end = processor.tokenizer.convert_tokens_to_ids(["<|begin_of_video|>", "<|end_of_video|>"])
        tokens += [begin, *next(waiting[kind]), end]
    return inputs, [*tokens, *reversed(text)]


def prompt_tokens(config: Any, inputs: dict[str, Tensor], text: Sequence[int]) -> list[int]:
    """Text, then each image between its marks, then text; of images in tiles, each tile (Gemma 3) or all together."""
    if config.model_type in TILED:
        tiles, start, end = num_tiles(inputs), *MARKS
        each, times = (1, tiles) if config.model_type != "internvl" else (tiles, min(tiles, 1))
        image = [start, *[config.image_token_id] * (TILE_TOKENS * each), end]
        return [*text, *image * times, *reversed(text)]
    merged = config.vision_config.spatial_merge_size**2
    tokens = list(text)
    for grid in inputs.get("image_grid_thw", ()):
        pads = [config.image_token_id] * (int(grid.prod()) // merged)
        tokens += [config.vision_start_token_id, *pads, config.vision_end_token_id]
    return [*tokens, *reversed(text)]


def seen_batch(
    config: Any,
    folder: Any,
    sizes: Sequence[Sequence[tuple[int, ...]]] = (((56, 56),), (), ((84, 56), (28, 112)), ((56, 84),)),
    samples: int = 2,
    response: int = 6,
    seed: int = 0,
) -> DataProto:
    """``samples`` adjacent rows per prompt; prompt p shows images of ``sizes[p]``, and may show none.

    A size of three numbers is a video's: frames, height and width.
    """
    generator = np.random.default_rng(seed)
    vocab = config.get_text_config().vocab_size
    prompts, column = [], np.empty(len(sizes) * samples, dtype=object)
    for number, shown in enumerate(sizes):
        text = generator.integers(TEXT, vocab, 2 + number % 3).tolist()
        if any(len(size) == 3 for size in shown):
            inputs, tokens = shown_clips(folder, shown, text, seed + number)
        else:
            inputs = processed(pictures(shown, seed + number), folder)
            tokens = prompt_tokens(config, inputs, text)
        prompts += [tokens] * samples
        for n in range(samples):
            column[number * samples + n] = inputs
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest + response, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(prompts), response, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        length = int(generator.integers(2, response + 1))
        ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
        ids[row, longest : longest + length] = torch.from_numpy(generator.integers(TEXT, vocab, length))
        attention[row, longest - len(prompt) : longest + length] = 1
        mask[row, :length] = 1
    floats = {name: torch.from_numpy(generator.standard_normal(mask.shape)).float() * mask for name in ("advantages",)}
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :longest],
            "responses": ids[:, longest:],
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "response_mask": mask,
            "old_log_probs": -5.0 * mask,
            **floats,
        },
        non_tensors={"multi_modal_inputs": column},
    )


def logits_row_by_row(model: Any, batch: DataProto) -> Tensor:
    """(B, T, V or 1) of transformers' own forward pass over each row alone, with positions that it computes itself."""
    tensors = batch.batch
    rows = []
    width = tensors["prompts"].shape[1]
    for row, inputs in enumerate(batch.non_tensor_batch["multi_modal_inputs"]):
        here = tensors["attention_mask"][row].bool()
        ids = tensors["input_ids"][row][here][None]
        if inputs:
            kinds = token_kinds(model.config, kinds_of(model.config, ids))
            logits = model(input_ids=ids, use_cache=False, **kinds, **inputs).logits[0]
        else:
            logits = model(input_ids=ids, use_cache=False).logits[0]
        made = logits.new_zeros(len(here), logits.shape[-1])
        made[here] = logits
        rows.append(made[width - 1 : -1])
    return torch.stack(rows)


def kinds_of(config: Any, ids: Tensor) -> Tensor:
    """1 where an image is, 2 where a video is; frames have the placeholder of images in InternVL, and in GLM-4V."""
    if config.model_type in GLM:
        is_image, inside = ids == config.image_token_id, torch.zeros_like(ids)
        for row, numbers in enumerate(ids.tolist()):
            for start in [at for at, one in enumerate(numbers) if one == config.video_start_token_id]:
                inside[row, start : numbers.index(config.video_end_token_id, start)] = 1
        return (is_image * (1 + inside)).int()
    return (ids == config.image_token_id).int() + 2 * (ids == getattr(config, "video_token_id", -1)).int()


def token_kinds(config: Any, kinds: Tensor) -> dict[str, Tensor]:
    """The argument of a family's forward pass for the kind of each token."""
    names = {"gemma3": "token_type_ids", **dict.fromkeys(TILED[1:])}
    name = names.get(config.model_type, "mm_token_type_ids")
    return {} if name is None else {name: kinds}


def log_probs_row_by_row(model: Any, batch: DataProto) -> Tensor:
    """(B, T) float32, zero where nothing is trained."""
    logits = logits_row_by_row(model, batch).float().log_softmax(-1)
    chosen = logits.gather(-1, batch.batch["responses"][..., None])[..., 0]
    return chosen * batch.batch["response_mask"]


def vision_example(name: str) -> Any:
    """One file of ``examples/vision`` as a module."""
    path = Path(__file__).parents[2] / "examples/vision" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"vision_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_vision_dir(folder: str | Path, family: str = "qwen2_5_vl", **sizes: Any) -> Path:
    """A complete Hugging Face folder of a small vision-language model with tokenizer, template and processor.

    Args:
        sizes: of ``build_model`` in ``examples/vision/make_model.py``; as small as they go where nothing is given.
    """
    small = {"hidden": 32, "layers": 2, "vision_layers": 2, "kv_heads": 2}
    return vision_example("make_model").write_model(folder, family, **{**small, **sizes})


def vision_dir(folder: Path, family: str, hidden: int = 32) -> Path:
    """As `tiny_vision_dir`, also of families that the example does not build: mixtures, and GLM-4V."""
    if family in TILED:
        return tiled_dir(folder, family, hidden)
    if family not in ("qwen3_vl_moe", *GLM):
        return tiny_vision_dir(folder, family, hidden=hidden)
    from transformers import AutoConfig, AutoModelForImageTextToText

    example = vision_example("make_model")
    tiny_vision_dir(folder, "qwen3_vl")  # tokenizer and processor are those of its sister
    tokenizer = example.train_tokenizer()
    axis = hidden // 8
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    rope["mrope_section"] = [axis // 2, axis // 4, axis // 4]
    text: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    vision, marks = example._vision("qwen3_vl", hidden, 2, 4), {}
    if family in GLM:
        tokenizer = _glm_tokenizer(example, folder)
        rope |= {"mrope_section": [axis // 4, axis // 4, axis // 2], "partial_rotary_factor": 1.0}
        vision = {"depth": 2, "hidden_size": hidden, "num_heads": 4, "patch_size": 14, "out_hidden_size": hidden}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "intermediate_size": 64, "image_size": 112}
        names = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
        keys = [f"{kind}_{edge}_token_id" for kind in ("image", "video") for edge in ("start", "end")]
        marks = dict(zip(keys, tokenizer.convert_tokens_to_ids(names)))
        text = {} if family == "glm4v" else {**text, "n_routed_experts": 4, "first_k_dense_replace": 1}
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(example.VISION_TOKENS))
    text |= {"vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    text["max_position_embeddings"] = 1024
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        family,
        text_config={**text, **ends, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        **marks,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _tiling(family: str) -> dict[str, Any]:
    """The image processor's settings of a family whose images come in tiles."""
    size, common = {"height": TILE, "width": TILE}, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "gemma3":
        cuts = {"pan_and_scan_min_crop_size": 28, "pan_and_scan_max_num_crops": 2}
        cuts |= {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": 1.2}
        return {**common, **cuts, "size": size, "image_processor_type": "Gemma3ImageProcessor"}
    if family == "internvl":
        cuts = {"crop_to_patches": True, "max_patches": 3}
        return {**common, **cuts, "size": size, "image_processor_type": "GotOcr2ImageProcessor"}
    sizes = {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}}
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    return {**common, **sizes, "image_processor_type": f"{name}ImageProcessor"}


def _rename(example: Any, *names: str) -> None:
    """Give the tokens of images and videos other names."""
    for old, new in zip(example.VISION_TOKENS, names):
        example.CHAT_TEMPLATE = example.CHAT_TEMPLATE.replace(old, new)
    example.VISION_TOKENS = names
    example.SPECIAL = (*example.SPECIAL[:3], *names)


def _glm_tokenizer(example: Any, folder: Path) -> Any:
    """Tokenizer and processor of GLM-4V, written to the folder; the marks of videos are its last tokens."""
    kinds = [[f"<|begin_of_{kind}|>", f"<|{kind}|>", f"<|end_of_{kind}|>"] for kind in ("image", "video")]
    of_videos = "".join(f"<|{name}|>" for name in ("vision_start", "video_pad", "vision_end"))
    example.CHAT_TEMPLATE = example.CHAT_TEMPLATE.replace(of_videos, "".join(kinds[1]))
    _rename(example, kinds[0][0], kinds[0][2], kinds[0][1], kinds[1][1])
    tokenizer = example.train_tokenizer()
    tokenizer.add_tokens(kinds[1][::2], special_tokens=True)
    tokenizer.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    named = {"image_processor_type": "Glm4vImageProcessor", "processor_class": "Glm4vProcessor"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return tokenizer


def tiled_dir(folder: Path, family: str, hidden: int = 32, layers: int = 2) -> Path:
    """As `tiny_vision_dir`, of a family whose images come in tiles: 4 x 4 patches, 4 tokens."""
    from tokenizers import AddedToken, Regex, pre_tokenizers
    from transformers import AutoConfig, AutoModelForImageTextToText

    example = vision_example("make_model")
    example.WORDS = (*example.WORDS, "\n\n", "\n\n\n", "\n\n\n\n")
    if family in ("idefics3", "smolvlm"):
        _rename(example, "<fake_token_around_image>", "<end_of_utterance>", "<image>", "<video>")
    tokenizer = example.train_tokenizer()
    backend = tokenizer.backend_tokenizer  # line breaks in a row are one token, whatever follows, as Gemma's are
    breaks = pre_tokenizers.Split(Regex("\n+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([breaks, backend.pre_tokenizer])
    start, end, image, video = example.VISION_TOKENS
    is_gemma = family == "gemma3"
    if is_gemma:  # vLLM looks for them by these names, which a byte-level vocabulary writes otherwise
        tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in range(1, 5)])
    tokenizer.chat_template = tokenizer.chat_template.replace(start + image + end, start if is_gemma else image)
    tokenizer.save_pretrained(folder)
    marks = {"boi_token": start, "eoi_token": end, "image_token": image}
    if not is_gemma:
        marks = {"start_image_token": start, "end_image_token": end, "context_image_token": image, "video_token": video}
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_special_tokens": marks}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_tiling(family)))
    length = "image_seq_length" if family in ("gemma3", "internvl") else "image_seq_len"
    (folder / "processor_config.json").write_text(json.dumps({length: TILE_TOKENS}))
    text: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden}
    text |= {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4}
    text |= {"max_position_embeddings": 1024, "bos_token_id": None, "tie_word_embeddings": True}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vision = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": TILE, "patch_size": 7, "num_channels": 3}
    more: dict[str, Any] = {"image_seq_length": TILE_TOKENS}
    if is_gemma:
        vision["vision_use_head"] = False
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        text |= {"sliding_window": 3, "layer_types": kinds, "query_pre_attn_scalar": hidden // 4}
        more = {"mm_tokens_per_image": TILE_TOKENS, "boi_token_index": MARKS[0], "eoi_token_index": MARKS[1]}
    more["image_token_index" if is_gemma else "image_token_id"] = tokenizer.convert_tokens_to_ids(image)
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=True, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if is_gemma:  # zeros at first: its features would say nothing
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    model.save_pretrained(folder)
    if is_gemma:  # under the names of published files, which a model that was loaded from one keeps
        file = folder / "model.safetensors"
        new = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in load_file(file).items()}
        save_file(new, file, metadata={"format": "pt"})
    return folder
