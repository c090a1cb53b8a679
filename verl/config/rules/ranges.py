"""Rules about single numbers that a type cannot state: what is positive, what is a share, what is a probability."""

from __future__ import annotations

from typing import Any

from verl.config.rules.checks import Problems, in_range, one_of
from verl.config.schema.optim import OptimizerConfig
from verl.config.schema.preference import WITHOUT_REFERENCE, DPOConfig, DPOTrainerConfig, RMTrainerConfig
from verl.config.schema.root import PPOTrainerConfig, of_schedule, uses_critic
from verl.config.schema.sft import EACH_EPOCH, SFTTrainerConfig
from verl.errors import ConfigError

_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DTYPES = ("auto", "fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half")
_HALF = ("fp16", "float16", "half")
LOAD_FORMATS = ("dummy", "hf", "safetensors", "auto")
MOST_SAMPLES = 1 << 16
"""Of a prompt: more than that is a typing error, which would fill the memory before anything is sampled."""


def numbers(cfg: PPOTrainerConfig) -> Problems:
    """Every number of an RL run that can be out of range by itself."""
    return [
        *_lengths(cfg),
        *_replay(cfg),
        *_sampling(cfg),
        *_actor(cfg),
        *_critic(cfg),
        *_algorithm(cfg),
        *_run(cfg.trainer),
    ]


def sft_numbers(cfg: SFTTrainerConfig) -> Problems:
    """The same for a supervised run."""
    data = cfg.data
    problems = _at_least("data", data, 1, "train_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
    problems += _at_least("data", data, 2, "max_length") + _at_least("data", data, 0, "num_workers")
    return (
        problems + _samples(data) + _engine("engine", cfg.engine) + optimizer("optim", cfg.optim) + _steps(cfg.trainer)
    )


def pair_numbers(cfg: DPOTrainerConfig | RMTrainerConfig) -> Problems:
    """The numbers of a loss on pairs."""
    if isinstance(cfg, RMTrainerConfig):
        return _at_least("rm", cfg.rm, 0, "centering")
    problems = _above_zero("dpo", cfg.dpo, "beta")
    smoothing = cfg.dpo.label_smoothing
    problems += in_range("dpo.label_smoothing", smoothing, "0 or more, below 0.5", 0 <= smoothing < 0.5)
    if smoothing and cfg.dpo.loss_type != "sigmoid":
        fix = "Leave it out, or set dpo.loss_type=sigmoid."
        problems.append(ConfigError("only the sigmoid loss has it", key="dpo.label_smoothing", got=smoothing, fix=fix))
    key = "dpo.loss_type" if cfg.dpo.loss_type in WITHOUT_REFERENCE else "dpo.reference_free"
    has_none = cfg.dpo.reference_free or cfg.dpo.loss_type in WITHOUT_REFERENCE
    if has_none and (cfg.dpo.ref_model_path or cfg.dpo.precompute_ref_log_probs):
        got, fix = cfg.dpo[key.removeprefix("dpo.")], "Leave out dpo.ref_model_path and dpo.precompute_ref_log_probs."
        problems.append(ConfigError("there is no reference policy to load", key=key, got=got, fix=fix))
    problems += _at_least("dpo", cfg.dpo, 0, "sft_coef", "simpo_gamma")
    gamma = cfg.dpo.simpo_gamma
    if gamma != DPOConfig().simpo_gamma and cfg.dpo.loss_type != "simpo":
        fix = "Leave it out, or set dpo.loss_type=simpo."
        problems.append(ConfigError("only the loss of SimPO has it", key="dpo.simpo_gamma", got=gamma, fix=fix))
    return problems


def _at_least(section: str, node: Any, least: float, *names: str) -> Problems:
    problems: Problems = []
    for name in names:
        value = node[name]
        problems += in_range(f"{section}.{name}", value, f"{least} or more", value is None or value >= least)
    return problems


def _above_zero(section: str, node: Any, *names: str) -> Problems:
    problems: Problems = []
    for name in names:
        value = node[name]
        problems += in_range(f"{section}.{name}", value, "above 0", value is None or value > 0)
    return problems


def _share(section: str, node: Any, *names: str) -> Problems:
    problems: Problems = []
    for name in names:
        problems += in_range(f"{section}.{name}", node[name], "0 to 1", 0 <= node[name] <= 1)
    return problems


def _dtype(key: str, value: str, *no: str) -> Problems:
    return one_of(key, value.removeprefix("torch."), [name for name in _DTYPES if name not in no])


def _samples(data: Any) -> Problems:
    problems: Problems = []
    for name in ("train_max_samples", "val_max_samples"):
        value = data[name]
        problems += in_range(f"data.{name}", value, "-1 for all rows, or 1 or more", value == -1 or value >= 1)
    return problems


def _lengths(cfg: PPOTrainerConfig) -> Problems:
    data = cfg.data
    problems = _at_least("data", data, 1, "train_batch_size", "gen_batch_size", "val_batch_size")
    problems += _at_least(
        "data", data, 1, "max_prompt_length", "max_response_length", "filter_overlong_prompts_workers"
    )
    shortest, longest = data.min_response_length, data.max_response_length
    fits = f"0 to data.max_response_length={longest}"
    problems += in_range("data.min_response_length", shortest, fits, 0 <= shortest <= longest)
    return problems + _at_least("data", data, 0, "dataloader_num_workers") + _samples(data)


def _replay(cfg: PPOTrainerConfig) -> Problems:
    steps, key = cfg.skip.rollout.steps, "skip.rollout.steps"
    holds = all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 for step in steps)
    problems = in_range(key, steps, "a list of steps, each 1 or more", holds)
    if cfg.skip.rollout.enable and cfg.actor_rollout_ref.rollout.keep_unfinished:
        message, fix = "samples that began in an earlier step are not those of this step's prompts", "Leave one out."
        problems.append(ConfigError(message, key=f"{_R}.keep_unfinished", got=True, fix=fix))
    return problems


def _sampling(cfg: PPOTrainerConfig) -> Problems:
    rollout, val = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.val_kwargs
    problems = _at_least(_R, rollout, 1, "n") + engine_limits(_R, rollout)
    problems += _at_least(f"{_R}.trace", rollout.trace, 1, "max_samples_per_step_per_worker")
    problems += _at_least(f"{_R}.val_kwargs", val, 1, "n") + _at_least(f"{_R}.val_kwargs", val, 0, "temperature")
    problems += in_range(
        f"{_R}.temperature",
        rollout.temperature,
        "above 0, since log-probs are those at this temperature (do_sample=false is greedy)",
        rollout.temperature > 0,
    )
    for key, node in ((_R, rollout), (f"{_R}.val_kwargs", val)):
        problems += in_range(f"{key}.n", node.n, f"at most {MOST_SAMPLES}", node.n <= MOST_SAMPLES)
        problems += in_range(f"{key}.top_p", node.top_p, "above 0, at most 1", 0 < node.top_p <= 1)
        problems += in_range(f"{key}.top_k", node.top_k, "-1 for all tokens, or 1 or more", node.top_k >= -1)
    problems += _above_zero(_R, rollout, "repetition_penalty")
    rate = rollout.over_sample_rate
    problems += in_range(f"{_R}.over_sample_rate", rate, "0 or more, below 1", 0 <= rate < 1)
    problems += _at_least(f"{_R}.agent", rollout.agent, 1, "num_workers") + _conversations(rollout.multi_turn)
    bucket = rollout.checkpoint_engine
    problems += _at_least(f"{_R}.checkpoint_engine", bucket, 1, "update_weights_bucket_megabytes")
    problems += _at_least(_R, rollout, 1, "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu")
    return problems + _at_least(_R, rollout, 1, "log_prob_max_token_len_per_gpu") + engine_choices(_R, rollout)


def engine_limits(key: str, rollout: Any) -> Problems:
    """An engine's limits, and those of requests to servers, in a rollout section of any program."""
    problems = _at_least(key, rollout, 1, "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    memory = rollout.gpu_memory_utilization
    problems += in_range(f"{key}.gpu_memory_utilization", memory, "above 0, at most 1", 0 < memory <= 1)
    problems += _at_least(f"{key}.server", rollout.server, 1, "max_attempts", "max_connections")
    problems += _at_least(f"{key}.server", rollout.server, 0, "retry_delay", "max_start_wait_time")
    return problems + _above_zero(f"{key}.server", rollout.server, "timeout")


def engine_choices(key: str, rollout: Any) -> Problems:
    """The dtype of an engine, and the choices that only vLLM has."""
    problems = _dtype(f"{key}.dtype", rollout.dtype)
    return problems + (
        one_of(f"{key}.load_format", rollout.load_format, LOAD_FORMATS) if rollout.name == "vllm" else []
    )


def _conversations(turns: Any) -> Problems:
    key = f"{_R}.multi_turn"
    problems = _at_least(key, turns, 1, "max_assistant_turns", "max_user_turns", "max_parallel_calls")
    problems += _at_least(key, turns, 1, "max_tool_response_length")
    for name in ("tool_timeout", "trajectory_timeout"):
        seconds = turns[name]
        problems += in_range(f"{key}.{name}", seconds, "more than 0 seconds, or null", seconds is None or seconds > 0)
    return problems


def _actor(cfg: PPOTrainerConfig) -> Problems:
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    problems = _at_least("actor_rollout_ref.model", cfg.actor_rollout_ref.model, 0, "lora_rank")
    problems += _at_least(_A, actor, 1, "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu")
    problems += _at_least(_A, actor, 1, "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")
    problems += _above_zero(
        _A, actor, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "grad_clip", "loss_scale_factor"
    )
    problems += in_range(f"{_A}.clip_ratio_c", actor.clip_ratio_c, "above 1", actor.clip_ratio_c > 1)
    problems += _at_least(_A, actor, 0, "kl_loss_coef") + optimizer(f"{_A}.optim", actor.optim)
    names = ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu")
    problems += _at_least("actor_rollout_ref.ref", ref, 1, *names)
    model = cfg.reward.reward_model
    if model.enable:
        problems += _engine("reward.reward_model.fsdp_config", model.fsdp_config, trains=of_schedule(cfg).reward_model)
    problems += _engine(f"{_A}.fsdp_config", actor.fsdp_config)
    return problems + _engine("actor_rollout_ref.ref.fsdp_config", ref.fsdp_config, trains=False)


def _engine(key: str, engine: Any, trains: bool = True) -> Problems:
    if trains and engine.model_dtype.removeprefix("torch.") in _HALF:
        fix = f"Keep them in fp32, and set {key}.dtype=float16 for products in float16."
        message = "weights that are kept in float16 lose small updates"
        return [ConfigError(message, key=f"{key}.model_dtype", got=engine.model_dtype, fix=fix)]
    problems = _dtype(f"{key}.dtype", engine.dtype) + _dtype(f"{key}.model_dtype", engine.model_dtype, "auto")
    problems += _at_least(key, engine, 1, "ulysses_sequence_parallel_size", "expert_parallel_size")
    return problems + _at_least(f"{key}.wrap_policy", engine.wrap_policy, 0, "min_num_params")


def _critic(cfg: PPOTrainerConfig) -> Problems:
    critic = cfg.critic
    if not uses_critic(cfg):
        return []
    problems = _at_least("critic", critic, 1, "ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu")
    problems += _at_least("critic", critic, 1, "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")
    problems += _at_least("critic", critic, 1, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
    problems += _above_zero("critic", critic, "cliprange_value", "grad_clip", "loss_scale_factor")
    problems += _engine("critic.fsdp", critic.fsdp)
    return problems + optimizer("critic.optim", critic.optim)


def _algorithm(cfg: PPOTrainerConfig) -> Problems:
    algorithm, key = cfg.algorithm, "algorithm.kl_ctrl"
    problems = _share("algorithm", algorithm, "gamma", "lam") + _at_least(key, algorithm.kl_ctrl, 0, "kl_coef")
    problems += _above_zero(key, algorithm.kl_ctrl, "horizon", "target_kl")
    problems += _at_least("reward.sandbox_fusion", cfg.reward.sandbox_fusion, 1, "max_concurrent", "memory_limit_mb")
    return problems + _above_zero("reward", cfg.reward, "timeout") + _at_least("reward", cfg.reward, 1, "num_workers")


def _run(trainer: Any) -> Problems:
    problems = _at_least(
        "trainer", trainer, 0, "critic_warmup", "esi_redundant_time", "log_train_generations", "log_val_generations"
    )
    problems += _at_least("trainer", trainer, 1, "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep")
    problems += _above_zero("trainer", trainer, "remote_timeout")
    if "hang_seconds" in trainer:
        problems += _above_zero("trainer", trainer, "hang_seconds", "journal_max_bytes")
    return problems + _steps(trainer)


def _steps(trainer: Any) -> Problems:
    problems = _at_least("trainer", trainer, 1, "total_epochs", "total_training_steps")
    for name in ("save_freq", "test_freq"):
        value = trainer[name]
        allowed = "-1 for never, or a number of steps"
        if isinstance(value, str):
            problems += in_range(f"trainer.{name}", value, f"{allowed}, or {EACH_EPOCH}", value == EACH_EPOCH)
        else:
            problems += in_range(f"trainer.{name}", value, allowed, value >= -1)
    every = trainer.copy_check_freq
    problems += in_range(
        "trainer.copy_check_freq", every, "-1 for checkpoints only, or a number of steps", every == -1 or every >= 1
    )
    if "max_ckpt_to_keep" in trainer:
        problems += _at_least("trainer", trainer, 1, "max_ckpt_to_keep")
    return problems


def optimizer(key: str, optim: OptimizerConfig) -> Problems:
    """Numbers of one optimizer section."""
    problems = _at_least(key, optim, 0, "lr", "weight_decay") + _at_least(key, optim, -1, "lr_warmup_steps")
    problems += _share(key, optim, "lr_warmup_steps_ratio", "min_lr_ratio") + _above_zero(key, optim, "num_cycles")
    problems += _above_zero(key, optim, "clip_grad")
    problems += _at_least(key, optim, 0, "lr_warmup_init", "min_lr") + _above_zero(key, optim, "lr_decay_steps")
    problems += _above_zero(key, optim, "lr_wsd_decay_steps") + _decay(key, optim)
    betas_of, override = {"betas": optim.betas}, optim.override_optimizer_config or {}
    if "betas" in override:
        betas_of["override_optimizer_config.betas"] = override["betas"]
    for name, betas in betas_of.items():
        holds = isinstance(betas, list | tuple) and len(betas) == 2
        holds = holds and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
        problems += in_range(f"{key}.{name}", betas, "two numbers, each at least 0 and below 1", holds)
    return problems


def _decay(key: str, optim: OptimizerConfig) -> Problems:
    """Megatron's schedule is one, the floor is below the rate, and the last part of WSD has a length."""
    style, problems = optim.lr_decay_style, []
    for name in ("lr_warmup_init", "min_lr"):
        rate = optim[name]
        problems += in_range(f"{key}.{name}", rate, f"at most {key}.lr={optim.lr}", rate <= optim.lr)
    if style != "constant" and optim.lr_scheduler_type != "constant":
        message = (
            f"{key}.lr_scheduler_type={optim.lr_scheduler_type} and {key}.lr_decay_style={style} are two schedules"
        )
        problems.append(ConfigError(message, key=f"{key}.lr_decay_style", got=style, fix="Leave one of them out."))
    if style == "WSD" and optim.lr_wsd_decay_steps is None:
        message = "lr_decay_style=WSD needs the length of its last part"
        problems.append(ConfigError(message, key=f"{key}.lr_wsd_decay_steps", fix="Set it to a number of steps."))
    return problems
