"""Rules about the implicit reward model (PRIME), and about choosing prompts by how often they were answered rightly."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from verl import env, registry
from verl.config.checks import Problems, bad_model_folder, in_range, one_of
from verl.config.data import DataConfig
from verl.config.node import ConfigNode
from verl.config.reward import ImplicitRewardConfig, RewardModelConfig
from verl.config.root import PPOTrainerConfig
from verl.errors import ConfigError
from verl.json_text import read_json
from verl.metrics import notice

_RM = "reward.reward_model"
_KEY = f"{_RM}.implicit"
_PATH = f"{_RM}.model_path"
_SCHEDULE, _ESTIMATOR = "trainer.v1.trainer_mode", "algorithm.adv_estimator"
OF_RECIPE = {
    _SCHEDULE: "recipe.prime.schedule:PrimeSchedule",
    _ESTIMATOR: "recipe.prime.core:leave_one_out",
}
"""What trains the model and what reads its rewards, as `recipe.prime.main_prime` sets them."""
LOSSES = ("ce",)
_MODEL_HINT = "It starts from a language model with the policy's tokens, usually from the policy's own first weights."


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with the two."""
    found = _oversampling(cfg)
    return found + _model(cfg) if cfg.reward.reward_model.implicit.enable else found


def tell(cfg: PPOTrainerConfig) -> None:
    """Settings without effect in this run."""
    data, model, key = cfg.data, cfg.reward.reward_model, "data.oversample_factor"
    if data.oversample_factor == 1:
        for name in _differing(data, DataConfig(), ("filter_accuracy", "filter_truncate")):
            notice(f"data.{name}", f"has no effect with {key}=1: every sampled prompt is trained on")
    elif not data.filter_accuracy and not data.filter_truncate:
        notice(key, "no filter is on, so the earliest prompts are trained on and the others dropped")
    if not data.filter_accuracy:
        for name in _differing(data, DataConfig(), ("accuracy_lower_bound", "accuracy_upper_bound")):
            notice(f"data.{name}", "has no effect without data.filter_accuracy=true")
    if not model.implicit.enable:
        usual = ImplicitRewardConfig()
        names = [name for name in usual if type(usual).__dataclass_fields__[name].metadata.get("follows") is None]
        for name in _differing(model.implicit, usual, names):
            notice(f"{_KEY}.{name}", f"has no effect without {_KEY}.enable=true; see python -m recipe.prime.main_prime")
        return
    for name in _differing(model, RewardModelConfig(), ("input_tokenizer", "max_length")):
        notice(f"{_RM}.{name}", "has no effect: the implicit reward model reads the policy's tokens as they are")
    if model.implicit.ref_type == "policy" and model.implicit.ref_path != model.model_path:
        notice(f"{_KEY}.ref_path", f"has no effect with {_KEY}.ref_type=policy")


def _differing(node: ConfigNode, usual: ConfigNode, names: Iterable[str]) -> list[str]:
    return [name for name in names if node[name] != usual[name]]


def _oversampling(cfg: PPOTrainerConfig) -> Problems:
    data, key = cfg.data, "data.oversample_factor"
    low, high = data.accuracy_lower_bound, data.accuracy_upper_bound
    found = in_range(key, data.oversample_factor, "1 or more", data.oversample_factor >= 1)
    found += in_range("data.accuracy_lower_bound", low, f"0 to accuracy_upper_bound={high}", 0 <= low <= high)
    found += in_range("data.accuracy_upper_bound", high, "at most 1", high <= 1)
    if data.oversample_factor == 1:
        return found
    both = {
        "algorithm.filter_groups.enable": cfg.algorithm.filter_groups.enable,
        "data.gen_batch_size": data.gen_batch_size,
    }
    for other, value in both.items():
        if value:
            message = f"{other}={value} chooses how many prompts are sampled, too"
            found.append(ConfigError(message, key=key, got=data.oversample_factor, fix="Keep one of the two."))
    return found


def _model(cfg: PPOTrainerConfig) -> Problems:
    model, implicit, rollout = cfg.reward.reward_model, cfg.reward.reward_model.implicit, cfg.actor_rollout_ref.rollout
    found = _recipe(cfg)
    if model.model_path is None:
        found.append(ConfigError("the implicit reward model needs a model", key=_PATH, got=None, fix=_MODEL_HINT))
    else:
        paths = {_PATH: model.model_path}
        if implicit.ref_type == "freeze" and implicit.ref_path not in (None, model.model_path):
            paths[f"{_KEY}.ref_path"] = implicit.ref_path
        for key, path in paths.items():
            found += bad_model_folder(key, path, _MODEL_HINT) or _no_language_model(key, path)
    if model.rollout.name != "hf":
        message = "a model on a server is not trained"
        found.append(ConfigError(message, key=f"{_RM}.rollout.name", got=model.rollout.name, fix="Leave it out."))
    if rollout.n < 2 or not rollout.do_sample:
        message = "answers to a prompt are compared with each other, so there must be several that differ"
        got = f"n={rollout.n}, do_sample={str(rollout.do_sample).lower()}"
        fix = "Set e.g. actor_rollout_ref.rollout.n=4, and leave do_sample out."
        found.append(ConfigError(message, key="actor_rollout_ref.rollout.n", got=got, fix=fix))
    for name in ("beta_train", "grad_clip"):
        found += in_range(f"{_KEY}.{name}", implicit[name], "above 0", implicit[name] > 0)
    found += one_of(f"{_KEY}.loss_type", implicit.loss_type, LOSSES)
    found += in_range(f"{_KEY}.optim.lr", implicit.optim.lr, "0 or more", implicit.optim.lr >= 0)
    return found + _mini_batch(cfg)


def _recipe(cfg: PPOTrainerConfig) -> Problems:
    """The model is one of three parts; what trains it and what reads its rewards must be there, too."""
    found: Problems = []
    if not cfg.reward.reward_model.enable:
        message, key = "PRIME does not run without its reward model", f"{_RM}.enable"
        found.append(ConfigError(message, key=key, got=False, fix=f"Set it to true, or {_KEY}.enable=false."))
    chosen = {
        _SCHEDULE: (cfg.trainer.v1.trainer_mode, registry.SCHEDULES, "trains no implicit reward model"),
        _ESTIMATOR: (cfg.algorithm.adv_estimator, registry.ADVANTAGE_ESTIMATORS, "reads no process rewards"),
    }
    for key, (name, table, lacks) in chosen.items():
        if name in table.builtin_targets():  # one of the person's own may well do it
            fix = f"Set {key}={OF_RECIPE[key]}, as python -m recipe.prime.main_prime does by itself."
            found.append(ConfigError(f"{name!r} {lacks}", key=key, got=name, fix=fix))
    return found


def _no_language_model(key: str, path: str) -> Problems:
    try:
        file = Path(env.expand(path)) / "config.json"
        architectures = read_json(file.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return []  # a hub name, or told when it is loaded
    if not architectures or any(str(name).endswith("ForCausalLM") for name in architectures):
        return []
    message = "the implicit reward model is a language model: what it rates tokens by are their probabilities"
    return [ConfigError(message, key=key, got=f"{path} ({', '.join(map(str, architectures))})", fix=_MODEL_HINT)]


def _mini_batch(cfg: PPOTrainerConfig) -> Problems:
    model, samples = cfg.reward.reward_model, cfg.actor_rollout_ref.rollout.n
    prompts, key = model.implicit.mini_batch_size, f"{_KEY}.mini_batch_size"
    batch, found = cfg.data.train_batch_size, in_range(key, prompts, "1 or more", prompts >= 1)
    if not found and batch % prompts:
        message = f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {prompts}"
        found.append(ConfigError(message, key=key, got=prompts, allowed=f"a divisor of {batch}"))
    processes = _processes(cfg)
    if not found and processes and prompts * samples % processes:
        message = (
            f"{prompts} prompts x n = {prompts * samples} samples cannot be shared evenly by {processes} processes"
        )
        found.append(ConfigError(message, key=key, got=prompts, fix="Change it, or the number of processes."))
    return found


def _processes(cfg: PPOTrainerConfig) -> int:
    """How many hold the model; 0 where that is told to be wrong elsewhere."""
    trainer, model = cfg.trainer, cfg.reward.reward_model
    if model.enable_resource_pool:
        return model.nnodes * model.n_gpus_per_node
    for pool in trainer.resource_pools.values():
        if isinstance(pool, dict) and "rm" in pool.get("roles", ()) and isinstance(pool.get("processes"), list):
            return sum(count for count in pool["processes"] if isinstance(count, int))
    return trainer.nnodes * (trainer.n_gpus_per_node or 1)
