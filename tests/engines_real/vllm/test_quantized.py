"""vLLM rounds the weights that it gets to int8 by torchao, at its start and at each weight sync."""

from __future__ import annotations

import asyncio
import json

import pytest
from torch import nn
from torchao.core.config import config_to_dict
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.harness.samplers import largest_difference, requests, sample
from verl.rollout.hf.sampler import HFSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights

PROMPTS = [(40, 41, 42), (50, 51, 52, 53, 54, 55)]


@pytest.fixture(scope="module")
def sampler(folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("torchao") / "int8.json"
    file.write_text(json.dumps(config_to_dict(Int8WeightOnlyConfig())))
    made = VLLMSampler(
        {"model": str(folder), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "quantization": "torchao",
         "hf_overrides": {"quantization_config_file": str(file)}}
    )  # fmt: skip
    yield made
    made.close()


def test_after_a_weight_sync_its_log_probs_are_those_of_the_new_weights_in_int8(sampler, folder):
    """Those of transformers' model whose layers torchao rounds."""
    model = HFSampler(str(folder)).model
    new = {name: tensor * 1.3 if tensor.dim() > 1 else tensor for name, tensor in model.state_dict().items()}
    asyncio.run(sampler.update_weights(chunk_weights(new.items(), 1 << 16, 2), 2))
    wanted = requests(PROMPTS, samples=3, max_tokens=12, ignore_eos=True)
    found = sample(sampler, wanted)
    model.load_state_dict(new)
    in_full = largest_difference(model, wanted, found)
    head = model.get_output_embeddings()
    quantize_(model, Int8WeightOnlyConfig(), lambda module, _: isinstance(module, nn.Linear) and module is not head)
    rounded = largest_difference(model, wanted, found)
    assert in_full > 1e-3, "it does round"
    assert rounded < 1e-4
