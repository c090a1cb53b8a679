"""Online DPO, XPO and Nash-MD: their papers' formulas in numpy, learning, settings, what the recipe touches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipe.online_dpo.core import nash_md, online_dpo, xpo
from recipe.online_dpo.main_online_dpo import ALGORITHMS, defaults_of, main
from tests.harness.runs import logged, prepare
from verl.algorithms.aggregation import loss_norm
from verl.config import load_config
from verl.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CONFIG = SimpleNamespace(online_beta=0.3, xpo_alpha=0.2, nash_mixture=0.4, nash_scale=0.5)


def answers(seed: int, rows: int = 8) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Log-probs (rows, 5) of the policy, of the one that drew, and of the reference; the second pair is none."""
    draw = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, 5, generator=draw) < 0.7).long()
    mask[:, 0] = 1
    mask[2:4] = 0
    names = ("log_prob", "old_log_prob", "ref_log_prob")
    return {n: -torch.rand(rows, 5, generator=draw, dtype=torch.float64) * mask for n in names}, mask


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def written_out(tensors: dict[str, torch.Tensor], mask: torch.Tensor, alpha: float) -> float:
    """Algorithm 1 of XPO pair by pair, its mean over the reference by self-normalised weights; alpha 0: online DPO."""
    policy, old, reference = (tensors[n].numpy().sum(-1) for n in ("log_prob", "old_log_prob", "ref_log_prob"))
    losses = []
    for better in range(0, len(mask), 2):
        worse = better + 1
        if mask[better].sum() == 0:
            continue
        h = (policy[better] - reference[better]) - (policy[worse] - reference[worse])
        ratio = np.exp(reference[[better, worse]] - old[[better, worse]])
        bonus = (ratio / ratio.sum() * policy[[better, worse]]).sum()
        losses.append(-np.log(sigmoid(CONFIG.online_beta * h)) + alpha * bonus)
    return float(np.mean(losses))


@pytest.mark.parametrize("seed", range(3))
def test_losses_on_pairs_are_the_formulas_of_their_papers(seed):
    tensors, mask = answers(seed)
    norm = loss_norm(mask)
    loss, _ = online_dpo(tensors["log_prob"], tensors["ref_log_prob"], mask, CONFIG, norm)
    assert loss.item() == pytest.approx(written_out(tensors, mask, 0.0), rel=1e-9)
    loss, metrics = xpo(**tensors, response_mask=mask, config=CONFIG, norm=norm)
    assert loss.item() == pytest.approx(written_out(tensors, mask, CONFIG.xpo_alpha), rel=1e-9)
    assert 0.5 <= metrics["xpo_largest_weight"].value <= 1


def test_the_bonus_of_xpo_lowers_the_answers_of_the_reference_by_weight():
    """d loss / d log pi(y) of the bonus alone is alpha w / pairs, by finite differences of the numpy formula."""
    tensors, mask = answers(1)
    policy = tensors["log_prob"].clone().requires_grad_()
    arguments = {**tensors, "log_prob": policy}
    loss, _ = xpo(**arguments, response_mask=mask, config=CONFIG, norm=loss_norm(mask))
    (gradient,) = torch.autograd.grad(loss, policy)
    for row in (0, 1, 5):
        moved = []
        for step in (1e-6, -1e-6):
            changed = tensors["log_prob"].clone()
            changed[row, 0] += step
            moved.append(written_out({**tensors, "log_prob": changed}, mask, CONFIG.xpo_alpha))
        assert gradient[row, 0].item() == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("loss_fn", [online_dpo, xpo])
def test_micro_batches_add_up_and_a_tied_prompt_counts_nowhere(loss_fn):
    tensors, mask = answers(2)
    norm = loss_norm(mask)

    def of(rows: slice) -> float:
        read = {n: t[rows] for n, t in tensors.items() if loss_fn is xpo or n != "old_log_prob"}
        return loss_fn(**read, response_mask=mask[rows], config=CONFIG, norm=norm)[0].item()

    assert of(slice(0, 2)) + of(slice(2, 4)) + of(slice(4, 8)) == pytest.approx(of(slice(0, 8)), rel=1e-12)
    assert of(slice(2, 4)) == 0


def nash(scores, old, reference, index, mixture: float = 0.4, tau: float = 0.1) -> np.ndarray:
    """Section 7 of arXiv 2312.00886 answer by answer: the opponents are the other answers to the prompt."""
    result = np.zeros(len(scores))
    for i, prompt in enumerate(index):
        others = [j for j, other in enumerate(index) if other == prompt and j != i and np.isfinite(scores[j])]
        ratio = np.array([np.exp(reference[j] - old[j]) ** mixture for j in others])
        beats = np.array([sigmoid((scores[i] - scores[j]) / CONFIG.nash_scale) for j in others])
        preferred = (ratio * beats).sum() / ratio.sum() - 0.5 if others else 0.0
        result[i] = preferred - tau * (old[i] - reference[i])
    return result


@pytest.mark.parametrize("mixture", [0.0, 0.4, 1.0])
def test_nash_md_compares_each_answer_with_the_mixture(mixture):
    _, mask = answers(3, rows=9)
    mask[2:4], index = torch.tensor([1, 1, 0, 0, 0]), list("abaabbabc")
    draw = np.random.default_rng(0)
    scores, old, reference = draw.normal(size=9), -draw.random((9, 5)), -draw.random((9, 5))
    old, reference = old * mask.numpy(), reference * mask.numpy()
    rewards = torch.zeros(9, 5, dtype=torch.float64)
    rewards[:, 0] = torch.tensor(scores)
    charged = rewards - 0.1 * torch.tensor(old - reference)
    config = SimpleNamespace(nash_mixture=mixture, nash_scale=CONFIG.nash_scale)
    arguments = (torch.tensor(old), torch.tensor(reference), mask, index, config)
    advantages, returns = nash_md(charged, rewards, *arguments)
    expected = nash(scores, old.sum(-1), reference.sum(-1), index, mixture)
    np.testing.assert_allclose(advantages.numpy(), expected[:, None] * mask.numpy(), rtol=1e-6, atol=1e-9)
    assert advantages is returns


def test_an_answer_without_a_score_is_no_opponent_and_learns_nothing():
    mask, ones = torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.float64)
    rewards = torch.tensor([[1.0], [0.0], [float("nan")], [0.5]], dtype=torch.float64)
    advantages, _ = nash_md(rewards, rewards, ones, ones, mask, ["a"] * 4, CONFIG)
    expected = nash(rewards[:, 0].numpy(), np.zeros(4), np.zeros(4), "aaaa", tau=0.0)
    np.testing.assert_allclose(advantages[[0, 1, 3], 0].numpy(), expected[[0, 1, 3]], rtol=1e-6)
    assert advantages[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path, name):
    status = main(
        [
            f"algorithm={name}", "data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            f"{A}.optim.lr=3e-2", "reward.custom_reward_function.path=scorer.py", "trainer.logger=[file]",
            "trainer.resume_mode=disable", "trainer.total_training_steps=12", f"trainer.experiment_name={name}",
            "algorithm.nash_scale=0.1",
        ]
    )  # fmt: skip
    means = [step["critic/score/mean"] for step in logged("logs/verl-online-dpo", name)]
    assert status == 0 and len(means) == 12
    assert sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.3, means


def words(name: str, *changes: str) -> list[str]:
    made = [*defaults_of([f"algorithm={name}"])[1], "data.train_files=train.parquet", "data.train_batch_size=4",
            "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py", *changes]  # fmt: skip
    keys = [word.partition("=")[0] for word in made]
    return [word for i, word in enumerate(made) if keys[i] not in keys[i + 1 :]]


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("online_dpo", f"{A}.online_beta=0", "online_beta: out of range"),
        ("online_dpo", f"{R}.n=1", f"{R}.n"),
        ("xpo", f"{A}.xpo_alpha=-1", "xpo_alpha: out of range"),
        ("xpo", f"{R}.n=3", "the bonus weighs the two answers of a pair"),
        ("xpo", f"{A}.use_rollout_log_probs=false", "by the policy that drew them"),
        ("nash_md", "algorithm.nash_mixture=1.5", "nash_mixture: out of range"),
        ("nash_md", "algorithm.nash_scale=0", "nash_scale: out of range"),
        ("nash_md", f"{R}.n=2", "a mixture has several opponents"),
        ("nash_md", "algorithm.use_kl_in_reward=false", "reads the reference's log-probs"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_loads(workplace, name, change, says):
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    load_config("ppo_trainer", words(name))
    with pytest.raises(ConfigError) as error:
        load_config("ppo_trainer", words(name, change))
    assert says in str(error.value)


def test_the_algorithm_is_named_on_the_command_line_which_wins(capsys):
    with pytest.raises(SystemExit) as left:
        main(["algorithm=xpo", f"{A}.xpo_alpha=0.5", "--cfg", "job"])
    assert not left.value.code
    printed = capsys.readouterr().out
    assert "xpo_alpha: 0.5" in printed and "recipe.online_dpo.core:xpo" in printed
    assert main(["algorithm=nash"]) == 2
    assert "Did you mean 'nash_md'" in capsys.readouterr().err


def test_the_losses_have_200_lines_and_the_core_knows_no_recipe_of_them(project_root):
    assert len((project_root / "recipe/online_dpo/core.py").read_text().splitlines()) <= 200
    names = ("online_dpo", "xpo_alpha", "nash_md")
    files = [file for file in (project_root / "verl").rglob("*.py") if any(n in file.read_text() for n in names)]
    assert not files
