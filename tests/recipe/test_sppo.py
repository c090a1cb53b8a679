"""The SPPO recipe: targets and loss by hand, and a run whose reward rises."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.sppo.core import centred, centred_over_batch, softmean, sppo
from recipe.sppo.main_sppo import SPPO, main
from tests.harness.runs import logged
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.groups import Groups

MODE = "seq-mean-token-mean"
A = "actor_rollout_ref.actor"


def loss_of(old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, eta: float = 1.0):
    return sppo(old, new, advantages, mask, MODE, SimpleNamespace(sppo_eta=eta), None, loss_norm(mask))


def test_scores_of_one_and_zero_have_the_targets_of_the_worked_example():
    """ln((e + 1) / 2) = 0.620115."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    advantages, _ = centred(rewards, torch.ones(2, 2), index=["a", "a"])
    expected = torch.tensor([[0.379885, 0.379885], [-0.620115, -0.620115]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_the_loss_is_the_worked_example_however_its_log_ratios_are_spread_over_tokens():
    """(0.2 - 0.379885)^2 and (-0.1 + 0.620115)^2 have the mean 0.151439."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    old = torch.full((2, 3), -1.0)
    new = old + torch.tensor([[0.5, -0.4, 0.1], [-0.2, 0.1, 7.0]])
    advantages = torch.tensor([[0.379885], [-0.620115]]) * mask
    loss, metrics = loss_of(old, new, advantages, mask)
    assert loss.item() == pytest.approx(0.151439, abs=1e-6)
    assert metrics["sppo_log_ratio"].value == pytest.approx(0.05, abs=1e-6)
    assert metrics["sppo_error"].value == pytest.approx((0.179885 + 0.520115) / 2, abs=1e-6)


def test_prompts_have_soft_means_of_their_own_unless_the_batch_has_one():
    rewards = torch.tensor([[1.0], [5.0], [0.0], [5.0]])
    own, _ = centred(rewards, torch.ones(4, 1), index=["a", "b", "a", "b"])
    torch.testing.assert_close(own[[1, 3]], torch.zeros(2, 1))
    torch.testing.assert_close(own[[0, 2], 0], torch.tensor([0.379885, -0.620115]), atol=1e-6, rtol=0)
    whole, _ = centred_over_batch(rewards, torch.ones(4, 1))
    mean = (torch.tensor([1.0, 5.0, 0.0, 5.0]).exp().mean()).log()
    torch.testing.assert_close(whole, rewards - mean, atol=1e-6, rtol=0)


def test_a_soft_mean_of_huge_scores_is_finite_and_unscored_rows_are_in_none():
    scores = torch.tensor([1000.0, 999.0, float("nan")], dtype=torch.float64)
    groups = Groups.of([0, 0, 0], scores.isfinite())
    assert softmean(scores, groups)[0].item() == pytest.approx(999.620115, abs=1e-6)
    advantages, _ = centred(scores[:, None].float(), torch.ones(3, 1), index=[0, 0, 0])
    assert advantages[2].item() == 0 and advantages[:2].isfinite().all()


def test_the_gradient_on_the_policy_that_sampled_is_minus_two_eta_times_the_target():
    mask = torch.tensor([[1, 1], [1, 0]])
    old = torch.full((2, 2), -2.0, dtype=torch.float64)
    new = old.clone().requires_grad_(True)
    advantages = torch.tensor([[0.5, 0.5], [-1.0, 0.0]], dtype=torch.float64)
    loss_of(old, new, advantages, mask, eta=3.0)[0].backward()
    torch.testing.assert_close(new.grad, -2 * 3.0 * advantages / 2)  # over two rows


def test_micro_batches_add_up_and_rows_without_tokens_do_not_count():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]])
    old, new = (-torch.rand(4, 3, generator=generator) for _ in range(2))
    advantages = torch.randn(4, 1, generator=generator) * mask
    config, norm = SimpleNamespace(sppo_eta=1.0), loss_norm(mask)
    whole = sppo(old, new, advantages, mask, MODE, config, None, norm)[0]
    split = [
        sppo(old[r], new[r], advantages[r], mask[r], MODE, config, None, norm)[0] for r in (slice(0, 1), slice(1, 4))
    ]
    rows = ((new - old) * mask).sum(-1) - advantages[:, 0]
    torch.testing.assert_close(sum(split), whole)
    torch.testing.assert_close(whole, rows[[0, 1, 3]].square().mean())


@pytest.mark.slow
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path):
    status = main(
        [
            "data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            f"{A}.optim.lr=3e-2", "reward.custom_reward_function.path=scorer.py", "trainer.logger=[file]",
            "trainer.resume_mode=disable", "trainer.total_training_steps=12", "trainer.experiment_name=sppo",
            "trainer.save_freq=-1", f"{A}.sppo_eta=5",
        ]
    )  # fmt: skip
    steps = logged("logs/verl-sppo", "sppo")
    means = [step["critic/score/mean"] for step in steps]
    assert status == 0 and len(means) == 12
    assert sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.5, means
    assert all(step["actor/sppo_error"] > 0 for step in steps)


def test_the_command_line_wins_over_the_recipe(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main([f"{A}.sppo_eta=2.5", "--cfg", "job"])
    assert not left.value.code
    said = capsys.readouterr().out
    assert "sppo_eta: 2.5" in said and "recipe.sppo.core:centred" in said and len(SPPO) == 8
