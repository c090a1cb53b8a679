"""Images in vLLM: its own processor sees what the trainer's saw, log-probs are the model's, new towers are used."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_vision import STEPS, learn, warm  # noqa: F401  # a fixture
from tests.engines_real.vllm.test_server import started
from tests.harness.programs import curve, metrics
from tests.harness.samplers import sample
from tests.harness.vision import pictures, processed, prompt_tokens, tiny_vision_dir
from verl.errors import RolloutError
from verl.models import export_weights, load_causal_lm
from verl.rollout.base import Request, SamplingParams
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights

SIZES = (((56, 56),), (), ((84, 56), (28, 112)), ((56, 84),))


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def seeing(tmp_path_factory, request):
    """A model with heads of 32, which vLLM's CPU kernels take, and weights wide enough for pictures to matter."""
    made = tiny_vision_dir(tmp_path_factory.mktemp("seeing") / "model", request.param, hidden=128)
    file = made / "model.safetensors"
    weights = {name: value * 3 if value.dim() > 1 else value for name, value in load_file(str(file)).items()}
    save_file(weights, str(file), metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module", params=["in this process", "a server"])
def sampler(seeing, request):
    if request.param == "a server":
        flags = ["--enable-scale-out", "--max-model-len", "256", "--max-num-seqs", "16"]
        with started(seeing, *flags) as server:
            yield ServerSampler(server.url, model=str(seeing), max_start_wait=5.0)
        return
    made = VLLMSampler(
        {"model": str(seeing), "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "max_model_len": 256}
    )
    yield made
    made.close()


def requests(folder, config, samples=2):
    for number, sizes in enumerate(SIZES):
        images = pictures(sizes, number)
        inputs = processed(images, folder)
        tokens = tuple(prompt_tokens(config, inputs, [9 + number, 11]))
        for index in range(samples):
            chosen = SamplingParams(max_tokens=4 + index, ignore_eos=True)
            yield Request(f"{number}-{index}", tokens, chosen, uid=str(number), sample_index=index,
                          images=images or None, multi_modal_inputs=inputs or None)  # fmt: skip


def expected(model, request, done):
    """The log-probs of the drawn tokens by transformers' own pass over the finished sequence, without placeholders."""
    ids = torch.tensor([[*request.token_ids, *done.token_ids]])
    inputs = dict(request.multi_modal_inputs or {})
    if inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(request.token_ids) - 1 : -1]
    logits[:, model.config.image_token_id] = float("-inf")
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]


def check_log_probs(sampler, model, jobs):
    for request, done in zip(jobs, sample(sampler, jobs), strict=True):
        assert model.config.image_token_id not in done.token_ids
        torch.testing.assert_close(torch.tensor(done.log_probs), expected(model, request, done), atol=1e-4, rtol=1e-4)


def test_log_probs_of_answers_about_images_are_those_of_the_model(seeing, sampler):
    model = load_causal_lm(str(seeing)).eval()
    check_log_probs(sampler, model, list(requests(seeing, model.config)))


def test_an_update_of_the_tower_is_seen_in_pictures_that_were_encoded_before(seeing, sampler):
    model = load_causal_lm(str(seeing)).eval()
    jobs = list(requests(seeing, model.config))
    before = [done.log_probs for done in sample(sampler, jobs)]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.5 if "visual" in name and weight.dim() > 1 else 1)
    weights = [(name, tensor.clone()) for name, tensor in export_weights(model)]
    asyncio.run(sampler.update_weights(chunk_weights(weights, 1 << 16, 1), 1))
    check_log_probs(sampler, model, jobs)
    changed = [one != done.log_probs for one, done in zip(before, sample(sampler, jobs))]
    assert changed == [bool(request.images) for request in jobs]


def test_pictures_that_are_not_those_of_the_prompt_are_refused_by_name(seeing, sampler):
    model = load_causal_lm(str(seeing)).eval()
    (first, *_) = requests(seeing, model.config)
    fewer = Request("a", first.token_ids, first.sampling, multi_modal_inputs=first.multi_modal_inputs)
    with pytest.raises(RolloutError, match="has places for 1 images, and the request has 0"):
        sample(sampler, [fewer])
    larger = Request("b", first.token_ids, first.sampling, images=pictures([(84, 56)]))
    said = r"made 12 other tokens of the prompt of 10|makes a prompt of 12 tokens, and the request has 10"
    with pytest.raises(RolloutError, match=rf"({said}).*mm_processor_kwargs"):
        sample(sampler, [larger])
    assert len(sample(sampler, [first])[0].token_ids) == 4, "the engine still samples"


@pytest.mark.slow
def test_rewards_alone_teach_colours_over_vllm_as_over_hf(warm):  # noqa: F811
    seen = "actor_rollout_ref.rollout.name=vllm", "trainer.skip_old_log_prob=false"
    accuracy = learn(warm, "vllm", *seen)
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.8, accuracy
    gaps = curve(metrics(warm, "e2e", "vllm"), "training/rollout_probs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < 1e-3, "what was sampled is what is trained on"
