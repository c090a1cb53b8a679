"""Rules about the machine a run starts on: its devices, files, models, kernels and installed packages.

How many processes a supervised run has is torchrun's word, not the configuration's.
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import env, registry
from verl.config.loading import recipes
from verl.config.machine import models, pools, topology
from verl.config.machine.pools import EngineRole, Pools, roles
from verl.config.rules import optimizers
from verl.config.rules.checks import (
    Problems,
    bad_model_folder,
    caught,
    known_name,
    looks_local,
    missing_files,
    missing_folder,
    missing_package,
)
from verl.config.schema.model import HFModelConfig
from verl.config.schema.node import ConfigNode, was_typed
from verl.config.schema.root import PPOTrainerConfig, uses_critic, uses_reward_model
from verl.config.schema.tree import one_of
from verl.errors import ConfigError
from verl.metrics import notice

if TYPE_CHECKING:
    from verl.config.schema.sft import SupervisedConfig


def processes(cfg: SupervisedConfig) -> Problems:
    """More processes than were started, or a backend that has no use for them."""
    trainer, started = cfg.trainer, env.get_int("WORLD_SIZE", 1)
    needed = trainer.nnodes * (trainer.n_gpus_per_node or 1)
    if needed > started:
        per_node = trainer.n_gpus_per_node or 1
        nodes = f"--nnodes={trainer.nnodes} " if trainer.nnodes > 1 else ""
        return [
            ConfigError(
                f"{needed} processes are requested, and {started} {'was' if started == 1 else 'were'} started",
                key=_GPUS if trainer.nnodes == 1 else "trainer.nnodes",
                got=per_node if trainer.nnodes == 1 else trainer.nnodes,
                fix=f"Start them with torchrun {nodes}--nproc_per_node={per_node} -m verl.trainer.sft_trainer ..., "
                "or leave it out.",
            )
        ]
    problems = _one_device_each(cfg)
    if problems:
        return problems
    if started > 1 and cfg.engine.strategy == "plain":
        return [
            ConfigError(
                f"the plain engine trains in one process, and {started} were started",
                key="engine.strategy",
                got="plain",
                fix="Leave it out, or set it to fsdp2.",
            )
        ]
    return []


def _one_device_each(cfg: SupervisedConfig) -> Problems:
    from verl import device  # torch is loaded only once there is something to validate

    here, kind = env.get_int("LOCAL_WORLD_SIZE", 1), device.resolve_device(cfg.trainer.device)
    there = here if kind == "cpu" else device.device_count(kind)
    if here <= there:
        return []
    return [
        ConfigError(
            f"torchrun started {here} processes on this machine, which has {there} GPU{'s' if there > 1 else ''}",
            key="--nproc_per_node",
            got=here,
            allowed=f"1 to {there}",
            fix="Or set trainer.device=cpu.",
        )
    ]


_ATTENTION = {
    "eager": None, "sdpa": None, "flex_attention": None, "paged|eager": None, "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface", "flash_attention_4": "flash_attn.cute",
}  # fmt: skip
"""What transformers calls them, and the package that each needs; a name with a slash is fetched from the hub."""


def kernel_problems(cfg: PPOTrainerConfig | SupervisedConfig) -> Problems:
    """Of every model of a run."""
    return _of(list(roles(cfg)), cfg.trainer.device) + optimizers.missing(cfg)


def _of(model_roles: list[EngineRole], device: str | None) -> Problems:
    from verl import device as devices  # torch is loaded only once there is something to validate

    problems = _packages({role.section.strategy: f"{role.key}.strategy" for role in reversed(model_roles)})
    if caught(devices.resolve_device, device):
        return problems  # another rule reports it
    kind = devices.resolve_device(device)
    for role in model_roles:
        problems += _attention(role, kind) + _adapter_folder(role) + _fp8(role)
        problems += [] if role.has_own_sizes else _on_gpu(role, kind)
    return list({problem.key: problem for problem in problems}.values())  # the reference has the actor's model


def _packages(keys: dict[str, str]) -> Problems:
    """Of the backends that are named, by the setting that names each: a package that is missing or of another version."""
    problems: Problems = []
    if "megatron" in keys:
        from verl.config.rules import validate_megatron  # the rules of a backend are loaded where a role is on it

        problems += validate_megatron.missing_or_other(keys["megatron"])
    if "torchtitan" in keys:
        from verl.config.rules import validate_torchtitan

        problems += validate_torchtitan.missing_or_other(keys["torchtitan"])
    return problems


def _attention(role: EngineRole, kind: str) -> Problems:
    key, name = f"{role.model_key}.override_config.attn_implementation", _named(role.model)
    if name is None or "/" in name or role.has_own_sizes:
        return []
    if name not in _ATTENTION:  # a module of one's own may have registered it
        return [] if role.model.external_lib else one_of(key, name, _ATTENTION)
    package = _ATTENTION[name] if not _is_there("kernels") else None  # which fetches those that are missing
    fix = "Set it to sdpa, or leave it out: packed rows have an attention of their own."
    if package is not None and not _is_there(package):
        return [ConfigError(f"it needs the package {package}, which is not installed", key=key, got=name, fix=fix)]
    if name == "flex_attention" and kind == "cpu":
        return [ConfigError("flex attention has no backward pass on a CPU", key=key, got=name, fix=fix)]
    return []


def _named(model: Any) -> str | None:
    name = (model.override_config or {}).get("attn_implementation")
    return name if isinstance(name, str) else None


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package inside another one
        return False


def _on_gpu(role: EngineRole, kind: str) -> Problems:
    model, key, problems = role.model, role.model_key, []
    if "use_liger" in model and model.use_liger:
        if kind == "cpu":
            message, fix = "Liger's kernels need a GPU", f"Set {key}.use_liger=false on a CPU."
            problems.append(ConfigError(message, key=f"{key}.use_liger", got=True, fix=fix))
        elif not _is_there("liger_kernel"):
            fix = "In the checkout: pip install -e '.[liger]', or leave it out."
            message = "the package liger-kernel is not installed"
            problems.append(ConfigError(message, key=f"{key}.use_liger", got=True, fix=fix))
    is_fused = "use_fused_kernels" in model and model.use_fused_kernels
    if kind == "cpu" and is_fused and model.fused_kernel_options.impl_backend == "triton":
        name, message = f"{key}.fused_kernel_options.impl_backend", "the triton kernels need a GPU"
        fix = "Set it to torch, which works on any device."
        problems.append(ConfigError(message, key=name, got="triton", fix=fix))
    return problems


def _fp8(role: EngineRole) -> Problems:
    if not role.is_megatron or _is_there("transformer_engine"):
        return []
    from verl.config.rules import megatron_fields

    return caught(megatron_fields.refuse_low_precision, role.of("override_mcore_model_config"), role.section.megatron)


def _adapter_folder(role: EngineRole) -> Problems:
    path = role.model.lora_adapter_path if "lora_adapter_path" in role.model else None
    if not path or role.adapter is None or not looks_local(path):
        return []
    return missing_folder(f"{role.model_key}.lora_adapter_path", path)


_GPUS, _NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
_PACKAGES = {name: name for name in ("wandb", "tensorboard", "mlflow", "swanlab", "trackio", "clearml", "rl_insight")}
_PACKAGES |= {"prometheus": "prometheus_client", "vemlp_wandb": "volcengine_ml_platform"}
_MODEL_HINT = "Set it to a folder with a Hugging Face model, or to a name on the hub."


def trackers(cfg: ConfigNode) -> Problems:
    """Trackers that do not exist, or whose package is not installed."""
    key, problems = "trainer.logger", []
    for name in cfg.trainer.logger:
        unknown = known_name(registry.TRACKERS, key, name, f"Take {name!r} out of {key}.")
        package = _PACKAGES.get(name)
        problems += unknown or (missing_package(key, name, package) if package else [])
    return problems


def traces(cfg: PPOTrainerConfig) -> Problems:
    """A backend of rollout traces whose package is not installed."""
    name, key = cfg.actor_rollout_ref.rollout.trace.backend, "actor_rollout_ref.rollout.trace.backend"
    return [] if name is None else missing_package(key, name, name)


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def rollout_engine(cfg: PPOTrainerConfig) -> Problems:
    """A rollout engine that is not installed, or a server without an address."""
    rollout, key = cfg.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.name"
    url = "actor_rollout_ref.rollout.server.url"
    if rollout.name == "server" and not rollout.server.url:
        return [ConfigError("needs the address of a server", key=key, got="server", fix=f"Set {url}=http://host:port.")]
    product = {"vllm": "vLLM", "sglang": "SGLang"}.get(rollout.name)
    if product is None or is_installed(rollout.name) or (rollout.name == "sglang" and rollout.server.url):
        return pools.on_machine("actor_rollout_ref.rollout", rollout, cfg.trainer.device, _is_local(cfg))
    near = "" if rollout.name == "vllm" else f", or name a server that runs: {url}=http://host:port"
    fix = f"Run in an environment that has it (docs/howto/engines.md), or set {key}=hf or {key}=server{near}."
    return [ConfigError(f"{product} is not installed in this environment", key=key, got=rollout.name, fix=fix)]


def _is_local(cfg: PPOTrainerConfig) -> bool:
    """Whether an engine sees all devices of a machine: it has them to itself, or each of its processes brings one."""
    pools = Pools.of(cfg)
    return pools.of_role("rollout").size > 1 or (cfg.trainer.runtime != "ray" and not pools.named)


def hardware(cfg: PPOTrainerConfig) -> Problems:
    """More GPUs than exist, a device that is not there."""
    if topology.problems(cfg) or recipes.problems(cfg) or joins_cluster(cfg):
        return []
    if any(pool.size < 1 for pool in Pools.of(cfg).by_name.values()):
        return []  # the sizes are refused at their settings
    return _devices(cfg.trainer) or _pools_fit(cfg)


def _pools_fit(cfg: PPOTrainerConfig) -> Problems:
    """Every process of every pool has a GPU of its own; the pools of a run without a cluster are on this machine."""
    from verl import device  # torch is loaded only once there is something to validate

    placed, kind = topology.Topology.of(cfg, topology.added_roles(cfg)), device.resolve_device(cfg.trainer.device)
    there = 0 if kind == "cpu" else device.device_count(kind)
    if kind == "cpu" or placed.runtime == "local" or len(placed.pools) == 1 or placed.processes <= there:
        return []
    sum_of = " + ".join(f"{pool.size} ({pool.name})" for pool in placed.pools)
    message = f"{sum_of} = {placed.processes} processes have a GPU each, and this machine has {there}"
    fix = "Make a pool smaller, set RAY_ADDRESS=auto to use the GPUs of a Ray cluster, or trainer.device=cpu."
    return [ConfigError(message, key=_GPUS, got=cfg.trainer.n_gpus_per_node, allowed=f"{there} in all", fix=fix)]


def joins_cluster(cfg: PPOTrainerConfig) -> bool:
    """Whether the machines of the run are another's to count: several nodes, or a cluster that is named."""
    named = cfg.ray_kwargs.ray_init.address or env.get("RAY_ADDRESS")
    return cfg.trainer.runtime != "local" and (cfg.trainer.nnodes > 1 or named not in (None, "local"))


def sft_hardware(cfg: SupervisedConfig) -> Problems:
    """The same for a supervised run, which torchrun starts."""
    return _devices(cfg.trainer) or processes(cfg)


def _devices(trainer: Any) -> Problems:
    from verl import device  # torch is loaded only once there is something to validate

    gpus = trainer.n_gpus_per_node
    problems = caught(device.resolve_device, trainer.device)
    if problems or trainer.nnodes < 1 or (gpus is not None and gpus < 1):
        return problems
    kind = device.resolve_device(trainer.device)
    there = 0 if kind == "cpu" else device.device_count(kind)
    if trainer.device == "cpu" or gpus is None or gpus <= max(there, 1):
        _tell_devices(trainer, kind, there)
        return []
    return [_too_many(gpus, there)]


def _too_many(gpus: int, there: int) -> ConfigError:
    here = "no GPU" if there == 0 else f"{there} GPU{'s' if there > 1 else ''}"
    on = "on CPU" if there == 0 else "on one GPU"
    return ConfigError(
        f"{gpus} GPUs are requested, and this machine has {here}",
        key=_GPUS,
        got=gpus,
        allowed=f"1 to {there}" if there > 1 else "1",
        fix=f"Set {_GPUS}=1 {_NODES}=1 to run {on} in this process, trainer.device=cpu for {gpus} processes on the "
        "CPU, or RAY_ADDRESS=auto to use the GPUs of a Ray cluster.",
    )


def _tell_devices(trainer: Any, kind: str, there: int) -> None:
    if trainer.n_gpus_per_node and trainer.device is None and kind == "cpu" and trainer.nnodes == 1:
        notice(_GPUS, "this machine has no GPU, so the run uses the CPU")
    if trainer.n_gpus_per_node is None and there > 1 and env.get_int("WORLD_SIZE", 1) == 1:
        notice(_GPUS, f"not set: the run uses 1 of {there} GPUs; set it to {there} for all of them")


def files(cfg: PPOTrainerConfig) -> Problems:
    """Data, reward and agent files that are missing, and model folders that are none."""
    data, reward, rollout = cfg.data, cfg.reward, cfg.actor_rollout_ref.rollout
    problems = _data_files(data, data.custom_cls.path)
    for name in ("tool_config_path", "function_tool_path", "interaction_config_path"):
        problems += missing_files(f"actor_rollout_ref.rollout.multi_turn.{name}", rollout.multi_turn[name])
    for key, path in (
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", rollout.agent.agent_loop_config_path),
        ("data.custom_cls.path", data.custom_cls.path),
        ("data.sampler.class_path", data.sampler.class_path),
        ("data.filter_function.path", data.filter_function.path),
        ("reward.custom_reward_function.path", reward.custom_reward_function.path),
        ("reward.reward_manager.module.path", reward.reward_manager.module.path),
    ):
        problems += missing_files(key, path)
    model = cfg.actor_rollout_ref.model.path
    problems += _model("actor_rollout_ref.model", cfg.actor_rollout_ref.model)
    problems += _towers(cfg)
    if uses_critic(cfg) and cfg.critic.model.path != model:
        problems += bad_model_folder("critic.model.path", cfg.critic.model.path, _MODEL_HINT)
    return problems + _interpreter(cfg)


def _towers(cfg: PPOTrainerConfig) -> Problems:
    """Models that take images or sounds, where that is not built."""
    policy, critic, scorer = cfg.actor_rollout_ref, cfg.critic, cfg.reward.reward_model
    path, actor = policy.model.path, policy.actor
    problems = models.vision_problems("actor_rollout_ref.model.path", path, policy.model.external_lib, actor.strategy)
    if uses_critic(cfg) and (critic.model.path != path or not problems):
        problems += models.vision_problems(
            "critic.model.path", critic.model.path, critic.model.external_lib, critic.strategy
        )
    if uses_reward_model(cfg):
        key = "reward.reward_model.model_path"
        problems += models.vision_problems(key, scorer.model_path, scorer.external_lib, scorer.strategy)
    return problems


def _interpreter(cfg: PPOTrainerConfig) -> Problems:
    """A command for the workers of a cluster of this machine's own that this machine cannot start."""
    command = cfg.ray_kwargs.ray_init.runtime_env.py_executable
    if not command or joins_cluster(cfg) or topology.Topology.of(cfg).runtime == "local":
        return []
    wrong, fix = "", "Leave it out: the workers run the Python of this program."
    try:
        program, *words = shlex.split(command)
    except ValueError:  # a quotation mark without its other one, or nothing but spaces
        program, words = command, []
    if shutil.which(program) is None:
        wrong = f"there is no program {program!r}"
    elif Path(program).name == "uv" and "--frozen" in words and not _locked():
        wrong, fix = "uv takes --frozen only next to a uv.lock, and there is none here", f"Run `uv lock`. {fix}"
    key = "ray_kwargs.ray_init.runtime_env.py_executable"
    return [ConfigError(wrong, key=key, got=command, fix=fix)] if wrong else []


def _locked() -> bool:
    here = Path.cwd()
    return any((folder / "uv.lock").is_file() for folder in (here, *here.parents))


def sft_files(cfg: SupervisedConfig) -> Problems:
    """The same for a supervised run."""
    problems = _data_files(cfg.data, cfg.data.custom_cls.path)
    problems += missing_files("data.custom_cls.path", cfg.data.custom_cls.path)
    path, engine = cfg.model.path, cfg.engine
    problems += models.vision_problems("model.path", path, cfg.model.external_lib, engine.strategy)
    return problems + _model("model", cfg.model)


def _model(key: str, section: HFModelConfig) -> Problems:
    """A folder that is no model; of a path that nobody has set, that none is set."""
    problems, default = bad_model_folder(f"{key}.path", section.path, _MODEL_HINT), HFModelConfig().path
    if problems and section.path == env.expand(default) and not was_typed(section, "path"):
        return [ConfigError("no model is named", key=f"{key}.path", fix=_MODEL_HINT)]
    return problems


def _data_files(data: ConfigNode, custom: str | None) -> Problems:
    if not data.train_files:
        return [
            ConfigError("no training files are given", key="data.train_files", fix="Name a file or a list of files.")
        ]
    if custom is not None:
        return []  # what the names mean is up to the user's dataset class
    hint = ""
    if data.train_files == _default_files(data):
        make = "python examples/data_preprocess/gsm8k.py --help"
        hint = f"This is the default path: set data.train_files, or make the file (`{make}`)."
    return _missing_data("data.train_files", data.train_files, hint) + _missing_data("data.val_files", data.val_files)


def _missing_data(key: str, files: Any, hint: str = "") -> Problems:
    """The files that do not exist; of a folder that `datasets` saved, the reader of data says what is wrong."""
    named = [files] if isinstance(files, str) else list(files or [])
    saved = ("state.json", "dataset_dict.json")
    return missing_files(
        key, [path for path in named if not any((Path(env.expand(path)) / name).is_file() for name in saved)], hint
    )


def _default_files(data: ConfigNode) -> str:
    return env.expand(str(type(data).__dataclass_fields__["train_files"].default))
