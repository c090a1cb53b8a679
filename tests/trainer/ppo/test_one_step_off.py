"""One step off: what is sampled when, by which weights, what corrects for it, and what a checkpoint keeps of it."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from statistics import mean

import pytest
import torch

from tests.harness.runs import CLOCKS, Seen, differing, numbers, train
from tests.harness.scorers import scorer
from verl.config import PPOTrainerConfig, load_config
from verl.errors import ConfigError, RolloutError
from verl.metrics import notices, reset_notices
from verl.protocol import DataProto
from verl.single_controller.base import interrupts
from verl.single_controller.base.interrupts import side_by_side
from verl.trainer.ppo import stages, staleness
from verl.trainer.ppo.context import RunState

MODE = "trainer.v1.trainer_mode=one_step_off"
STEPS = ("trainer.total_training_steps=4", "trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=1e-2")
STILL = ("trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=0", "trainer.skip_old_log_prob=false")
CORRECTION = "algorithm.rollout_correction"
OFF = "training/off_policy"
STREAM = (
    "trainer.v1.trainer_mode=fully_async",
    "async_training.staleness_threshold=0.5",
    "async_training.trigger_parameter_sync_step=1",
)
EVEN = scorer("sum(ord(character) % 2 == 0 for character in solution_str) / 6")
COMPARED = ("prompts", "responses", "rollout_log_probs")


@pytest.fixture(scope="module")
def ahead(shared_here) -> Seen:
    """Four steps, with the step of every call of the sampler."""
    asked: list[int] = []
    generate = stages.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stages, "generate", lambda prompts, roles, ctx: (asked.append(ctx.step), generate(prompts, roles, ctx))[1]
        )
        seen = run("once")
    seen.asked = asked  # type: ignore[attr-defined]
    return seen


@pytest.fixture(scope="module")
def still(shared_here) -> Seen:
    """The synchronous schedule, by weights that stay as they are."""
    return train(*STILL, "trainer.default_local_dir=still")


def run(folder: str, *changes: str) -> Seen:
    mode = [] if any("trainer_mode" in word for word in changes) else [MODE]
    return train(*STEPS, *mode, *changes, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")


def same_samples(one: DataProto, other: DataProto) -> bool:
    return all(torch.equal(one.batch[name], other.batch[name]) for name in COMPARED)


def per_step(seen: Seen, name: str) -> list[float]:
    return [step[name] for step in seen.metrics]


def test_every_batch_is_drawn_by_the_weights_from_before_the_update_that_it_was_collected_beside(ahead, still):
    """Steps 1 and 2 draw what the first weights draw, which a run that never learns shows; step 3 does not."""
    assert [same_samples(a, b) for a, b in zip(ahead.batches, still.batches)] == [True, True, False]
    versions = [batch.batch["token_versions"] for batch in ahead.batches]
    masks = [batch.batch["response_mask"].bool() for batch in ahead.batches]
    assert [set(v[m].tolist()) for v, m in zip(versions, masks)] == [{0}, {0}, {1}, {2}]
    for reduced in ("mean", "max", "min"):
        assert per_step(ahead, f"{OFF}/trajectory_staleness/{reduced}") == [0, 1, 1, 1]
        assert per_step(ahead, f"{OFF}/trajectory_staleness_worst/{reduced}") == [0, 1, 1, 1]
        assert per_step(ahead, f"{OFF}/trajectory_spans/{reduced}") == [1, 1, 1, 1]
    assert ahead.asked == [1, 2, 3, 4], "nothing is sampled beyond the last step"


def test_by_weights_that_stay_as_they_are_each_step_has_the_numbers_of_the_synchronous_schedule(still):
    one_off = train(*STILL, MODE, "trainer.default_local_dir=still_off")
    besides = (*CLOCKS, OFF)
    one, other = ([numbers(step, besides) for step in seen.metrics] for seen in (one_off, still))
    assert one == other and len(other) == 3


def test_old_log_probs_are_recomputed_although_one_update_of_own_samples_would_not_need_them(ahead):
    """The default skips the pass where a batch is used once; that is right for the policy's own samples alone."""
    assert all("old_log_probs" in batch.batch for batch in ahead.batches)
    apart = per_step(ahead, "training/rollout_probs_diff_max")
    assert apart[0] < 1e-6 and min(apart[1:]) > 1e-5, "the sampler is one version behind"


@pytest.mark.parametrize(
    "how", [f"{CORRECTION}.bypass_mode=true", "actor_rollout_ref.actor.use_rollout_log_probs=true"]
)
def test_the_ratio_is_that_to_the_policy_that_drew_the_token(shared_here, how):
    """The KL of the one update: the mean of the sampler's log-prob minus the policy's, which transformers computes."""
    seen = run(how.rpartition(".")[2].partition("=")[0], how)
    kl = per_step(seen, "actor/ppo_kl")
    assert abs(kl[0]) < 1e-6 and all(abs(value) > 1e-5 for value in kl[1:])
    batch = seen.batches[3]
    mask, sampler = batch.batch["response_mask"], batch.batch["rollout_log_probs"]
    policy = log_probs_of(Path(seen.trainer.config.trainer.default_local_dir) / "global_step_3", batch)
    expected = ((sampler - policy) * mask).sum() / mask.sum()
    assert kl[3] == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)


def log_probs_of(checkpoint: Path, batch: DataProto) -> torch.Tensor:
    """(B, T) by transformers itself, with the weights of a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint / "actor/huggingface", torch_dtype=torch.float32).eval()
    inputs = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    length = batch.batch["responses"].size(1)
    with torch.no_grad():
        logits = model(**inputs).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch.batch["responses"][..., None])[..., 0]


@pytest.mark.slow
def test_one_version_behind_a_run_learns_what_one_on_policy_learns(shared_here):
    """A quarter of what the first model writes are even characters; the sampler's log-probs are the old ones.

    In a stream of half a step ahead half of the samples are one version behind.
    """
    Path("even.py").write_text(EVEN)
    task = (
        "data.train_batch_size=8",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1.5e-2",
        "reward.custom_reward_function.path=even.py",
        "trainer.total_training_steps=20",
    )
    scores = []
    bypass = f"{CORRECTION}.bypass_mode=true"
    for mode in (["trainer.v1.trainer_mode=sync"], [MODE, bypass], [*STREAM, bypass]):
        seen = train(*task, *mode, f"trainer.default_local_dir=learn{len(mode)}")
        scores.append([batch.batch["token_level_scores"].sum(-1).mean().item() for batch in seen.batches])
    assert scores[0][0] == scores[1][0] < 0.3
    assert mean(scores[0][-3:]) > 0.9, scores
    assert all(mean(behind[-3:]) > mean(scores[0][-3:]) - 0.1 for behind in scores[1:]), scores
    assert max(per_step(seen, f"{OFF}/trajectory_staleness_worst/max")) == 1


def test_surplus_samples_that_would_be_two_versions_old_are_dropped_and_counted(shared_here):
    """Twice as many prompts as a batch needs: half of each collection waits, and step 4 comes too late for its rest."""
    filtered = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward",
        "data.gen_batch_size=8",
    )
    seen = run("filtered", *filtered)
    assert max(per_step(seen, f"{OFF}/trajectory_staleness_worst/max")) == 1
    dropped = [step.get(f"{OFF}/evicted_samples", 0) for step in seen.metrics]
    assert dropped[:3] == [0, 0, 0] and dropped[3] > 0
    assert seen.metrics[3][f"{OFF}/evicted_samples_staleness/max"] == 2


def test_a_resumed_run_trains_on_the_batch_that_was_sampled_ahead(ahead):
    saved = sorted(path.name for path in Path("once/global_step_2").iterdir() if path.is_dir())
    assert saved == ["actor", "queue"] and not Path("once/global_step_4/queue").exists()
    shutil.copytree("once/global_step_2", "again/global_step_2")
    again = run("again")
    for mine, other in zip(again.batches, ahead.batches[2:], strict=True):
        assert same_samples(mine, other) and torch.equal(mine.batch["advantages"], other.batch["advantages"])
    assert differing("once/global_step_4", "again/global_step_4") == []
    assert [numbers(step) for step in again.metrics] == [numbers(step) for step in ahead.metrics[2:]], (
        "the metrics of its sampling are those of its step, too"
    )


def test_another_schedule_that_goes_on_trains_on_it_too(ahead):
    shutil.copytree("once/global_step_2", "in_turn/global_step_2")
    in_turn = run(
        "in_turn", "trainer.v1.trainer_mode=sync", "trainer.resume_changed=accept", "trainer.total_training_steps=3"
    )
    assert same_samples(in_turn.batches[0], ahead.batches[2]), "nothing that was sampled is lost"


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["algorithm.adv_estimator=opo"], ["algorithm.adv_estimator", "opo", "samples of the policy itself", "rloo"]),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"], ["loss_mode", "gpg", "no ratio", "rollout_is=token"]),
        (
            [
                "actor_rollout_ref.actor.use_rollout_log_probs=true",
                "actor_rollout_ref.rollout.calculate_log_probs=false",
            ],
            ["use_rollout_log_probs", "not kept", "calculate_log_probs=true"],
        ),
    ],
)
def test_what_is_right_for_own_samples_alone_is_refused_before_anything_starts(shared_here, words, parts):
    usual = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo"]
    with pytest.raises(ConfigError) as caught:
        load_config("ppo_trainer", [*usual, "actor_rollout_ref.rollout.n=4", MODE, *words])
    assert all(part in str(caught.value) for part in parts), caught.value
    if "calculate" not in words[-1]:
        load_config("ppo_trainer", [*usual, "actor_rollout_ref.rollout.n=4", *words])


def test_samples_that_nothing_corrects_for_are_worth_a_notice(shared_here):
    usual = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "algorithm.adv_estimator=grpo"]
    for words, said in (
        ([], True),
        ([f"{CORRECTION}.bypass_mode=true"], False),
        ([f"{CORRECTION}.rollout_is=token"], False),
    ):
        reset_notices()
        load_config("ppo_trainer", [*usual, "actor_rollout_ref.rollout.n=4", MODE, *words])
        assert (CORRECTION in notices()) is said, words
        assert "take turns" in notices()["trainer.v1.trainer_mode"]


def test_a_token_older_than_the_bound_ends_the_run_with_its_versions():
    run = RunState(PPOTrainerConfig(), reward=lambda batch: {}, total_steps=9)
    versions = torch.tensor([[3, 3, -1], [1, 2, 3], [-1, -1, -1]], dtype=torch.int32)
    batch = DataProto.from_dict(tensors={"token_versions": versions})
    ctx = run.open(4)
    staleness.check(batch, ctx, bound=2)
    measured = ctx.metrics.values()
    assert measured[f"{OFF}/trajectory_spans/mean"] == 2.0 and measured[f"{OFF}/trajectory_staleness/max"] == 0
    assert measured[f"{OFF}/trajectory_staleness_worst/mean"] == 1.0
    with pytest.raises(
        RolloutError, match=r"step 4 trains version 3, and a sample has tokens of version 1.*2 versions old"
    ):
        staleness.check(batch, run.open(4), bound=1)
    with pytest.raises(RolloutError, match=r"tokens of version 3.*-1 versions old"):
        staleness.check(batch, run.open(3), bound=2)


# ---- two halves at once --------------------------------------------------------------------------------------------


def test_both_halves_run_at_once_and_both_results_come_back():
    meet = threading.Barrier(2, timeout=60)
    mine, theirs = side_by_side(lambda: (meet.wait(), "ahead")[1], lambda: (meet.wait(), "here")[1])
    assert (mine, theirs) == ("ahead", "here")


def waits_for_workers(seconds: float = 60.0) -> None:
    """As a runtime waits: it looks for an interrupt now and then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        interrupts.current().check()
        time.sleep(0.01)
    raise AssertionError("nothing interrupted it")


def test_an_error_ahead_reaches_the_caller_at_once_with_its_own_traceback():
    def reward_function():
        raise ValueError("the reward of row 3")

    with pytest.raises(ValueError, match="the reward of row 3") as caught:  # not that nothing interrupted the wait
        side_by_side(reward_function, waits_for_workers)
    assert "reward_function" in str(caught.traceback[-1])
    assert not [thread for thread in threading.enumerate() if thread.name == "verl-ahead"]


def test_an_error_here_ends_the_thread_too():
    def fails():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        side_by_side(waits_for_workers, fails)
    assert not [thread for thread in threading.enumerate() if thread.name == "verl-ahead"]
    assert interrupts.current() is None
