"""Models that see on CUDA: log-probs and answers are those of transformers, row by row."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from tests.harness.engines import gradients, make_engine, relative_error
from tests.harness.vision import (
    log_probs_row_by_row,
    pictures,
    processed,
    prompt_tokens,
    seen_batch,
    token_kinds,
    vision_dir,
)
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import ActorConfig
from verl.engines.settings import PassSettings
from verl.models import load_causal_lm
from verl.rollout import Request, SamplingParams
from verl.rollout.hf.sampler import HFSampler

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "gemma3", "internvl")
SHARED, PADDED = PassSettings(share_prompts=True), PassSettings(packed=False)


def test_log_probs_are_those_of_each_row_alone() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = vision_dir(Path(folder), family)
            model = load_causal_lm(str(path)).eval()
            batch = seen_batch(model.config, path)
            with torch.no_grad():
                expected = log_probs_row_by_row(model, batch)
            for passes, dtype in ((SHARED, "float32"), (PADDED, "float32"), (SHARED, "bfloat16")):
                engine = make_engine(path, trains=False, engine={"dtype": dtype}, passes=passes, device="cuda")
                error = relative_error(engine.infer(batch)["log_probs"].cpu(), expected)
                assert error < (1e-4 if dtype == "float32" else 3e-2), (family, passes, dtype, error)


def test_gradients_of_tower_and_language_model_do_not_depend_on_the_layout() -> None:
    for family in ("qwen2_5_vl", "qwen3_vl", "gemma3", "internvl"):
        with tempfile.TemporaryDirectory() as folder:
            path, made = vision_dir(Path(folder), family), []
            for passes in (SHARED, PADDED):
                engine = make_engine(path, engine={"dtype": "float32"}, passes=passes, device="cuda")
                batch = seen_batch(engine.model.config, path)
                made.append(gradients(engine, batch, PPOPolicyLoss(ActorConfig()), micro_batch_size=3))
            assert abs(made[0][0] - made[1][0]) < 1e-4, family
            assert relative_error(made[0][1], made[1][1]) < 1e-4, family


def test_log_probs_of_answers_about_pictures_are_those_of_the_model() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = vision_dir(Path(folder), family)
            model = load_causal_lm(str(path)).eval().to("cuda")
            sampler = HFSampler(str(path), device="cuda", dtype=torch.float32)
            requests = []
            for number, sizes in enumerate((((56, 56),), (), ((84, 56), (28, 112)))):
                inputs = processed(pictures(sizes, number), path)
                tokens = tuple(prompt_tokens(model.config, inputs, [9 + number, 11]))
                for index in range(3):
                    how = SamplingParams(max_tokens=4 + index, ignore_eos=True)
                    more = {"uid": str(number), "sample_index": index, "multi_modal_inputs": inputs or None}
                    requests.append(Request(f"{number}-{index}", tokens, how, **more))

            async def together(sampler=sampler, requests=requests):
                return await asyncio.gather(*(sampler.generate(request) for request in requests))

            for request, done in zip(requests, asyncio.run(together())):
                ids = torch.tensor([[*request.token_ids, *done.token_ids]], device="cuda")
                inputs = {name: tensor.cuda() for name, tensor in (request.multi_modal_inputs or {}).items()}
                if inputs:
                    shown = (ids == model.config.image_token_id).int()
                    shown[:, len(request.token_ids) :] = 0
                    inputs |= token_kinds(model.config, shown)
                with torch.no_grad():
                    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(request.token_ids) - 1 : -1]
                logs = logits.float().log_softmax(-1).gather(-1, ids[0, len(request.token_ids) :, None])[:, 0].cpu()
                torch.testing.assert_close(torch.tensor(done.log_probs), logs, atol=1e-4, rtol=0, msg=family)
