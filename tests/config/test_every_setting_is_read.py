"""Every setting that a run accepts is read by something: short real runs with the reads on the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipe.prime import IMPLICIT, RECIPE
from tests.harness.models import tiny_model_dir
from tests.harness.reward_models import reward_model_dir
from tests.harness.rows import talks, write_prompts
from tests.harness.scorers import scorer
from verl.config import PPOTrainerConfig, SFTTrainerConfig, leaves, load_config, record_reads
from verl.config.loading.groups import PPO
from verl.config.loading.recipes import with_recipes
from verl.config.schema.algorithm import DistillationConfig
from verl.config.schema.model import MegatronLoraConfig
from verl.config.schema.reward import RewardRolloutConfig
from verl.config.schema.role import MegatronEngineConfig
from verl.config.schema.root import AsyncTrainingConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.trainer import main_ppo, sft_trainer

PROFILER_TOOLS = (
    *(f"torch.schedule.{name}" for name in ("skip_first", "wait", "warmup", "repeat")),
    "torch_memory.trace_alloc_max_entries",
)
READ_ELSEWHERE = {
    # Settings of one policy loss or estimator each: tests/trainer/test_every_algorithm.py runs them all.
    *(f"actor_rollout_ref.actor.policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub")),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef",
    "actor_rollout_ref.actor.policy_loss.dro_beta",
    "actor_rollout_ref.actor.tau_pos",
    "actor_rollout_ref.actor.tau_neg",
    "algorithm.gdpo_reward_keys",
    "algorithm.gdpo_reward_weights",
    "algorithm.vapo_length_alpha",
    "algorithm.vapo_lam_critic",
    "algorithm.gigpo.step_advantage_w",
    "algorithm.pf_ppo.reweight_method",
    "algorithm.pf_ppo.weight_pow",
    # Only a run that resumes reads it: tests/trainer/ppo/test_saving.py.
    *(f"{role}.checkpoint.load_contents" for role in ("actor_rollout_ref.actor", "critic")),
    "trainer.best_mode",  # Only a run that compares checkpoints reads it: tests/checkpoint/test_best.py.
    # Only dynamic sampling reads it: tests/trainer/ppo/test_dynamic_sampling.py.
    "algorithm.filter_groups.max_inflight_gen_batches",
    # Only a schedule with a queue reads them: tests/trainer/ppo/test_queue_schedules.py.
    *(f"trainer.v1.sampler.{name}" for name in ("order", "max_off_policy_threshold", "max_off_policy_strategy")),
    "trainer.v1.colocate_async.num_warmup_batches",
    "trainer.v1.separate_async.num_warmup_batches",
    "trainer.v1.separate_async.parameter_sync_step",
    *(f"async_training.{name}" for name in AsyncTrainingConfig.__dataclass_fields__),
    # Only a run with teachers reads them: tests/trainer/ppo/test_teachers.py.
    *(f"distillation.{name}" for name, _ in leaves(DistillationConfig)),
    # Only data of a model that sees reads them in fine-tuning: tests/data/vision.
    "data.max_image_pixels",
    "data.max_video_frames",
    "data.allow_remote_images",
    # The actor reads its mirror, actor.policy_loss.rollout_correction.loss_type.
    "algorithm.rollout_correction.loss_type",
    # Trackers get the configuration as a plain dict; tests/observability/backends/test_wandb.py reads this one.
    "trainer.wandb_proxy",
    "trainer.console",  # tests/observability/backends/test_console.py
    # Read while a configuration is checked: tests/config/test_vision.py.
    "actor_rollout_ref.rollout.enable_vision",
    # The topology of a configuration is worked out while it is loaded: tests/config/test_topology.py.
    "actor_rollout_ref.rollout.nnodes",
    # Only a run on Ray reads them: tests/trainer/on_ray.
    "transfer_queue.enable",
    *(f"ray_kwargs.ray_init.{name}" for name in ("address", "num_cpus", "num_gpus", "object_store_memory", "further")),
    *(f"ray_kwargs.ray_init.runtime_env.{name}" for name in ("py_executable", "further")),
    "ray_kwargs.timeline_json_file",
    "trainer.ray_wait_register_center_timeout",
    # Only a run with a remote folder has one: tests/checkpoint/test_remote.py.
    "trainer.remote_timeout",
    # Only samplers and a reward model with a pool of their own have these: tests/config/test_topology.py.
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "reward.reward_model.n_gpus_per_node",
    "reward.reward_model.nnodes",
    # Only a run that records traces reads them: tests/agent_loop/test_row_traces.py.
    *(f"actor_rollout_ref.rollout.trace.{name}" for name in ("token2text", "max_samples_per_step_per_worker")),
    *(f"actor_rollout_ref.rollout.trace.{name}" for name in ("project_name", "experiment_name")),
    # Only a reward model on servers has these: tests/trainer/ppo/test_reward_model.py, tests/agent_loop/test_judges.py.
    *(f"reward.reward_model.rollout.{name}" for name, _ in leaves(RewardRolloutConfig) if name != "name"),
    # Only rows whose answers are programs are scored there: tests/rewards/test_programs.py.
    *(f"reward.sandbox_fusion.{name}" for name in ("url", "max_concurrent", "memory_limit_mb", "allow_missing")),
    # Only a transport between processes reads them: tests/rollout/test_place.py.
    *(f"actor_rollout_ref.rollout.checkpoint_engine.{name}" for name in ("engine_kwargs", "custom_backend_module")),
    # Only a recording with a schedule, or one of a CUDA device's memory: tests/trainer/test_profiling.py.
    *(
        f"{role}.profiler.tool_config.{name}"
        for role in (*(f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref")), "critic")
        for name in PROFILER_TOOLS
    ),
    *(f"profiler.tool_config.{name}" for name in PROFILER_TOOLS),
    "global_profiler.global_tool_config.torch_memory.trace_alloc_max_entries",
    *(f"global_profiler.global_tool_config.nsys.{name}" for name in ("discrete", "worker_nsight_options")),
    # The loader copies them into the sections of the roles; tests/trainer/test_profiling.py shows that they arrive.
    "global_profiler.tool",
    "global_profiler.save_path",
    # Only Megatron-Core's engine reads them: tests/megatron/test_engine.py.
    *(
        f"{role}.megatron.{name}"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward.reward_model", "engine")
        for name, _ in leaves(MegatronEngineConfig)
    ),
    # Only TorchTitan's engine reads them: tests/dist/test_titan.py.
    *(
        f"{role}.torchtitan.{name}"
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "engine")
        for name, _ in leaves(TorchTitanEngineConfig)
    ),
    # These runs have another schedule for them: tests/algorithms/test_schedules.py reads these.
    *(
        f"{role}.optim.{name}"
        for role in ("critic", IMPLICIT)
        for name in (
            *("lr_warmup_init", "lr_decay_steps", "lr_decay_style"),
            *("min_lr", "lr_wsd_decay_style", "lr_wsd_decay_steps"),
        )
    ),
    # Only a policy has a sampler; a notice says so where another one sets it: tests/config/test_notices.py.
    "critic.model.lora.merge",
    "model.lora.merge",
    # The loader makes the model's own settings of them: tests/config/test_megatron_lora.py.
    *(
        f"{model}.lora.{name}"
        for model in ("actor_rollout_ref.model", "critic.model", "model")
        for name in MegatronLoraConfig.__dataclass_fields__
        if name != "merge"
    ),
    # They stand for those of fsdp_config, which follow them.
    "actor_rollout_ref.actor.entropy_checkpointing",
    "actor_rollout_ref.actor.entropy_from_logits_chunk_size",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking",
    # They stand for the setting of their name in fsdp_config of their role, which follows them.
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.ref.use_torch_compile",
    "actor_rollout_ref.actor.pad_to_length",
    "actor_rollout_ref.ref.pad_to_length",
    # The loader copies it into grad_clip, which is read; tests/config/test_loading.py shows that it arrives.
    "actor_rollout_ref.actor.optim.clip_grad",
    "critic.optim.clip_grad",
    f"{IMPLICIT}.optim.clip_grad",
    # Older forms, which the loader copies into fsdp_config; tests/config/test_brief.py shows that they arrive.
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "critic.ulysses_sequence_parallel_size",
}

SCORER = scorer("0.5")
MANAGER = "from verl.rewards.managers.naive import NaiveRewardManager\n\n\nclass Mine(NaiveRewardManager):\n    pass\n"
DATASET = (
    "from torch.utils.data import SequentialSampler\nfrom verl.data import RLHFDataset\n\n\n"
    "class Mine(RLHFDataset):\n    pass\n\n\n"
    "class InOrder(SequentialSampler):\n    def __init__(self, data_source, data_config):\n        "
    "super().__init__(data_source)\n\n\n"
    "def keep_prompt(row):\n    return True\n"
)
SFT_DATASET = "from verl.data import MultiTurnSFTDataset\n\n\nclass Mine(MultiTurnSFTDataset):\n    pass\n"

PROFILED = "{0}.profiler.enable=true {0}.profiler.tool_config.torch.discrete=true"
COMMON = [
    "data.train_files=train.parquet",
    "data.train_batch_size=2",
    "data.max_prompt_length=64",
    "data.max_response_length=4",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "reward.custom_reward_function.path=scorer.py",
    "trainer.logger=[file]",
    "trainer.resume_mode=disable",
]
PPO_RUNS = {
    "importance sampling between sampler and trainer": [
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "algorithm.rollout_is_threshold=2.0",
        "skip.rollout.enable=true",
        "skip.rollout.dump_dir=samples",
        "skip.rollout.steps=[1]",
    ],
    "the newer form of it, inside the loss": [
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        "actor_rollout_ref.rollout.quantization=int8",
    ],
    "grpo, everything around it on": [
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "data.val_files=train.parquet",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.rollout_data_dir=dumps",
        "trainer.validation_data_dir=dumps_val",
        "trainer.log_val_generations=1",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=Mine",
        "reward.reward_manager.module.path=manager.py",
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        *PROFILED.format("actor_rollout_ref.actor").split(),
        *PROFILED.format("actor_rollout_ref.rollout").split(),
        *PROFILED.format("actor_rollout_ref.ref").split(),
    ],
    "conversations with a tool": [
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
    ],
    "a reward model": [
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "reward.reward_model.enable=true",
        "reward.reward_model.model_path=rm",
    ],
    "an implicit reward model": [
        "algorithm.adv_estimator=recipe.prime.core:leave_one_out",
        "trainer.v1.trainer_mode=recipe.prime.schedule:PrimeSchedule",
        "trainer.total_training_steps=1",
        "reward.reward_model.enable=true",
        "reward.reward_model.model_path=model",
        "reward.reward_model.implicit.enable=true",
        "reward.reward_model.implicit.optim.lr_scheduler_type=cosine",
        "data.oversample_factor=2",
        "data.filter_accuracy=true",
        "data.filter_truncate=true",
    ],
    "ppo with a critic for one epoch": [
        "algorithm.adv_estimator=gae",
        "trainer.total_epochs=1",
        "data.train_max_samples=2",
        "trainer.save_freq=1",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "critic.optim.lr_scheduler_type=cosine",
        "data.custom_cls.path=dataset.py",
        "data.custom_cls.name=Mine",
        "data.sampler.class_path=dataset.py",
        "data.sampler.class_name=InOrder",
        "data.filter_function.path=dataset.py",
        "data.val_files=train.parquet",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.5",
        "global_profiler.tool=torch",
        "global_profiler.steps=[1]",
        *PROFILED.format("critic").split(),
    ],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_model_dir("model")
    reward_model_dir("rm")
    write_prompts("train.parquet", 8)
    for name, text in {"scorer": SCORER, "manager": MANAGER, "dataset": DATASET, "sft_dataset": SFT_DATASET}.items():
        Path(f"{name}.py").write_text(text)
    Path("tools.yaml").write_text("tools: [{class_name: examples.calculator.tool.CalculatorTool}]\n")
    write_prompts("sft.parquet", talks(4))
    return tmp_path


def accepted(cls: type) -> set[str]:
    """Leaves that a run may change with effect."""
    return {k for k, f in leaves(cls) if not f.metadata["planned"] and not f.metadata["no_effect"]}


def test_every_accepted_setting_of_an_rl_run_is_read(here):
    reads: set[str] = set()
    for arguments in PPO_RUNS.values():
        config = load_config("ppo_trainer", [*COMMON, *arguments])
        with record_reads() as found:
            main_ppo.run_ppo(config)
        reads |= found
    of_recipe = accepted(with_recipes(PPO, [RECIPE]).root)
    assert of_recipe > accepted(PPOTrainerConfig) and f"{IMPLICIT}.beta_train" in of_recipe
    assert sorted(of_recipe - reads - READ_ELSEWHERE) == []


def test_every_accepted_setting_of_a_supervised_run_is_read(here):
    runs = [
        [
            "trainer.total_epochs=1",
            "trainer.profile_interval=[1,1]",
            "profiler.enable=true",
            "distillation.enabled=true",
            "distillation.teacher_models.teacher.model_path=model",
        ],
        [
            "trainer.total_epochs=1",
            "trainer.resume_mode=auto",
            "trainer.resume_changed=accept",
            "optim.lr_scheduler_type=constant",
        ],
    ]
    reads: set[str] = set()
    for arguments in runs:
        config = load_config(
            "sft_trainer",
            [
                "data.train_files=sft.parquet",
                "data.val_files=sft.parquet",
                "data.train_batch_size=2",
                "data.custom_cls.path=sft_dataset.py",
                "data.custom_cls.name=Mine",
                "model.path=model",
                "optim.lr_scheduler_type=cosine",
                "trainer.save_freq=1",
                "trainer.test_freq=1",
                "trainer.logger=[file]",
                "trainer.default_local_dir=sft",
                *arguments,
            ],
        )
        with record_reads() as found:
            sft_trainer.run_sft(config)
        reads |= found
    assert accepted(SFTTrainerConfig) - reads - READ_ELSEWHERE == set()


def test_a_setting_that_nothing_reads_is_found(here):
    config = load_config("ppo_trainer", [*COMMON, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"])
    with record_reads() as found:
        main_ppo.run_ppo(config)
    assert "data.custom_cls.name" in accepted(PPOTrainerConfig) - found
