"""The commands of recipes: what they set, what the command line changes, and settings that cannot be."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.harness.configs import changed
from verl.algorithms.aggregation import loss_norm
from verl.algorithms.losses import PPOPolicyLoss
from verl.config import load_config
from verl.errors import ConfigError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REQUIRED = ("data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            "reward.custom_reward_function.path=scorer.py", f"{R}.n=4")  # fmt: skip
PRINTED = {
    "collabllm": (
        ["actor_rollout_ref.rollout.multi_turn.max_user_turns=5"],
        "max_user_turns: 5",
        "collabllm/users.yaml",
    ),
    "dapo": (["algorithm.filter_groups.max_num_gen_batches=3"], "max_num_gen_batches: 3", "clip_ratio_high: 0.28"),
    "entropy": ([f"{A}.policy_loss.kl_cov_ratio=0.5"], "kl_cov_ratio: 0.5", "loss_mode: kl_cov"),
    "fapo": ([f"{A}.clip_ratio_high=0.5"], "clip_ratio_high: 0.5", "name: compute_score_fapo"),
    "flowrl": (["algorithm.flowrl_beta=3"], "flowrl_beta: 3", "recipe.flowrl.core:flow_balance"),
    "genrm_remote": ([f"{A}.kl_loss_coef=0.5"], "kl_loss_coef: 0.5", "while_sampling: true"),
    "gkd": (
        ["distillation.teacher_models.teacher_model.model_path=model", "distillation.distillation_loss.loss_mode=k3+"],
        "loss_mode: k3+",
        "use_task_rewards: false",
    ),
    "ladder": (["gspo", f"{A}.clip_ratio_low=0.05"], "clip_ratio_low: 0.05", "clip_ratio_high: 0.0004"),
    "langgraph_agent": ([f"{A}.clip_ratio_high=0.5"], "clip_ratio_high: 0.5", "langgraph_agent/loops.yaml"),
    "deepeyes": ([f"{R}.multi_turn.max_assistant_turns=3"], "max_assistant_turns: 3", "deepeyes/tools.yaml"),
    "pf_ppo": (["algorithm.pf_ppo.weight_pow=3"], "weight_pow: 3", "use_pf_ppo: true"),
    "rep_exp": (["algorithm.rep_exp_beta=0.5"], "rep_exp_beta: 0.5", "recipe.rep_exp.core:explored"),
    "retool": ([f"{R}.multi_turn.max_assistant_turns=3"], "max_assistant_turns: 3", "recipe/retool/tools.yaml"),
    "spo": (["data.spo_rho=0.8"], "spo_rho: 0.8", "recipe.spo.core:single_stream"),
    "vapo": (["trainer.critic_warmup=7"], "critic_warmup: 7", "adv_estimator: vapo"),
}
"""Recipe -> words of the command line, what they change, and a setting of the recipe."""
REFUSED = [
    ("flowrl", "algorithm.flowrl_beta=0", "flowrl_beta: out of range"),
    ("flowrl", "algorithm.adv_estimator=grpo", "recipe.flowrl.core:group_partition"),
    ("flowrl", f"{A}.policy_loss.loss_mode=vanilla", "recipe.flowrl.core:flow_balance"),
    ("flowrl", f"{A}.use_kl_loss=false", "reads the reference's log-probs"),
    ("flowrl", "algorithm.use_kl_in_reward=true", "charge it twice"),
    ("flowrl", f"{R}.n=1", f"{R}.n"),
    ("rep_exp", "algorithm.rep_exp_beta=-1", "rep_exp_beta: out of range"),
    ("rep_exp", "algorithm.rep_exp_lambda=0", "rep_exp_lambda: out of range"),
    ("rep_exp", "algorithm.rep_exp_dim=-1", "rep_exp_dim: out of range"),
    ("rep_exp", "algorithm.adv_estimator=grpo", "recipe.rep_exp.core:explored"),
    ("rep_exp", "trainer.v1.trainer_mode=sync", "recipe.rep_exp.schedule:RepExpSchedule"),
    ("rep_exp", f"{R}.n=1", f"{R}.n"),
    ("spo", "data.spo_rho=1", "spo_rho: out of range"),
    ("spo", "data.spo_floor=0", "spo_floor: out of range"),
    ("spo", "data.sampler.class_path=null", "data.sampler.class_path"),
    ("spo", "data.custom_cls.path=null", "data.custom_cls.path"),
]


def program(recipe: str):
    return importlib.import_module(f"recipe.{recipe}.main_{recipe}")


@pytest.mark.parametrize("recipe", PRINTED)
def test_the_command_line_wins_over_the_recipe(lower_case_task: Path, capsys: pytest.CaptureFixture[str], recipe: str):
    words, *printed = PRINTED[recipe]
    with pytest.raises(SystemExit) as left:
        program(recipe).main([*REQUIRED, *words, "--cfg", "job"])
    output = capsys.readouterr().out
    assert not left.value.code and [text for text in printed if text not in output] == []


@pytest.mark.parametrize(("recipe", "change", "says"), REFUSED)
def test_settings_that_cannot_be_are_refused(lower_case_task: Path, recipe: str, change: str, says: str):
    words = changed(getattr(program(recipe), recipe.upper()), *REQUIRED)
    load_config("ppo_trainer", words)
    with pytest.raises(ConfigError) as error:
        load_config("ppo_trainer", changed(words, change))
    assert says in str(error.value)


@pytest.mark.parametrize("words", [[], ["gspa"], ["gspo", "grpo"]])
def test_a_ladder_has_one_rung_and_says_which_there_are(capsys: pytest.CaptureFixture[str], words: list[str]):
    assert program("ladder").main([*words, *REQUIRED]) == 2
    report = capsys.readouterr().err
    assert "on one rung" in report and "clip_higher" in report


def test_the_rungs_weigh_tokens_as_their_papers_do(lower_case_task: Path):
    """Answers of 1 and 4 tokens with ratios 1: slopes of the loss at a token, for an advantage of -1."""
    ladder, slopes = program("ladder"), {}
    for rung in ladder.RUNGS:
        words, settings = ladder.defaults_of([*REQUIRED, rung])
        config = load_config("ppo_trainer", changed(settings, *words))
        mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
        log_probs = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
        batch = {"response_mask": mask, "advantages": -mask.double(), "old_log_probs": log_probs.detach()}
        rollout = config.actor_rollout_ref.rollout
        loss_fn = PPOPolicyLoss(config.actor_rollout_ref.actor, rollout.response_length)
        loss, _ = loss_fn({"log_probs": log_probs}, batch, loss_norm(mask))
        (slope,) = torch.autograd.grad(loss, log_probs)
        slopes[rung] = [*slope[:, 0].tolist(), config.algorithm.norm_adv_by_std_in_grpo]
    assert slopes == {
        "grpo": [pytest.approx(1 / 2), pytest.approx(1 / 8), True],
        "token_mean": [pytest.approx(1 / 5), pytest.approx(1 / 5), True],
        "clip_higher": [pytest.approx(1 / 5), pytest.approx(1 / 5), True],
        "dr_grpo": [pytest.approx(1 / 12), pytest.approx(1 / 12), False],
        "gspo": [pytest.approx(1 / 2), pytest.approx(1 / 8), True],
    }
