"""FSDP2 by hand over one process: what the pieces do, against torch, and a checkpoint that goes on bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.harness.models import tiny_model_dir
from verl.errors import CheckpointError
from verl.metrics import notices, reset_notices
from verl.utils import fsdp_utils
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager


def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def trained() -> tuple:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))


def test_a_checkpoint_by_hand_goes_on_where_it_was_made(tmp_path):
    model, optimizer, schedule = trained()
    step(model, optimizer, schedule)
    FSDPCheckpointManager(model, optimizer, schedule).save_checkpoint(str(tmp_path / "actor"), global_step=1)
    step(model, optimizer, schedule)
    other, again, schedule_again = trained()
    FSDPCheckpointManager(other, again, schedule_again).load_checkpoint(str(tmp_path / "actor"))
    assert schedule_again.last_epoch == 1
    again.param_groups[0]["lr"] = 0.05
    step(other, again, schedule_again)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_without_a_schedule_is_loaded_and_a_schedule_is_told_that_it_begins_anew(tmp_path):
    model, optimizer, schedule = trained()
    step(model, optimizer, schedule)
    FSDPCheckpointManager(model, optimizer).save_checkpoint(str(tmp_path), global_step=1)
    other, again, schedule_again = trained()
    FSDPCheckpointManager(other, again).load_checkpoint(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    reset_notices()
    FSDPCheckpointManager(other, again, schedule_again).load_checkpoint(str(tmp_path))
    assert schedule_again.last_epoch == 0 and "the schedule starts from scratch" in notices()["lr_scheduler"]


def test_a_checkpoint_of_another_model_is_refused_by_the_name_that_differs(tmp_path):
    model, optimizer, schedule = trained()
    step(model, optimizer, schedule)
    FSDPCheckpointManager(model, optimizer).save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"2\.weight is in one of the two only"):
        FSDPCheckpointManager(nn.Sequential(*model, nn.Linear(2, 2, bias=False))).load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"0\.weight has another shape.*\[4, 4\].*\[2, 4\]"):
        FSDPCheckpointManager(nn.Sequential(nn.Linear(4, 2), model[1])).load_checkpoint(str(tmp_path))


def test_a_gradient_is_clipped_as_torch_does_it():
    model, _, _ = trained()
    model(torch.ones(1, 4)).sum().backward()
    other = copy.deepcopy(model)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        two.grad = one.grad.clone()
    norm = fsdp_utils.fsdp2_clip_grad_norm_(model.parameters(), 0.1)
    assert norm == nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_longest_dimension_that_fits_is_cut():
    place = fsdp_utils.get_shard_placement_fn(4)
    shapes = {(8, 4): 0, (4, 8): 1, (6, 8): 1, (3, 5): 0}
    assert {shape: place(nn.Parameter(torch.zeros(shape))).dim for shape in shapes} == shapes


def test_an_optimizers_state_moves_where_it_is_asked_to():
    model, optimizer, schedule = trained()
    step(model, optimizer, schedule)
    fsdp_utils.offload_fsdp_optimizer(optimizer)
    fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
    assert {v.device.type for entries in optimizer.state.values() for v in entries.values()} == {"cpu"}
    fsdp_utils.offload_fsdp_model_to_cpu(model)
    assert fsdp_utils.fsdp_version(model) == 0


def test_layers_of_a_model_are_the_units_that_are_wrapped(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / "model"))
    policy = fsdp_utils.get_fsdp_wrap_policy(model)
    wrapped = [name for name, m in model.named_modules() if policy(module=m, recurse=False, nonwrapped_numel=0)]
    assert wrapped == ["model.layers.0", "model.layers.1"]
    with fsdp_utils.get_init_weight_context_manager(use_meta_tensor=True)():
        assert nn.Linear(2, 2).weight.device.type == "cpu", "the first process makes the values"


@pytest.mark.parametrize("size", [1, 2])
def test_models_are_counted_and_named(tmp_path, capsys, size):
    from transformers import AutoConfig

    from verl.models.flops import ModelFlops
    from verl.utils.flops_counter import FlopsCounter
    from verl.utils.model import print_model_size, update_model_config

    print_model_size(nn.Linear(1000, 1000 * size, bias=False), "it")
    assert capsys.readouterr().out == f"it has {size / 1000:.3f} B parameters\n"
    config = AutoConfig.from_pretrained(tiny_model_dir(tmp_path / "model"))
    achieved, _ = FlopsCounter(config).estimate_flops([16, 16], delta_time=2.0)
    assert achieved == ModelFlops.of(config).train([16, 16]) / 2e12
    update_model_config(config, {"hidden_size": 64 * size})
    assert config.hidden_size == 64 * size
