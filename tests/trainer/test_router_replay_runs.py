"""Whole runs of a tiny mixture: the sampler's experts, or those of the old log-probs, in the updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.models import tiny_model_dir
from tests.harness.runs import logged_steps, prepare
from tests.harness.scorers import scorer
from verl.errors import RolloutError, VerlError
from verl.models.router_replay import expert_balance

MODE, RECORD = "actor_rollout_ref.actor.router_replay.mode", "actor_rollout_ref.rollout.enable_rollout_routing_replay"
REF, KL = "actor_rollout_ref.ref.router_replay.mode", "actor_rollout_ref.actor.use_kl_loss"
EVERY = "actor_rollout_ref.rollout.moe_load_balance_metrics_interval"
R3 = [f"{MODE}=R3", f"{RECORD}=true"]


@pytest.fixture(scope="module", autouse=True)
def folder(shared_workplace) -> Path:
    tiny_model_dir("dense")
    prepare(
        scorer("len(solution_str) % 5"),
        family="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    return shared_workplace


def run(name: str, *more: str) -> list[dict]:
    few = ("data.train_batch_size=2", "data.max_response_length=6", "actor_rollout_ref.actor.optim.lr=1e-4")
    return logged_steps(name, *few, "trainer.total_training_steps=2", "trainer.save_freq=-1", *more)


TWO_UPDATES = ["actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.rollout.dtype=bfloat16"]


def test_the_samplers_experts_are_replayed_in_old_log_probs_and_updates(folder, monkeypatch):
    more = [*TWO_UPDATES, "actor_rollout_ref.actor.use_kl_loss=true", f"{EVERY}=2"]
    steps = run("r3", *R3, *more)
    for step in steps[-2:]:
        assert 0 <= step["moe/replay_differs"] < 0.05 and step["training/rollout_probs_diff_max"] < 0.01
    assert ["rollout/moe/entropy" in step for step in steps[-2:]] == [False, True]
    last = steps[-1]
    assert 1 / 8 <= last["rollout/moe/max_share"] <= 1 / 2
    assert last["rollout/moe/max_load"] == pytest.approx(8 * last["rollout/moe/max_share"])
    assert 0 < last["rollout/moe/max_violation"] <= last["rollout/moe/max_load"] - 1
    assert 0 < last["rollout/moe/entropy"] <= torch.tensor(8.0).log()
    assert 0 <= last["rollout/moe/dead_experts"] <= 2 * 6
    assert steps[-2]["actor/kl_loss"] > 1e-9, "the reference has chosen other experts than the bf16 sampler"


def test_a_reference_that_replays_the_experts_starts_where_the_actor_does(folder, monkeypatch):
    once = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.dtype=bfloat16"]
    more = [*once, f"{KL}=true", f"{REF}=R3"]
    steps = run("reference", *R3, *more)
    assert abs(steps[-2]["actor/kl_loss"]) < 1e-12, "the same weights and experts"
    assert steps[-1]["actor/kl_loss"] > 1e-9, "after an update they are another policy"
    assert not any(name.startswith("rollout/moe") for name in steps[-1]), "nobody has asked for it"


def test_the_trainers_own_experts_are_replayed_with_several_updates(folder, monkeypatch):
    steps = run("r2", f"{MODE}=R2", *TWO_UPDATES)
    # The first update of a batch is where the experts were recorded; the second has other weights.
    assert all(0 <= step["moe/replay_differs"] < 0.05 for step in steps[-2:])
    assert not any(name.startswith("rollout/moe") for name in steps[-1])


def test_a_loop_that_loses_the_experts_is_no_run_with_replay(folder, monkeypatch):
    from verl.agent_loop import single_turn

    made = single_turn.AgentLoopOutput
    monkeypatch.setattr(single_turn, "AgentLoopOutput", lambda **given: made(**{**given, "routed_experts": None}))
    with pytest.raises(RolloutError, match="no sample came with them"):
        run("lost", *R3, *TWO_UPDATES)


REFUSED = {
    "a dense model": ([*R3, "actor_rollout_ref.model.path=dense"], "dense"),
    "nothing recorded": ([f"{MODE}=R3"], "not recorded"),
    "another sampler": ([*R3, "actor_rollout_ref.rollout.name=vllm"], "sampler vllm does not say"),
    "no old log-probs": ([f"{MODE}=R2", "algorithm.rollout_correction.bypass_mode=true"], "makes no such pass"),
    "from a file": (["actor_rollout_ref.actor.router_replay.replay_file=/r"], "router replay from a file"),
    "the reference alone": ([f"{REF}=R3"], "that the actor replays"),
    "the reference from a file": (["actor_rollout_ref.ref.router_replay.replay_file=/r"], "router replay from a file"),
    "a reference of no pass": ([f"{MODE}=R2", f"{REF}=R2", f"{KL}=true"], "makes no such pass"),
    "an exact KL": (
        [*R3, f"{REF}=R3", f"{KL}=true", "actor_rollout_ref.actor.kl_loss_type=full"],
        "chooses its experts itself",
    ),
    "a negative interval": ([f"{EVERY}=-1"], "no number of steps"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_replayed_is_refused_before_a_model_is_loaded(folder, monkeypatch, why):
    more, message = REFUSED[why]
    with pytest.raises(VerlError, match=message):
        run("refused", *more)
    assert not (folder / "logs" / "logged" / "refused.jsonl").exists()


def test_the_balance_of_recorded_experts_by_hand():
    """Two response tokens with a record, of four experts: layer 0 takes 0,1 and 0,2; layer 1 takes 3,1 and 3,1."""
    experts = torch.full((1, 5, 2, 2), -1, dtype=torch.int16)
    experts[0, 1] = 2  # a prompt's token
    experts[0, 2] = torch.tensor([[0, 1], [3, 1]])
    experts[0, 3] = torch.tensor([[0, 2], [3, 1]])
    routing = experts[:, 2:]
    metrics = expert_balance(routing, 4)
    half, quarter = torch.tensor([0.5, 0.25]).log().tolist()
    entropies = [-(0.5 * half + 2 * 0.25 * quarter), -half]
    # Of four choices a layer, one is each expert's mean: 2, 1, 1, 0 and 0, 2, 0, 2.
    loads = {"max_load": 2.0, "max_violation": 1.0, "dead_experts": 3.0}
    assert metrics == pytest.approx({"max_share": 0.5, "entropy": sum(entropies) / 2, **loads})
    experts[0, 3, 0] = torch.tensor([3, 2])
    evener = expert_balance(routing, 4)
    assert (evener["max_load"], evener["max_violation"], evener["dead_experts"]) == (2.0, 0.5, 2.0), "one layer is even"
    assert set(expert_balance(routing, None)) == {"max_share", "entropy"}
    experts[:] = -1
    assert expert_balance(routing, 4) == {}
