"""Settings that change nothing are told once, with what would give them effect; nobody is told about defaults."""

import json

import pytest

from tests.harness.configs import changed
from verl import device
from verl.config import load_config
from verl.config.loading.configuration import read_config
from verl.config.schema.root import skips_old_log_prob

A, R, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MICRO = (f"{A}.ppo_micro_batch_size_per_gpu", f"{R}.log_prob_micro_batch_size_per_gpu",
         f"{REF}.log_prob_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu")  # fmt: skip


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: None)


@pytest.fixture
def ppo(tmp_path):
    """Load a configuration with micro-batches and validation files; returns it."""
    (tmp_path / "rows.parquet").write_text("")
    (tmp_path / "config.json").write_text(json.dumps({}))
    rows = f"{tmp_path}/rows.parquet"
    usual = [f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={tmp_path}"]
    usual += [f"{key}=4" for key in MICRO]

    def load(*overrides):
        return load_config("ppo_trainer", changed(usual, *overrides))

    return load


GRPO = ("algorithm.adv_estimator=grpo", f"{R}.n=4")
NO_KL = "has no effect without algorithm.use_kl_in_reward=true"
KL_IN_REWARD = "algorithm.use_kl_in_reward=true"
CASES = [
    (["data.source_weights={a: 1}", "data.sampler.class_path=pkg://my_verl.data.x", "data.sampler.class_name=X"],
     "data.source_weights", "has an effect only if data.sampler.class_name reads it"),
    (["algorithm.kl_ctrl.kl_coef=0.01"], "algorithm.kl_ctrl.kl_coef", NO_KL),
    (["algorithm.kl_ctrl.kl_coef=0.001"], "algorithm.kl_ctrl.kl_coef", NO_KL),  # its default, but typed
    (["algorithm.kl_ctrl.type=adaptive"], "algorithm.kl_ctrl.type", NO_KL),
    (["algorithm.kl_ctrl.target_kl=0.2", f"{A}.use_kl_loss=true"], "algorithm.kl_ctrl.target_kl",
     f"{NO_KL} ({A}.kl_loss_coef weighs the KL in the loss)"),
    (["algorithm.kl_ctrl.target_kl=0.2", KL_IN_REWARD], "algorithm.kl_ctrl.target_kl",
     "has no effect without algorithm.kl_ctrl.type=adaptive"),
    (["algorithm.kl_penalty=k3"], "algorithm.kl_penalty", NO_KL),
    (["actor_rollout_ref.model.lora.merge=true"], "actor_rollout_ref.model.lora.merge",
     "has no effect without actor_rollout_ref.model.lora_rank"),
    (["critic.model.lora.merge=true"], "critic.model.lora.merge",
     "has no effect: no sampler takes a critic's weights"),
    ([f"{A}.kl_loss_coef=0.1"], f"{A}.kl_loss_coef", f"has no effect without {A}.use_kl_loss=true"),
    ([f"{A}.use_kl_loss=true", KL_IN_REWARD], "algorithm.use_kl_in_reward",
     f"the KL to the reference is charged twice: {A}.use_kl_loss is on as well"),
    ([f"{A}.clip_ratio=0.3", f"{A}.clip_ratio_low=0.2", f"{A}.clip_ratio_high=0.28"], f"{A}.clip_ratio",
     "has no effect, since clip_ratio_low and clip_ratio_high are both set"),
    (["data.min_response_length=4", f"{R}.repetition_penalty=1.1"], f"{R}.repetition_penalty",
     "the sampler draws with it (and data.min_response_length) and reports the log-probs of what it draws from; the "
     "trainer's are without it. Only training/rollout_probs_diff_* and algorithm.rollout_correction see the "
     "difference, even with equal weights"),
    (["data.min_response_length=4", f"{R}.ignore_eos=true"], "data.min_response_length",
     f"has no effect: {R}.ignore_eos=true makes every response as long as can be"),
    ([f"{R}.logprobs_mode=raw_logprobs", f"{R}.temperature=0.7"], f"{R}.logprobs_mode",
     "raw log-probs are of temperature 1, the trainer's of temperature 0.7: training/rollout_probs_diff_* shows both "
     "this and what differs between the engines"),
    ([f"{R}.logprobs_mode=raw_logprobs", f"{R}.calculate_log_probs=false"], f"{R}.logprobs_mode",
     f"has no effect without {R}.calculate_log_probs=true"),
    ([f"{R}.logprobs_mode=raw_logprobs", f"{R}.repetition_penalty=1.1", "algorithm.rollout_is_threshold=2.0"],
     f"{R}.logprobs_mode", f"the rollout correction does not see that responses are drawn with {R}.repetition_penalty"),
    ([f"{R}.trace.token2text=true"], f"{R}.trace.token2text", f"has no effect without {R}.trace.backend"),
    ([f"{A}.loss_scale_factor=100"], f"{A}.loss_scale_factor",
     f"has no effect without {A}.loss_agg_mode=seq-mean-token-sum-norm"),
    (["algorithm.norm_adv_by_std_in_grpo=false"], "algorithm.norm_adv_by_std_in_grpo",
     "has no effect without algorithm.adv_estimator=grpo"),
    (["algorithm.filter_groups.metric=acc"], "algorithm.filter_groups.metric",
     "has no effect without algorithm.filter_groups.enable=true"),
    ([*GRPO, "critic.enable=true"], "critic.enable",
     "a critic is trained, but the estimator 'grpo' does not use its values"),
    ([*GRPO, "critic.optim.lr=1e-4"], "critic.optim.lr", "has no effect, since 'grpo' has no critic"),
    ([*GRPO, "critic.cliprange_value=0.2", "critic.model.path=Qwen/Qwen3-8B"], "critic.cliprange_value",
     "has no effect, since 'grpo' has no critic; nor have critic.model.path"),
    ([*GRPO, "trainer.critic_warmup=5"], "trainer.critic_warmup",
     "there is no critic to warm up: the policy just waits for that many steps"),
    (["skip.rollout.enable=true"], "skip.rollout.enable", "has no effect: skip.rollout.steps names no step"),
    (["skip.rollout.action=repeat"], "skip.rollout.action", "has no effect without skip.rollout.enable=true"),
    (["data.filter_function.name=mine"], "data.filter_function.name",
     "has no effect without data.filter_function.path"),
    (["data.val_files=null"], "data.val_files", "no validation files are given, so nothing is validated"),
    ([f"{R}.val_kwargs.n=4"], f"{R}.val_kwargs.n",
     f"greedy validation gives the same response 4 times; set {R}.val_kwargs.do_sample=true and a temperature"),
    ([f"{R}.val_kwargs.temperature=0.6"], f"{R}.val_kwargs.temperature",
     f"has no effect without {R}.val_kwargs.do_sample=true"),
    ([f"{R}.multi_turn.max_parallel_calls=2"], f"{R}.multi_turn.max_parallel_calls",
     f"has effect only for rows with agent_name=tool_agent, unless {R}.multi_turn.enable=true"),
    (["reward.custom_reward_function.name=score"], "reward.custom_reward_function.name",
     "has no effect without reward.custom_reward_function.path"),
    (["trainer.resume_from_path=/a/global_step_3"], "trainer.resume_from_path",
     "has no effect without trainer.resume_mode=resume_path"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, key, text", CASES, ids=[" ".join(case[0]) for case in CASES])
def test_a_setting_without_effect_is_told_with_what_would_give_it_one(ppo, told, overrides, key, text):
    ppo(*overrides)
    assert told() == {key: text}


EFFECTIVE = [
    [f"{R}.multi_turn.max_parallel_calls=2", f"{R}.multi_turn.enable=true"],
    ["algorithm.kl_ctrl.kl_coef=0.01", KL_IN_REWARD],
    ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2", KL_IN_REWARD],
    [f"{A}.kl_loss_coef=0.1", f"{A}.use_kl_loss=true"],
    [f"{A}.clip_ratio=0.3"],
    [f"{A}.clip_ratio=0.3", f"{A}.clip_ratio_high=0.28"],
    [*GRPO, "algorithm.norm_adv_by_std_in_grpo=false"],
    ["algorithm.adv_estimator=my.own:one", "algorithm.norm_adv_by_std_in_grpo=false", "critic.enable=true"],
    ["critic.optim.lr=1e-4", "critic.cliprange_value=0.2", "trainer.critic_warmup=5"],
    [f"{R}.val_kwargs.n=4", f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=0.6"],
]


@pytest.mark.parametrize("overrides", EFFECTIVE, ids=" ".join)
def test_a_setting_with_effect_is_not_talked_about(ppo, told, overrides):
    ppo(*overrides)
    assert told() == {}


def test_a_file_may_repeat_a_default_without_being_told(ppo, told, tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: {kl_ctrl: {kl_coef: 0.001}}")
    ppo("--config-path", str(tmp_path), "--config-name", "mine")
    assert told() == {}


def test_no_micro_batch_size_is_one_notice_that_names_every_pass(ppo, told):
    ppo(f"{A}.use_kl_loss=true", *(f"{key}=null" for key in MICRO))
    also = f"nor {MICRO[1]}, {MICRO[2]}, {MICRO[3]}"
    text = f"not set ({also}): micro-batches get an automatic token budget, on which no result depends"
    assert told() == {MICRO[0]: text}


def test_passes_that_do_not_happen_are_not_talked_about(ppo, told):
    """No reference without a KL term, no critic in GRPO, no old log-probs with one mini-batch and one epoch."""
    ppo(*GRPO, "data.train_batch_size=256", *(f"{key}=null" for key in MICRO))
    assert told() == {MICRO[0]: "not set: micro-batches get an automatic token budget, on which no result depends"}


def test_a_token_budget_needs_no_micro_batch_size(ppo, told):
    ppo(f"{A}.use_dynamic_bsz=true", *(f"{key}=null" for key in MICRO))
    assert told() == {}


def test_a_pass_that_is_left_out_has_no_use_for_its_micro_batch_size(ppo, told):
    ppo("data.train_batch_size=256", f"{R}.log_prob_micro_batch_size=4")
    assert "trainer.skip_old_log_prob" in told()[f"{R}.log_prob_micro_batch_size"]


@pytest.mark.parametrize(
    "overrides, skipped",
    [
        ([], False),  # 1024 prompts in mini-batches of 256
        (["data.train_batch_size=256"], True),
        (["data.train_batch_size=256", "trainer.skip_old_log_prob=false"], False),
        (["data.train_batch_size=256", f"{A}.ppo_epochs=2"], False),
        (["data.train_batch_size=256", KL_IN_REWARD], False),
        (["data.train_batch_size=256", "algorithm.rollout_is_threshold=2.0"], False),
        (["data.train_batch_size=256", "algorithm.rollout_correction.rollout_is=token"], False),
        (["algorithm.rollout_correction.bypass_mode=true"], True),
    ],
)
def test_old_log_probs_are_left_out_exactly_where_the_trainer_leaves_them_out(overrides, skipped):
    from verl.trainer.ppo.context import RunState

    cfg = read_config("ppo_trainer", overrides)
    assert skips_old_log_prob(cfg) is skipped
    assert RunState(cfg, reward=lambda batch: {}, total_steps=1).needs_old_log_prob is not skipped


def test_a_supervised_run_tells_what_has_no_effect(tmp_path, told):
    (tmp_path / "rows.parquet").write_text("")
    load_config("sft_trainer", [f"data.train_files={tmp_path}/rows.parquet", "data.micro_batch_size_per_gpu=2",
                                "model.path=Qwen/Qwen3-8B", "trainer.resume_from_path=/a/global_step_3",
                                "model.lora.merge=true"])  # fmt: skip
    assert told() == {
        "model.lora.merge": "has no effect: there is no sampler",
        "data.val_files": "no validation files are given, so nothing is validated",
        "data.micro_batch_size_per_gpu": "has no effect without data.use_dynamic_bsz=false",
        "trainer.resume_from_path": "has no effect without trainer.resume_mode=resume_path",
    }


OLDER, NEWER = "algorithm.rollout_is", "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        ([f"{OLDER}=true"], OLDER, "has no effect without algorithm.rollout_is_threshold"),
        ([f"{OLDER}_level=sequence"], f"{OLDER}_level", "has no effect without algorithm.rollout_is_threshold"),
        ([f"{NEWER}.loss_type=reinforce"], f"{NEWER}.loss_type", f"without {NEWER}.bypass_mode=true"),
        ([f"{NEWER}.rollout_rs_threshold=2.0"], f"{NEWER}.rollout_rs_threshold", f"without {NEWER}.rollout_rs"),
        (
            [f"{NEWER}.rollout_is_batch_normalize=true"],
            f"{NEWER}.rollout_is_batch_normalize",
            f"without {NEWER}.rollout_is",
        ),
        (
            [f"{NEWER}.bypass_mode=true", f"{NEWER}.rollout_is=token", f"{NEWER}.rollout_is_batch_normalize=true"],
            f"{NEWER}.rollout_is_batch_normalize",
            "applies no weights",
        ),
        (
            [f"{NEWER}.bypass_mode=true", f"{NEWER}.rollout_is=token"],
            f"{NEWER}.rollout_is",
            "weights are measured but not applied",
        ),
        ([f"{OLDER}_threshold=2.0", f"{R}.top_p=0.9"], f"{R}.top_p", "ratios of at most 1"),
        ([f"{NEWER}.rollout_is=token", f"{R}.top_k=20"], f"{R}.top_k", "ratios of at most 1"),
        (["algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable", f"drops nothing with {R}.n=1"),
    ],
)
def test_a_correction_that_changes_nothing_or_misleads_is_told(ppo, told, overrides, key, says):
    ppo(*overrides)
    assert says in told()[key]


def test_a_correction_as_it_should_be_is_not_remarked_on(ppo, told):
    ppo(f"{OLDER}_threshold=2.0", f"{OLDER}=true", f"{R}.n=4")
    assert [key for key in told() if "rollout_is" in key or "correction" in key] == []
