"""Images and videos in vLLM: prompts are the trainer's tokens, log-probs the model's, and new towers are used."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.test_vision import STEPS, learn, warm  # noqa: F401  # a fixture
from tests.engines_real.vllm.test_server import started
from tests.harness.programs import curve, metrics
from tests.harness.samplers import sample
from tests.harness.vision import (
    GLM,
    WITH_VIDEOS,
    kinds_of,
    pictures,
    processed,
    prompt_tokens,
    shown_clips,
    token_kinds,
    vision_dir,
)
from verl.errors import RolloutError
from verl.models import export_weights, load_causal_lm
from verl.models.vision import family_of
from verl.rollout.base import Request, SamplingParams
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.vllm.sampler import VLLMSampler
from verl.weight_sync import chunk_weights

HERE, SERVER = "this process", "a server"
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "idefics3")
SIZES = (((56, 56),), (), ((84, 56), (28, 112)), ((56, 84),))


PLACES = [(family, HERE) for family in FAMILIES] + [(family, SERVER) for family in FAMILIES[:3]]


def model_dir(folder, family):
    """A model with heads of 32, which vLLM's CPU kernels take, and weights wide enough for pictures to matter."""
    made = vision_dir(folder, family, hidden=128)
    file = made / "model.safetensors"
    weights = {name: value * 3 if value.dim() > 1 else value for name, value in load_file(str(file)).items()}
    save_file(weights, str(file), metadata={"format": "pt"})
    return made


def sampler_of(folder):
    settings = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "max_model_len": 256}
    return VLLMSampler({"model": str(folder), **settings, "limit_mm_per_prompt": {"image": 1, "video": 1}})


@pytest.fixture(scope="module", params=PLACES, ids=" in ".join)
def served(tmp_path_factory, request):
    """The folder of a model, and a sampler of vLLM over it."""
    family, place = request.param
    made = model_dir(tmp_path_factory.mktemp("seeing") / "model", family)
    if place == SERVER:
        flags = ["--enable-scale-out", "--max-model-len", "256", "--max-num-seqs", "16"]
        with started(made, *flags) as server:
            yield made, ServerSampler(server.url, model=str(made), max_start_wait=5.0)
        return
    sampler = sampler_of(made)
    yield made, sampler
    sampler.close()


def requests(folder, config, samples=2):
    for number, sizes in enumerate(SIZES):
        images = pictures(sizes, number)
        inputs = processed(images, folder)
        tokens = tuple(prompt_tokens(config, inputs, [9 + number, 11]))
        for index in range(samples):
            chosen = SamplingParams(max_tokens=4 + index, ignore_eos=True)
            yield Request(f"{number}-{index}", tokens, chosen, uid=str(number), sample_index=index,
                          images=images or None, multi_modal_inputs=inputs or None)  # fmt: skip


def expected(model, request, done, excluded):
    """The log-probs of the drawn tokens by a pass of transformers over the finished sequence.

    Args:
        excluded: tokens that are left out of the distribution.
    """
    ids = torch.tensor([[*request.token_ids, *done.token_ids]])
    inputs = dict(request.multi_modal_inputs or {})
    if inputs:
        kinds = torch.zeros_like(ids, dtype=torch.int)
        kinds[:, : len(request.token_ids)] = kinds_of(model.config, ids[:, : len(request.token_ids)])
        inputs |= token_kinds(model.config, kinds)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(request.token_ids) - 1 : -1]
    logits[:, sorted(excluded)] = float("-inf")
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]


def check_log_probs(sampler, model, jobs):
    marks = set(family_of(model.config).never_drawn)
    excluded = marks if isinstance(sampler, ServerSampler) else set()  # the server does not report their share
    for request, done in zip(jobs, sample(sampler, jobs), strict=True):
        assert not marks & set(done.token_ids)
        same = expected(model, request, done, excluded)
        torch.testing.assert_close(torch.tensor(done.log_probs), same, atol=1e-4, rtol=1e-4)


def test_log_probs_of_answers_about_images_are_those_of_the_model(served):
    folder, sampler = served
    model = load_causal_lm(str(folder)).eval()
    check_log_probs(sampler, model, list(requests(folder, model.config)))


def about_videos(folder, model, sizes, number):
    inputs, tokens = shown_clips(folder, sizes, [9 + number, 11], number)
    for index in range(2):
        drawn = SamplingParams(max_tokens=4 + index, ignore_eos=True)
        named = {"uid": f"video {number}", "sample_index": index, "multi_modal_inputs": inputs}
        yield Request(f"{number}-{index}", tuple(tokens), drawn, **named)


def test_log_probs_of_answers_about_videos_are_those_of_the_model(served):
    folder, sampler = served
    model = load_causal_lm(str(folder)).eval()
    family = model.config.model_type
    if family not in WITH_VIDEOS or isinstance(sampler, ServerSampler):
        pytest.skip("takes no videos")
    pictured = () if family in GLM else ((56, 56),)  # transformers refuses such a row of GLM-4V
    prompts = [((4, 56, 56),), ((5, 84, 56), *pictured, (2, 28, 112))]
    if family == "qwen2_5_vl":  # 2 frames at a distance of 2 seconds, which are 8 positions, and 2 tokens wide
        with pytest.raises(RolloutError, match=r"from its last frame \(8\), transformers from .* \(2 tokens\)"):
            sample(sampler, list(about_videos(folder, model, prompts[0], 0)))
        prompts = [((4, 56, 252),), ((2, 84, 56), (56, 56), (2, 28, 112))]
    jobs = [job for number, sizes in enumerate(prompts) for job in about_videos(folder, model, sizes, number)]
    check_log_probs(sampler, model, jobs)


def test_an_update_of_the_tower_is_seen_in_pictures_that_were_encoded_before(served):
    folder, sampler = served
    model = load_causal_lm(str(folder)).eval()
    jobs = list(requests(folder, model.config))
    before = [done.log_probs for done in sample(sampler, jobs)]
    towers = ("visual", "vision_tower", "vision_model")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(1.5 if any(tower in name for tower in towers) and weight.dim() > 1 else 1)
    weights = [(name, tensor.clone()) for name, tensor in export_weights(model)]
    asyncio.run(sampler.update_weights(chunk_weights(weights, 1 << 16, 1), 1))
    check_log_probs(sampler, model, jobs)
    changed = [one != done.log_probs for one, done in zip(before, sample(sampler, jobs))]
    assert changed == [bool(request.images) for request in jobs]


def test_pictures_that_are_not_those_of_the_prompt_are_refused_by_name(served):
    folder, sampler = served
    model = load_causal_lm(str(folder)).eval()
    (first, *_) = requests(folder, model.config)
    larger = pictures([(84, 56)])
    if isinstance(sampler, ServerSampler):
        fewer = Request("a", first.token_ids, first.sampling, multi_modal_inputs=first.multi_modal_inputs)
        refused = [
            (fewer, "has places for 1 images, and the request has 0"),
            (Request("b", first.token_ids, first.sampling, images=larger),
             r"made 12 other tokens of the prompt of 10.*mm_processor_kwargs"),
        ]  # fmt: skip
    else:
        inputs = processed([*larger, *larger], folder)
        refused = [
            (Request("a", first.token_ids, first.sampling, images=larger), "images without multi_modal_inputs"),
            (Request("b", first.token_ids, first.sampling, multi_modal_inputs=inputs),
             r"images take \d+ tokens, and the row lacks placeholders"),
            (Request("c", first.token_ids, first.sampling),
             "request c: the prompt has placeholders of images, and the request shows none"),
        ]  # fmt: skip
    for request, said in refused:
        with pytest.raises(RolloutError, match=said):
            sample(sampler, [request])
    assert len(sample(sampler, [first])[0].token_ids) == 4, "the engine still samples"


def test_on_a_cpu_images_of_gemma_3_are_refused_and_its_text_is_exact(tmp_path):
    folder = model_dir(tmp_path / "model", "gemma3")
    sampler, model = sampler_of(folder), load_causal_lm(str(folder)).eval()
    jobs = list(requests(folder, model.config))
    with pytest.raises(
        RolloutError, match="on a CPU vLLM lets the tokens of an image of gemma3 see only those in front"
    ):
        sample(sampler, jobs[:1])
    check_log_probs(sampler, model, [job for job in jobs if not job.images])
    sampler.close()


@pytest.mark.slow
def test_rewards_alone_teach_colours_over_vllm_as_over_hf(warm):  # noqa: F811
    seen = "actor_rollout_ref.rollout.name=vllm", "trainer.skip_old_log_prob=false"
    accuracy = learn(warm, "vllm", *seen)
    assert accuracy[0] < 0.65 and accuracy[-1] >= 0.8, accuracy
    gaps = curve(metrics(warm, "e2e", "vllm"), "training/rollout_probs_diff_max")
    assert len(gaps) == STEPS and max(gaps) < 1e-3, "what was sampled is what is trained on"
