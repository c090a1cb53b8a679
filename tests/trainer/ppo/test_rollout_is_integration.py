"""Rollout importance sampling in the training loop: a sampler in bfloat16 against a trainer in float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness.runs import Seen, prepare, train
from verl.config import PPOTrainerConfig, RolloutCorrectionConfig, replace
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.trainer.ppo import correction, stages
from verl.trainer.ppo.context import RunState, StepContext
from verl.trainer.ppo.rollout_corr_helper import apply_bypass_mode, compute_rollout_correction_and_add_to_batch

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CAP = 1.002  # ratios of this model are within a few per mille or per cent of 1, so the cap has to be that tight
HALF = "actor_rollout_ref.rollout.dtype=bfloat16"
IS = (f"algorithm.rollout_is_threshold={CAP}", "algorithm.rollout_is_level=token", HALF)


@pytest.fixture(scope="module")
def here(shared_workplace):
    """Sharp logits: an initialisation ten times the usual makes the rounding of bfloat16 visible."""
    prepare(initializer_range=0.2)


@pytest.fixture(scope="module")
def runs(here) -> dict[str, Seen]:
    return {
        "none": train(HALF),
        "metrics": train(*IS),
        "truncate": train(*IS, "algorithm.rollout_is=true"),
        "mask": train(*IS, "algorithm.rollout_is=true", "algorithm.rollout_is_mode=mask"),
        "reject": train(
            HALF,
            "algorithm.rollout_correction.rollout_rs=token_k1",
            f"algorithm.rollout_correction.rollout_rs_threshold={CAP}",
        ),
        "same": train("algorithm.rollout_is_threshold=2.0"),
    }


def gradient(batch: DataProto, weights: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """Loss ``-sum(w A) / N`` at a ratio of 1 and the norm of ``d/dtheta -sum(w A log pi) / N``, by plain autograd."""
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    t = batch.batch
    width = t["responses"].shape[1]
    out = model(t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"])
    log_probs = out.logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, t["responses"][..., None])[..., 0]
    kept = mask.bool()
    loss = -(weights * t["advantages"] * log_probs)[kept].sum() / kept.sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return -(weights * t["advantages"])[kept].sum().item() / kept.sum().item(), norm.item()


def ratios(batch: DataProto) -> torch.Tensor:
    """pi_old / mu of each token, by hand."""
    return (batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]).exp()


def test_a_sampler_in_half_precision_shows_in_the_metrics(runs):
    seen, same = runs["metrics"].metrics[0], runs["same"].metrics[0]
    assert abs(same["mismatch/mismatch_k3_kl"]) < 1e-6, "equal weights and precision"
    assert seen["mismatch/mismatch_k3_kl"] > 100 * abs(same["mismatch/mismatch_k3_kl"])
    assert seen["mismatch/rollout_is_max"] > CAP > 1 > seen["mismatch/rollout_is_min"]
    assert seen["mismatch/rollout_is_ratio_fraction_high"] > 0.05
    assert all(math.isfinite(value) for value in seen.values())


def test_metrics_alone_leave_the_update_as_it_is(runs):
    plain, seen = runs["none"], runs["metrics"]
    assert "rollout_is_weights" not in seen.batches[0].batch.keys()
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert plain.metrics[0][name] == seen.metrics[0][name], "to the last bit"
    assert not any(name.startswith("mismatch/") for name in plain.metrics[0])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_change_loss_and_gradient_as_the_formula_says(runs, mode):
    batch, metrics = runs[mode].batches[0], runs[mode].metrics[0]
    mask, ratio = batch.batch["response_mask"], ratios(batch)
    by_hand = ratio.clamp(max=CAP) if mode == "truncate" else ratio * ((ratio >= 1 / CAP) & (ratio <= CAP))
    torch.testing.assert_close(batch.batch["rollout_is_weights"], by_hand * mask, atol=1e-6, rtol=0)
    loss, norm = gradient(batch, by_hand, mask)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["actor/grad_norm"] != pytest.approx(runs["none"].metrics[0]["actor/grad_norm"], rel=1e-4)


def test_rejected_tokens_leave_the_denominator(runs):
    batch, metrics = runs["reject"].batches[0], runs["reject"].metrics[0]
    mask, ratio = batch.batch["response_mask"], ratios(batch)
    kept = mask.bool() & (ratio >= 1 / CAP) & (ratio <= CAP)
    assert torch.equal(batch.batch["rollout_rs_mask"].bool(), kept)
    assert mask.sum() == batch.batch["attention_mask"][:, -mask.shape[1] :].sum(), "the batch itself stays whole"
    loss, norm = gradient(batch, torch.ones_like(ratio), kept)
    assert metrics["actor/pg_loss"] == pytest.approx(loss, abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    share = 1 - kept.sum().item() / mask.sum().item()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share, abs=1e-6)


def test_the_bypass_mode_trains_against_the_samplers_log_probs(here):
    seen = train(
        HALF,
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
        f"algorithm.rollout_correction.rollout_is_threshold={CAP}",
    )
    batch, metrics = seen.batches[0], seen.metrics[0]
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    t, width = batch.batch, batch.batch["responses"].shape[1]
    with torch.no_grad():
        out = model(t["input_ids"], attention_mask=t["attention_mask"], position_ids=t["position_ids"])
    now = out.logits[:, -width - 1 : -1].log_softmax(-1).gather(-1, t["responses"][..., None])[..., 0]
    weights = (now - t["rollout_log_probs"]).exp().clamp(max=CAP)
    norm = gradient(batch, weights, t["response_mask"])[1]
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["rollout_corr/rollout_is_max"] > CAP


def test_the_trainers_method_adds_weights_and_returns_the_metrics(runs):
    trainer, done = runs["truncate"].trainer, runs["truncate"].batches[0]
    again = done.select(batch_keys=["old_log_probs", "rollout_log_probs", "response_mask"])
    returned, metrics = trainer.compute_rollout_importance_weights_and_add_to_batch(again)
    assert returned is again
    assert torch.equal(again.batch["rollout_is_weights"], done.batch["rollout_is_weights"])
    logged = {k: v for k, v in runs["truncate"].metrics[0].items() if k.startswith("mismatch/")}
    assert metrics == pytest.approx(logged)


def hand_made(**changes) -> tuple[DataProto, StepContext]:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    old, rollout = -torch.rand(4, 3), -torch.rand(4, 3)
    scores = torch.zeros(4, 3)
    scores[:, 0] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    batch = DataProto.from_dict(
        tensors={
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            "response_mask": mask,
            "token_level_scores": scores,
            "attention_mask": torch.ones(4, 5, dtype=torch.long),
        },
        non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)},
    )
    config = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2, "data.train_batch_size": 2}
    return batch, RunState(replace(PPOTrainerConfig(), **config, **changes), lambda _: {}, 1).open(0)


def test_weights_follow_their_rows_into_mini_batches():
    batch, ctx = hand_made(**{"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is": True})
    stages.correct_rollout(batch, ctx)
    order = [2, 0, 3, 1]
    shuffled = batch.select_idxs(order)
    assert torch.equal(shuffled.batch["rollout_is_weights"], batch.batch["rollout_is_weights"][order])
    alone, _ = hand_made(**{"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is": True})
    half = alone.select_idxs([0, 1])
    stages.correct_rollout(half, ctx)
    assert torch.equal(half.batch["rollout_is_weights"], batch.batch["rollout_is_weights"][:2]), "one per row, anywhere"


def test_read_only_tensors_from_workers_are_not_written_to():
    batch, ctx = hand_made(**{"algorithm.rollout_is_threshold": 1.1, "algorithm.rollout_is_mode": "mask"})
    before = {name: batch.batch[name].clone() for name in batch.batch.keys()}
    stages.correct_rollout(batch, ctx)
    stages.add_advantages(batch, ctx)
    for name, tensor in before.items():
        assert torch.equal(batch.batch[name], tensor), name


def test_a_rejected_sample_still_counts_in_its_groups_baseline():
    rejecting = {
        "algorithm.rollout_correction.rollout_rs": "seq_sum_k2",
        "algorithm.rollout_correction.rollout_rs_threshold": 1e-9,
    }
    batch, ctx = hand_made(**rejecting)
    plain, other = hand_made()
    stages.correct_rollout(batch, ctx)
    for data, context in ((batch, ctx), (plain, other)):
        stages.add_advantages(data, context)
    assert batch.batch["rollout_rs_mask"].sum() == 0
    assert torch.equal(batch.batch["advantages"], plain.batch["advantages"])


def test_upstreams_form_replaces_the_mask_of_the_batch():
    batch, _ = hand_made()
    mask = batch.batch["response_mask"].clone()
    config = RolloutCorrectionConfig.decoupled_k3_rs_token_tis(is_threshold=1.1, rs_threshold=0.07)
    returned, metrics = compute_rollout_correction_and_add_to_batch(batch, config)
    ratio = torch.where(mask.bool(), ratios(batch), 1.0)
    kept = ((ratio - 1 - ratio.log()).sum(-1) / mask.sum(-1)) <= 0.07
    assert 0 < kept.sum() < 4 and returned is batch
    assert torch.equal(batch.batch["response_mask"], mask * kept[:, None])
    torch.testing.assert_close(batch.batch["rollout_is_weights"], ratio.clamp(max=1.1) * mask)
    dropped = 1 - kept.float().mean().item()
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(dropped)


def test_upstreams_form_of_the_bypass_mode_takes_over_the_log_probs():
    batch, _ = hand_made()
    settings: dict = {"loss_mode": "vanilla"}
    apply_bypass_mode(batch, {"bypass_mode": True}, settings)
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    assert settings == {"loss_mode": "bypass_mode", "rollout_correction": {"bypass_mode": True}}
    with pytest.raises(ConfigError, match="brings its own loss"):
        apply_bypass_mode(
            batch, None, replace(PPOTrainerConfig(), **{LOSS: "gspo"}).actor_rollout_ref.actor.policy_loss
        )
    del batch.batch["rollout_log_probs"]
    with pytest.raises(DataError, match="the rollout engine returned none"):
        apply_bypass_mode(batch)


def test_without_the_samplers_log_probs_the_run_says_what_is_missing():
    batch, ctx = hand_made(**{"algorithm.rollout_is_threshold": 2.0})
    del batch.batch["rollout_log_probs"]
    with pytest.raises(DataError, match=r"the batch has no rollout_log_probs.*calculate_log_probs=true"):
        stages.correct_rollout(batch, ctx)


def test_without_a_threshold_the_mismatch_is_only_measured_in_the_newer_form():
    batch, ctx = hand_made()
    stages.correct_rollout(batch, ctx)
    assert "rollout_is_weights" not in batch.batch.keys() and correction.KEPT_MASK not in batch.batch.keys()
    assert {name.split("/")[0] for name in ctx.metrics.values()} == {"rollout_corr"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["actor_rollout_ref.actor.tis_imp_ratio_cap=2.0"], r"no longer exists.*rollout_is_threshold=<value>"),
        (["algorithm.rollout_is_threshold=2.0", "actor_rollout_ref.rollout.calculate_log_probs=false"], "not kept"),
        (["algorithm.rollout_is=true", "actor_rollout_ref.rollout.calculate_log_probs=false"], "not kept"),
        (["algorithm.rollout_is_threshold=2.0", "algorithm.rollout_is_threshold_lower=2.5"], "below the upper one"),
        (["algorithm.rollout_is_threshold=-1"], "must be positive"),
        (["algorithm.rollout_is_threshold=2.0", "algorithm.rollout_is_veto_threshold=0"], "veto is for ratios"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_anything_is_loaded(here, words, says):
    with pytest.raises(ConfigError, match=says):
        train(*words)
