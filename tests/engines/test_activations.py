"""Activations on the host: what goes there, and that gradients stay the same (here the host plays the device, too)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from verl.engines.activations import OffloadedActivations, host_activations
from verl.metrics import notices, reset_notices


class Model(torch.nn.Module):
    def __init__(self, checkpointed: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        for layer in self.layers:
            part = torch.nn.Sequential(layer, torch.nn.Tanh())
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return x.square().sum()


def gradients(model, x, host=None):
    model.zero_grad()
    if host is None:
        loss = model(x)
    else:
        with host.offloaded_activations():
            loss = model(x)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_bits(checkpointed):
    model, x = Model(checkpointed), torch.randn(2, 5, 4, requires_grad=True)
    host = OffloadedActivations(model.parameters(), "cpu", smallest=0)
    assert torch.equal(gradients(model, x, host), gradients(model, x))
    assert host.moved_bytes > 0


def test_weights_and_small_tensors_stay():
    model, x = Model(), torch.randn(2, 5, 4)
    seen = []
    host = OffloadedActivations(model.parameters(), "cpu", smallest=0)
    original = host._pack
    host._pack = lambda tensor: seen.append((tuple(tensor.shape), host._moves(tensor))) or original(tensor)
    gradients(model, x, host)
    assert any(not moved for shape, moved in seen if shape == (4, 4))
    assert all(not moved for shape, moved in seen if shape == (4, 4))
    assert host.moved_bytes == sum(4 * torch.Size(shape).numel() for shape, moved in seen if moved)
    assert host.moved_bytes % (2 * 5 * 4 * 4) == 0
    small = OffloadedActivations(model.parameters(), "cpu", smallest=2 * 5 * 4 * 4 + 1)
    gradients(model, x, small)
    assert small.moved_bytes == 0


def test_with_checkpointing_only_the_input_of_each_layer_and_the_end_go_to_the_host():
    model, x = Model(checkpointed=True), torch.randn(2, 5, 4, requires_grad=True)
    host = OffloadedActivations(model.parameters(), "cpu", smallest=0)
    gradients(model, x, host)
    one = 2 * 5 * 4 * 4
    # Inputs of the second and third layer and of the square; the first one's is a leaf of the caller's.
    assert host.moved_bytes == 3 * one


def test_on_a_cpu_the_setting_has_no_effect_and_says_so():
    assert host_activations(True, [], "cpu") is None and "no effect" in notices()["enable_activation_offload"]
    reset_notices()
    assert host_activations(False, [], "cuda") is None and notices() == {}
    assert host_activations(True, [], "cuda") is not None


def test_under_upstreams_name_a_models_own_forward_pass_keeps_its_activations_on_the_host(monkeypatch):
    from verl.utils import activation_offload

    model, x = Model(), torch.randn(2, 5, 4, requires_grad=True)
    expected, hosts = gradients(model, x), []

    def on_host(asked, parameters, device):
        hosts.append(OffloadedActivations(parameters, device, smallest=0))
        return hosts[-1]

    monkeypatch.setattr(activation_offload, "host_activations", on_host)
    activation_offload.enable_activation_offloading(model)
    assert torch.equal(gradients(model, x), expected)
    assert hosts[0].moved_bytes > 0
