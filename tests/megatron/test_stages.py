"""How many layers a pipeline stage has, by hand and beside Megatron-Core's own arithmetic."""

import pytest
import torch

from tests.megatron.test_fields import DENSE
from verl.config.rules.megatron_fields import layer_groups, stage_depths
from verl.config.schema.role import MegatronEngineConfig
from verl.engines.megatron.layers import transformer_config
from verl.engines.megatron.parallel import MegatronSizes, import_megatron
from verl.errors import ConfigError

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
SPREAD = [
    # layers, stages, groups per stage, fields, layers of each group
    (8, 4, None, {}, (2, 2, 2, 2)),
    (8, 2, 2, {}, (2, 2, 2, 2)),
    (61, 8, None, {FIRST: 5, LAST: 8}, (5, 8, 8, 8, 8, 8, 8, 8)),
    (94, 8, None, {FIRST: 11, LAST: 11}, (11, 12, 12, 12, 12, 12, 12, 11)),
    (5, 2, None, {FIRST: 2}, (2, 3)),
    (5, 2, None, {LAST: 1}, (4, 1)),
    (5, 2, None, {FIRST: 3, LAST: 2}, (3, 2)),
    (10, 3, 2, {FIRST: 2, LAST: 4}, (1, 2, 2, 1, 2, 2)),
    (94, 4, None, {EMBEDDING: True, LOSS: True}, (23, 24, 24, 23)),
    (7, 2, 2, {EMBEDDING: True}, (1, 2, 2, 2)),
    (7, 2, 2, {LOSS: True}, (2, 2, 2, 1)),
    (3, 1, None, {EMBEDDING: True, LOSS: True}, (3,)),
    (43, 8, None, {LAYOUT: "Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L"}, (6, 6, 6, 5, 5, 5, 5, 5)),
    (6, 3, None, {LAYOUT: "Et,(tt|)*2,tL"}, (3, 2, 1)),
    (6, 2, None, {LAYOUT: "E|ttt|tt|tL"}, (0, 3, 2, 1)),
    (3, 2, None, {LAYOUT: [["embedding", "decoder", "decoder"], ["decoder", "loss"]]}, (2, 1)),
]  # fmt: skip


def section(stages, groups, given):
    return MegatronEngineConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=groups,
        override_mcore_model_config=given,
    )


@pytest.mark.parametrize(("layers", "stages", "groups", "given", "depths"), SPREAD)
def test_stages_have_the_layers_that_megatron_core_gives_them(layers, stages, groups, given, depths):
    settings = section(stages, groups, given)
    assert stage_depths("megatron", settings, layers) == depths and sum(depths) == layers
    virtual = layer_groups("megatron", settings)
    assert len(depths) == stages * (virtual or 1)
    sizes = MegatronSizes(tensor=1, pipeline=stages, data=1, virtual=virtual)
    config = transformer_config({**DENSE, "num_layers": layers}, sizes, settings, torch.float32)
    assert config.virtual_pipeline_model_parallel_size == virtual
    block, layer = import_megatron("transformer.transformer_block"), import_megatron("transformer.transformer_layer")
    kind = import_megatron("transformer.enums").LayerType.decoder
    for number, depth in enumerate(depths):
        group, stage = divmod(number, stages)
        if LAYOUT in given:
            assert config.pipeline_model_parallel_layout.layout[stage][group].count(kind) == depth
            continue
        place = {"vp_stage": None if virtual is None else group, "pp_rank": stage}
        assert block.get_num_layers_to_build(config, **place) == depth
        assert layer.get_transformer_layer_offset(config, **place) == sum(depths[:number])


REFUSED = [
    ((7, 2, None, {}), r"megatron.pipeline_model_parallel_size: the model's 7 layers cannot be split evenly over 2"),
    ((7, 2, None, {}), r"Allowed: 1, 7\. .*or give the first and last stage another number with .*_first_pipeline_st"),
    ((7, 2, None, {EMBEDDING: True, LOSS: True}), r"7 layers \(with account_for_embedding.* and account_for_loss"),
    ((7, 4, None, {FIRST: 2, LAST: 2}), r"3 of the model's 7 layers are left for 2 stage\(s\).*Got {'num_la"),
    ((7, 2, None, {FIRST: 7}), r"0 of the model's 7 layers are left for 1 stage"),
    ((7, 2, None, {FIRST: 9}), r"-2 of the model's 7 layers are left"),
    ((7, 2, None, {FIRST: 0}), r"first_pipeline_stage: a stage has a number of layers. Got 0. Allowed: 1 or more"),
    ((7, 2, None, {LAST: "two"}), r"last_pipeline_stage: a stage has a number of layers. Got 'two'"),
    ((7, 1, None, {LAST: 3}), r"stages of a pipeline need one.*or set pipeline_model_parallel_size to 2 or more"),
    ((7, 2, 2, {FIRST: 3}), r"virtual_pipeline_model_parallel_size: the 3 layers of a pipeline stage cannot .* over 2"),
    ((7, 2, None, {FIRST: 3, LOSS: True}), r"account_for_loss_in_pipeline_split: it says .* num_layers_in_first_pi"),
    ((7, 2, None, {LAST: 3, LAYOUT: "Et*4|t*3L"}), r"parallel_layout: it says .* num_layers_in_last_pipe"),
    ((7, 2, None, {LAYOUT: "Et*4|t*2L"}), r"it has 6 layers, and the model has 7.*Write 7 times t"),
    ((7, 2, None, {LAYOUT: "Et*2|t*2|t*3L"}), r"its 3 groups of layers do not divide over 2 stages"),
    ((7, 2, 2, {LAYOUT: "Et*4|t*3L"}), r"virtual_pipeline_model_parallel_size: the layout has 1 group\(s\) of layers"),
    ((7, 2, None, {LAYOUT: "t*4|t*3L"}), r"this is no layout of a pipeline. Got 't\*4\|t\*3L'. Allowed: e.g. Et\*3\|"),
    ((7, 2, None, {LAYOUT: "Et*4|t*3mL"}), r"further tokens \(m\) are neither trained nor saved"),
    ((7, 2, None, {LAYOUT: ["embedding", "loss"]}), r"this is no layout"),
    ((7, 2, None, {LAYOUT: [["embedding"], ["attention", "loss"]]}), r"this is no layout"),
    ((7, 2, None, {LAYOUT: "E(t*9999999)*9999999L"}), r"this is no layout"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_stages_that_cannot_be_are_refused_with_those_that_can(given, message):
    layers, *words = given
    with pytest.raises(ConfigError, match=message):
        stage_depths("megatron", section(*words), layers)
