"""What one model that sees computes in several ways, and by how much the ways differ; ``-s`` prints the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

from tests.dist.ulysses_cells import ulysses_over_images
from tests.e2e.test_vision import RAY, steps_of, warm  # noqa: F401  # a fixture
from tests.harness.engines import make_engine, relative_error
from tests.harness.programs import curve
from tests.harness.ranks import cells_on_demand
from tests.harness.rows import columns
from tests.harness.runs import train
from tests.harness.samplers import sample
from tests.harness.vision import tiny_vision_dir, vision_example
from tests.rollout.hf.test_vision import requests
from verl.engines.settings import PassSettings
from verl.models import load_model_config
from verl.models.hf_folder import read_weights
from verl.protocol import DataProto
from verl.rollout.base import Completion, Request
from verl.rollout.hf.sampler import HFSampler

pytestmark = pytest.mark.slow
EXACT, SAMPLED = 1e-5, 1e-4
"""Bounds of a relative difference between two layouts, and of log-probs (nats) between sampler and trainer."""


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, tuple[float, float]]]:
    """What is compared -> (difference, bound)."""
    rows: dict[str, tuple[float, float]] = {}
    yield rows
    print("\n| compared, float32 | largest difference | bound |\n|---|---|---|")
    for name, (difference, bound) in rows.items():
        print(f"| {name} | {difference:.1e} | {bound:.0e} |")


def answered(prompts: list[Request], answers: list[Completion]) -> DataProto:
    """A batch of the prompts and what was drawn; rows are padded on the left and on the right."""
    longest, most = max(len(one.token_ids) for one in prompts), max(len(one.token_ids) for one in answers)
    ids = torch.zeros(len(prompts), longest + most, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(prompts), most, dtype=torch.long)
    for row, (request, answer) in enumerate(zip(prompts, answers)):
        tokens = torch.tensor([*request.token_ids, *answer.token_ids])
        start = longest - len(request.token_ids)
        ids[row, start : start + len(tokens)], attention[row, start : start + len(tokens)] = tokens, 1
        mask[row, : len(answer.token_ids)] = 1
    tensors = {"prompts": ids[:, :longest], "responses": ids[:, longest:], "input_ids": ids}
    tensors |= {"attention_mask": attention, "position_ids": (attention.cumsum(-1) - 1).clamp(min=0)}
    inputs = columns(multi_modal_inputs=[one.multi_modal_inputs or {} for one in prompts])
    return DataProto.from_dict(tensors={**tensors, "response_mask": mask}, non_tensors=inputs)


def test_sampler_and_layouts_of_the_trainer_agree_in_one_batch(tmp_path, table):
    """Prompts with pictures of several sizes, with two of them and without any, four samples of each."""
    folder = tiny_vision_dir(tmp_path / "model")
    prompts = list(requests(folder, load_model_config(str(folder))))
    answers = sample(HFSampler(str(folder)), prompts)
    batch = answered(prompts, answers)
    drawn = torch.zeros_like(batch.batch["response_mask"], dtype=torch.float32)
    for row, answer in enumerate(answers):
        drawn[row, : len(answer.log_probs)] = torch.tensor(answer.log_probs)

    def log_probs(**passes: object) -> Tensor:
        engine = make_engine(folder, trains=False, passes=PassSettings(**passes))
        return engine.infer(batch)["log_probs"] * batch.batch["response_mask"]

    packed = log_probs()
    table["log-probs: sampler hf, trainer"] = (float((drawn - packed).abs().max()), SAMPLED)
    for name, passes in (("padded", {"packed": False}), ("shared prompts", {"share_prompts": True})):
        table[f"log-probs: packed, {name}"] = (float(relative_error(log_probs(**passes), packed)), EXACT)
    fused = log_probs(share_prompts=True, fused_head="torch")
    table["log-probs: packed, fused head"] = (float(relative_error(fused, packed)), EXACT)
    assert all(difference <= bound for difference, bound in table.values()), table


def test_two_ranks_that_share_each_sequence_agree_with_one(tmp_path, table):
    with cells_on_demand({2: (ulysses_over_images,)}, tmp_path) as runs:
        errors = runs[2]["ulysses_over_images"][0]["errors"]
    for name, error in errors.items():
        table[f"{name}: Ulysses 1, 2"] = (float(error), EXACT)
    assert {"log_probs", "gradient", "weights"} < set(errors) and max(errors.values()) <= EXACT


def test_a_run_on_ray_with_two_workers_is_the_run_here(warm, table):  # noqa: F811
    """Scores depend on every token that was drawn: one other token and later steps train on another batch."""
    short = ("trainer.val_before_train=false", "trainer.test_freq=-1")
    here, on_ray = (steps_of(warm, name, *words, *short, steps=4) for name, words in (("here", ()), ("on_ray", RAY)))

    def both(name: str) -> tuple[list[float], list[float]]:
        return curve(here, name), curve(on_ray, name)

    scores, losses, norms = map(both, ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"))
    assert len(scores[0]) == len(scores[1]) == 4 and len(set(scores[0])) > 1 and min(norms[0]) > 0
    table["scores of 4 steps: one process here, two on Ray"] = (max(abs(a - b) for a, b in zip(*scores)), 0.0)
    table["loss: one process here, two on Ray"] = (max(abs(a - b) for a, b in zip(*losses)), EXACT)
    table["gradient norm: one process here, two on Ray"] = (max(abs(a - b) / a for a, b in zip(*norms)), EXACT)
    assert all(difference <= bound for difference, bound in table.values()), table


def weights_of(folder: str) -> dict[str, Tensor]:
    return read_weights(Path(folder) / "global_step_2/actor/huggingface")


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, monkeypatch, table):
    monkeypatch.chdir(tmp_path)
    tiny_vision_dir("model")
    pd.DataFrame(vision_example("make_data").rows("colour", {"train": 8}, 56, 0)["train"]).to_parquet("train.parquet")
    words = (
        "actor_rollout_ref.model.path=model", "data.max_prompt_length=64", "data.max_response_length=4",
        "data.train_batch_size=4", "actor_rollout_ref.rollout.n=3", "actor_rollout_ref.actor.optim.lr=1e-2",
        f"reward.custom_reward_function.path={vision_example('reward').__file__}", "trainer.save_freq=1",
    )  # fmt: skip
    train(*words, "trainer.total_training_steps=2", "trainer.default_local_dir=straight")
    train(*words, "trainer.total_training_steps=1", "trainer.default_local_dir=stopped")
    again = ("trainer.resume_mode=auto", "trainer.default_local_dir=stopped")
    resumed = train(*words, "trainer.total_training_steps=2", *again)
    straight, stopped = weights_of("straight"), weights_of("stopped")
    differing = sum(not torch.equal(straight[name], stopped[name]) for name in straight)
    table["weights after a resumed run, parameters with other bits"] = (float(differing), 0.0)
    assert differing == 0 and len(straight) == len(stopped) > 20 and len(resumed.batches) == 1
    assert any(not torch.equal(straight[name], tensor) for name, tensor in read_weights("model").items())
