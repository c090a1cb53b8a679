"""The commands, YAML files and keys that people have in front of them work as they stand there."""

import pytest

from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, NotBuiltError

GRPO = """
algorithm.adv_estimator=grpo data.train_files=~/data/gsm8k/train.parquet
actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.rollout.n=8
actor_rollout_ref.actor.use_kl_loss=True trainer.n_gpus_per_node=8
"""
PPO_CRITIC = "algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen2.5-7B-Instruct trainer.n_gpus_per_node=8"
QUICKSTART = """
data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.rollout.name=vllm
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=15
"""
GRPO_KL = """
algorithm.adv_estimator=grpo data.train_batch_size=1024 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.use_kl_loss=True algorithm.kl_ctrl.kl_coef=0.001
"""
MULTI_NODE = """
trainer.nnodes=4 trainer.n_gpus_per_node=8 actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.param_offload=True
"""
REWARD_MODEL_SHAPE = """
algorithm.adv_estimator=gae critic.model.path=$RM_PATH critic.ppo_micro_batch_size_per_gpu=4
algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.rollout.name=vllm
"""
FSDP2 = """
actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.actor.strategy=fsdp2 critic.strategy=fsdp2
reward_model.strategy=fsdp2
"""
GRPO_MATH = """
algorithm:
  adv_estimator: grpo
  gamma: 1.0
  lam: 1.0
data:
  train_files: /path/to/train.parquet
  val_files: /path/to/val.parquet
  train_batch_size: 256
  max_prompt_length: 512
  max_response_length: 2048
actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-7B-Instruct
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.001
    ppo_mini_batch_size: 64
  rollout:
    name: vllm
    n: 8  # samples per prompt
    temperature: 0.7
    top_p: 0.95
trainer:
  total_epochs: 3
  n_gpus_per_node: 8
  save_freq: 100
"""
CRITIC = """
algorithm:
  adv_estimator: gae  # Use GAE instead of GRPO
  gamma: 0.99
  lam: 0.95
critic:
  model:
    path: Qwen/Qwen2.5-7B-Instruct
  ppo_mini_batch_size: 64
actor_rollout_ref:
  actor:
    use_kl_loss: true
    kl_loss_coef: 0.02
    clip_ratio: 0.2
"""
DOTTED = """
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
MEMORY = """
actor_rollout_ref.rollout.log_prob_micro_batch_size: 4
actor_rollout_ref.model.enable_gradient_checkpointing: true
actor_rollout_ref.actor.strategy: fsdp2
actor_rollout_ref.actor.fsdp_config.offload_policy: true
"""
STABILITY = """
actor_rollout_ref.actor.lr: 5e-7
actor_rollout_ref.actor.kl_loss_coef: 0.01
actor_rollout_ref.actor.max_grad_norm: 1.0
"""
MEGATRON = """
actor_rollout_ref:
  model:
    path: /path/to/megatron/checkpoint
    backend: megatron
  actor:
    strategy: megatron
    tensor_model_parallel_size: 8
    pipeline_model_parallel_size: 2
  rollout:
    name: vllm
    tensor_parallel_size: 8
"""
VISION = """
actor_rollout_ref:
  model:
    path: Qwen/Qwen2.5-VL-7B-Instruct
  rollout:
    name: vllm
    enable_vision: true
"""
LORA = """
actor_rollout_ref:
  actor:
    lora:
      enabled: true
      r: 16
      alpha: 32
      target_modules: ["q_proj", "v_proj"]
"""


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RM_PATH", "/models/rm")


def run(command):
    """The configuration of a command, as a shell without expansion hands it over."""
    return read_config("ppo_trainer", command.split())


def run_yaml(tmp_path, text, *argv):
    (tmp_path / "mine.yaml").write_text(text)
    return read_config("ppo_trainer", ["--config-path", str(tmp_path), "--config-name", "mine", *argv])


def test_the_grpo_command():
    cfg = run(GRPO)
    assert cfg.algorithm.adv_estimator == "grpo" and cfg.actor_rollout_ref.actor.use_kl_loss is True
    assert cfg.data.train_files == "/home/me/data/gsm8k/train.parquet" and cfg.data.val_files is None
    assert cfg.actor_rollout_ref.model.path == "Qwen/Qwen2.5-7B" and cfg.trainer.n_gpus_per_node == 8
    assert cfg.actor_rollout_ref.rollout.n == cfg.actor_rollout_ref.actor.rollout_n == 8


def test_the_ppo_command_with_a_critic():
    cfg = run(PPO_CRITIC)
    assert cfg.critic.model.path == "Qwen/Qwen2.5-7B-Instruct" and cfg.algorithm.adv_estimator == "gae"


def test_the_quickstart_command_gives_the_critic_the_actors_model():
    cfg = run(QUICKSTART)
    assert cfg.data.val_files == "/home/me/data/gsm8k/test.parquet" and cfg.trainer.total_epochs == 15
    assert cfg.critic.model.path == cfg.actor_rollout_ref.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert cfg.actor_rollout_ref.rollout.name == "vllm"


def test_the_grpo_command_with_a_kl_coefficient():
    cfg = run(GRPO_KL)
    assert cfg.algorithm.kl_ctrl.kl_coef == 0.001 and cfg.data.train_batch_size == 1024


def test_the_command_for_several_nodes():
    cfg = run(MULTI_NODE)
    assert (cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node) == (4, 8)
    assert cfg.actor_rollout_ref.actor.strategy == cfg.actor_rollout_ref.ref.strategy == "fsdp2"
    assert cfg.actor_rollout_ref.actor.fsdp_config.param_offload is True


def test_the_cookbook_command_with_a_shell_variable():
    cfg = run(REWARD_MODEL_SHAPE)
    assert cfg.critic.model.path == "/models/rm" and cfg.critic.ppo_micro_batch_size_per_gpu == 4


def test_the_fsdp2_switches_with_the_one_of_a_reward_model_that_the_run_has_not(told):
    cfg = run(FSDP2)
    assert {cfg.critic.strategy, cfg.actor_rollout_ref.ref.strategy, cfg.actor_rollout_ref.actor.strategy} == {"fsdp2"}
    assert cfg.reward.reward_model.strategy == "fsdp2"
    assert "reward.reward_model.strategy" in told()["reward_model.strategy"]


def test_the_grpo_file_laid_over_our_defaults_by_its_relative_folder(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "grpo_math.yaml").write_text(GRPO_MATH)
    monkeypatch.chdir(tmp_path)
    argv = "--config-path config --config-name grpo_math trainer.experiment_name=grpo_math_qwen7b"
    cfg = read_config("ppo_trainer", argv.split())
    assert (cfg.trainer.experiment_name, cfg.trainer.total_epochs, cfg.trainer.save_freq) == (
        "grpo_math_qwen7b",
        3,
        100,
    )
    assert cfg.actor_rollout_ref.actor.ppo_mini_batch_size == 64 and cfg.critic.ppo_mini_batch_size == 64
    assert (cfg.actor_rollout_ref.rollout.temperature, cfg.actor_rollout_ref.rollout.top_p) == (0.7, 0.95)
    assert cfg.actor_rollout_ref.rollout.response_length == 2048
    assert cfg.trainer.default_local_dir == "checkpoints/verl_examples/grpo_math_qwen7b"


def test_the_critic_file(tmp_path):
    cfg = run_yaml(tmp_path, CRITIC)
    assert (cfg.algorithm.gamma, cfg.algorithm.lam, cfg.critic.ppo_mini_batch_size) == (0.99, 0.95, 64)
    assert cfg.actor_rollout_ref.actor.clip_ratio == 0.2 and cfg.actor_rollout_ref.actor.clip_ratio_low is None


def test_a_file_with_dotted_keys(tmp_path):
    cfg = run_yaml(tmp_path, DOTTED)
    assert (cfg.actor_rollout_ref.rollout.n, cfg.actor_rollout_ref.actor.optim.lr) == (8, 1e-6)
    assert cfg.algorithm.kl_ctrl.target_kl == 0.1


def test_the_advice_against_running_out_of_memory(tmp_path):
    cfg = run_yaml(tmp_path, MEMORY)
    assert cfg.actor_rollout_ref.actor.fsdp_config.offload_policy is True
    assert cfg.actor_rollout_ref.rollout.log_prob_micro_batch_size == 4
    assert cfg.actor_rollout_ref.model.enable_gradient_checkpointing is True


def test_the_advice_against_instability(tmp_path):
    cfg = run_yaml(tmp_path, STABILITY)
    assert (cfg.actor_rollout_ref.actor.optim.lr, cfg.actor_rollout_ref.actor.grad_clip) == (5e-7, 1.0)
    assert cfg.actor_rollout_ref.actor.kl_loss_coef == 0.01


def test_the_advice_against_slow_weight_sync():
    assert run("actor_rollout_ref.actor.strategy=fsdp2 trainer.async_weight_update=true").trainer.async_weight_update


def test_a_file_for_a_feature_that_is_missing_is_refused_by_its_key(tmp_path):
    with pytest.raises(NotBuiltError, match=r"actor_rollout_ref\.actor\.qat\.enable: not built yet"):
        run_yaml(tmp_path, "actor_rollout_ref: {actor: {qat: {enable: true}}}")
    assert run_yaml(tmp_path, VISION).actor_rollout_ref.rollout.enable_vision


def test_the_sizes_of_a_megatron_model_count_for_actor_and_reference(tmp_path):
    cfg = run_yaml(tmp_path, MEGATRON).actor_rollout_ref
    for role in (cfg.actor, cfg.ref):
        assert role.strategy == "megatron"
        assert (role.megatron.tensor_model_parallel_size, role.megatron.pipeline_model_parallel_size) == (8, 2)


@pytest.mark.parametrize("name", ["grpo", "gae", "reinforce_plus_plus", "rloo", "remax", "opo"])
def test_every_estimator_name_of_the_table_is_a_value(name):
    assert run(f"algorithm.adv_estimator={name}").algorithm.adv_estimator == name


ROLLOUT_IS = {
    "rollout_is_threshold": 2.0,
    "rollout_is": True,
    "rollout_is_threshold_lower": 0.5,
    "rollout_is_level": "geometric",
    "rollout_is_mode": "mask",
    "rollout_is_veto_threshold": 1e-3,
}


@pytest.mark.parametrize("name", ROLLOUT_IS)
def test_a_setting_of_rollout_importance_sampling_is_taken_as_it_is_printed(name):
    cfg = run(f"algorithm.{name}={str(ROLLOUT_IS[name]).lower()}")
    assert cfg.algorithm[name] == ROLLOUT_IS[name]


def test_rollout_importance_sampling_switched_off_in_words_is_fine():
    cfg = run("algorithm.rollout_is_threshold=null algorithm.rollout_is=false algorithm.rollout_is_veto_threshold=1e-4")
    assert cfg.algorithm.rollout_is_threshold is None


def test_the_cap_that_was_removed_names_the_three_settings_that_replace_it():
    with pytest.raises(ConfigError, match=r"rollout_is_threshold=<value>, algorithm\.rollout_is=true"):
        run("actor_rollout_ref.actor.tis_imp_ratio_cap=2.0")


def test_a_scorer_file_by_its_short_key(told):
    cfg = run("custom_reward_function.path=~/my_reward.py")
    assert cfg.reward.custom_reward_function.path == "/home/me/my_reward.py"
    assert cfg.reward.custom_reward_function.name is None
    assert "reward.custom_reward_function.path" in told()["custom_reward_function.path"]


SHIPPED_GRPO = """
algorithm.adv_estimator=grpo data.train_files=['/a/train.parquet'] data.val_files=["/a/test.parquet"]
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k trainer.experiment_name=qwen3_8b trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 trainer.use_v1=false
"""
SHIPPED_SFT = """
data.train_files=~/data/gsm8k/train.parquet data.val_files=~/data/gsm8k/test.parquet data.prompt_key=extra_info
data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer']
data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct
trainer.default_local_dir=$RM_PATH/out trainer.project_name=gsm8k-sft trainer.experiment_name=gsm8k-sft-qwen
trainer.total_epochs=1 trainer.logger=console
"""


def test_a_grpo_script_as_the_releases_shipped_it(told):
    cfg = run(SHIPPED_GRPO)
    assert cfg.trainer.logger == ["console", "wandb"] and cfg.data.train_files == ["/a/train.parquet"]
    assert cfg.actor_rollout_ref.actor.entropy_coeff == 0.0 and cfg.data.truncation == "error"
    assert set(told()) == {"trainer.use_v1"}


def test_an_sft_script_of_the_old_trainer():
    cfg = read_config("sft_trainer", SHIPPED_SFT.split())
    assert cfg.model.path == "Qwen/Qwen2.5-0.5B-Instruct" and cfg.trainer.logger == ["console"]
    assert (cfg.data.prompt_key, cfg.data.prompt_dict_keys) == ("extra_info", ["question"])
    assert cfg.trainer.default_local_dir == "/models/rm/out" and cfg.optim.lr == 1e-4
