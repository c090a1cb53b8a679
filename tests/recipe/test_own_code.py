"""A loss on pairs and settings of the user's own, in files of his own: what recipes have, these have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.runs import prepare, train
from verl.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODE = f"{A}.policy_loss.loss_mode=my_pairs:hinge"


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch, project_root: Path):
    """The working folder, with the code of the documentation's page."""
    monkeypatch.syspath_prepend(workplace)
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    page = (project_root / "docs/howto/extending.md").read_text(encoding="utf-8")
    for name in ("my_pairs", "my_bonus"):
        code = page.partition(f"`{name}.py`:")[2].partition("```python\n")[2].partition("```")[0]
        Path(f"{name}.py").write_text(code)
    yield workplace
    for name in ("my_pairs", "my_bonus"):
        sys.modules.pop(name, None)


def test_a_run_makes_the_pairs_and_keeps_them_whole(here):
    """On the reference every gain is 0, so that the loss of the first pass is 1 for each pair."""
    seen = train(MODE, f"{R}.n=3", f"{A}.ppo_micro_batch_size_per_gpu=2",
                 f"{A}.optim.lr=1e-2", "trainer.total_training_steps=2",
                 "trainer.ref_update_freq=2")  # fmt: skip
    first, batch = seen.metrics[0], seen.batches[0]
    assert first["training/pairs"] + 4 * first["training/tied_prompts"] == 4 and first["training/pairs"] > 0
    assert "ref_log_prob" in batch.tensors.keys() and "old_log_probs" not in batch.tensors.keys()
    assert first["actor/grad_norm"] > 0
    assert first["actor/pg_loss"] == pytest.approx(1) != seen.metrics[1]["actor/pg_loss"]


def test_what_pairs_cannot_do_is_refused(here):
    for word, says in ((f"{R}.n=1", "several answers"), (f"{A}.ppo_micro_batch_size_per_gpu=1", "two rows of a pair"),
                       ("algorithm.use_pf_ppo=true", "no pairs")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            train(MODE, f"{R}.n=2", "algorithm.adv_estimator=reinforce_plus_plus", word)


def test_an_estimator_reads_the_setting_that_its_file_brings(here):
    """Scores below 1 and a bonus of 3: every advantage lies between 3 and 4."""
    seen = train("algorithm.adv_estimator=my_bonus:flat", "algorithm.bonus=3", f"{R}.n=2")
    advantages = seen.batches[0].tensors["advantages"]
    of_tokens = advantages[seen.batches[0].tensors["response_mask"].bool()]
    assert of_tokens.min() >= 3 and of_tokens.max() < 4
    assert seen.trainer.config.algorithm.bonus == 3
