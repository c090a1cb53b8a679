"""Every command, YAML file and key that guides print: it works, works with a notice, or is refused by name.

The guides were written for clusters; what they print is read here on a laptop, and where that is the only obstacle, on
one process as well.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

from verl import device, registry
from verl.config import load_config
from verl.errors import ConfigError, NotBuiltError

A, R, REF, M = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
LAPTOP = "8 GPUs are requested, and this machine has no GPU"
ONE = "trainer.n_gpus_per_node=1 trainer.nnodes=1"
NO_VAL, NO_MICRO, ON_CPU = "data.val_files", f"{A}.ppo_micro_batch_size_per_gpu", "trainer.n_gpus_per_node"


@dataclass(frozen=True)
class Works:
    """The configuration is accepted: with these values, and with a notice under each of these keys and no other."""

    values: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """One error with a line for each of ``parts``; ``not_built`` if there is nothing wrong but missing features."""

    parts: tuple[str, ...]
    not_built: bool = True


def refused(*parts: str) -> Refused:
    """Every problem is a feature that is not built yet."""
    return Refused(parts)


def wrong(*parts: str) -> Refused:
    """At least one problem is another one."""
    return Refused(parts, not_built=False)


def named(names: registry.Registry, name: str, **values: Any) -> Works | Refused:
    """A name that upstream has: it works if it is built, and is refused by its name if not."""
    return Works(values) if name in names.names() else refused(f"the {names.kind} {name!r} is not built yet")


@pytest.fixture
def laptop(monkeypatch, tmp_path):
    """A machine without GPUs: home, working directory and model folder of the guides' commands."""
    monkeypatch.setattr(device, "accelerator", lambda: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RM_PATH", str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    for name in ("data/gsm8k/train.parquet", "data/gsm8k/test.parquet", "data/rlhf/gsm8k/train.parquet", "my_reward.py",
                 "models/deepseek-llm-7b-chat/config.json", "model/config.json"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    return tmp_path


def check(outcome: Works | Refused, told: Any, program: str, argv: list[str]) -> None:
    if isinstance(outcome, Refused):
        with pytest.raises(NotBuiltError if outcome.not_built else ConfigError) as caught:
            load_config(program, argv)
        said = str(caught.value)
        assert [part for part in outcome.parts if part not in said] == []
        assert len(said.splitlines()) == (1 if len(outcome.parts) == 1 else len(outcome.parts) + 1), said
        assert outcome.not_built or not isinstance(caught.value, NotBuiltError)
        return
    made = load_config(program, argv)
    for key, value in outcome.values.items():
        node: Any = made
        for part in key.split("."):
            node = node[part]
        assert node == value, key
    assert set(told()) == set(outcome.notices), json.dumps(told(), indent=1)


GRPO = (
    "algorithm.adv_estimator=grpo data.train_files=~/data/gsm8k/train.parquet "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.n=8 "
    "actor_rollout_ref.actor.use_kl_loss=True trainer.n_gpus_per_node=8"
)
CRITIC = "algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen2.5-7B-Instruct trainer.n_gpus_per_node=8"
HOW_TO_USE = (
    "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet "
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=vllm "
    "trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=15"
)
DEVELOP = (
    "algorithm.adv_estimator=grpo data.train_batch_size=1024 actor_rollout_ref.rollout.name=vllm "
    "actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True algorithm.kl_ctrl.kl_coef=0.001"
)
SCALE = (
    "trainer.nnodes=4 trainer.n_gpus_per_node=8 actor_rollout_ref.actor.strategy=fsdp2 "
    "actor_rollout_ref.actor.fsdp_config.param_offload=True"
)
COOKBOOK_1 = (
    "algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet "
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.name=sglang "
    "actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 trainer.nnodes=1"
)
COOKBOOK_2 = (
    "algorithm.adv_estimator=gae critic.model.path=$RM_PATH critic.ppo_micro_batch_size_per_gpu=4 "
    "algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.rollout.name=vllm"
)
FSDP2_EVERYWHERE = (
    "actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.actor.strategy=fsdp2 critic.strategy=fsdp2 "
    "reward_model.strategy=fsdp2"
)

COMMANDS = {
    "quick start: GRPO on eight GPUs": (GRPO, wrong(LAPTOP)),
    "quick start, on one process": (
        f"{GRPO} {ONE}",
        Works({f"{R}.n": 8, f"{R}.name": "hf", "data.train_batch_size": 1024}, (NO_VAL, NO_MICRO, ON_CPU)),
    ),
    "PPO with a critic": (CRITIC, wrong(LAPTOP)),
    "PPO with a critic, on one process": (
        f"{CRITIC} {ONE}",
        Works({"critic.model.path": "Qwen/Qwen2.5-7B-Instruct"}, (NO_VAL, NO_MICRO, ON_CPU)),
    ),
    "launch on four nodes": (
        "trainer.nnodes=4 trainer.n_gpus_per_node=8",
        Works({"trainer.nnodes": 4}, (NO_VAL, NO_MICRO)),
    ),
    "how to use it": (HOW_TO_USE, Works({f"{R}.name": "vllm"}, (NO_MICRO, ON_CPU))),
    "how to use it, with the built-in sampler": (
        f"{HOW_TO_USE} {R}.name=hf",
        Works({"trainer.total_epochs": 15}, (NO_MICRO, ON_CPU)),
    ),
    "how to develop with it": (
        DEVELOP,
        Works({f"{R}.name": "vllm"}, (NO_VAL, NO_MICRO, "algorithm.kl_ctrl.kl_coef")),
    ),
    "how to develop with it, with the built-in sampler": (
        f"{DEVELOP} {R}.name=hf",
        Works({f"{R}.n": 8}, (NO_VAL, NO_MICRO, "algorithm.kl_ctrl.kl_coef")),
    ),
    "how to scale it": (SCALE, Works({f"{A}.fsdp_config.param_offload": True}, (NO_VAL, NO_MICRO))),
    "how to scale it, on one process": (
        f"{SCALE} {ONE}",
        Works({f"{A}.fsdp_config.param_offload": True}, (NO_VAL, NO_MICRO, ON_CPU)),
    ),
    "cookbook 1: GRPO on math": (COOKBOOK_1, wrong(LAPTOP)),
    "cookbook 1, on one process": (f"{COOKBOOK_1} {ONE} {R}.name=hf", Works({}, (NO_VAL, NO_MICRO, ON_CPU))),
    "cookbook 2: PPO with a critic": (
        COOKBOOK_2,
        Works({f"{R}.name": "vllm"}, (NO_VAL, NO_MICRO, "algorithm.kl_ctrl.kl_coef")),
    ),
    "cookbook 2, with the built-in sampler": (
        f"{COOKBOOK_2} {R}.name=hf",
        Works({"critic.ppo_micro_batch_size_per_gpu": 4}, (NO_VAL, NO_MICRO, "algorithm.kl_ctrl.kl_coef")),
    ),
    "cookbook 3: GRPO on four nodes": (
        f"{COOKBOOK_1} trainer.nnodes=4 trainer.n_gpus_per_node=8 {A}.strategy=megatron",
        Works({f"{A}.strategy": "megatron", f"{REF}.strategy": "megatron"}, (NO_VAL, NO_MICRO)),
    ),
    "upgrade to FSDP2": (
        FSDP2_EVERYWHERE,
        Works(
            {"critic.strategy": "fsdp2", f"{REF}.strategy": "fsdp2"},
            (NO_VAL, NO_MICRO, "reward_model.strategy", "reward.reward_model.strategy"),
        ),
    ),
    "FSDP2 with CPU offloading": (
        f"{A}.fsdp_config.offload_policy=True",
        Works({f"{A}.fsdp_config.offload_policy": True}, (NO_VAL, NO_MICRO)),
    ),
    "faster weight sync": (
        f"{A}.strategy=fsdp2 trainer.async_weight_update=true",
        Works({"trainer.async_weight_update": True}, (NO_VAL, NO_MICRO)),
    ),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_as_it_is_printed(laptop, told, case):
    command, outcome = COMMANDS[case]
    last = {word.partition("=")[0]: word for word in shlex.split(command)}  # what a person changes replaces the former
    check(outcome, told, "ppo_trainer", list(last.values()))


GRPO_MATH = """
algorithm: {adv_estimator: grpo, gamma: 1.0, lam: 1.0}
data:
  train_files: data/gsm8k/train.parquet
  val_files: data/gsm8k/test.parquet
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 2048
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  actor: {use_kl_loss: true, kl_loss_coef: 0.001, ppo_mini_batch_size: 64}
  rollout:
    name: vllm
    n: 8  # samples per prompt
    temperature: 0.7
    top_p: 0.95
trainer: {total_epochs: 3, n_gpus_per_node: 8, save_freq: 100}
"""
CRITIC_FILE = """
algorithm: {adv_estimator: gae, gamma: 0.99, lam: 0.95}
critic:
  model: {path: Qwen/Qwen2.5-7B-Instruct}
  ppo_mini_batch_size: 64
actor_rollout_ref:
  actor: {use_kl_loss: true, kl_loss_coef: 0.02, clip_ratio: 0.2}
"""
MEGATRON_FILE = """
actor_rollout_ref:
  model: {path: model, backend: megatron}
  actor: {strategy: megatron, tensor_model_parallel_size: 8, pipeline_model_parallel_size: 2}
  rollout: {name: vllm, tensor_parallel_size: 8}
"""
MEGATRON_NOTICES = (
    *(f"{A}.{name}_model_parallel_size" for name in ("tensor", "pipeline")),
    *(f"{R}.tensor_parallel_size", f"{M}.backend", NO_VAL, NO_MICRO),
)
KEY_PARAMETERS = """
actor_rollout_ref.rollout.n: 8
actor_rollout_ref.rollout.temperature: 0.7
actor_rollout_ref.rollout.top_p: 0.95
actor_rollout_ref.actor.lr: 1e-6
actor_rollout_ref.actor.ppo_mini_batch_size: 64
actor_rollout_ref.actor.clip_ratio: 0.2
actor_rollout_ref.actor.use_kl_loss: true
actor_rollout_ref.actor.kl_loss_coef: 0.001
algorithm.kl_ctrl.target_kl: 0.1
"""
STABILITY = """
actor_rollout_ref.actor.lr: 5e-7
actor_rollout_ref.actor.kl_loss_coef: 0.01
actor_rollout_ref.actor.max_grad_norm: 1.0
"""
MEMORY = """
actor_rollout_ref.rollout.log_prob_micro_batch_size: 4
actor_rollout_ref.model.enable_gradient_checkpointing: true
"""
VISION = """
actor_rollout_ref:
  model: {path: Qwen/Qwen2.5-VL-7B-Instruct}
  rollout: {name: vllm, enable_vision: true}
"""
LORA = """
actor_rollout_ref:
  actor:
    lora: {enabled: true, r: 16, alpha: 32, target_modules: ["q_proj", "v_proj"]}
"""
TOKEN_TRUNCATION = """
algorithm:
  rollout_is_threshold: 2.0
  rollout_is: true
  rollout_is_threshold_lower: null
  rollout_is_level: token
  rollout_is_mode: truncate
  rollout_is_veto_threshold: 1e-4
actor_rollout_ref:
  rollout: {calculate_log_probs: true}
"""
SEQUENCE_MASKING = """
algorithm: {rollout_is_threshold: 2.0, rollout_is: true, rollout_is_level: sequence, rollout_is_mode: mask}
"""
METRICS_ONLY = """
algorithm: {rollout_is_threshold: 2.0, rollout_is: false, rollout_is_level: token, rollout_is_mode: truncate}
"""
HF_1 = [f"{R}.name=hf", *ONE.split()]

FILES = {
    "GRPO on math": (GRPO_MATH, ["trainer.experiment_name=grpo_math_qwen7b"], wrong(LAPTOP)),
    "GRPO on math, on one process": (
        GRPO_MATH,
        ["trainer.experiment_name=grpo_math_qwen7b", *HF_1],
        Works({f"{A}.ppo_mini_batch_size": 64, f"{R}.top_p": 0.95, "trainer.save_freq": 100}, (NO_MICRO, ON_CPU)),
    ),
    "PPO with a critic": (
        CRITIC_FILE,
        [],
        Works({"algorithm.lam": 0.95, "critic.ppo_mini_batch_size": 64, f"{A}.clip_ratio": 0.2}, (NO_VAL, NO_MICRO)),
    ),
    "Megatron for large models, in one process": (
        MEGATRON_FILE,
        [],
        wrong("1 process(es) cannot be cut into copies of 8 (tensor) x 2 (pipeline)"),
    ),
    "Megatron for large models, on two nodes, with the sampler of the library": (
        MEGATRON_FILE,
        ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{R}.name=hf"],
        wrong("the hf engine holds the whole model in one process"),
    ),
    "key parameters": (
        KEY_PARAMETERS,
        [],
        Works(
            {f"{R}.n": 8, f"{A}.optim.lr": 1e-6, f"{A}.ppo_mini_batch_size": 64},
            (NO_VAL, NO_MICRO, f"{A}.lr"),
        ),
    ),
    "against instability": (
        STABILITY,
        [],
        Works(
            {f"{A}.optim.lr": 5e-7, f"{A}.grad_clip": 1.0},
            (NO_VAL, NO_MICRO, f"{A}.lr", f"{A}.max_grad_norm", f"{A}.kl_loss_coef"),
        ),
    ),
    "against running out of memory": (
        MEMORY,
        [],
        Works({f"{R}.log_prob_micro_batch_size": 4, f"{M}.enable_gradient_checkpointing": True}, (NO_VAL, NO_MICRO)),
    ),
    "vision-language models": (VISION, [], Works({f"{R}.enable_vision": True}, (NO_VAL, NO_MICRO))),
    "LoRA": (
        LORA,
        [],
        Works(
            {f"{M}.lora_rank": 16, f"{M}.lora_alpha": 32, f"{M}.target_modules": ["q_proj", "v_proj"]},
            (NO_VAL, NO_MICRO, *(f"{A}.lora.{name}" for name in ("r", "alpha", "target_modules"))),
        ),
    ),
    "LoRA, switched off": (LORA.replace("true", "false"), [], Works({f"{M}.lora_rank": 0}, (NO_VAL, NO_MICRO))),
    "importance sampling, truncated by token": (
        TOKEN_TRUNCATION,
        [],
        Works(
            {"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is": True, f"{R}.calculate_log_probs": True},
            (NO_VAL, NO_MICRO),
        ),
    ),
    "importance sampling, masked by sequence": (
        SEQUENCE_MASKING,
        [],
        Works({"algorithm.rollout_is_level": "sequence", "algorithm.rollout_is_mode": "mask"}, (NO_VAL, NO_MICRO)),
    ),
    "importance sampling, metrics only": (
        METRICS_ONLY,
        [],
        Works({"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is": False}, (NO_VAL, NO_MICRO)),
    ),
    "importance sampling without the sampler's log-probs": (
        TOKEN_TRUNCATION,
        [f"{R}.calculate_log_probs=false"],
        wrong(f"Set {R}.calculate_log_probs=true"),
    ),
    "importance sampling between senseless bounds": (
        METRICS_ONLY,
        ["algorithm.rollout_is_threshold_lower=3.0"],
        wrong("algorithm.rollout_is_threshold_lower: the lower bound must be positive and below the upper one, 2"),
    ),
    "the cap that importance sampling replaced": (
        "actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0}}",
        [],
        wrong(f"{A}.tis_imp_ratio_cap: no longer exists. Got 2.0. Set algorithm.rollout_is_threshold=<value>"),
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_as_it_is_printed(laptop, told, case):
    text, argv, outcome = FILES[case]
    (laptop / "config").mkdir()
    (laptop / "config" / "mine.yaml").write_text(text)
    check(outcome, told, "ppo_trainer", ["--config-path", "config", "--config-name", "mine", *argv])


def built(names: registry.Registry, key: str, *wanted: str, more: str = "") -> dict[str, tuple[str, Works | Refused]]:
    """One case per name that ``key`` may have."""
    return {f"{key}={name}": (f"{key}={name} {more}".strip(), named(names, name)) for name in wanted}


GROUP = f"{R}.n=2"
ESTIMATORS = built(
    registry.ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator",
    "gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo",
    "rloo_vectorized", "remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline", more=GROUP,
)  # fmt: skip
ESTIMATORS |= built(
    registry.ADVANTAGE_ESTIMATORS, "algorithm.adv_estimator", "gdpo",
    more=f"{GROUP} algorithm.gdpo_reward_keys=[acc,format]",
)  # fmt: skip
LOSSES = built(
    registry.POLICY_LOSSES, f"{A}.policy_loss.loss_mode",
    "vanilla", "gspo", "gpg", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "sapo", "cispo", "bypass_mode",
)  # fmt: skip
LOSSES |= built(registry.POLICY_LOSSES, f"{A}.policy_loss.loss_mode", "dro", more=f"{A}.policy_loss.dro_beta=0.1")
ENGINES = built(
    registry.ENGINES, f"{A}.strategy", "fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan", "automodel"
)
SAMPLERS = built(registry.SAMPLERS, f"{R}.name", "hf", "vllm", "sglang", "trtllm")
TRACKERS = built(registry.TRACKERS, "trainer.logger", "console", "file", "tensorboard")
PACKAGES = {name: name for name in ("wandb", "mlflow", "swanlab", "clearml", "trackio", "rl_insight")}
PACKAGES |= {"vemlp_wandb": "volcengine_ml_platform", "prometheus": "prometheus_client"}
for words in (*(f"trainer.logger={name}" for name in PACKAGES), f"{R}.trace.backend=weave"):
    package = PACKAGES.get(name := words.partition("=")[2], name)
    install = "Install {} from Volcengine's index" if name == "vemlp_wandb" else "pip install {}"
    missing = wrong(f"{name!r} needs the package {package!r}, which is not installed. {install.format(package)}, or")
    TRACKERS[words] = (words, Works() if find_spec(package) else missing)
MANAGERS = built(registry.REWARD_MANAGERS, "reward.reward_manager.name", "naive", "dapo", "batch", "prime", "remote")
NAMES = ESTIMATORS | LOSSES | ENGINES | SAMPLERS | TRACKERS | MANAGERS


@pytest.mark.parametrize("case", NAMES)
def test_a_name_of_upstream_works_or_is_refused_by_name(laptop, case):
    words, outcome = NAMES[case]
    if isinstance(outcome, Works):
        load_config("ppo_trainer", words.split())
    else:
        check(outcome, None, "ppo_trainer", words.split())


LATER = "not built yet: "
GRPO_2 = f"algorithm.adv_estimator=grpo {GROUP}"
SINGLE = {
    # settings that work
    "algorithm.gamma=0.99 algorithm.lam=0.95": Works({"algorithm.gamma": 0.99}),
    f"{GRPO_2} algorithm.norm_adv_by_std_in_grpo=False {A}.loss_agg_mode=seq-mean-token-sum-norm "
    f"{A}.loss_scale_factor=512": Works({"critic.loss_agg_mode": "seq-mean-token-sum-norm"}),
    f"{A}.loss_agg_mode=seq-mean-token-mean": Works(),
    f"{A}.clip_ratio=0.3": Works({f"{A}.clip_ratio_low": None, f"{A}.clip_ratio_high": None}),
    f"{A}.clip_ratio_high=0.28": Works(),
    f"{A}.optim.lr=1e-6 {A}.grad_clip=1.0": Works({f"{A}.optim.lr": 1e-6}),
    f"{A}.ppo_mini_batch_size=64": Works({"critic.ppo_mini_batch_size": 64}),
    "critic.ppo_mini_batch_size=64": Works(),
    f"{A}.use_dynamic_bsz=true": Works({"critic.use_dynamic_bsz": True}),
    f"{A}.fsdp_config.param_offload=True {A}.fsdp_config.optimizer_offload=True": Works(),
    f"{R}.enable_prefix_caching=false": Works({f"{R}.enable_prefix_caching": False}),
    f"{R}.calculate_log_probs=true": Works(),
    f"{M}.enable_gradient_checkpointing=true": Works({"critic.model.enable_gradient_checkpointing": None}),
    f"{M}.override_config.attn_implementation=sdpa": Works({f"{M}.override_config": {"attn_implementation": "sdpa"}}),
    "trainer.balance_batch=True trainer.save_freq=100 trainer.test_freq=5": Works({"trainer.save_freq": 100}),
    "algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc data.gen_batch_size=2048": Works(
        {}, ("algorithm.filter_groups.enable",)
    ),
    f"algorithm.filter_groups.enable=true {R}.n=2": Works({"algorithm.filter_groups.enable": True}),
    "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.len=128 "
    "+reward.reward_kwargs.max_resp_len=512": Works(
        {"reward.reward_kwargs": {"overlong_buffer_cfg": {"len": 128}, "max_resp_len": 512}}
    ),
    "algorithm.rollout_is_threshold=2.0": Works({"algorithm.rollout_is": False}),
    "algorithm.rollout_correction.rollout_is=token": Works({"algorithm.rollout_correction.rollout_is": "token"}),
    "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=0.5_5.0": Works(
        {"algorithm.rollout_correction.rollout_is_threshold": "0.5_5.0"}
    ),
    "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type=reinforce": Works(
        {"algorithm.rollout_correction.bypass_mode": True}, (f"{R}.log_prob_micro_batch_size_per_gpu",)
    ),
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
    "algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001": Works(),
    "reward.custom_reward_function.path=my_reward.py": Works({"reward.custom_reward_function.path": "my_reward.py"}),
    "trainer.device=cpu": Works(),
    f"{A}.fsdp_config.offload_policy=true": Works({f"{A}.fsdp_config.offload_policy": True}),
    "algorithm.use_pf_ppo=True algorithm.pf_ppo.reweight_method=max_min": Works({"algorithm.use_pf_ppo": True}),
    f"{A}.policy_loss.loss_mode=sapo {A}.tau_neg=1.1": Works({f"{A}.tau_neg": 1.1}),
    f"{A}.policy_loss.loss_mode=recipe.sppo.core:sppo {A}.sppo_eta=1.0": Works({f"{A}.sppo_eta": 1.0}),
    f"{A}.policy_loss.loss_mode=recipe.spin.core:dpo {A}.dpo_beta=0.2 {R}.n=2": Works(
        {f"{A}.dpo_beta": 0.2}, (f"{R}.log_prob_micro_batch_size_per_gpu",)
    ),
    # settings that work and say something
    "trainer.ref_update_freq=1": Works({}, ("trainer.ref_update_freq",)),
    "algorithm.pf_ppo.reweight_method=max_min": Works({}, ("algorithm.pf_ppo.reweight_method",)),
    f"{A}.policy_loss.clip_cov_ratio=0.001": Works({}, (f"{A}.policy_loss.clip_cov_ratio",)),
    f"{A}.policy_loss.loss_mode=gspo {A}.loss_agg_mode=token-mean": Works({}, (f"{A}.loss_agg_mode",)),
    "custom_reward_function.path=my_reward.py custom_reward_function.name=score": Works(
        {"reward.custom_reward_function.name": "score"}, ("custom_reward_function.path", "custom_reward_function.name")
    ),
    "reward_model.overlong_buffer.len=128": Works({}, ("reward_model.overlong_buffer.len",)),
    f"{A}.lr=5e-7": Works({f"{A}.optim.lr": 5e-7}, (f"{A}.lr",)),
    f"{A}.max_grad_norm=0.5": Works({f"{A}.grad_clip": 0.5}, (f"{A}.max_grad_norm",)),
    "algorithm.kl_ctrl.target_kl=0.1": Works({}, ("algorithm.kl_ctrl.target_kl",)),
    "algorithm.kl_ctrl.kl_coef=0.001": Works({}, ("algorithm.kl_ctrl.kl_coef",)),
    f"{A}.kl_loss_coef=0.01": Works({}, (f"{A}.kl_loss_coef",)),
    f"{R}.gpu_memory_utilization=0.4": Works({}, (f"{R}.gpu_memory_utilization",)),
    f"{M}.use_remove_padding=True": Works({f"{M}.use_remove_padding": True}),
    f"{A}.use_torch_compile=False": Works({f"{A}.fsdp_config.use_torch_compile": False}),
    f"{R}.mode=async": Works({}, (f"{R}.mode",)),
    "trainer.use_v1=false": Works({}, ("trainer.use_v1",)),
    # settings of features that are not built yet
    f"{A}.fsdp_config.use_orig_params=true": Works({}, (f"{A}.fsdp_config.use_orig_params",)),
    f"{A}.fsdp_config.ulysses_sequence_parallel_size=2": wrong("one process cannot share its sequences with others"),
    f"{A}.ulysses_sequence_parallel_size=2": wrong("one process cannot share its sequences with others"),
    f"{A}.megatron.expert_model_parallel_size=8": Works({}, (f"{A}.megatron.expert_model_parallel_size",)),
    f"{A}.strategy=megatron {A}.megatron.context_parallel_size=2": wrong("cannot be cut into groups of 2 (context)"),
    f"{A}.megatron.dynamic_context_parallel=true": refused(f"{LATER}a context-parallel size by row length"),
    f"{R}.expert_parallel_size=8": refused("not built for this sampler: sampling on several ranks"),
    f"{R}.tensor_model_parallel_size=2": wrong("the hf engine holds the whole model in one process"),
    f"{R}.tensor_parallel_size=2": wrong("the hf engine holds the whole model in one process"),
    f"{R}.quantization=fp8": Works({f"{R}.quantization": "fp8"}),
    f"{A}.qat.enable=true": refused(f"{LATER}quantization-aware training"),
    f"{R}.enable_vision=true": Works({f"{R}.enable_vision": True}),
    f"{R}.multi_turn.enable=true": Works({f"{R}.multi_turn.enable": True}),
    f"{M}.use_liger=true": wrong("Liger's kernels need a GPU"),
    f"{M}.use_fused_kernels=true": Works({f"{M}.use_fused_kernels": True}),
    f"{M}.lora_rank=16": Works({f"{M}.lora_rank": 16}),
    f"{M}.lora.rank=16": Works({f"{M}.lora_rank": 16, f"{M}.lora_alpha": 32}, (f"{M}.lora.rank",)),
    "reward.reward_model.enable=true": wrong("reward.reward_model.model_path"),
    "reward_model.enable=true": wrong("reward.reward_model.model_path"),
    "reward.reward_model.rollout.top_p=0.5": Works({}, ("reward.reward_model.rollout.top_p",)),
    "sandbox_fusion.url=http://a": Works({"reward.sandbox_fusion.url": "http://a"}, ("sandbox_fusion.url",)),
    "trainer.async_weight_update=true": Works({"trainer.async_weight_update": True}),
    f"{R}.checkpoint_engine.backend=gloo": Works({f"{R}.checkpoint_engine.backend": "gloo"}),
    f"{R}.checkpoint_engine.backend=nixl": refused("the transport of weights 'nixl' is not built yet"),
    f"{R}.checkpoint_engine.backend=glo": wrong("unknown transport of weights"),
    "trainer.v1.trainer_mode=separate_async": Works(
        {"trainer.v1.trainer_mode": "separate_async"}, ("trainer.v1.trainer_mode", "algorithm.rollout_correction")
    ),
    "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=3": wrong("= 768 prompts"),
    "actor_rollout_ref.hybrid_engine=false": wrong("separate samplers need a pool, and it has 0 nodes"),
    "model_engine=megatron": Works({"critic.strategy": "megatron"}),
    "trainer.runtime=ray": Works({"trainer.runtime": "ray"}),
    # settings that are wrong
    f"{A}.policy_loss.loss_mode=dro": wrong("'dro' has no default for it"),
    f"{A}.policy_loss.loss_mode=dro {A}.policy_loss.dro_beta=-1": wrong("dro_beta: out of range"),
    f"{A}.policy_loss.clip_cov_lb=6": wrong("clip_cov_lb: out of range"),
    f"algorithm.adv_estimator=gdpo {GROUP}": wrong("'gdpo' normalises each of several rewards"),
    f"algorithm.adv_estimator=gdpo {GROUP} algorithm.gdpo_reward_keys=[a] algorithm.gdpo_reward_weights=[1,2]": wrong(
        "1 rewards have 2 weights"
    ),
    "algorithm.adv_estimator=vapo critic.enable=false": wrong("'vapo' needs the values of a critic"),
    "algorithm.adv_estimator=vapo algorithm.vapo_length_alpha=0": wrong("vapo_length_alpha: out of range"),
    "algorithm.adv_estimator=grpo": wrong("compares the samples of one prompt and needs several"),
    f"{R}.log_prob_micro_batch_size=4 {R}.log_prob_micro_batch_size_per_gpu=8": wrong("contradict each other"),
    f"{A}.lr=1e-6 {A}.optim.lr=2e-6": wrong("two values for one setting"),
    f"{A}.tis_imp_ratio_cap=2.0": wrong("no longer exists"),
    f"algorithm.rollout_is_threshold=2.0 {R}.calculate_log_probs=false": wrong("which are not kept"),
    f"algorithm.rollout_correction.bypass_mode=true {R}.calculate_log_probs=false": wrong("which are not kept"),
    "algorithm.rollout_is_threshold=0": wrong("algorithm.rollout_is_threshold: a bound of a ratio must be positive"),
    "algorithm.rollout_is_threshold=0.5": wrong("would not lie below the upper one"),
    "algorithm.rollout_is_level=tokens": wrong("no such choice"),
    "algorithm.rollout_correction.rollout_rs=seq_mean_k1": wrong("rejection needs a threshold"),
    "trainer.device=npu": refused("Ascend NPUs are not built yet"),
}


@pytest.mark.parametrize("words", SINGLE)
def test_a_key_by_itself(laptop, told, words):
    quiet = [f"data.val_files={laptop}/data/gsm8k/test.parquet", f"{A}.ppo_micro_batch_size_per_gpu=4",
             f"{REF}.log_prob_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"]  # fmt: skip
    if f"{R}.log_prob" not in words:
        quiet.append(f"{R}.log_prob_micro_batch_size_per_gpu=4")
    check(SINGLE[words], told, "ppo_trainer", [*quiet, *words.split()])


SUPERVISED = {
    "as the trainer's page has it": (
        "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet "
        "model.path=model optim.lr=1e-4 trainer.total_epochs=4",
        Works({"optim.lr": 1e-4}),
    ),
    "as scripts of the former trainer have it": (
        "data.train_files=~/data/gsm8k/train.parquet data.val_files=~/data/gsm8k/test.parquet data.prompt_key=question "
        "data.response_key=answer data.micro_batch_size=4 model.partial_pretrain=model optim.lr_scheduler=cosine "
        "use_remove_padding=true trainer.logger=console data.use_dynamic_bsz=false",
        Works(
            {"model.path": "model", "data.micro_batch_size_per_gpu": 4, "trainer.logger": ["console"]},
            ("data.micro_batch_size", "model.partial_pretrain", "optim.lr_scheduler", "use_remove_padding"),
        ),
    ),
    "LoRA": ("model.path=model model.lora_rank=32", Works({"model.lora_rank": 32}, (NO_VAL,))),
    "sequence parallel, with Liger": (
        "model.path=model ulysses_sequence_parallel_size=2 model.use_liger=True",
        wrong("Liger's kernels need a GPU"),
    ),
    "Megatron": ("model.path=model engine=megatron engine.tensor_model_parallel_size=1 engine.param_offload=true",
                 Works({"engine.strategy": "megatron", "engine.megatron.param_offload": True},
                       ("engine.tensor_model_parallel_size", NO_VAL))),
    "Megatron on more processes than we have": ("model.path=model engine=megatron engine.tensor_model_parallel_size=2",
        wrong("1 process(es) cannot be cut into copies of 2 (tensor) x 1 (pipeline)")),
    "eight processes": ("model.path=model trainer.n_gpus_per_node=8", wrong(LAPTOP)),
}  # fmt: skip


@pytest.mark.parametrize("case", SUPERVISED)
def test_a_supervised_command(laptop, told, case):
    command, outcome = SUPERVISED[case]
    check(outcome, told, "sft_trainer", shlex.split(command))


@pytest.mark.parametrize("argv", [["--config-name", "ppo_megatron_trainer"], ["--config-name=ppo_megatron_trainer"]])
def test_the_megatron_configuration_chooses_its_engine_for_every_role(laptop, told, argv):
    roles = (A, REF, "critic")
    outcome = Works({f"{role}.strategy": "megatron" for role in roles}, (NO_VAL, NO_MICRO))
    check(outcome, told, "ppo_trainer", argv)


def test_commands_that_name_a_cluster_run_as_they_stand_once_the_machine_has_the_gpus(laptop, told, monkeypatch):
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "device_count", lambda kind: 8)
    check(Works({"trainer.n_gpus_per_node": 8}, (NO_VAL, NO_MICRO)), told, "ppo_trainer", GRPO.split())
