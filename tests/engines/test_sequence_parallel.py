"""How a packed micro-batch is cut over the ranks that share it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.harness.engines import ragged_batch
from tests.harness.vision import seen_batch, tiny_vision_dir
from verl.distributed import Ranks
from verl.engines.packing import pack_rows
from verl.engines.rows import AlignedRows, MicroBatch
from verl.engines.sequence_parallel import check_heads, local_tokens, pooled, sequence_peers
from verl.errors import ConfigError
from verl.models import load_model_config
from verl.models.vision import VisionInputs, family_of, placing


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_equally_long_and_together_the_whole_row(size):
    rows = AlignedRows.of(ragged_batch(rows=5))
    whole = pack_rows(rows, [0, 1, 3], "cpu")
    parts = [local_tokens(whole, Ranks(rank, size)) for rank in range(size)]
    length = parts[0].input_ids.shape[1]
    total = whole.input_ids.shape[1]
    assert {tuple(part.input_ids.shape) for part in parts} == {(1, length)} and total <= size * length < total + size
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1)[:, :total], whole.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in parts], 1)[:, :total], whole.position_ids)
    at = torch.cat([part.positions + rank * length for rank, part in enumerate(parts)])
    order = at.argsort(stable=True)
    expected = whole.positions.argsort(stable=True)
    for name in ("labels", "places"):
        found = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(found[order], getattr(whole, name)[expected])
    for part in parts:
        assert ((part.positions >= 0) & (part.positions < length)).all()
        assert part.attention.full_row.segments.num_tokens == size * length


def test_the_filler_of_ranks_without_rows_is_not_cut():
    filler = MicroBatch.filler("cpu")
    assert local_tokens(filler, Ranks(1, 2)) is filler


def test_alone_there_is_nothing_to_share(caplog):
    peers = sequence_peers(Ranks(), 1)
    batch = ragged_batch(rows=3)
    batch.non_tensor_batch["uid"] = ragged_batch(rows=3).batch["responses"][:, 0].numpy().astype(object)
    whole, mine = pooled(batch, peers)
    assert mine == slice(0, 3) and list(whole.non_tensor_batch["uid"]) == [
        str(x) for x in batch.non_tensor_batch["uid"]
    ]
    for name, tensor in batch.batch.items():
        torch.testing.assert_close(whole.batch[name], tensor, equal_nan=True, rtol=0, atol=0)


def test_rows_of_peers_keep_their_images_and_samples_share_theirs(tmp_path):
    folder = tiny_vision_dir(tmp_path / "model")
    batch = seen_batch(load_model_config(str(folder)), folder, samples=2)
    whole, mine = pooled(batch, Ranks())
    assert mine == slice(0, len(batch))
    for before, after in zip(*(one.non_tensor_batch["multi_modal_inputs"] for one in (batch, whole)), strict=True):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    shown = whole.non_tensor_batch["multi_modal_inputs"]
    assert shown[0] is shown[1] and shown[0] is not shown[4]


def test_a_cut_through_a_picture_leaves_each_rank_the_features_it_needs():
    places = {"image": torch.tensor([1, 2, 5, 6, 7, 9])}
    vision = VisionInputs({"pixel_values": torch.zeros(6, 1)}, places)
    first, second = vision.part(0, 6), vision.part(6, 6)
    assert first.places["image"].tolist() == [1, 2, 5] and first.rows["image"].tolist() == [0, 1, 2]
    assert second.places["image"].tolist() == [0, 1, 3] and second.rows["image"].tolist() == [3, 4, 5]
    assert first.tensors is second.tensors is vision.tensors, "each runs the tower on all pictures"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_and_videos_of_a_pass_are_each_cut_by_their_own_rows(tmp_path, family):
    """Qwen3-VL computes the features of videos by its function for images."""
    model = AutoModelForImageTextToText.from_pretrained(tiny_vision_dir(tmp_path / family, family)).eval()
    dim = family_of(model.config).smallest("image").tensors["pixel_values"].shape[1]
    grids = {"image": torch.tensor([[1, 4, 6]]), "video": torch.tensor([[1, 4, 4]])}
    pixels = {kind: torch.randn(int(grid.prod()), dim) for kind, grid in grids.items()}
    tensors = {"pixel_values": pixels["image"], "pixel_values_videos": pixels["video"]}
    vision = VisionInputs(tensors, {"image": torch.arange(6), "video": torch.arange(7, 11)}).part(4, 5)

    def features() -> list[torch.Tensor]:
        made = [getattr(model.model, f"get_{kind}_features")(pixels[kind], grids[kind]) for kind in grids]
        return [torch.cat(tuple(one.pooler_output)) for one in made]

    with torch.no_grad():
        of_images, of_videos = features()
        with placing(model, vision):
            images, videos = features()
    assert torch.equal(images, of_images[4:6]) and torch.equal(videos, of_videos[:2])


def test_heads_and_ranks_must_divide():
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=12))
    check_heads(config, 4)
    with pytest.raises(ConfigError, match=r"12 attention heads.*Got 8.*1, 2, 3, 4, 6, 12"):
        check_heads(config, 8)
    with pytest.raises(ConfigError, match=r"6 processes.*Got 4.*1, 2, 3, 6"):
        sequence_peers(Ranks(0, 6), 4)
