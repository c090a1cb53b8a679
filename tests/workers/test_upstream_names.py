"""Classes of a user's own under upstream's names: the loop calls what they override."""

from __future__ import annotations

import pytest

from tests.harness.runs import COMMON, Keep, Seen, prepare
from verl.config import load_config
from verl.metrics import Metric
from verl.single_controller.base import ResourcePoolManager, Role, register
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.workers import ActorRolloutRefWorker, CriticWorker


def tagged_as(method):
    return register(dispatch_mode=getattr(method, MAGIC_ATTR)["dispatch_mode"])


class MyPolicy(ActorRolloutRefWorker):
    @tagged_as(ActorRolloutRefWorker.update_actor)
    def update_actor(self, data):
        metrics = super().update_actor(data)
        metrics.merge({"mine": Metric(7.0, "last")})
        return metrics

    @tagged_as(ActorRolloutRefWorker.generate_sequences)
    def generate_sequences(self, prompts):
        made = super().generate_sequences(prompts)
        made.meta_info["metrics"]["rollout/mine"] = Metric(float(len(prompts)), "sum")
        return made

    @tagged_as(ActorRolloutRefWorker.compute_ref_log_prob)
    def compute_ref_log_prob(self, data):
        found = super().compute_ref_log_prob(data)
        found.batch["ref_log_prob"] = found.batch["ref_log_prob"] - 1.0
        return found


class MyCritic(CriticWorker):
    @tagged_as(CriticWorker.compute_values)
    def compute_values(self, data):
        found = super().compute_values(data)
        found.batch["values"] = found.batch["values"] * 0.0 + 3.0
        return found


@pytest.mark.parametrize("keys", [(Role.ActorRolloutRef,), (Role.ActorRollout, Role.RefPolicy)])
def test_what_a_class_of_ones_own_overrides_is_what_the_loop_calls(tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    seen = Seen()

    class Runner(TaskRunner):
        def make_trainer(self, config, tokenizer, processor):
            trainer = super().make_trainer(config, tokenizer, processor)
            trainer.role_worker_mapping = {**dict.fromkeys(keys, MyPolicy), Role.Critic: MyCritic}
            pools = dict.fromkeys(trainer.role_worker_mapping, "global_pool")
            trainer.resource_pool_manager = ResourcePoolManager({"global_pool": [1]}, pools)
            trainer.callbacks.append(Keep(seen))
            seen.trainer = trainer
            return trainer

    words = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "trainer.critic_warmup=0")
    run_ppo(load_config("ppo_trainer", [*COMMON[1:], *words]), Runner)
    metrics = seen.metrics[0]
    assert metrics["actor/mine"] == 7.0 and metrics["rollout/mine"] == 16.0
    assert metrics["actor/kl_loss"] == pytest.approx(0.3678794, rel=1e-3), "k3 at ref - policy = -1: 1/e + 1 - 1"
    batch = seen.batches[0].batch
    assert set(batch["values"][batch["response_mask"].bool()].tolist()) == {3.0}
