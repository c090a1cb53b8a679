"""Checkpoints as Hugging Face folders: ours, adapters, and shards in the form that upstream's FSDP writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from tests.harness.engines import make_engine, ragged_batch
from tests.harness.hub import fake_hub
from tests.harness.models import tiny_model_dir
from tests.harness.programs import command
from verl import distributed
from verl.algorithms.losses import SFTLoss
from verl.checkpoint.part import write_part
from verl.errors import ModelError
from verl.metrics import notices, reset_notices
from verl.models.hf_folder import read_weights
from verl.models.merging import compare_folders, merge
from verl.trainer.export import main as merger


def logits(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def write_shards(folder: Path, weights: dict[str, torch.Tensor], size: int, copies: int = 1) -> None:
    """What each rank of an FSDP run saves: its piece of dimension 0 of every weight, as a distributed tensor."""
    distributed.leave_group()  # one that other tests of this process have left
    for rank in range(size * copies):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size * copies)
        shape = (size,) if copies == 1 else (copies, size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
        placements = [Shard(0)] if copies == 1 else [Replicate(), Shard(0)]
        pieces = {}
        for name, tensor in weights.items():
            chunks = list(tensor.chunk(size)) + [tensor[:0]] * size
            local = chunks[rank % size].clone()
            pieces[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        torch.save(pieces, folder / f"model_world_size_{size * copies}_rank_{rank}.pt")
        dist.destroy_process_group()


def upstream_checkpoint(tmp_path: Path, size: int, copies: int = 1) -> tuple[Path, Path]:
    """The original model, and a checkpoint of it."""
    original = tiny_model_dir(tmp_path / "original", tie_word_embeddings=True)
    folder = tmp_path / "global_step_3" / "actor"
    AutoModelForCausalLM.from_pretrained(original).config.save_pretrained(folder / "huggingface")
    weights = read_weights(original)
    write_shards(folder, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, size, copies)
    return original, folder


@pytest.mark.parametrize(("size", "copies"), [(1, 1), (2, 1), (3, 1), (2, 2)])
def test_shards_of_upstream_become_the_model_that_was_cut(tmp_path, size, copies):
    original, folder = upstream_checkpoint(tmp_path, size, copies)
    merge(folder, tmp_path / "merged")
    assert compare_folders(tmp_path / "merged", original) == []
    assert torch.equal(logits(tmp_path / "merged"), logits(original))


def test_a_missing_rank_is_told(tmp_path):
    _, folder = upstream_checkpoint(tmp_path, 3)
    (folder / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(ModelError, match=r"not complete.*ranks \[0, 2\].*ranks 0 to 2"):
        merge(folder, tmp_path / "merged")


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_shard_that_holds_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, folder = upstream_checkpoint(tmp_path, 1)
    torch.save({"model.norm.weight": Harmful()}, folder / "model_world_size_1_rank_0.pt")
    with pytest.raises(ModelError, match=r"tensors alone.*rank_0\.pt"):
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "harmed").exists()


def test_an_adapter_of_upstream_is_merged_and_kept(tmp_path):
    """One weight with factors of ones: W + alpha / r * B A = W + 8 / 2 * 2."""
    original, folder = upstream_checkpoint(tmp_path, 1)
    weights = {f"base_model.model.{name}": tensor for name, tensor in read_weights(original).items()}
    name = "model.layers.0.self_attn.q_proj"
    before = weights.pop(f"base_model.model.{name}.weight")
    weights[f"base_model.model.{name}.base_layer.weight"] = before
    weights[f"base_model.model.{name}.lora_A.default.weight"] = torch.ones(2, 32)
    weights[f"base_model.model.{name}.lora_B.default.weight"] = torch.ones(32, 2)
    write_shards(folder, weights, 1)
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 8, "task_type": "CAUSAL_LM"}))
    merge(folder, tmp_path / "merged")
    merged = read_weights(tmp_path / "merged")
    torch.testing.assert_close(merged[f"{name}.weight"], before + 8.0)
    assert set(merged) == set(read_weights(original))
    settings = json.loads((tmp_path / "merged" / "lora_adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 8.0, ["q_proj"])


def shards_with(tmp_path, owner: str, factors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Path]:
    """The weights of a tied model, and a checkpoint of it with this adapter on one module."""
    original, folder = upstream_checkpoint(tmp_path, 1)
    weights = read_weights(original)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    named = {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    named[f"base_model.model.{owner}.base_layer.weight"] = named.pop(f"base_model.model.{owner}.weight")
    write_shards(folder, named | {f"base_model.model.{owner}.{name}": t for name, t in factors.items()}, 1)
    return weights, folder


def test_an_adapter_on_a_tied_head_unties_it_in_the_merged_folder(tmp_path):
    """alpha = r = 2: the head alone gets B A, which is 0.02 everywhere."""
    size = 259
    factors = {"lora_A.default.weight": torch.full((2, 32), 0.1), "lora_B.default.weight": torch.full((size, 2), 0.1)}
    before, folder = shards_with(tmp_path, "lm_head", factors)
    merge(folder, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(model.lm_head.weight.data, before["lm_head.weight"] + 0.02)
    assert torch.equal(model.model.embed_tokens.weight.data, before["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("model.embed_tokens", "lora_embedding_A.default"),
        ("model.layers.0.self_attn.q_proj", "lora_magnitude_vector.default.weight"),
        ("lm_head", "modules_to_save.default.weight"),
    ],
)
def test_parts_of_an_adapter_that_no_merged_weight_takes_are_named(tmp_path, owner, name):
    factors = {"lora_A.default.weight": torch.ones(2, 32), "lora_B.default.weight": torch.ones(259, 2)}
    if "q_proj" in owner:
        factors["lora_B.default.weight"] = torch.ones(32, 2)
    _, folder = shards_with(tmp_path, owner, {**factors, name: torch.ones(2, 32)})
    with pytest.raises(ModelError, match=rf"no two factors.*{owner}\.{name}.*merge_and_unload"):
        merge(folder, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_our_checkpoint_becomes_the_trained_model(tmp_path, adapter):
    path = tiny_model_dir(tmp_path / "model")
    engine = make_engine(path, model={"lora_rank": 4} if adapter else {})
    engine.train_batch(ragged_batch(), SFTLoss())
    write_part(tmp_path / "actor", engine.state(), hf=engine.hf_writer())
    engine.save_hf(tmp_path / "expected")
    merge(tmp_path / "actor", tmp_path / "merged")
    assert compare_folders(tmp_path / "merged", tmp_path / "expected") == []
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(tmp_path / "expected"))


def test_a_folder_one_level_too_high_is_told_with_its_roles(tmp_path):
    _, folder = upstream_checkpoint(tmp_path, 1)
    with pytest.raises(ModelError, match=r"no weights.*roles: actor"):
        merge(folder.parent, tmp_path / "merged")


def test_the_command_merges_and_tells_a_difference(tmp_path):
    original, folder = upstream_checkpoint(tmp_path, 2)
    common = ["--backend", "fsdp", "--local_dir", str(folder), "--target_dir", str(tmp_path / "merged")]
    same = command("verl.model_merger", "test", *common, "--test_hf_dir", str(original))
    assert "the same model" in same.stdout
    other = tiny_model_dir(tmp_path / "other", seed=1, tie_word_embeddings=True)
    assert any("differs by up to" in line for line in compare_folders(tmp_path / "merged", other))


def test_the_command_pushes_what_it_merged_to_the_repository_that_is_named(tmp_path):
    original, folder = upstream_checkpoint(tmp_path, 1)
    words = ["merge", "--backend", "fsdp", "--local_dir", str(folder), "--target_dir", str(tmp_path / "merged")]
    with fake_hub() as hub:
        words += ["--hf_upload_path", "me/model", "--private"]
        done = command("verl.model_merger", *words, timeout=120, **hub.variables)
        assert f"pushed it to {hub.url}/me/model" in done.stdout
        assert len(hub.created) == 1
        for name, content in hub.files.items():
            (tmp_path / "received").mkdir(exist_ok=True)
            (tmp_path / "received" / name).write_bytes(content)
    assert compare_folders(tmp_path / "received", original) == []
    assert torch.equal(logits(tmp_path / "received"), logits(original))


def test_a_repository_that_cannot_be_one_is_refused_before_anything_is_merged(tmp_path, capsys):
    words = ["merge", "--local_dir", str(tmp_path), "--target_dir", str(tmp_path / "merged")]
    assert merger([*words, "--hf_upload_path", "no repository"]) == 1
    assert "--hf_upload_path: is no name of a repository" in capsys.readouterr().err
    assert merger([*words, "--hf_upload_path", "me/model", "--hub", "github"]) == 1
    assert "--hub: there is no such hub" in capsys.readouterr().err


def test_options_of_upstream_that_change_nothing_say_so(tmp_path):
    _, folder = upstream_checkpoint(tmp_path, 1)
    reset_notices()
    words = [
        "merge",
        "--local_dir",
        str(folder),
        "--target_dir",
        str(tmp_path / "merged"),
        "--is-value-model",
        "--private",
    ]
    assert merger(words) == 0
    assert {"--is_value_model", "--private"} <= set(notices())
