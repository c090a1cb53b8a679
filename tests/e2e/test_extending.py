"""A newcomer's walk: an estimator in one file outside the package, used by its dotted path."""

from __future__ import annotations

import pytest

from tests.harness.programs import curve, trained

pytestmark = pytest.mark.slow

ESTIMATOR = '''"""Advantage = reward minus a fixed half, the same for every token."""


def half(*, token_level_rewards, response_mask, **_):
    advantages = (token_level_rewards.sum(-1, keepdim=True) - 0.5) * response_mask
    return advantages, advantages
'''


def test_an_estimator_in_a_file_of_its_own_is_used_by_its_dotted_path(arithmetic):
    (arithmetic.folder / "my_estimators.py").write_text(ESTIMATOR)
    words = ("algorithm.adv_estimator=my_estimators:half", "trainer.total_training_steps=2")
    steps = trained(arithmetic.folder, "own", *arithmetic.arguments, *words, "trainer.val_before_train=false")
    assert set(curve(steps, "critic/advantages/max")) == {0.5}
    assert set(curve(steps, "critic/advantages/min")) == {-0.5}
