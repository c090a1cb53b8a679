"""The single-file references give the library's losses on the library's own rollouts, and stay single files."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.runs import prepare, train
from tests.harness.scorers import scorer
from verl.models.loading import load_value_model

FOLDER = Path(__file__).resolve().parents[2] / "examples/single_file"


def reference(name: str):
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(f"single_file_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def inputs(shared_workplace: Path) -> Path:
    prepare(scorer("float(sum(map(ord, solution_str)) % 3)"), initializer_range=0.2)
    return shared_workplace


def library_run(*arguments: str):
    """One step of the library with two epochs over two mini-batches: the trained batch, and the step's metrics."""
    actor = (f"actor_rollout_ref.actor.{word}" for word in ("ppo_mini_batch_size=2", "ppo_epochs=2", "optim.lr=3e-2"))
    seen = train("data.max_response_length=6", *actor, *arguments)
    return seen.batches[-1], seen.metrics[-1]


def as_rollouts(module, batch, **more):
    tensors = batch.batch
    prompt_mask = tensors["attention_mask"][:, : tensors["prompts"].shape[1]]
    return module.Rollouts(tensors["prompts"], tensors["responses"], prompt_mask, tensors["response_mask"], **more)


def sizes(batch) -> list[int]:
    """Valid tokens of the mini-batches, which weigh their losses in the step's metric."""
    return [int(mask.sum()) for mask in batch.batch["response_mask"].split(8)] * 2


def weighted(values: list[float], weights: list[int]) -> float:
    return sum(v * w for v, w in zip(values, weights)) / sum(weights)


def test_grpo_gives_the_librarys_losses(inputs):
    grpo = reference("grpo")
    batch, metrics = library_run("algorithm.adv_estimator=grpo")
    uids = list(batch.non_tensor_batch["uid"])
    groups = torch.tensor([uids.index(uid) for uid in uids])
    rewards = batch.batch["token_level_scores"].sum(-1)
    advantages = grpo.group_advantages(rewards, groups)
    mask = batch.batch["response_mask"]
    torch.testing.assert_close(advantages[:, None] * mask, batch.batch["advantages"], atol=1e-5, rtol=0)
    settings = grpo.Settings(samples_per_prompt=4, mini_batch=2, epochs=2, learning_rate=3e-2)
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    rollouts = as_rollouts(grpo, batch, groups=groups)
    old = grpo.response_log_probs(model, rollouts).detach()
    torch.testing.assert_close(old, batch.batch["old_log_probs"] * mask, atol=1e-5, rtol=0)
    losses = grpo.update(model, grpo.make_optimizer(model, settings), rollouts, advantages, settings)
    assert len(losses) == 4 and max(map(abs, losses)) > 0.01  # the policy moved, and the clip was reached
    assert metrics["actor/pg_clipfrac"] > 0
    assert weighted(losses, sizes(batch)) == pytest.approx(metrics["actor/pg_loss"], abs=1e-5)


def test_ppo_gives_the_librarys_losses(inputs):
    ppo = reference("ppo")
    extra = ("algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.9", "critic.ppo_mini_batch_size=2")
    batch, metrics = library_run(*extra, "critic.ppo_epochs=2", "critic.optim.lr=3e-2")
    s = ppo.Settings(samples_per_prompt=4, mini_batch=2, epochs=2, gamma=0.99, lam=0.9)
    critic = load_value_model(str(inputs / "model"), seed=1)  # trainer.seed
    rollouts, rewards = as_rollouts(ppo, batch), batch.batch["token_level_scores"]
    values = ppo.response_values(critic, rollouts).detach()
    torch.testing.assert_close(values, batch.batch["values"] * rollouts.mask, atol=1e-5, rtol=0)
    advantages, returns = ppo.gae(rewards, values, rollouts.mask, s.gamma, s.lam)
    torch.testing.assert_close(advantages, batch.batch["advantages"], atol=1e-5, rtol=0)
    torch.testing.assert_close(returns, batch.batch["returns"], atol=1e-5, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    both = [(m, torch.optim.AdamW(m.parameters(), lr=3e-2, weight_decay=0.01)) for m in (model, critic)]
    losses, value_losses = ppo.update(*both, rollouts, rewards, s)
    assert weighted(losses, sizes(batch)) == pytest.approx(metrics["actor/pg_loss"], abs=1e-5)
    assert weighted(value_losses, sizes(batch)) == pytest.approx(metrics["critic/vf_loss"], abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_it_is_one_short_file_without_the_library(name):
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 250
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= {
        "__future__", "argparse", "random", "collections.abc", "dataclasses", "pandas", "torch", "transformers",
    }  # fmt: skip
