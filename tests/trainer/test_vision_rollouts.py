"""A step of GRPO on pictures whose sampler is elsewhere: the samples of one in the trainer's process, bit by bit."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

from tests.harness.runs import train
from tests.harness.servers import serving
from tests.harness.vision import tiny_vision_dir, vision_example
from verl.outcomes import run_now
from verl.rollout.server.process import HostProcess

pytestmark = pytest.mark.slow
R = "actor_rollout_ref.rollout"
SETTINGS = ("actor_rollout_ref.model.path=model", "data.max_prompt_length=64", "data.max_response_length=4",
            f"{R}.full_determinism=true")  # fmt: skip
STEP = (*SETTINGS, "data.train_batch_size=4", f"{R}.n=3", f"{R}.calculate_log_probs=true",
        f"reward.custom_reward_function.path={Path(__file__).parents[2] / 'examples/vision/reward.py'}",
        "trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=1e-2")  # fmt: skip


@pytest.fixture(scope="module")
def place(shared_workplace):
    tiny_vision_dir("model")
    rows = vision_example("make_data").rows("colour", {"train": 8}, 56, 0)["train"]
    pd.DataFrame(rows).to_parquet("train.parquet")
    return shared_workplace


@pytest.fixture(scope="module")
def here(place):
    """The steps of a run whose sampler is in its process."""
    return samples(train(*STEP))


def samples(seen):
    names = ("prompts", "responses", "rollout_log_probs")
    return [{name: batch.batch[name].clone() for name in names} for batch in seen.batches]


def assert_same(steps, others):
    assert len(steps) == len(others) == 2
    for one, other in zip(steps, others):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(steps[0]["rollout_log_probs"], steps[1]["rollout_log_probs"])


@pytest.mark.parametrize("backend", ["shared_memory", "disk"])
def test_a_sampler_in_a_child_process_draws_what_one_in_the_trainer_draws(here, backend):
    assert_same(here, samples(train(*STEP, f"{R}.checkpoint_engine.backend={backend}")))


def test_a_host_of_this_library_draws_what_a_sampler_in_the_trainer_draws(here, monkeypatch):
    host = HostProcess([*SETTINGS], "cpu", "the host")
    try:
        run_now(host.wait_until_up(300.0))
        monkeypatch.setenv("HOST_KEY", host.key)
        served = (f"{R}.name=server", f"{R}.server.url={host.url}", f"{R}.server.api_key_env=HOST_KEY")
        assert_same(here, samples(train(*STEP, *served)))
    finally:
        host.close()


class FakeSGLang:
    """Expands prompts as SGLang does: as many placeholders as the size of the decoded picture says."""

    def __init__(self, pad):
        self.pad, self.sizes = pad, []

    def __call__(self, payload):
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in payload["image_data"]]
        self.sizes += [image.size for image in images]
        counts = iter([(image.width // 28) * (image.height // 28) for image in images])
        used = [one for t in payload["input_ids"] for one in [t] * (next(counts) if t == self.pad else 1)]
        sampling = payload["sampling_params"]
        draw = random.Random(sampling["sampling_seed"])
        triples = [[-5.5, draw.randrange(7, 259), None] for _ in range(sampling["max_new_tokens"])]
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": triples}
        return 200, {"meta_info": meta, "prompt_token_ids": used}


def test_a_step_over_sglang_sends_the_pictures_of_the_rows_and_trains_on_its_tokens(here, place):
    pad = json.loads((place / "model/config.json").read_text())["image_token_id"]
    answers = FakeSGLang(pad)
    with serving({"/generate": answers, "/update_weights_from_disk": (200, {"success": True})}) as server:
        steps = samples(train(*STEP, f"{R}.name=sglang", f"{R}.server.url={server.url}",
                              "actor_rollout_ref.actor.freeze_vision_tower=true"))  # fmt: skip
        payloads = server.payloads("/generate")
    assert answers.sizes == [(56, 56)] * 2 * 4 * 3 and len(payloads) == 2 * 4 * 3
    assert all(torch.equal(one["prompts"], other["prompts"]) for one, other in zip(steps, here))
    drawn = {tuple(row) for step in steps for row in step["responses"].tolist()}
    expected = {tuple(t for _, t, _ in FakeSGLang(pad)(payload)[1]["meta_info"]["output_token_logprobs"])
                for payload in payloads}  # fmt: skip
    assert drawn == expected
    assert server.count("/update_weights_from_disk") >= 2
