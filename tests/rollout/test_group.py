"""Which plans of weights' ways a tensor group of samplers can follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import tiny_model_dir
from verl.config import HFModelConfig, RolloutConfig
from verl.rollout.group import Sharing, brings
from verl.rollout.hf.parts import templates
from verl.weight_sync.resharding import Layout, ModelWeights, Sharded, make_plan


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("group") / "model", "qwen2")
    return Sharing.of(RolloutConfig(tensor_model_parallel_size=4), HFModelConfig(path=str(path)), "cpu", 4)


def test_the_parts_of_a_tensor_group_are_those_of_the_familys_plan(sharing):
    """Four query heads of width 8, two key/value heads, 64 wide inside, a vocabulary of 259: 65, 65, 65 and 64 rows."""
    layer = "model.layers.1."
    assert sharing.weights[f"{layer}self_attn.q_proj.weight"].bounds(4) == (0, (0, 8, 16, 24, 32))
    assert sharing.weights[f"{layer}self_attn.k_proj.weight"].bounds(4) == (0, (0, 8, 16)), "two ranks have each"
    assert sharing.weights[f"{layer}mlp.down_proj.weight"].bounds(4) == (1, (0, 16, 32, 48, 64))
    assert sharing.weights[f"{layer}input_layernorm.weight"].bounds(4) == (0, (0, 32))
    assert sharing.weights["lm_head.weight"].bounds(4) == (0, (0, 65, 130, 195, 259))


def test_a_plan_made_of_the_same_cuts_brings_them(sharing):
    assert brings(make_plan(templates(sharing.weights), Sharded(4), Layout(4)), sharing.weights)


def test_a_plan_that_cuts_a_weight_otherwise_or_lacks_one_is_not_followed(sharing):
    model = templates(sharing.weights)
    whole = [replace(w, cut=None) if "down_proj" in w.name else w for w in model.weights]
    fewer = [w for w in model.weights if "k_proj" not in w.name]
    for weights in (whole, fewer):
        plan = make_plan(ModelWeights(tuple(weights), model.layers), Sharded(4), Layout(4))
        assert not brings(plan, sharing.weights)
