"""Layers with kernels for a CPU: their values, gradients, memory, and which modules they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tests.harness.engines import make_engine
from tests.harness.models import tiny_model_dir
from verl.models import load_causal_lm
from verl.models.kernels import (
    FusedRMSNorm,
    FusedRotary,
    FusedSwiGLU,
    accumulate_in_place,
    apply_rotary,
    replace_layers,
)

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def log_probs_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(60).view(2, 30) % model.config.vocab_size
    log_probs = model(input_ids=ids).logits.log_softmax(-1)
    model.zero_grad()
    log_probs[..., 7].sum().backward()
    return log_probs.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_equal_those_of_transformers(tmp_path, family):
    model = load_causal_lm(str(tiny_model_dir(tmp_path, family)))
    for weight in model.parameters():  # norms start with ones and biases with zeros
        torch.nn.init.normal_(weight, std=0.3)
    log_probs, gradients = log_probs_and_gradients(copy.deepcopy(model).double())
    assert replace_layers(model) == 2 * (4 + 2 * (family == "qwen3")) + 1
    its_log_probs, its_gradients = log_probs_and_gradients(model)
    torch.testing.assert_close(its_log_probs.double(), log_probs, rtol=0, atol=1e-4)
    for name, gradient in gradients.items():
        error = (its_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-4, (name, error)


def test_written_out_gradients_are_those_of_finite_differences():
    def norm(x, weight):  # of heads: its input and its gradient have strides of their own
        return FusedRMSNorm.apply(x, weight, 1e-5).transpose(1, 2).contiguous()

    for x in (numbers(2, 5, 3, 8), numbers(2, 3, 5, 8).transpose(1, 2)):
        assert torch.autograd.gradcheck(norm, (x, numbers(8)))
    assert torch.autograd.gradcheck(FusedSwiGLU.apply, (numbers(5, 8), numbers(1, 5, 8)[0]))
    cos, sin = numbers(5, 8).detach(), numbers(1, 5, 8).detach()[0]  # any numbers: halves need not agree
    assert torch.autograd.gradcheck(lambda x: FusedRotary.apply(x, cos, sin), (numbers(1, 3, 5, 8),))


def test_a_frozen_norm_gets_no_gradient():
    x, weight = numbers(3, 8), numbers(8).detach()
    FusedRMSNorm.apply(x, weight, 1e-5).sum().backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_below_float32_values_and_dtypes_are_those_of_transformers(weights):
    """Autocast has float32 weights, and activations below."""
    norm = LlamaRMSNorm(64).to(weights)
    x, cos, sin = (numbers(*shape, dtype=torch.bfloat16) for shape in ((2, 9, 64), (2, 9, 16), (2, 9, 16)))
    torch.testing.assert_close(FusedRMSNorm.apply(x, norm.weight, norm.variance_epsilon), norm(x), rtol=8e-3, atol=0)
    q, k = x.view(2, 9, 4, 16).transpose(1, 2), x.view(2, 9, 4, 16)[:, :, :2].transpose(1, 2)
    cos, sin = cos.detach().to(weights), sin.detach().to(weights)
    for turned, expected in zip(apply_rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)):
        torch.testing.assert_close(turned, expected, rtol=8e-3, atol=2e-2)
        turned.sum().backward(retain_graph=True)
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def saved_values(function) -> int:
    """Numbers that autograd keeps for a backward pass, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(kept.values())


def test_a_layer_keeps_less_for_its_backward_pass(tmp_path):
    """Per token: xhat of both norms (2 x 32), and silu(gate) of the MLP (64), are not kept."""
    model = load_causal_lm(str(tiny_model_dir(tmp_path, "llama", layers=1)))
    replaced = copy.deepcopy(model)
    replace_layers(replaced)
    ids = torch.arange(50)[None]
    kept = [saved_values(lambda its=its: its.model(input_ids=ids)) for its in (model, replaced)]
    assert kept[0] - kept[1] >= 50 * (3 * 32 + 64), kept


def test_a_norm_or_an_activation_of_another_kind_stays(tmp_path):
    """Gemma's norms multiply by 1 + weight and its MLP has GELU: of its layers the rotations alone are replaced."""
    model = load_causal_lm(str(tiny_model_dir(tmp_path, "gemma", hidden_activation="gelu_pytorch_tanh")))
    expected = log_probs_and_gradients(model)[0]
    assert replace_layers(model) == model.config.num_hidden_layers
    torch.testing.assert_close(log_probs_and_gradients(model)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_copy_of_the_model_computes_with_its_weights(tmp_path):
    model = load_causal_lm(str(tiny_model_dir(tmp_path)))
    replace_layers(model)
    copied = copy.deepcopy(model)
    before = log_probs_and_gradients(model)[0]
    torch.nn.init.constant_(copied.model.norm.weight, 2.0)
    assert torch.equal(log_probs_and_gradients(model)[0], before)
    assert not torch.equal(log_probs_and_gradients(copied)[0], before)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_of_several_micro_batches_add_up_in_place(tmp_path, recomputes):
    model = load_causal_lm(str(tiny_model_dir(tmp_path))).train()
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    replaced = copy.deepcopy(model)
    accumulate_in_place(replaced)
    sums, made = [], []
    for its in (model, replaced):
        arrived: list[torch.Tensor] = []
        accumulator = torch.autograd.graph.get_gradient_edge(its.model.layers[0].mlp.down_proj.weight).node
        accumulator.register_prehook(arrived.extend)
        for first in (0, 40, 80):
            its(input_ids=torch.arange(first, first + 40)[None]).logits.log_softmax(-1)[..., 7].sum().backward()
        sums.append({name: weight.grad for name, weight in its.named_parameters()})
        made.append(sum(gradient is not None for gradient in arrived))
    assert made == [3, 1]
    for name, expected in sums[0].items():
        torch.testing.assert_close(sums[1][name], expected, rtol=1e-5, atol=1e-5)


def test_gradients_that_torch_returns_are_not_added_to_those_there():
    layer = torch.nn.Linear(4, 3)
    accumulate_in_place(layer)
    x = numbers(5, 4, dtype=torch.float32)
    loss = layer(x).square().sum()
    expected = torch.autograd.grad(loss, [x, layer.weight, layer.bias], retain_graph=True)
    loss.backward(retain_graph=True)
    for inputs, gradients in (([x, layer.weight, layer.bias], expected), ([x], expected[:1])):
        torch.testing.assert_close(torch.autograd.grad(loss, inputs, retain_graph=True), gradients)
    torch.testing.assert_close((x.grad, layer.weight.grad, layer.bias.grad), expected)
    loss.backward(inputs=[layer.weight])
    torch.testing.assert_close(layer.weight.grad, 2 * expected[1])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_weight_gets_the_gradient_of_each_micro_batch(register):
    layer, calls = torch.nn.Linear(4, 3), []
    accumulate_in_place(layer)
    getattr(layer.weight, register)(lambda tensor: calls.append(tensor.shape))
    for _ in range(3):
        layer(numbers(5, 4, dtype=torch.float32)).sum().backward()
    assert calls == [(3, 4)] * 3


@pytest.mark.parametrize("lowered", ["autocast", "frozen", "no_grad"])
def test_where_nothing_can_be_added_a_linear_layer_is_torchs(lowered):
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    plain[1].requires_grad_(lowered != "frozen")
    replaced = copy.deepcopy(plain)
    accumulate_in_place(replaced)
    x, gradients = numbers(5, 8, dtype=torch.float32).detach(), []
    for its in (plain, replaced):
        for _ in range(2):
            with torch.autocast("cpu", enabled=lowered == "autocast"), torch.set_grad_enabled(lowered != "no_grad"):
                out = its(x)
            if lowered != "no_grad":
                out.float().sum().backward()
        gradients.append([out.detach(), *(p.grad for p in its.parameters())])
    for one, other in zip(*gradients):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("is_compiled", "replaced"), [(None, True), (True, False)])
def test_an_engine_on_a_cpu_has_them_unless_it_compiles(tmp_path, is_compiled, replaced):
    model = make_engine(tiny_model_dir(tmp_path), engine={"use_torch_compile": is_compiled}).model.model
    for module in (model.norm, model.layers[0].mlp, model.layers[0].self_attn, model.layers[0].self_attn.q_proj):
        assert ("forward" in vars(module)) == replaced
