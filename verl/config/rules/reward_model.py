"""Rules about the reward model: what it has to be given, and which forms of it are not built."""

from __future__ import annotations

from verl import registry
from verl.config.machine.config_json import config_json
from verl.config.machine.host import is_installed
from verl.config.machine.pools import REWARD_POOL, Pools
from verl.config.rules.checks import Problems, bad_model_folder, known_name
from verl.config.schema.reward import JUDGE_ENGINES, RewardModelConfig
from verl.config.schema.root import PPOTrainerConfig, of_schedule, starts_judges
from verl.config.schema.tree import in_range, one_of
from verl.errors import ConfigError, NotBuiltError

_KEY = "reward.reward_model"
_PATH, _NAME, _URL = f"{_KEY}.model_path", f"{_KEY}.rollout.name", f"{_KEY}.rollout.server.url"
ENGINES = ("hf", *JUDGE_ENGINES, "server")
_TENSOR = f"{_KEY}.rollout.tensor_model_parallel_size"
STRATEGIES = ("auto", "plain", "fsdp", "fsdp2", "megatron")
_HINT = "Train one with `python -m verl.trainer.rm_trainer`, or name a classification checkpoint with one label."

_JUDGE = "Name a language model that judges, such as Qwen/Qwen2.5-7B-Instruct."


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
    """A folder or a package that this machine does not have."""
    model = cfg.reward.reward_model
    name, is_loaded = model.rollout.name, model.rollout.name == "hf" and not of_schedule(cfg).reward_model
    problems: Problems = []
    if name in ("vllm", "sglang") and not is_installed(name):
        product, fix = {"vllm": "vLLM", "sglang": "SGLang"}[name], f"Set {_NAME}=hf_server, or install it."
        problems.append(
            ConfigError(
                f"{product} is not installed in this environment", key=_NAME, got=name, allowed=ENGINES, fix=fix
            )
        )
    if model.model_path and (is_loaded or starts_judges(cfg)):
        problems += bad_model_folder(_PATH, model.model_path, _HINT if is_loaded else _JUDGE)
    return problems


def _engine(cfg: PPOTrainerConfig) -> Problems:
    rollout = cfg.reward.reward_model.rollout
    if rollout.name == "hf" or rollout.name not in ENGINES:
        return one_of(_NAME, rollout.name, ENGINES)
    problems = _servers(cfg) if rollout.name in JUDGE_ENGINES else []
    if rollout.name == "server" and not rollout.server.url:
        problems.append(ConfigError("needs the address of a server", key=_URL, fix=f"Set {_URL}=http://host:port."))
    manager = cfg.reward.reward_manager
    custom_manager = manager.source == "importlib" or manager.name not in registry.REWARD_MANAGERS.builtin_targets()
    if cfg.reward.custom_reward_function.path is None and not custom_manager:
        message = "a generative reward model needs a function that queries it and reads its answer"
        fix = "It gets reward_router_address; docs/howto/rewards.md has one. "
        fix += f"A model with a scalar head needs none: {_NAME}=hf."
        problems.append(ConfigError(message, key="reward.custom_reward_function.path", fix=fix))
    return problems


def _servers(cfg: PPOTrainerConfig) -> Problems:
    """Of those that the run starts."""
    problems: Problems = []
    model = cfg.reward.reward_model
    rollout, size = model.rollout, model.rollout.tensor_model_parallel_size
    if rollout.server.url:
        message = f"with {_NAME}={rollout.name} the run starts the servers, and {rollout.server.url} is none of them"
        problems.append(ConfigError(message, key=_URL, fix=f"Leave it out, or set {_NAME}=server."))
    if model.model_path is None:
        problems.append(ConfigError("a judge needs a folder or a hub name", key=_PATH, fix=_JUDGE))
    elif _heads(model.model_path, "Classification"):
        message = "this model has a scalar head and writes no answers"
        problems.append(ConfigError(message, key=_PATH, got=model.model_path, fix=f"Set {_NAME}=hf, which reads it."))
    if rollout.name == "hf_server" and size > 1:
        message, fix = "the hf engine holds a model in one process", f"Leave it out, or set {_NAME}=vllm."
        problems.append(ConfigError(message, key=_TENSOR, got=size, allowed=[1], fix=fix))
    unknown = sorted(set(rollout.engine_kwargs) - {"vllm", "sglang"})
    if unknown:
        key, allowed = f"{_KEY}.rollout.engine_kwargs.{unknown[0]}", ["vllm", "sglang"]
        problems.append(ConfigError("no engine that takes arguments", key=key, allowed=allowed, fix="Leave it out."))
    nodes = max(len(pool.processes) for pool in Pools.of(cfg).by_name.values())
    if cfg.reward.while_sampling and nodes > 1:
        message = f"samples are scored on {nodes} machines, and the judge's servers are on one, which they alone reach"
        fix = f"Leave it out, or start servers yourself and set {_NAME}=server."
        problems.append(NotBuiltError(message, key="reward.while_sampling", got=True, allowed=[False], fix=fix))
    return problems


def headless(path: str) -> Problems:
    """A language model has no scalar head: a new one would score at random."""
    if not _heads(path, "ForCausalLM"):
        return []
    message = "this is a language model without a scalar head, which would score at random"
    fix = f"{_HINT} A language model that judges runs on a server: {_NAME}=hf_server, vllm or sglang."
    return [ConfigError(message, key=_PATH, got=path, fix=fix)]


def _heads(path: str, ending: str) -> bool:
    """Whether the architecture in a model's config.json has a name with this end."""
    return any(str(name).endswith(ending) for name in config_json(path).get("architectures") or ())


def _pool(cfg: PPOTrainerConfig) -> Problems:
    model = cfg.reward.reward_model
    if not model.enable_resource_pool:
        return []
    problems: Problems = []
    for name in ("nnodes", "n_gpus_per_node"):
        key = f"{_KEY}.{name}"
        problems += in_range(key, model[name], "1 or more, with enable_resource_pool=true", model[name] >= 1)
    if model.rollout.name in JUDGE_ENGINES:
        return problems or _shared_out(model)
    if model.rollout.name != "hf":
        message = "a reward model on a server that runs already has no processes in this run"
        return [ConfigError(message, key=f"{_KEY}.enable_resource_pool", got=True, fix="Leave it out.")]
    if Pools.of(cfg).named["rm"] != REWARD_POOL:
        message = "trainer.resource_pools has a pool for the reward model as well"
        problems.append(ConfigError(message, key=f"{_KEY}.enable_resource_pool", fix="Keep one of the two."))
    return problems


def _shared_out(model: RewardModelConfig) -> Problems:
    """Of the GPUs of a judge's pool each server has as many."""
    size, copies, gpus = (
        model.rollout.tensor_model_parallel_size,
        model.rollout.data_parallel_size,
        model.n_gpus_per_node,
    )
    if model.nnodes > 1:
        message, key = "a judge's servers on several machines: a run starts them on the controller's", f"{_KEY}.nnodes"
        fix = f"Set it to 1, or start servers yourself and set {_NAME}=server."
        return [NotBuiltError(message, key=key, got=model.nnodes, allowed=[1], fix=fix)]
    if gpus % (size * copies):
        message = f"a pool of {gpus} cannot be shared out to servers of {_TENSOR}={size}, {copies} at a time"
        fix = f"Change it, or {_TENSOR}, and leave {_KEY}.rollout.data_parallel_size out."
        return [ConfigError(message, key=f"{_KEY}.n_gpus_per_node", got=gpus, fix=fix)]
    return []
