"""A newcomer's walk: an estimator in one file outside the package, used by its dotted path."""

from __future__ import annotations

import pytest

from tests.harness.programs import command, curve, metrics

pytestmark = pytest.mark.e2e

ESTIMATOR = '''"""Advantage = reward minus a fixed half, the same for every token."""


def half(*, token_level_rewards, response_mask, **_):
    advantages = (token_level_rewards.sum(-1, keepdim=True) - 0.5) * response_mask
    return advantages, advantages
'''


def test_an_estimator_in_a_file_of_its_own_is_used_by_its_dotted_path(arithmetic):
    (arithmetic.folder / "my_estimators.py").write_text(ESTIMATOR)
    command(
        "verl.trainer.main_ppo",
        *arithmetic.arguments,
        "algorithm.adv_estimator=my_estimators:half",
        "trainer.experiment_name=own",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        cwd=arithmetic.folder,
    )
    steps = metrics(arithmetic.folder, "e2e", "own")
    assert set(curve(steps, "critic/advantages/max")) == {0.5}
    assert set(curve(steps, "critic/advantages/min")) == {-0.5}
