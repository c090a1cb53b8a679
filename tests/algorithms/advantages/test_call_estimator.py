import pytest
import torch

from tests.harness.algorithms import outcome_batch
from verl.algorithms.advantages import call_estimator
from verl.algorithms.advantages.gae import gae
from verl.algorithms.advantages.grpo import grpo
from verl.errors import ConfigError
from verl.metrics import notices

REWARDS, MASK, UIDS = outcome_batch()


def call(estimator, **inputs):
    given = {"token_level_rewards": REWARDS, "response_mask": MASK, "index": UIDS, "config": object(), **inputs}
    return call_estimator(estimator, **given)


def test_built_in_estimators_take_what_they_need_from_everything_there_is():
    everything = {"values": REWARDS, "gamma": 0.9, "lam": 0.8, "singleton": "raw", "prompts": REWARDS, "extra": 1}
    assert torch.equal(call(gae, **everything)[0], gae(REWARDS, REWARDS, MASK, 0.9, 0.8)[0])
    assert torch.equal(call(grpo, **everything)[0], grpo(REWARDS, MASK, UIDS, singleton="raw")[0])


def test_a_users_estimator_gets_only_the_parameters_it_names():
    def mine(token_level_rewards, response_mask, config=None, index=None):
        assert index is UIDS and config is not None
        return token_level_rewards * response_mask, token_level_rewards

    advantages, _ = call(mine, values=REWARDS, gamma=1.0)
    assert torch.equal(advantages, REWARDS * MASK)


def test_a_users_estimator_with_kwargs_gets_everything():
    seen = {}

    def mine(token_level_rewards, response_mask, **kwargs):
        seen.update(kwargs)
        return token_level_rewards, token_level_rewards

    call(mine, values=REWARDS, old_log_probs=None)
    assert set(seen) == {"index", "config", "values"}  # an input of None is absent


def test_a_missing_input_is_named_with_the_setting_that_provides_it():
    with pytest.raises(ConfigError, match=r"gae requires 'values'.*critic\.enable=true"):
        call(gae, gamma=1.0, lam=1.0)


@pytest.mark.parametrize("result", [None, (REWARDS,), (REWARDS, REWARDS[:, :2]), (REWARDS, 1.0)])
def test_a_result_of_another_form_is_refused_with_the_allowed_one(result):
    with pytest.raises(ConfigError, match=r"\(advantages, returns\), both of shape \(7, 4\)"):
        call(lambda token_level_rewards, response_mask: result)


def test_what_a_user_returns_outside_the_mask_is_cleared_and_nan_inside_is_told():
    junk = torch.where(MASK.bool(), 1.0, torch.nan)
    advantages, returns = call(lambda token_level_rewards, response_mask: (junk, junk))
    assert torch.equal(advantages, MASK.float()) and torch.equal(returns, MASK.float())
    assert not notices()
    call(lambda token_level_rewards, response_mask: (junk * torch.nan, junk))
    assert "NaN" in notices()["algorithm.adv_estimator"]


def test_an_estimator_in_a_users_file_is_found_by_its_dotted_path(tmp_path, monkeypatch):
    from verl.registry import ADVANTAGE_ESTIMATORS

    (tmp_path / "estimators_of_mine.py").write_text(
        "def halves(token_level_rewards, response_mask, **kwargs):\n"
        "    return token_level_rewards / 2, token_level_rewards\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    advantages, _ = call(ADVANTAGE_ESTIMATORS.get("estimators_of_mine:halves"))
    assert torch.equal(advantages, REWARDS / 2)
