"""When the trainers' devices are lent and until when, and that the bound and the queue live with it."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.config import load_config
from verl.config.lending import KEY, lends
from verl.config.trainer import HybridRolloutConfig
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.trainer.ppo.lending import HANDED, TO_SAMPLING, TO_TRAINING, LendingRule
from verl.trainer.ppo.queue import GroupQueue, QueueBound

SWITCH = "trainer.v1.separate_async.hybrid_rollout"
OWN_POOL = (
    "trainer.v1.trainer_mode=separate_async",
    f"{SWITCH}.enable_switch=true",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "data.train_batch_size=64",
    "trainer.device=cpu",
)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lending")
    tiny_model_dir(folder / "model")
    write_prompts(folder / "train.parquet", 4)
    files = (f"actor_rollout_ref.model.path={folder}/model", f"data.train_files={folder}/train.parquet")
    return lambda *words: load_config("ppo_trainer", [*files, *words])


def rule(groups=64, fewest=16, speedup=2.0, **settings):
    return LendingRule(HybridRolloutConfig(**settings), groups, fewest, speedup)


def test_devices_are_lent_until_a_share_of_the_step_is_complete_and_no_less_than_it_begins_with():
    assert [rule(switch_threshold_ratio=share).threshold for share in (0.1, 0.4, 1.0)] == [16, 26, 64]
    assert rule(fewest=64).threshold == 64
    assert [rule().until(complete) for complete in (0, 25, 26, 64)] == [26, 26, 0, 0]


def test_devices_are_lent_where_the_groups_that_are_missing_take_longer_than_the_switches():
    """20 groups in 10 seconds with twice the replicas are a second per group without: 26 missing ones take 26 seconds,
    of which two replicas for one spare the half."""
    one = rule()
    one.waited_for(20, 10.0, is_lent=True)
    assert one.seconds_per_group == 1.0 and one.benefit(complete=0) == 13.0
    for there, back in ((4.0, 1.0), (6.0, 3.0)):
        one.switched(TO_SAMPLING, there)
        one.switched(TO_TRAINING, back)
    assert one.cost == 7.0 and [one.until(complete) for complete in (0, 11, 12)] == [26, 26, 0]
    for _ in range(3):  # the window forgets what is older
        one.switched(TO_SAMPLING, 20.0)
    assert one.cost == 22.0 and one.until(complete=0) == 0
    one.waited_for(10, 20.0, is_lent=False)
    assert one.benefit(complete=0) == 26.0 and one.until(complete=0) == 26


def test_the_weights_of_a_step_are_handed_over_once_and_joining_again_costs_the_switches_alone():
    one = rule()
    assert one.is_worth_weights() and one.is_worthwhile_later(1)  # nothing is known yet
    one.waited_for(20, 10.0, is_lent=True)  # a second per group without
    for way, seconds in ((HANDED, 8.0), (TO_SAMPLING, 1.0), (TO_TRAINING, 2.0)):
        one.switched(way, seconds)
    assert (one.cost, one.cost_again) == (11.0, 3.0)
    assert [one.is_worthwhile_later(missing) for missing in (0, 6, 7)] == [False, False, True]  # half a second each
    assert [one.until(complete) for complete in (3, 4)] == [26, 0]
    decided = []
    for spared in (11.0, 11.5):
        one.spared_later = spared
        decided.append(one.is_worth_weights())
    assert decided == [False, True]


def test_the_share_moves_after_alike_steps_in_a_row():
    one = rule()
    shares = []
    for waited in (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0):
        one.end_step(waited)
        shares.append(round(one.ratio, 2))
    assert shares == [0.4, 0.45, 0.5, 0.5, 0.5, 0.5, 0.47, 0.44]
    for _ in range(40):
        one.end_step(0.0)
    assert one.ratio == 0.25  # a step begins with 16 of 64
    fixed = rule(adaptive_switch_threshold=False)
    for _ in range(5):
        fixed.end_step(1.0)
    assert fixed.ratio == 0.4


def test_a_trainer_that_waits_for_more_groups_than_it_needs_gets_them_within_the_bound():
    """Whatever the queue holds and loses, so many groups become complete without new weights."""
    for seed in range(400):
        draw = random.Random(seed)
        chunk, chunks = draw.randint(1, 3), draw.randint(1, 4)
        ahead = Fraction(draw.choice(("0", "0.5", "1", "1.5")))
        overdue, in_order = draw.choice(("wait", "drop")), draw.random() < 0.5
        queue = GroupQueue(QueueBound(chunk * chunks, chunk, ahead, in_order=in_order, overdue=overdue))
        bound = queue.bound
        for step in range(5):
            queue.publish(step)
            one = rule(bound.groups, chunk, switch_threshold_ratio=draw.random() or 1.0)
            until = one.until(queue.complete_groups)
            while not (queue.is_ready() and queue.complete_groups >= until):
                numbers = [queue.admit(None) for _ in range(queue.room())]
                queue.drop_overdue()
                pending = [entry.number for entry in queue if not entry.is_complete]
                assert numbers or pending, f"seed {seed}: nothing is to come, and {until} groups are waited for"
                number = draw.choice(pending)
                if draw.random() < 0.2:
                    queue.lose(number, "filtered")
                else:
                    queue.complete(number, None, step)
            while queue.step == step:
                while not queue.is_ready():
                    pending = [entry.number for entry in queue if not entry.is_complete]
                    queue.complete(pending[0] if pending else queue.admit(None), None)
                assert all(step - entry.version <= bound.allowed for entry in queue.take())


def test_devices_are_lent_only_to_samplers_of_another_pool(load):
    assert lends(load(*OWN_POOL))
    reset_notices()
    alone = [word for word in OWN_POOL if "rollout.n" not in word and "backend" not in word]
    assert not lends(load(*alone))
    assert "share the trainers' processes" in notices()[KEY]


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["actor_rollout_ref.rollout.max_replacements=2"], KEY, "replicas come and go by themselves"),
        (["actor_rollout_ref.rollout.name=sglang"], KEY, "through a folder"),
        ([f"{SWITCH}.switch_threshold_ratio=1.2"], f"{SWITCH}.switch_threshold_ratio", "at most 1"),
        ([f"{SWITCH}.switch_cost_window_size=0"], f"{SWITCH}.switch_cost_window_size", "1 or more"),
    ],
)
def test_what_cannot_be_lent_is_refused(load, words, key, said):
    with pytest.raises(ConfigError) as caught:
        load(*OWN_POOL, *words)
    assert key in str(caught.value) and said in str(caught.value)
