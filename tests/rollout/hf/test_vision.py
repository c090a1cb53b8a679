"""Images in the hf sampler: log-probs are the model's own, a picture goes through the tower once, pictures matter."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.harness.models import tiny_model_dir
from tests.harness.samplers import sample
from tests.harness.vision import (
    FAMILIES,
    GLM,
    TILED,
    kinds_of,
    num_tiles,
    pictures,
    processed,
    prompt_tokens,
    shown_clips,
    token_kinds,
)
from verl.errors import RolloutError
from verl.models import export_weights, load_causal_lm
from verl.models.vision import family_of
from verl.models.vision import inputs as vision_inputs
from verl.rollout.base import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler
from verl.weight_sync import chunk_weights

SIZES = (((56, 56),), (), ((84, 56), (28, 112)), ((56, 84),))


def requests(folder, config, samples=4, **more):
    """``samples`` requests for each prompt of `SIZES`, with the inputs that they share."""
    for number, sizes in enumerate(SIZES):
        inputs = processed(pictures(sizes, number), folder)
        tokens = tuple(prompt_tokens(config, inputs, [9 + number, 11]))
        for index in range(samples):
            yield Request(
                f"{number}-{index}",
                tokens,
                SamplingParams(max_tokens=4 + index, ignore_eos=True),
                uid=str(number),
                sample_index=index,
                multi_modal_inputs=inputs or None,
                **more,
            )


def expected(model, request, done):
    """The log-probs of the drawn tokens by transformers' own pass over the finished sequence."""
    ids = torch.tensor([[*request.token_ids, *done.token_ids]])
    inputs = dict(request.multi_modal_inputs or {})
    if inputs:
        kinds = torch.zeros_like(ids, dtype=torch.int)
        kinds[:, : len(request.token_ids)] = kinds_of(model.config, ids[:, : len(request.token_ids)])
        inputs |= token_kinds(model.config, kinds)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(request.token_ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, torch.tensor(done.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"full_determinism": True}])
def test_log_probs_of_answers_about_images_are_those_of_the_model(seeing_model, family, options):
    folder = seeing_model(family)
    sampler, model = HFSampler(str(folder), **options), load_causal_lm(str(folder)).eval()
    asked = [request for request in requests(folder, model.config) if request.sampling.max_tokens]
    for request, done in zip(asked, sample(sampler, asked)):
        assert model.config.image_token_id not in done.token_ids, (
            "choose another seed: transformers cannot compare this"
        )
        torch.testing.assert_close(torch.tensor(done.log_probs), expected(model, request, done), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "internvl"]
)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}])
def test_log_probs_of_answers_about_videos_are_those_of_the_model(seeing_model, family, options):
    folder = seeing_model(family)
    sampler, model = HFSampler(str(folder), **options), load_causal_lm(str(folder)).eval()
    jobs, pictured = [], () if family in GLM else ((56, 56),)  # transformers refuses such a row of GLM-4V
    for number, sizes in enumerate((((4, 56, 56),), ((5, 84, 56), *pictured, (2, 28, 112)))):
        inputs, tokens = shown_clips(folder, sizes, [9 + number, 11], number)
        for index in range(3):
            drawn = SamplingParams(max_tokens=4 + index, ignore_eos=True)
            named = {"uid": f"video {number}", "sample_index": index, "multi_modal_inputs": inputs}
            jobs.append(Request(f"{number}-{index}", tuple(tokens), drawn, **named))
    for job, done in zip(jobs, sample(sampler, jobs)):
        drawn_marks = {model.config.image_token_id, getattr(model.config, "video_token_id", -1)} & set(done.token_ids)
        assert not drawn_marks, "choose another uid: transformers cannot compare this"
        torch.testing.assert_close(torch.tensor(done.log_probs), expected(model, job, done), atol=1e-5, rtol=1e-5)
    shown = 5 + 2 + 4 if family == "internvl" else 3  # each frame is a tile there
    shown += len(pictured)
    assert sampler.stats()["images_encoded"] == shown


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_take_no_features_see_the_pictures_too(seeing_model, family, monkeypatch):
    """As in transformers 5.17, which ignores the argument: a sampler of that version saw no picture."""
    folder = seeing_model(family)
    model, results = load_causal_lm(str(folder)).eval(), []
    jobs = [request for request in requests(folder, model.config) if request.sampling.max_tokens]
    for _ in range(2):
        sampler = HFSampler(str(folder))
        results.append([(done.token_ids, done.log_probs) for done in sample(sampler, jobs)])
        shown = {id(job.multi_modal_inputs): job.multi_modal_inputs for job in jobs if job.multi_modal_inputs}
        tiles = sum(num_tiles(inputs) for inputs in shown.values()) if family in TILED else 4
        assert sampler.stats()["images_encoded"] == tiles
        monkeypatch.setattr(vision_inputs, "takes_features", lambda backbone: False)
    assert results[0] == results[1]


def test_a_picture_goes_through_the_tower_once_for_all_samples_and_again_after_new_weights(seeing_model):
    folder = seeing_model()
    sampler, config = HFSampler(str(folder)), load_causal_lm(str(folder)).config
    asked = list(requests(folder, config, samples=8))
    sample(sampler, asked)
    assert sampler.stats()["images_encoded"] == 4 and sampler.stats()["prompt_hits"] == 4 * 7
    sample(sampler, asked)
    assert sampler.stats()["images_encoded"] == 4
    weights = [(name, tensor.clone()) for name, tensor in export_weights(sampler.model)]
    asyncio.run(sampler.update_weights(chunk_weights(weights, 10_000, 1), 1))
    sample(sampler, asked)
    assert sampler.stats()["images_encoded"] == 8


def test_the_same_words_about_another_picture_are_another_prompt(seeing_model):
    folder = seeing_model()
    sampler, config = HFSampler(str(folder)), load_causal_lm(str(folder)).config
    first, second = (processed(pictures([(56, 56)], seed), folder) for seed in (1, 2))
    tokens = tuple(prompt_tokens(config, first, [9, 11]))
    greedy = SamplingParams(max_tokens=3, do_sample=False)
    one, two = sample(
        sampler, [Request(n, tokens, greedy, multi_modal_inputs=x) for n, x in (("a", first), ("b", second))]
    )
    assert one.log_probs != two.log_probs and sampler.stats()["images_encoded"] == 2


def test_a_response_goes_on_from_its_prefix_as_if_it_had_not_stopped(seeing_model):
    folder = seeing_model()
    sampler, config = HFSampler(str(folder)), load_causal_lm(str(folder)).config
    whole = next(iter(requests(folder, config)))
    done = sample(sampler, [whole])[0]
    rest = next(iter(requests(folder, config, generated_prefix=done.token_ids[:2])))
    again = sample(sampler, [rest])[0]
    assert again.token_ids == done.token_ids[2:]
    torch.testing.assert_close(torch.tensor(again.log_probs), torch.tensor(done.log_probs[2:]), atol=1e-5, rtol=1e-5)


def test_a_model_of_text_refuses_images_and_pictures_without_a_processor_are_told(seeing_model, tmp_path):
    text = HFSampler(str(tiny_model_dir(tmp_path)))
    asked = next(iter(requests(seeing_model(), load_causal_lm(str(seeing_model())).config)))
    with pytest.raises(RolloutError, match="Qwen2ForCausalLM takes no images"):
        sample(text, [asked])
    with pytest.raises(RolloutError, match="has no processor"):
        sample(HFSampler(str(seeing_model())), [Request("a", (9,), SamplingParams(), images=pictures([(56, 56)]))])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "glm4v"])
def test_no_placeholder_is_drawn(seeing_model, family):
    """At a high temperature every token is about as likely: of 4,096 draws some would be placeholders."""
    sampler = HFSampler(str(seeing_model(family)))
    drawn = SamplingParams(max_tokens=64, temperature=1000.0, ignore_eos=True)
    jobs = [Request(str(number), (9, 11), drawn, uid=str(number), sample_index=0) for number in range(64)]
    tokens = {token for done in sample(sampler, jobs) for token in done.token_ids}
    config = sampler.model.config
    marks = {config.image_token_id, config.video_start_token_id if family == "glm4v" else config.video_token_id}
    size = config.get_text_config().vocab_size
    assert size < 512 and not tokens & marks and len(tokens) > 0.9 * (size - len(marks))


def test_text_is_sampled_from_a_model_whose_placeholder_has_no_logit(seeing_model):
    """As in checkpoints of Gemma 3 that were cut to the tokens of text: the placeholder is beyond the vocabulary."""
    model = load_causal_lm(str(seeing_model("gemma3")))
    size = model.config.get_text_config().vocab_size
    model.config.image_token_id = size
    sampler = HFSampler(model)
    (done,) = sample(sampler, [Request("a", (9, 11), SamplingParams(max_tokens=4, ignore_eos=True), uid="a")])
    assert family_of(model.config).never_drawn == () and len(done.token_ids) == 4
    model.config.image_token_id = size - 1
    assert family_of(model.config).never_drawn == (size - 1,)
