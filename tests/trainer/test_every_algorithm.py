"""``main_ppo`` runs every estimator and policy loss by configuration alone, ten steps each in this one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.harness.configs import changed
from tests.harness.runs import logged, prepare
from verl.config import load_config, record_reads
from verl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from verl.trainer import main_ppo

A, ALG = "actor_rollout_ref.actor", "algorithm"
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": digits + len(solution_str) % 3, "digits": digits, "thirds": len(solution_str) % 3}
"""
GAME = """
class Letters:
    def reset(self, *, seed=None, options=None):
        self.turns = 0
        return "Say a letter.", {}

    def step(self, action):
        self.turns += 1
        return "Another.", float(action[:1].isalpha()), self.turns == 2, False, {}
"""
LOOPS = """
- name: letters
  _target_: verl.agent_loop.envs.loop.EnvironmentAgentLoop
  environment: game.py:Letters
  max_tokens_per_turn: 1
"""
COMMON = [
    "data.train_files=train.parquet",
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=3",
    f"{A}.ppo_mini_batch_size=2",
    f"{A}.optim.lr=1e-2",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
    "trainer.total_training_steps=10",
]
ESTIMATORS: dict[str, list[str]] = {
    **{name: [] for name in ADVANTAGE_ESTIMATORS.builtin_targets()},
    "gae": ["actor_rollout_ref.rollout.n=1", "critic.ppo_mini_batch_size=4"],
    "vapo": [
        "critic.ppo_mini_batch_size=4",
        f"{ALG}.vapo_length_alpha=0.2",
        f"{ALG}.vapo_lam_critic=0.9",
        f"{A}.positive_lm_coef=0.1",
    ],
    "gigpo": [
        f"{ALG}.gigpo.step_advantage_w=0.5",
        "data.max_response_length=64",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=letters",
    ],
    "gdpo": [f"{ALG}.gdpo_reward_keys=[digits,thirds]", f"{ALG}.gdpo_reward_weights=[1.0,0.5]"],
}
LOSSES: dict[str, list[str]] = {
    **{name: [] for name in POLICY_LOSSES.builtin_targets()},
    "dro": [f"{A}.policy_loss.dro_beta=0.1"],
    "sapo": [f"{A}.tau_pos=1.0", f"{A}.tau_neg=1.1"],
    "clip_cov": [f"{A}.policy_loss.clip_cov_{k}" for k in ("ratio=0.1", "lb=-9.0", "ub=9.0")],
    "kl_cov": [f"{A}.policy_loss.kl_cov_ratio=0.1", f"{A}.policy_loss.ppo_kl_coef=1.0"],
}
OTHERS = {
    "dr_grpo": [
        f"{ALG}.norm_adv_by_std_in_grpo=false", f"{A}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{A}.loss_scale_factor=6",
    ],
    "pf_ppo": [f"{ALG}.use_pf_ppo=true", f"{ALG}.pf_ppo.reweight_method=pow", f"{ALG}.pf_ppo.weight_pow=1.0"],
    "token_sum_and_k3_in_the_loss": [f"{A}.loss_agg_mode=token-sum", f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=k3+"],
    "sppo": [
        f"{ALG}.adv_estimator=recipe.sppo.core:centred", f"{A}.policy_loss.loss_mode=recipe.sppo.core:sppo",
        f"{A}.loss_agg_mode=seq-mean-token-mean", f"{A}.sppo_eta=2.0",
    ],
    "nash_md": [
        f"{ALG}.adv_estimator=recipe.online_dpo.core:nash_md", f"{ALG}.use_kl_in_reward=true",
        f"{ALG}.nash_mixture=0.3", f"{ALG}.nash_scale=0.5",
    ],
    "k2_in_the_reward": [f"{ALG}.use_kl_in_reward=true", f"{ALG}.kl_penalty=k2", f"{ALG}.kl_ctrl.type=adaptive"],
    "exact_kl_in_the_loss": [f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=full"],
    "exact_kl_in_the_reward": [f"{ALG}.use_kl_in_reward=true", f"{ALG}.kl_penalty=full"],
    "exact_kl_to_the_base": [
        f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=full", f"{ALG}.use_kl_in_reward=true", f"{ALG}.kl_penalty=full",
        "actor_rollout_ref.model.lora_rank=4",
    ],
    "sequence_mean_and_entropy": [f"{A}.loss_agg_mode=seq-mean-token-mean", f"{A}.entropy_coeff=0.01"],
    "bypass_with_reinforce": [
        f"{ALG}.rollout_correction.bypass_mode=true", f"{ALG}.rollout_correction.loss_type=reinforce",
        f"{ALG}.rollout_correction.rollout_is=token", f"{ALG}.rollout_correction.rollout_is_batch_normalize=true",
    ],
}  # fmt: skip
RUNS = {
    **{f"estimator {name}": [f"{ALG}.adv_estimator={name}", *more] for name, more in ESTIMATORS.items()},
    **{
        f"loss {name}": [f"{ALG}.adv_estimator=grpo", f"{A}.policy_loss.loss_mode={name}", *more]
        for name, more in LOSSES.items()
    },
    **{name: [f"{ALG}.adv_estimator=grpo", *more] for name, more in OTHERS.items()},
}
READ_HERE = [
    f"{A}.policy_loss.clip_cov_ratio", f"{A}.policy_loss.clip_cov_lb", f"{A}.policy_loss.clip_cov_ub",
    f"{A}.policy_loss.kl_cov_ratio", f"{A}.policy_loss.ppo_kl_coef", f"{A}.policy_loss.dro_beta", f"{A}.tau_pos",
    f"{A}.tau_neg", f"{A}.sppo_eta", f"{ALG}.nash_mixture",
    f"{ALG}.nash_scale", f"{ALG}.gdpo_reward_keys", f"{ALG}.gdpo_reward_weights",
    f"{ALG}.vapo_length_alpha", f"{ALG}.vapo_lam_critic", f"{ALG}.gigpo.step_advantage_w",
    f"{ALG}.pf_ppo.reweight_method", f"{ALG}.pf_ppo.weight_pow",
]  # fmt: skip
EXACT_KL = {"actor/kl_loss": f"{A}.kl_loss_type", "actor/reward_kl_penalty": f"{ALG}.kl_penalty"}
reads: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def here(shared_workplace: Path) -> None:
    prepare(SCORER, 16, hidden=16, heads=2, kv_heads=1, layers=1)
    Path("game.py").write_text(GAME)
    Path("loops.yaml").write_text(LOOPS)


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_by_configuration_alone(name):
    label = name.replace(" ", "_")
    words = changed(COMMON, f"trainer.experiment_name={label}", *RUNS[name])
    config = load_config("ppo_trainer", words)
    with record_reads() as found:
        main_ppo.run_ppo(config)
    reads.update(found)
    steps = logged("logs", label)
    assert len(steps) == 10
    for step in steps:
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl", "critic/advantages/mean"):
            assert math.isfinite(step[key]), key
    for key in (key for key, switch in EXACT_KL.items() if f"{switch}=full" in words):
        assert steps[-1][key] > 0, key
    assert steps[0]["actor/grad_norm"] > 0 and sum(step["actor/grad_norm"] > 0 for step in steps) >= 5


def test_every_setting_of_a_loss_or_an_estimator_was_read_by_its_run():
    assert [key for key in READ_HERE if key not in reads] == []
