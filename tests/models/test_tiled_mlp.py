"""MLPs in tiles give the numbers of whole ones, and keep nothing of their width for the backward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engines.test_families import EXPERTS, LATENT
from tests.harness.engines import gradients, make_engine, model_dir, ragged_batch, relative_error
from verl.algorithms.losses import SFTLoss
from verl.errors import ConfigError
from verl.models.tiled_mlp import mlps, tile_mlps

HIDDEN, WIDTH, TOKENS, TILES = 32, 64, 10, 4


def model(tmp_path, family: str = "qwen2", **config):
    path = model_dir(tmp_path, family, **config)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(1, TOKENS, HIDDEN), (2, 5, HIDDEN), (1, 1, HIDDEN), (1, 0, HIDDEN)])
def test_output_and_gradients_are_those_of_the_whole(tmp_path, shape):
    own = model(tmp_path)
    mlp, found = own.model.layers[0].mlp, []
    states = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for tiled in (False, True):
        if tiled:
            assert tile_mlps(own, TILES) == 2
        hidden = states.clone().requires_grad_()
        output = mlp(hidden)
        found.append([output, *torch.autograd.grad(output.square().sum(), [hidden, *mlp.parameters()])])
    for whole, tiles in zip(*found, strict=True):
        torch.testing.assert_close(tiles, whole)


def kept(module: torch.nn.Module, states: torch.Tensor) -> int:
    """Numbers that a forward pass keeps for the backward one, weights left out."""
    weights, seen = {p.data_ptr() for p in module.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(states)
    assert output.requires_grad
    return sum(seen.values())


def test_only_the_input_is_kept_for_the_backward_pass(tmp_path):
    own = model(tmp_path)
    mlp = own.model.layers[0].mlp
    states = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert kept(mlp, states) == TOKENS * (HIDDEN + 4 * WIDTH)  # gate, its activation, up, and their product
    tile_mlps(own, TILES)
    assert kept(mlp, states) == TOKENS * HIDDEN


def test_each_tile_has_its_share_of_the_tokens_in_both_passes(tmp_path):
    own = model(tmp_path)
    tile_mlps(own, TILES)
    mlp, rows = own.model.layers[0].mlp, []
    mlp.up_proj.register_forward_hook(lambda _, __, output: rows.append(len(output)))
    mlp(torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert sorted(rows) == [2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "family, config, expected",
    [
        ("gemma2", {}, ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("qwen3_moe", EXPERTS, []),
        ("deepseek_v3", LATENT, ["model.layers.0.mlp", "model.layers.1.mlp.shared_experts"]),
    ],
)
def test_dense_mlps_are_tiled_and_experts_are_not(tmp_path, family, config, expected):
    own = model(tmp_path, family, **config)
    names = {module: name for name, module in own.named_modules()}
    assert [names[module] for module in mlps(own)] == expected
    assert tile_mlps(own, 2) == len(expected)


def test_an_engine_trains_with_tiles_as_without_them(tmp_path):
    path, batch, found = model_dir(tmp_path, "qwen3"), ragged_batch(), []
    for settings in (
        {},
        {"tiled_mlp": {"enabled": True, "num_shards": 3}},
        {"tiled_mlp": {"enabled": True}, "enable_gradient_checkpointing": True},
    ):
        found.append(gradients(make_engine(path, model=settings), batch, SFTLoss(), micro_batch_size=2))
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert relative_error(gradient, found[0][1]) < 1e-5


def test_less_than_one_tile_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tiled_mlp\.num_shards"):
        make_engine(model_dir(tmp_path), model={"tiled_mlp": {"enabled": True, "num_shards": 0}})
