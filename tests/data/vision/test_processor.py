"""The processor without torchvision: the tensors and the expansion that transformers' own parts make."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.harness.models import tiny_model_dir, tiny_tokenizer
from tests.harness.vision import TILED, tiny_vision_dir
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import join_inputs, load_processor
from verl.errors import ConfigError, DataError, ModelError, NotBuiltError


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_tensors_are_those_of_the_image_processor_and_the_ids_as_many_as_merged_patches(tmp_path, family):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder = tiny_vision_dir(tmp_path, family)
    processor = load_processor(folder)
    images = [noise(56, 56), noise(112, 84)]
    inputs, pieces = processor.process(images)
    alone = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=images, return_tensors="pt")
    assert torch.equal(inputs["pixel_values"], alone["pixel_values"])
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 6, 8]]
    assert pieces["image"] == [[processor.placeholder_id] * 4, [processor.placeholder_id] * 12]
    assert processor.pieces(images) == pieces


def test_expanding_ids_gives_the_tokens_that_transformers_expands_in_text(processor, seeing_tokenizer):
    images = [noise(56, 56), noise(84, 56)]
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<|im_start|>user\n{pad}What{pad} colour is the disc?<|im_end|>\n"
    _, pieces = processor.process(images)
    ids = processor.expand(seeing_tokenizer(text)["input_ids"], pieces)
    assert ids == processor.wrapped(text=[text], images=images)["input_ids"][0]


@pytest.mark.parametrize("family", TILED)
@pytest.mark.parametrize("text", ["\n{}What", "{}{}", "user\n\n{}\n{} is\n", "{}"])
def test_tiles_and_line_breaks_around_an_image_are_the_tokens_of_the_expanded_text(seeing_model, family, text):
    folder = seeing_model(family)
    crops = {"gemma3": {"do_pan_and_scan": True}, "internvl": {"max_patches": 2}}.get(family, {})
    processor = load_processor(folder, hf_tokenizer(folder), call=crops)
    images = [noise(56, 56), noise(112, 28)][: text.count("{}")]
    inputs, pieces = processor.process(images)
    text = f"<|im_start|>{text.format(*[processor.placeholder] * len(images))}<|im_end|>"
    expanded = processor.wrapped(text=[text], images=images, return_tensors="pt", images_kwargs=crops)
    ids = processor.wrapped.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert processor.expand(ids, pieces) == expanded["input_ids"][0].tolist()
    assert torch.equal(inputs["pixel_values"], expanded["pixel_values"].flatten(0, -4))
    assert processor.expand(ids, pieces).count(5) == 4 * len(inputs["pixel_values"])


def test_a_line_break_that_joins_one_of_an_image_is_trained_as_little(seeing_model):
    processor = load_processor(seeing_model("gemma3"))
    ids = processor.wrapped.tokenizer("a\n", add_special_tokens=False)["input_ids"]
    piece = processor.piece((28, 28))
    made, mask = processor.expand_with([*ids, processor.placeholder_id], {"image": [piece]}, [1] * (len(ids) + 1))
    assert len(made) == len(ids) + len(piece) - 1 and mask == [1] * (len(ids) - 1) + [0] * len(piece)


def test_nothing_of_an_image_is_trained(processor):
    pad = processor.placeholder_id
    ids, mask = processor.expand_with([50, pad, 60], {"image": [[pad, pad]]}, [1, 1, 1])
    assert (ids, mask) == ([50, pad, pad, 60], [1, 0, 0, 1])


def test_placeholders_and_images_that_do_not_match_are_an_error(processor):
    with pytest.raises(DataError, match=r"writes 0 placeholders \(<\|image_pad\|>\) for 1 images"):
        processor.expand([50, 60], {"image": [[1]]})


def test_a_language_model_has_no_processor(tmp_path):
    assert load_processor(tiny_model_dir(tmp_path / "text")) is None


def test_a_family_that_is_loaded_as_a_language_model_has_none_either(tmp_path):
    tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3n", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "SiglipImageProcessor"}))
    assert load_processor(tmp_path) is None


def test_a_processor_that_cannot_be_built_is_an_error_and_never_the_tokenizer_alone(tmp_path):
    folder = tiny_vision_dir(tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchImageProcessor"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(ModelError, match=r"its processor could not be loaded"):
        load_processor(folder)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"preprocessor_config.json cannot be read"):
        load_processor(folder)


def test_arguments_that_the_processor_does_not_take_are_refused(seeing_folder, seeing_tokenizer):
    with pytest.raises(ConfigError, match=r"mm_processor_kwargs: .* Did you mean 'do_resize'"):
        load_processor(seeing_folder, seeing_tokenizer, call={"do_resise": False})
    plain = load_processor(seeing_folder, seeing_tokenizer, call={"do_normalize": False, "max_pixels": 9})
    inputs, _ = plain.process([Image.new("RGB", (28, 28), "white")])
    assert plain.call == {"do_normalize": False} and inputs["pixel_values"].unique().tolist() == [1.0]


def test_an_image_that_the_processor_refuses_is_named(processor):
    with pytest.raises(DataError, match=r"row 5, image 1: the processor refuses the image"):
        processor.process([noise(56, 56), noise(1, 300)], "row 5")


def test_its_files_are_copied_as_they_are(processor, seeing_folder, tmp_path):
    processor.save_pretrained(tmp_path / "new")
    kept = (tmp_path / "new" / "preprocessor_config.json").read_bytes()
    assert kept == (seeing_folder / "preprocessor_config.json").read_bytes()


def test_inputs_are_joined_along_images_and_other_shapes_are_refused():
    one, two = {"pixel_values": torch.ones(4, 3)}, {"pixel_values": torch.zeros(2, 3)}
    assert join_inputs([one, {}, two])["pixel_values"].tolist() == [[1.0] * 3] * 4 + [[0.0] * 3] * 2
    assert join_inputs([]) == {} and join_inputs([{}, one]) == one
    with pytest.raises(NotBuiltError, match="pixel_values"):
        join_inputs([one, {"pixel_values": torch.ones(4, 5)}])
