"""Rules about the reward model: what it has to be given, and which forms of it are not built."""

from __future__ import annotations

from pathlib import Path

from verl import env, registry
from verl.config.machine.pools import REWARD_POOL, Pools
from verl.config.rules.checks import Problems, bad_model_folder, known_name
from verl.config.schema.root import PPOTrainerConfig, of_schedule
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError, NotBuiltError
from verl.json_text import read_json

_KEY = "reward.reward_model"
_PATH, _NAME, _URL = f"{_KEY}.model_path", f"{_KEY}.rollout.name", f"{_KEY}.rollout.server.url"
ENGINES = ("hf", "server")
STRATEGIES = ("auto", "plain", "fsdp", "fsdp2", "megatron")
_HINT = "Train one with `python -m verl.trainer.rm_trainer`, or name a classification checkpoint with one label."


def problems(cfg: PPOTrainerConfig) -> Problems:
    """What is wrong with ``reward.reward_model`` of a run that uses it."""
    model = cfg.reward.reward_model
    problems = _engine(cfg) + _pool(cfg)
    if model.rollout.name != "hf":
        return problems
    if of_schedule(cfg).reward_model:
        pass  # a language model, which the rules of the schedule's recipe look at
    elif model.model_path is None:
        problems.append(ConfigError("a reward model needs a folder or a hub name", key=_PATH, fix=_HINT))
    else:
        problems += headless(model.model_path)
    if model.strategy not in STRATEGIES:
        problems += known_name(registry.ENGINES, f"{_KEY}.strategy", model.strategy, "Leave it out.") or one_of(
            f"{_KEY}.strategy", model.strategy, STRATEGIES
        )
    return problems


def lacking(cfg: PPOTrainerConfig) -> Problems:
    """A folder that this machine does not have."""
    model = cfg.reward.reward_model
    is_loaded = model.rollout.name == "hf" and not of_schedule(cfg).reward_model
    return bad_model_folder(_PATH, model.model_path, _HINT) if is_loaded and model.model_path else []


def _engine(cfg: PPOTrainerConfig) -> Problems:
    rollout = cfg.reward.reward_model.rollout
    if rollout.name in ("vllm", "sglang"):
        fix = f"Start a server of your own and set {_NAME}=server {_URL}=http://host:port, or leave {_NAME} out."
        message = "served reward models: a run does not start the server of its reward model itself"
        return [NotBuiltError(message, key=_NAME, got=rollout.name, allowed=ENGINES, fix=fix)]
    if rollout.name != "server":
        return one_of(_NAME, rollout.name, ENGINES)
    problems: Problems = []
    if not rollout.server.url:
        problems.append(ConfigError("needs the address of a server", key=_URL, fix=f"Set {_URL}=http://host:port."))
    manager = cfg.reward.reward_manager
    custom_manager = manager.source == "importlib" or manager.name not in registry.REWARD_MANAGERS.builtin_targets()
    if cfg.reward.custom_reward_function.path is None and not custom_manager:
        message = "a generative reward model needs a function that queries it and reads its answer"
        fix = "It gets reward_router_address; docs/howto/rewards.md has one."
        problems.append(ConfigError(message, key="reward.custom_reward_function.path", fix=fix))
    return problems


def headless(path: str) -> Problems:
    """A language model has no scalar head: a new one would score at random."""
    file = Path(env.expand(path)) / "config.json"
    try:
        architectures = read_json(file.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return []  # a hub name, or a file that loading refuses
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        return []
    message = "this is a language model without a scalar head, which would score at random"
    fix = f"{_HINT} A language model that judges runs on a server: {_NAME}=server."
    return [ConfigError(message, key=_PATH, got=path, fix=fix)]


def _pool(cfg: PPOTrainerConfig) -> Problems:
    model = cfg.reward.reward_model
    if not model.enable_resource_pool:
        return []
    problems: Problems = []
    for name in ("nnodes", "n_gpus_per_node"):
        key = f"{_KEY}.{name}"
        problems += in_range(key, model[name], "1 or more, with enable_resource_pool=true", model[name] >= 1)
    if Pools.of(cfg).named["rm"] != REWARD_POOL:
        message = "trainer.resource_pools has a pool for the reward model as well"
        problems.append(ConfigError(message, key=f"{_KEY}.enable_resource_pool", fix="Keep one of the two."))
    if model.rollout.name != "hf":
        message = "a reward model on a server has no processes in this run"
        problems.append(ConfigError(message, key=f"{_KEY}.enable_resource_pool", got=True, fix="Leave it out."))
    return problems
