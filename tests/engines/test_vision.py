"""Rows with images in the engines: packed, padded, shared and alone they are what transformers computes row by row."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from tests.harness.engines import gradients, make_engine, relative_error
from tests.harness.vision import (
    FAMILIES,
    GLM,
    TILED,
    WITH_VIDEOS,
    log_probs_row_by_row,
    logits_row_by_row,
    seen_batch,
)
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.errors import DataError
from verl.models import load_causal_lm, load_value_model
from verl.models.vision import family_of

TOWERS = ("visual", "vision_tower", "multi_modal_projector", "vision_model", "connector")


def is_of_tower(name):
    return any(f".{part}." in name for part in TOWERS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "passes",
    [
        PassSettings(share_prompts=True),
        PassSettings(share_prompts=True, fused_head="torch", multiple=16),
        PassSettings(packed=False),
    ],
    ids=["shared", "fused", "padded"],
)
def test_log_probs_of_rows_with_and_without_images_are_those_of_each_row_alone(seeing_model, family, passes):
    path = seeing_model(family)
    engine = make_engine(path, trains=False, passes=passes)
    batch = seen_batch(engine.model.config, path)
    assert engine.forward.passes.packed == passes.packed
    with torch.no_grad():
        expected = log_probs_row_by_row(load_causal_lm(str(path)).eval(), batch)
    for limits in ({}, {"micro_batch_size": 3}, {"max_tokens": 64}):
        made = engine.infer(batch, **limits)["log_probs"]
        assert relative_error(made, expected) < 1e-5, limits


@pytest.mark.parametrize("family", WITH_VIDEOS)
@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_of_rows_with_videos_are_those_of_each_row_alone(seeing_model, family, packed):
    """In a batch with rows of pictures and of text alone; frames at several distances in time, and an odd number."""
    path = seeing_model(family)
    engine = make_engine(path, trains=False, passes=PassSettings(packed=packed, share_prompts=packed))
    pictured = () if family in GLM else ((56, 56),)  # transformers counts both for images there, and refuses such a row
    sizes = (((4, 56, 56),), (), ((5, 84, 56), *pictured, (2, 28, 112)), ((56, 84),), ((6, 56, 28),))
    batch = seen_batch(engine.model.config, path, sizes)
    with torch.no_grad():
        expected = log_probs_row_by_row(load_causal_lm(str(path)).eval(), batch)
    for limits in ({}, {"micro_batch_size": 3}, {"max_tokens": 128}):
        made = engine.infer(batch, **limits)["log_probs"]
        assert relative_error(made, expected) < 1e-5, limits


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_rows_with_images_are_those_of_each_row_alone(seeing_model, family):
    path = seeing_model(family)
    engine = make_engine(path, kind="value", trains=False, seed=3)
    batch = seen_batch(engine.model.config, path)
    with torch.no_grad():
        values = logits_row_by_row(load_value_model(str(path), seed=3).eval(), batch)[..., 0]
    expected = values * batch.batch["response_mask"]
    assert relative_error(engine.infer(batch, ("values",))["values"], expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_the_tower_are_those_that_torch_counts(seeing_model, family):
    path = seeing_model(family)
    engine = make_engine(path)
    column = seen_batch(engine.model.config, path, (((112, 112),), ()), samples=1).non_tensor_batch[
        "multi_modal_inputs"
    ]
    model = load_causal_lm(str(path), attn="eager").eval()  # its products are counted one by one
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model.model.get_image_features(*column[0].values(), return_dict=True)
    # InternVL's token that stands for the picture has no pixels, and counts as if it had.
    near = 0.02 if family == "internvl" else 0
    assert engine.tower_flops(column) == pytest.approx(3 * counted.get_total_flops(), rel=near)
    frozen = make_engine(path, freeze_vision_tower=True)
    assert frozen.tower_flops(column) == pytest.approx(counted.get_total_flops(), rel=near)


def test_another_picture_in_the_same_place_changes_what_follows_it(seeing_model):
    path = seeing_model()
    engine = make_engine(path, trains=False, passes=PassSettings(share_prompts=True))
    batch = seen_batch(engine.model.config, path, (((56, 56),), ()), samples=2)
    before = engine.infer(batch)["log_probs"]
    column = batch.non_tensor_batch["multi_modal_inputs"]
    column[1] = {**column[1], "pixel_values": -column[1]["pixel_values"]}  # the second sample of the same prompt
    after = engine.infer(batch)["log_probs"]
    assert (before[1] != after[1]).any() and relative_error(after[[0, 2, 3]], before[[0, 2, 3]]) < 1e-6


def test_the_tower_sees_the_picture_of_a_shared_prompt_once(seeing_model):
    path = seeing_model()
    engine = make_engine(path, trains=False, passes=PassSettings(share_prompts=True))
    batch, seen = seen_batch(engine.model.config, path, (((56, 56),),), samples=8), []
    hook = engine.model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    engine.infer(batch)
    hook.remove()
    assert seen == [16]  # patches of one picture


def test_a_placeholder_that_the_model_drew_is_text(seeing_model):
    path = seeing_model()
    engine = make_engine(path, trains=False, passes=PassSettings(share_prompts=True))
    batch = seen_batch(engine.model.config, path, (((56, 56),),), samples=2)
    width = batch.batch["prompts"].shape[1]
    for name, column in (("input_ids", width), ("responses", 0)):
        batch.batch[name][0, column] = engine.model.config.image_token_id
    made = engine.infer(batch)["log_probs"]
    expected = engine.infer(batch[[0]])["log_probs"]
    assert torch.isfinite(made).all() and (made[0] != 0).any() and relative_error(made[:1], expected) < 1e-5


def test_a_mark_of_a_video_that_the_model_drew_hides_no_image(seeing_model):
    config = load_causal_lm(str(seeing_model("glm4v"))).config
    family = family_of(config)
    image = [config.image_start_token_id, config.image_token_id, config.image_end_token_id]
    ids = torch.tensor([9, config.video_start_token_id, 11, *image])
    [placed] = family.place(ids, [family.smallest("image")])
    assert placed.runs == ((4, 1),)
    with pytest.raises(DataError, match="1 videos take 1 tokens"):
        family.place(ids, [family.smallest("video")])


def test_padding_in_a_tile_is_refused(seeing_model):
    family = family_of(load_causal_lm(str(seeing_model("idefics3"))).config)
    inputs = {"pixel_values": torch.ones(1, 2, 3, 28, 28), "pixel_attention_mask": torch.ones(1, 2, 28, 28)}
    assert len(family.pictures(inputs)) == 2
    inputs["pixel_attention_mask"][0, 1, 3] = 0
    with pytest.raises(DataError, match="padding in tiles is not built"):
        family.pictures(inputs)


def test_a_row_with_fewer_placeholders_than_its_picture_has_tokens_is_named(seeing_model):
    path = seeing_model()
    engine = make_engine(path, trains=False)
    batch = seen_batch(engine.model.config, path, ((), ((56, 56),)), samples=1)
    batch.batch["input_ids"][batch.batch["input_ids"] == engine.model.config.image_token_id] = 9
    with pytest.raises(DataError, match=r"row 1: 1 images take 4 tokens.*input_ids|input_ids.*row 1: 1 images take 4"):
        engine.infer(batch)


def test_gradients_of_tower_and_language_model_do_not_depend_on_the_layout(seeing_model):
    path = seeing_model()
    made = []
    for passes in (PassSettings(share_prompts=True), PassSettings(packed=False)):
        engine = make_engine(path, passes=passes, model={"enable_gradient_checkpointing": passes.packed})
        batch = seen_batch(engine.model.config, path)
        made.append(gradients(engine, batch, PPOPolicyLoss(ActorConfig()), micro_batch_size=3))
    assert abs(made[0][0] - made[1][0]) < 1e-5 and relative_error(made[0][1], made[1][1]) < 1e-5
    of_tower = sum(p.numel() for p in engine.model.model.visual.parameters())
    assert next(iter(engine.model.named_parameters()))[0].startswith("model.visual")
    assert made[0][1][:of_tower].abs().max() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_transformers_row_by_row(seeing_model, family):
    path = seeing_model(family)
    engine = make_engine(path, passes=PassSettings(share_prompts=True), model={"enable_gradient_checkpointing": True})
    batch = seen_batch(engine.model.config, path)
    batch.pop(["old_log_probs"])  # on policy: the gradient is that of the advantages times the log-probs
    _, gradient = gradients(engine, batch, PPOPolicyLoss(ActorConfig()), micro_batch_size=3)
    model, mask = load_causal_lm(str(path)), batch.batch["response_mask"]
    (-(batch.batch["advantages"] * log_probs_row_by_row(model, batch)).sum() / mask.sum()).backward()
    parameters = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    assert relative_error(gradient, torch.cat([grad.flatten() for _, grad in parameters])) < 1e-5
    of_tower = [grad.abs().max() for name, grad in parameters if is_of_tower(name)]
    assert of_tower and max(of_tower) > 1e-6


@pytest.mark.parametrize("family", TILED)
def test_pixels_of_another_tile_size_are_refused(seeing_model, family):
    path = seeing_model(family)
    engine = make_engine(path, trains=False)
    batch = seen_batch(engine.model.config, path, (((28, 28),),), samples=1)
    batch.non_tensor_batch["multi_modal_inputs"][0] = {"pixel_values": torch.zeros(1, 3, 14, 14)}
    with pytest.raises(DataError, match=r"tiles of \(3, 28, 28\) channels, rows and columns"):
        engine.infer(batch)


def test_a_saved_folder_has_the_processor_and_loads_with_transformers_bit_by_bit(seeing_model, tmp_path):
    path = seeing_model()
    engine = make_engine(path, trains=False)
    engine.save_hf(tmp_path / "saved")
    processor = (tmp_path / "saved/preprocessor_config.json").read_text()
    assert processor == (path / "preprocessor_config.json").read_text()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", *TILED])
def test_a_frozen_tower_keeps_its_bits_and_the_language_model_learns(seeing_model, family):
    path = seeing_model(family)
    engine = make_engine(path, freeze_vision_tower=True)
    batch, before = seen_batch(engine.model.config, path), {k: v.clone() for k, v in engine.model.state_dict().items()}
    engine.train_batch(batch, PPOPolicyLoss(ActorConfig()))
    moved = {name for name, tensor in engine.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and not any(is_of_tower(name) for name in moved)
    assert any(is_of_tower(name) for name in before)


@pytest.mark.parametrize(
    "family, targets, parts",
    [
        ("qwen2_5_vl", {"target_modules": r".*language_model.*\.(q_proj|v_proj)"}, {"language_model"}),
        ("qwen2_5_vl", {"target_modules": r".*visual.*\.(qkv|proj)"}, {"visual"}),
        ("qwen2_5_vl", {"exclude_modules": r".*visual.*"}, {"language_model"}),
        ("qwen2_5_vl", {}, {"language_model", "visual"}),
        ("gemma3", {"target_modules": r".*vision_tower.*\.(q_proj|v_proj)"}, {"vision_tower"}),
        ("gemma3", {}, {"language_model", "vision_tower"}),
        ("internvl", {"exclude_modules": r".*(vision_tower|multi_modal_projector).*"}, {"language_model"}),
        ("internvl", {}, {"language_model", "vision_tower", "multi_modal_projector"}),
        ("idefics3", {"exclude_modules": r".*(vision_model|connector).*"}, {"text_model"}),
    ],
)
def test_an_adapter_lies_on_the_language_model_on_the_tower_or_on_both(seeing_model, family, targets, parts):
    path = seeing_model(family)
    engine = make_engine(path, model={"lora_rank": 4, **targets})
    batch = seen_batch(engine.model.config, path)
    engine.train_batch(batch, PPOPolicyLoss(ActorConfig()))
    factors = {name: tensor for name, tensor in engine.export_adapter() if "lora_B" in name and tensor.abs().max() > 0}
    assert {part for part in ("language_model", "text_model", *TOWERS) for name in factors if part in name} == parts
