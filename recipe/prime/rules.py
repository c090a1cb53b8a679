"""Rules about the implicit reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipe.prime.settings import IMPLICIT
from verl import env, registry
from verl.config.machine.pools import Pools
from verl.config.rules.checks import Problems, bad_model_folder
from verl.config.rules.optimizers import of_section
from verl.config.schema.reward import RewardModelConfig
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError
from verl.json_text import read_json
from verl.metrics import notice

_RM = "reward.reward_model"
_PATH = f"{_RM}.model_path"
_SCHEDULE, _ESTIMATOR = "trainer.v1.trainer_mode", "algorithm.adv_estimator"
OF_RECIPE = {
    _SCHEDULE: "recipe.prime.schedule:PrimeSchedule",
    _ESTIMATOR: "recipe.prime.core:leave_one_out",
}
"""What trains the model and what reads its rewards, as `recipe.prime.main_prime` sets them."""
LOSSES = ("ce",)
_MODEL_HINT = "It starts from a language model with the policy's tokens, usually from the policy's own first weights."


def problems(cfg: Any) -> Problems:
    """What is wrong with the reward model and what stands around it."""
    return _chosen(cfg) + _model(cfg)


def tell(cfg: Any) -> None:
    """Settings without effect in this run."""
    model, usual = cfg.reward.reward_model, RewardModelConfig()
    for name in ("input_tokenizer", "max_length"):
        if model[name] != usual[name]:
            notice(f"{_RM}.{name}", "has no effect: the implicit reward model reads the policy's tokens as they are")
    if model.implicit.ref_type == "policy" and model.implicit.ref_path != model.model_path:
        notice(f"{IMPLICIT}.ref_path", f"has no effect with {IMPLICIT}.ref_type=policy")


def _model(cfg: Any) -> Problems:
    model, implicit, rollout = cfg.reward.reward_model, cfg.reward.reward_model.implicit, cfg.actor_rollout_ref.rollout
    problems: Problems = []
    if model.model_path is None:
        problems.append(ConfigError("the implicit reward model needs a model", key=_PATH, got=None, fix=_MODEL_HINT))
    else:
        paths = {_PATH: model.model_path}
        if implicit.ref_type == "freeze" and implicit.ref_path not in (None, model.model_path):
            paths[f"{IMPLICIT}.ref_path"] = implicit.ref_path
        for key, path in paths.items():
            problems += bad_model_folder(key, path, _MODEL_HINT) or _no_language_model(key, path)
    if model.rollout.name != "hf":
        message = "a model on a server is not trained"
        problems.append(ConfigError(message, key=f"{_RM}.rollout.name", got=model.rollout.name, fix="Leave it out."))
    if rollout.n < 2 or not rollout.do_sample:
        message = "answers to a prompt are compared with each other, so there must be several that differ"
        got = f"n={rollout.n}, do_sample={str(rollout.do_sample).lower()}"
        fix = "Set e.g. actor_rollout_ref.rollout.n=4, and leave do_sample out."
        problems.append(ConfigError(message, key="actor_rollout_ref.rollout.n", got=got, fix=fix))
    for name in ("beta_train", "grad_clip"):
        problems += in_range(f"{IMPLICIT}.{name}", implicit[name], "above 0", implicit[name] > 0)
    problems += one_of(f"{IMPLICIT}.loss_type", implicit.loss_type, LOSSES)
    problems += in_range(f"{IMPLICIT}.optim.lr", implicit.optim.lr, "0 or more", implicit.optim.lr >= 0)
    problems += of_section(f"{IMPLICIT}.optim", implicit.optim, model.strategy)
    return problems + _mini_batch(cfg)


def _chosen(cfg: Any) -> Problems:
    """The model is one of three parts; what trains it and what reads its rewards must be there, too."""
    problems: Problems = []
    if not cfg.reward.reward_model.enable:
        message, key = "PRIME does not run without its reward model", f"{_RM}.enable"
        problems.append(ConfigError(message, key=key, got=False, fix="Set it to true."))
    if not cfg.reward.reward_model.implicit.enable:
        message, key = "PRIME does not run without its reward model", f"{IMPLICIT}.enable"
        problems.append(ConfigError(message, key=key, got=False, fix="Set it to true, or leave it out."))
    chosen = {
        _SCHEDULE: (cfg.trainer.v1.trainer_mode, registry.SCHEDULES, "trains no implicit reward model"),
        _ESTIMATOR: (cfg.algorithm.adv_estimator, registry.ADVANTAGE_ESTIMATORS, "reads no process rewards"),
    }
    for key, (name, table, lacks) in chosen.items():
        if name in table.builtin_targets():  # one of the person's own may well do it
            fix = f"Set {key}={OF_RECIPE[key]}, as python -m recipe.prime.main_prime does by itself."
            problems.append(ConfigError(f"{name!r} {lacks}", key=key, got=name, fix=fix))
    return problems


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


def _mini_batch(cfg: Any) -> Problems:
    model, samples = cfg.reward.reward_model, cfg.actor_rollout_ref.rollout.n
    prompts, key = model.implicit.mini_batch_size, f"{IMPLICIT}.mini_batch_size"
    batch, problems = cfg.data.train_batch_size, in_range(key, prompts, "1 or more", prompts >= 1)
    if not problems and batch % prompts:
        message = f"data.train_batch_size={batch} prompts cannot be cut into mini-batches of {prompts}"
        problems.append(ConfigError(message, key=key, got=prompts, allowed=f"a divisor of {batch}"))
    processes = Pools.of(cfg).of_role("rm").size
    if not problems and processes and prompts * samples % processes:
        message = (
            f"{prompts} prompts x n = {prompts * samples} samples cannot be shared evenly by {processes} processes"
        )
        problems.append(ConfigError(message, key=key, got=prompts, fix="Change it, or the number of processes."))
    return problems
