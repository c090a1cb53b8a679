"""The PRIME recipe: loss, ratings and advantages by hand, short runs of every setting, and one whose accuracy rises."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from recipe.prime.core import (
    OUTCOMES,
    PROCESS_REWARDS,
    REFERENCE,
    ImplicitRewardLoss,
    leave_one_out,
    leave_one_out_compat,
    pair_accuracy,
    process_rewards,
)
from recipe.prime.main_prime import ESTIMATOR, PRIME, main
from tests.harness.runs import Seen, prepare, train
from tests.harness.scorers import scorer
from verl.algorithms.advantages import call_estimator
from verl.algorithms.aggregation import loss_norm
from verl.config import load_config
from verl.config.loading.configuration import read_config
from verl.metrics import notices, reset_notices

A, RM, IMPLICIT = "actor_rollout_ref.actor", "reward.reward_model", "reward.reward_model.implicit"
# The worked example: log-ratios of two answers of three and two tokens, the first of them right.
LOG_RATIOS = torch.tensor([[1.0, -2.0, 0.5], [0.4, 0.2, torch.nan]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
RIGHT = torch.tensor([1.0, 0.0])
LOWER = scorer("float(sum(c.islower() for c in solution_str) >= 2)")


def loss_of(log_ratios: torch.Tensor, outcomes: torch.Tensor, mask: torch.Tensor, norm=None, beta: float = 0.05):
    batch = {"response_mask": mask, OUTCOMES: outcomes, REFERENCE: torch.zeros_like(log_ratios)}
    return ImplicitRewardLoss(beta)({"log_probs": log_ratios}, batch, norm or loss_norm(mask))


def test_the_loss_is_the_cross_entropy_of_the_worked_example():
    """Logits -0.025 and 0.03: (ln(1 + e^0.025) + ln(1 + e^0.03)) / 2 = 0.706992; both are on the wrong side."""
    loss, metrics = loss_of(LOG_RATIOS, RIGHT, MASK)
    assert loss.item() == pytest.approx(0.706992, abs=1e-6) == metrics["dpo_loss"].value
    assert metrics["dpo_acc_abs"].value == 0
    assert loss_of(-LOG_RATIOS, RIGHT, MASK)[1]["dpo_acc_abs"].value == 1


def test_every_token_of_an_answer_gets_the_same_gradient():
    """beta (s(logit) - outcome) / rows, which an outcome in between makes zero at its own logit."""
    log_ratios = LOG_RATIOS.nan_to_num().requires_grad_()
    loss_of(log_ratios, torch.tensor([1.0, 0.5]), MASK, beta=2.0)[0].backward()
    slopes = [2 * (1 / (1 + math.exp(1.0)) - 1) / 2, 2 * (1 / (1 + math.exp(-1.2)) - 0.5) / 2]
    torch.testing.assert_close(log_ratios.grad, torch.tensor(slopes)[:, None] * MASK)


def test_micro_batches_add_up_and_an_answer_without_tokens_does_not_count():
    generator = torch.Generator().manual_seed(0)
    log_ratios = torch.randn(4, 3, generator=generator)
    mask, outcomes = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    norm = loss_norm(mask)
    parts = [loss_of(log_ratios[r], outcomes[r], mask[r], norm)[0] for r in (slice(0, 1), slice(1, 3), slice(3, 4))]
    logits = 0.05 * (log_ratios * mask).sum(-1)[[0, 1, 3]]
    by_hand = -torch.stack([logits[0].sigmoid(), (-logits[1]).sigmoid(), logits[2].sigmoid()]).log().mean()
    torch.testing.assert_close(sum(parts), by_hand)
    torch.testing.assert_close(loss_of(log_ratios, outcomes, mask)[0], by_hand)


def test_ratings_stand_inside_the_mask_alone():
    expected = [[0.05, -0.1, 0.025], [0.02, 0.01, 0.0]]
    torch.testing.assert_close(process_rewards(LOG_RATIOS, torch.zeros(2, 3), MASK, 0.05), torch.tensor(expected))


def test_pairs_weigh_as_their_outcomes_differ_and_ties_are_half_right():
    """a: 0.9 > 0.1 right (0.5), 0.9 > 0.4 wrong (0.5), 0.4 > 0.1 right (1); b: a tie; c: no pair; d is left out."""
    logits = torch.tensor([0.9, 0.1, 0.4, 2.0, 2.0, 5.0, 6.0, 0.0])
    outcomes = torch.tensor([0.5, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    index, counted = ["a", "a", "a", "b", "b", "c", "c", "d"], torch.tensor([True] * 7 + [False])
    assert pair_accuracy(logits, outcomes, index, counted) == pytest.approx((1.5 / 2 + 0.5 + 0.5) / 3)
    assert pair_accuracy(logits[:0], outcomes[:0], [], counted[:0]) == 0.5


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (leave_one_out, [[0.93, 0.895, 1.01], [-0.953333, -0.981667, 0]]),
        (leave_one_out_compat, [[0.93, 0.836667, 1.043333], [-0.953333, -0.986667, 0]]),
    ],
)
def test_advantages_are_the_worked_example_with_the_kl_of_the_run_on_top(estimator, expected):
    """A KL of 0.1 in the first answer's second token lowers the returns up to there."""
    scores = torch.tensor([[0.0, 0, 7], [0, 3, 0]])  # what stands here is no outcome: `acc` differs from the score
    kl = torch.tensor([[0, 0.1, 0], [0, 0, 0]])
    inputs = {
        PROCESS_REWARDS: process_rewards(LOG_RATIOS, torch.zeros(2, 3), MASK, 0.05), OUTCOMES: RIGHT,
        "token_level_scores": scores, "response_mask": MASK, "index": ["a", "a"], "singleton": "zero",
        "config": SimpleNamespace(reward_dpo_coef=1.0, reward_gt_coef=1.0),
    }  # fmt: skip
    _, plain = call_estimator(estimator, token_level_rewards=scores, **inputs)
    torch.testing.assert_close(plain, torch.tensor(expected), atol=1e-5, rtol=0)
    advantages, charged = call_estimator(estimator, token_level_rewards=scores - kl, **inputs)
    torch.testing.assert_close(
        charged, torch.tensor(expected) - torch.tensor([[0.1, 0.1, 0], [0, 0, 0]]), atol=1e-5, rtol=0
    )
    valid = charged[MASK.bool()]
    torch.testing.assert_close(advantages[MASK.bool()], (valid - valid.mean()) / valid.std(), atol=1e-5, rtol=0)


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(workplace):
    prepare(LOWER, 64, hidden=16, heads=2, kv_heads=1, layers=1)
    return workplace


def run(*changes: str) -> Seen:
    """One step on four prompts, all of them trained on unless ``changes`` say otherwise."""
    words = [*PRIME, f"{RM}.model_path=model", "data.oversample_factor=1", f"{IMPLICIT}.optim.lr=1e-2", *changes]
    last = {word.partition("=")[0]: word for word in words}
    return train(*last.values())


def ratings(seen: Seen) -> torch.Tensor:
    (batch,) = seen.batches
    assert (batch.tensors[PROCESS_REWARDS][batch.tensors["response_mask"] == 0] == 0).all()
    return batch.tensors[PROCESS_REWARDS]


def test_it_rates_what_it_has_learnt_from_or_rates_first_or_never_learns(here):
    """At first the model is its reference, so that what it rates before it learns is worth nothing."""
    before, after, never = (run(f"{IMPLICIT}.update={when}") for when in ("before", "after", "none"))
    assert ratings(before).abs().max() > 0 and before.metrics[0]["reward_model/dpo_acc"] > 0.5
    assert ratings(after).abs().max() == 0 and after.metrics[0]["reward_model/dpo_acc"] == 0.5
    assert ratings(never).abs().max() == 0 and "reward_model/grad_norm" not in never.metrics[0]
    for name in ("dpo_loss", "dpo_acc_abs", "grad_norm"):  # they learn the same
        assert after.metrics[0][f"reward_model/{name}"] == before.metrics[0][f"reward_model/{name}"]
    assert after.metrics[0]["reward_model/dpo_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert notices()[f"{A}.ppo_micro_batch_size_per_gpu"]


def test_ratings_are_shaped_as_the_settings_say(here):
    """Not normalised they are beta times log-ratios; normalised the largest sum to the end is 1; whole, on the last."""
    plain, normed, whole, twice = (
        run(*words)
        for words in (
            [f"{IMPLICIT}.prime_norm=none"],
            [f"{IMPLICIT}.prime_norm=batch_norm"],
            [f"{IMPLICIT}.prime_norm=none", f"{IMPLICIT}.prime_granularity=whole"],
            [f"{IMPLICIT}.prime_norm=none", f"{IMPLICIT}.zero_last=true", f"{IMPLICIT}.beta_train=0.05"],
        )
    )
    to_go = ratings(plain).flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(ratings(normed), ratings(plain) / (to_go.abs().max() + 1e-6))
    mask = plain.batches[0].tensors["response_mask"].bool()
    last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    torch.testing.assert_close(ratings(whole)[last], ratings(plain).sum(-1))
    assert ratings(whole)[~last].abs().max() == 0
    torch.testing.assert_close(ratings(twice), torch.where(last, 0.0, ratings(plain)))


def test_its_models_live_with_the_others_or_in_a_pool_of_their_own(here):
    """The roles that a recipe adds are placed as the reward model is."""
    together, apart = run(), run("trainer.resource_pools={raters:{roles:[rm],processes:[1]}}")
    assert torch.equal(ratings(together), ratings(apart))
    pools = apart.trainer.resource_pool_manager
    assert pools.get_resource_pool("reward_model") is pools.get_resource_pool("reward_model_ref")
    assert pools.get_resource_pool("reward_model") is not pools.get_resource_pool("actor")


def test_the_policy_can_be_the_reference(here):
    """The model rates by how it differs from the policy that sampled, which at first it does only by what it learns."""
    frozen, policy = run(f"{IMPLICIT}.ref_type=freeze"), run(f"{IMPLICIT}.ref_type=policy")
    torch.testing.assert_close(ratings(policy), ratings(frozen), atol=1e-5, rtol=1e-4)
    assert "reward_model_ref" in frozen.trainer.roles and "reward_model_ref" not in policy.trainer.roles


def test_the_advantage_is_that_of_the_ratings_and_outcomes(here):
    seen = run("algorithm.reward_dpo_coef=2", "algorithm.reward_gt_coef=3")
    (batch,) = seen.batches
    tensors, uids = batch.tensors, list(batch.non_tensor_batch["uid"])
    paid, mask, right = tensors[PROCESS_REWARDS], tensors["response_mask"], tensors["token_level_scores"].sum(-1)
    row = int(right.argmax())
    others = [i for i in range(len(uids)) if uids[i] == uids[row] and i != row]
    baseline = sum(float(paid[i].sum() / mask[i].sum()) for i in others) / len(others)
    outcome = 1 - float(right[others].mean())
    tokens = int(mask[row].sum())
    first = 2 * (float(paid[row].sum()) - tokens * baseline) + 3 * outcome
    assert right[row] == 1 and tensors["returns"][row, 0].item() == pytest.approx(first, abs=1e-4)


@pytest.mark.slow
def test_accuracy_rises_and_pairs_that_were_never_learnt_from_are_told_apart(here):
    """The model rates each batch before it learns from it: chance at first, then better, while answers get right."""
    learning = [f"{A}.optim.lr=2e-2", f"{IMPLICIT}.optim.lr=2e-2", f"{IMPLICIT}.beta_train=0.5"]
    more = ["data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8", "data.max_response_length=6"]
    steps = ["trainer.total_training_steps=18", "trainer.total_epochs=30", "data.filter_truncate=false"]
    seen = run("data.oversample_factor=2", f"{IMPLICIT}.update=after", *learning, *more, *steps)
    accuracy = [step["critic/acc/mean"] for step in seen.metrics]
    pairs = [step["reward_model/dpo_acc"] for step in seen.metrics]
    assert pairs[0] == 0.5 and sum(accuracy[:3]) / 3 < 0.4
    assert sum(accuracy[-3:]) / 3 > 0.85, accuracy
    assert sum(pairs[8:14]) / 6 > 0.7, pairs
    # the batch holds the prompts of middling difficulty first, and fills up with others
    assert all(len(batch) == 32 for batch in seen.batches)
    assert {8 - step["training/oversampling/filled_prompts"] for step in seen.metrics} != {8.0}


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_interrupted(here):
    words = [f"{A}.optim.lr=1e-2", f"{IMPLICIT}.mini_batch_size=2", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    whole = run(*words, "trainer.total_training_steps=3", "trainer.default_local_dir=whole")
    run(*words, "trainer.total_training_steps=1", "trainer.default_local_dir=parts")
    rest = run(*words, "trainer.total_training_steps=3", "trainer.default_local_dir=parts")
    names = ("reward_model/dpo_loss", "reward_model/dpo_acc", "reward_model/grad_norm", "actor/grad_norm")
    ours, theirs = ([[step[name] for name in names] for step in seen.metrics] for seen in (rest, whole))
    assert len(ours) == 2 and ours == theirs[1:]
    folders = [Path(folder) / "global_step_3" for folder in ("whole", "parts")]
    files = [sorted(f.relative_to(folder) for f in folder.rglob("*.safetensors")) for folder in folders]
    assert files[0] == files[1] and {"actor", "reward_model"} <= {file.parts[0] for file in files[0]}
    for file in files[0]:
        ours, theirs = (load_file(folder / file) for folder in folders)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), file


# ---- what is said --------------------------------------------------------------------------------------------------

COMMAND = [
    "data.train_files=train.parquet", "data.train_batch_size=4", "data.max_prompt_length=64",
    "data.max_response_length=8", f"{A}.ppo_mini_batch_size=4", "actor_rollout_ref.model.path=model",
    "reward_model.model.path=model", "reward.custom_reward_function.path=scorer.py", "trainer.logger=[file]",
]  # fmt: skip


def test_the_script_spells_settings_that_are_there_as_upstream_does(here, project_root):
    """With TINY=1 the same command runs in small: this shows what it is made of."""
    script = str(project_root / "recipe/prime/run_prime_eurus2_7b.sh")
    command, variables = ["bash", script, "trainer.total_epochs=2"], {**os.environ, "SHOW": "1"}
    words = subprocess.check_output(command, env=variables, text=True).splitlines()
    assert words[-1] == "trainer.total_epochs=2" and "reward_model.model.update=before" in words
    config = read_config("ppo_trainer", [*PRIME, *words])
    implicit = config.reward.reward_model.implicit
    assert (implicit.grad_clip, implicit.optim.lr, implicit.mini_batch_size) == (10.0, 1e-6, 64)
    assert implicit.ref_path == config.reward.reward_model.model_path == "PRIME-RL/Eurus-2-7B-SFT"
    assert config.data.oversample_factor == 4 and config.data.filter_truncate


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["reward_model.prime_granularity=tokens"], [f"{IMPLICIT}.prime_granularity", "Allowed: token, whole"]),
        (["reward_model.model.update=befor"], [f"{IMPLICIT}.update", "Allowed: before, after, reverse, none"]),
        (["reward_model.model.path=null"], [f"{RM}.model_path", "from the policy's own first weights"]),
        (["reward_model.model.path=./modle"], [f"{RM}.model_path", "no such model folder", "model"]),
        (["reward_model.model.path=rm"], [f"{RM}.model_path", "is a language model", "ForTokenClassification"]),
        (["reward_model.model.ref_path=./nowhere"], [f"{IMPLICIT}.ref_path", "no such model folder"]),
        (["reward.reward_model.enable=false"], [f"{RM}.enable", "does not run without its reward model"]),
        (["algorithm.adv_estimator=grpo"], ["algorithm.adv_estimator", "reads no process rewards", "leave_one_out"]),
        (["trainer.v1.trainer_mode=syn"], ["trainer.v1.trainer_mode", "unknown schedule", "Did you mean 'sync'?"]),
        (["trainer.v1.trainer_mode=sync"], ["trainer.v1.trainer_mode", "recipe.prime.schedule:PrimeSchedule"]),
        (["actor_rollout_ref.rollout.n=1"], ["actor_rollout_ref.rollout.n", "there must be several"]),
        (["reward_model.mini_batch_size=3"], [f"{IMPLICIT}.mini_batch_size", "a divisor of 4"]),
        (["reward_model.model.loss_type=dpo"], [f"{IMPLICIT}.loss_type", "Allowed: ce"]),
        (["reward_model.model.beta_train=0"], [f"{IMPLICIT}.beta_train", "above 0"]),
        (["data.accuracy_lower_bound=0.9"], ["data.accuracy_lower_bound", "accuracy_upper_bound=0.8"]),
        (["data.oversample_factor=0.5"], ["data.oversample_factor", "1 or more"]),
    ],
)
def test_what_is_wrong_is_told_with_its_key_and_what_to_write(here, capsys, words, says):
    config = {"architectures": ["Qwen2ForTokenClassification"], "model_type": "qwen2"}
    Path("rm").mkdir()
    Path("rm/config.json").write_text(json.dumps(config))
    assert main([*COMMAND, *words]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in says), message


def test_an_outcome_that_is_no_rate_of_being_right_stops_the_run(here, capsys):
    Path("scorer.py").write_text(LOWER.replace("float(", "-float("))
    assert main([*COMMAND, "data.oversample_factor=1", "trainer.resume_mode=disable"]) == 2
    message = capsys.readouterr().err
    assert "a number from 0 to 1" in message and "'acc'" in message and "-1.0" in message


def test_settings_that_do_nothing_are_told(here, capsys):
    with pytest.raises(SystemExit):
        main(["--cfg", "job", "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=2", f"{RM}.model_path=m"])
    shown = capsys.readouterr().out
    assert ESTIMATOR.partition("=")[2] in shown and "PrimeSchedule" in shown
    assert "of process rewards" in notices()["algorithm.adv_estimator"]
    reset_notices()
    train("data.filter_accuracy=true", "data.accuracy_upper_bound=0.7")
    assert "data.oversample_factor=1" in notices()["data.filter_accuracy"]
    reset_notices()
    load_config(
        "ppo_trainer", [*PRIME, *COMMAND, f"{RM}.max_length=8", f"{IMPLICIT}.ref_type=policy", f"{IMPLICIT}.ref_path=x"]
    )
    assert "the policy's tokens as they are" in notices()[f"{RM}.max_length"]
    assert "ref_type=policy" in notices()[f"{IMPLICIT}.ref_path"]


@pytest.mark.parametrize(
    ("old", "value", "key", "expected"),
    [
        ("reward_model.prime_granularity", "whole", "prime_granularity", "whole"),
        ("reward_model.prime_norm", "none", "prime_norm", "none"),
        ("reward_model.mini_batch_size", "64", "mini_batch_size", 64),
        ("reward_model.model.ref_path", "/r", "ref_path", "/r"),
        ("reward_model.model.ref_type", "policy", "ref_type", "policy"),
        ("reward_model.model.beta_train", "0.1", "beta_train", 0.1),
        ("reward_model.model.loss_type", "ce", "loss_type", "ce"),
        ("reward_model.model.update", "after", "update", "after"),
        ("reward_model.model.enable_gradient_checkpointing", "true", "enable_gradient_checkpointing", True),
        ("reward_model.model.use_fused_kernels", "true", "use_fused_kernels", True),
        ("reward_model.model.optim.lr", "1e-6", "optim.lr", 1e-6),
        ("reward_model.model.optim.grad_clip", "10.0", "grad_clip", 10.0),
        ("reward_model.model.optim.warmup_style", "cosine", "optim.lr_scheduler_type", "cosine"),
        ("reward_model.model.optim.lr_scheduler", "cosine", "optim.lr_scheduler_type", "cosine"),
        ("reward_model.model.optim.warmup_steps_ratio", "0.1", "optim.lr_warmup_steps_ratio", 0.1),
    ],
)
def test_a_spelling_of_upstreams_recipe_sets_the_current_setting_and_says_its_name(old, value, key, expected):
    found = read_config("ppo_trainer", [ESTIMATOR, f"{old}={value}"]).reward.reward_model.implicit
    for part in key.split("."):
        found = found[part]
    assert found == expected and f"{IMPLICIT}.{key}" in notices()[old]


@pytest.mark.parametrize(
    "old", ["reward_model.model.tokenizer_path", "reward_model.model.fused_kernel_options.impl_backend"]
)
def test_a_spelling_that_means_nothing_here_gives_one_notice(old):
    read_config("ppo_trainer", [ESTIMATOR, f"{old}=x"])
    assert any(old.startswith(key) and "has no effect" in said for key, said in notices().items())
