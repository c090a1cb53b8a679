"""One generic registry, and the table of everything that is built in.

A name is looked up in this order: what was registered by decorator, the built-in table, a dotted path
(``my_pkg.my_mod:thing`` or ``my_pkg.my_mod.thing``). Built-ins are strings, so that the configuration can check a name
without importing its code; a test resolves every one of them. Names of upstream that are not built yet stand in
``planned`` and are refused by name.

What a run has to know of a thing before it is loaded are its facts (`EstimatorFacts`, `LossFacts`, `ScheduleFacts`).
Those of built-ins stand here, those of a registered thing are given with its name, those of a dotted path stand in a
table `FACTS` of its package or module.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from verl import env
from verl.errors import ConfigError, NotBuiltError, suggest

T = TypeVar("T")


@dataclass(frozen=True)
class EstimatorFacts:
    """What a run knows of an advantage estimator.

    Attributes:
        groups: it compares the samples of a prompt, so there must be several that differ.
        values: it reads the values of a critic.
        old_log_probs: it reads the trainer's log-probs of the samples.
        on_policy: it is right only for samples of the very policy that is updated.
        settings: settings of ``algorithm`` that it reads and most others do not; not checked for a dotted path,
            which may read any.
        rewards: the setting of ``algorithm`` that lists the rewards it normalises separately; it has to be set.
    """

    groups: bool = False
    values: bool = False
    old_log_probs: bool = False
    on_policy: bool = False
    settings: tuple[str, ...] = ()
    rewards: str | None = None


@dataclass(frozen=True)
class LossFacts:
    """What a run knows of a policy loss.

    Attributes:
        pairs: its rows come in pairs, the best and the worst answer to a prompt: it reads the reference's log-probs and
            no old ones, and a pair is never parted.
        settings: settings of ``actor_rollout_ref.actor`` that it reads and most others do not; not checked for a dotted
            path, which may read any.
        one_row: a term of it is of a sample, which is one row: not for several trajectories of one.
        required: those of them that have no default.
        on_policy: it has no ratio of the new policy to the old one, so samples of an older policy need importance
            weights.
        aggregation: how it becomes one number, where ``loss_agg_mode`` does not say so.
    """

    pairs: bool = False
    one_row: bool = False
    settings: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    on_policy: bool = False
    aggregation: str | None = None


@dataclass(frozen=True)
class ScheduleFacts:
    """What a run knows of a schedule.

    Attributes:
        reward_model: the model of ``reward.reward_model`` is a role that the schedule adds, and learns.
        off_policy: it trains on samples that older versions of the policy have drawn.
        one_row: its stages take a row for a sample: not for several trajectories of one.
        queue: groups wait between sampling and training, by the rules of ``trainer.v1.sampler``.
    """

    reward_model: bool = False
    off_policy: bool = False
    one_row: bool = False
    queue: bool = False


class Registry:
    """Names of one kind of thing.

    Args:
        facts: the class of what is known of each; ``known`` says it of built-ins for which it differs from the default.

    Example:
        >>> ESTIMATORS = Registry("advantage estimator", {"grpo": "verl.algorithms.advantages.grpo:grpo"})
        >>> @ESTIMATORS.register("mine")
        ... def mine(...): ...
        >>> ESTIMATORS.get("my_pkg.estimators:other")
    """

    def __init__(
        self,
        kind: str,
        builtins: Mapping[str, str],
        planned: Iterable[str] = (),
        key: str | None = None,
        facts: type | None = None,
        known: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.kind, self.key = kind, key
        self._builtins = dict(builtins)
        self._planned = frozenset(planned)
        self._facts = facts
        self._known = dict(known)
        self._registered: dict[str, Any] = {}

    def names(self) -> list[str]:
        """All names that work now, sorted."""
        return sorted(set(self._builtins) | set(self._registered))

    def planned(self) -> list[str]:
        """Names that are refused because what they name is not built, sorted."""
        return sorted(self._planned)

    def builtin_targets(self) -> dict[str, str]:
        return dict(self._builtins)

    def register(self, name: str, facts: Any = None) -> Callable[[T], T]:
        """Decorator that adds a thing under a name; a second, different thing under a used name is an error."""

        def add(thing: T) -> T:
            name_ = str(getattr(name, "value", name))  # an enum member stands for its value
            taken = self._registered.get(name_)
            same = taken is not None and _identity(taken) == _identity(thing)
            if (taken is not None and not same) or (name_ in self._builtins and not self._is_builtin(name_, thing)):
                raise ConfigError(f"the {self.kind} {name_!r} exists already", fix="Register yours under another name.")
            self._registered[name_] = thing
            if facts is not None:
                self._known[name_] = self._checked(facts, name_)
            return thing

        return add

    def check(self, name: str) -> None:
        """Raise if ``name`` cannot be resolved by its form; imports nothing. A dotted path passes unseen."""
        if name in self._registered or name in self._builtins or is_dotted(name):
            return
        if name in self._planned:
            raise NotBuiltError(f"the {self.kind} {name!r} is not built yet", key=self.key, allowed=self.names())
        raise ConfigError(
            f"unknown {self.kind}",
            key=self.key,
            got=name,
            allowed=self.names(),
            fix=suggest(name, self.names()) or "A dotted path 'my_pkg.my_mod:name' works too.",
        )

    def get(self, name: str) -> Any:
        """The thing behind a name or a dotted path."""
        name = str(getattr(name, "value", name))
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        return load_object(self._builtins.get(name, name))

    def facts(self, name: str) -> Any:
        """What is known of a thing, of the registry's class of facts; a fact that is not stated has its default.

        Of a dotted path that is no built-in's the package is imported, and where that has no table `FACTS`, the module.
        """
        name = str(getattr(name, "value", name))
        if name in self._known:
            return self._known[name]
        assert self._facts is not None, f"nothing is known of a {self.kind}"
        if name in self._registered or name in self._builtins or not is_dotted(name):
            return self._facts()
        built = next((b for b, target in self._builtins.items() if _split(target) == _split(name)), None)
        if built is not None:
            return self.facts(built)
        table = sibling(name, "FACTS") or {}
        stated = table.get(_split(name)[1])
        return self._facts() if stated is None else self._checked(stated, name)

    def table(self) -> RegistryTable:
        """What is registered, as a dictionary: for code that looks names up or takes them away itself."""
        return RegistryTable(self)

    def readers_of(self, setting: str) -> list[str]:
        """The names whose facts list a setting, in order."""
        return [name for name, facts in self._known.items() if setting in facts.settings]

    def _checked(self, facts: Any, name: str) -> Any:
        if isinstance(facts, self._facts or ()):
            return facts
        allowed = self._facts.__name__ if self._facts else "none"
        raise ConfigError(f"the facts of a {self.kind} are of another class", key=name, got=facts, allowed=allowed)

    def _is_builtin(self, name: str, thing: Any) -> bool:
        return _identity(thing) == tuple(self._builtins[name].split(":", 1))


class RegistryTable(MutableMapping[str, Any]):
    """A registry's names and things. A name that is taken away here is unknown until it is set again."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self._removed: dict[str, str] = {}  # built-ins, which are built-in again when they are set again

    def __getitem__(self, name: str) -> Any:
        if name not in self._registry.names():
            raise KeyError(name)
        return self._registry.get(name)

    def __setitem__(self, name: str, thing: Any) -> None:
        if name in self._removed and _identity(thing) == tuple(self._removed[name].split(":", 1)):
            self._registry._builtins[name] = self._removed.pop(name)
        else:
            self._registry._registered[name] = thing

    def __delitem__(self, name: str) -> None:
        if name not in self._registry.names():
            raise KeyError(name)
        self._registry._registered.pop(name, None)
        if name in self._registry._builtins:
            self._removed[name] = self._registry._builtins.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.names())

    def __len__(self) -> int:
        return len(self._registry.names())

    def copy(self) -> dict[str, Any]:
        """A dictionary that later changes do not reach."""
        return dict(self)


def _identity(thing: Any) -> tuple[str, str]:
    return getattr(thing, "__module__", ""), getattr(thing, "__qualname__", repr(thing))


def is_dotted(name: str) -> bool:
    """Whether it is a path to a thing of anybody's, and no name of a table."""
    return ":" in name or "." in name


def _split(path: str) -> tuple[str, str]:
    """Module and attribute of a dotted path in either form."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return module_name, attribute


ATTRIBUTES = ("FACTS", "RECIPE")
"""What a package or a module says of the functions and classes that are named by dotted paths."""


def sibling(path: str, name: str) -> Any:
    """What stands under ``name``, one of `ATTRIBUTES`, in the package of a dotted path; None where nothing does.

    A package that has none of them leaves it to the module, which may take long to load. What is raised is not caught.
    """
    module_name, _ = _split(path)
    for home in filter(None, (module_name.rpartition(".")[0], module_name)):
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if _is_missing(home, error):
                return None  # the load of the path itself reports it
            _refuse_old_base(error, path)
            raise
        if any(hasattr(module, attribute) for attribute in ATTRIBUTES):
            return getattr(module, name, None)
    return None


NEW_SCHEDULE = (
    "Write NAME = dataclasses.replace(SYNC, stages=..., models=...), with SYNC or another row of "
    "verl.trainer.ppo.schedules, and name it (docs/howto/extending.md)."
)
_OLD_SCHEDULES = "verl.trainer.ppo.schedules."


def _refuse_old_base(error: ModuleNotFoundError, path: str) -> None:
    """Raise `ConfigError` where a module is named, or imported by a user's, that held a schedule's class once."""
    if str(error.name).startswith(_OLD_SCHEDULES):
        message = f"there is no {error.name} any more: a schedule is a row of data and no class"
        raise ConfigError(message, key="trainer.v1.trainer_mode", got=path, fix=NEW_SCHEDULE) from error


def _is_missing(module_name: str, error: ModuleNotFoundError) -> bool:
    """Whether it is this module that is not there, or a package above it, and not one that it imports."""
    return error.name is not None and f"{module_name}.".startswith(f"{error.name}.")


def load_object(path: str) -> Any:
    """The object at ``pkg.mod:attr`` (or ``pkg.mod.attr``); a missing module or attribute is a `ConfigError`."""
    module_name, attribute = _split(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        _refuse_old_base(error, path)
        if not _is_missing(module_name, error):
            raise  # the user's own module exists and lacks something: that traceback is the message
        raise ConfigError(
            f"no module named {module_name!r}",
            got=path,
            fix="Is its folder on PYTHONPATH? The form is 'package.module:name'.",
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"module {module_name!r} has no {attribute!r}", got=path, fix=suggest(attribute, dir(module))
        ) from error


def load_module(module_path: str, module_name: str | None = None) -> ModuleType:
    """The module in a Python file (``~`` and variables expanded, ``file://`` allowed) or in a package (``pkg://a.b``).

    A file is run once as long as it does not change; its module stands in `sys.modules`, so that objects of its classes
    can travel to other processes that loaded it too. An error inside the file reaches the person as it is.
    """
    if module_path.startswith("pkg://"):
        return importlib.import_module(module_path.removeprefix("pkg://"))
    file = Path(env.expand(module_path.removeprefix("file://"))).resolve()
    if not file.is_file():
        near = suggest(file.name, [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else [])
        raise ConfigError("no such Python file", got=str(file), fix=near or "Is the path relative to another folder?")
    stat = file.stat()
    key = hashlib.sha256(f"{file}:{stat.st_mtime_ns}:{stat.st_size}".encode()).hexdigest()[:12]
    name = module_name or f"verl_user_{file.stem}_{key}"
    if module_name is None and name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError("not a Python file", got=str(file), fix="Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    outer, _loading.started_run = getattr(_loading, "started_run", None), False
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a half-run module must not be found by the next call
        if not _loading.started_run:
            raise
    finally:
        started, _loading.started_run = _loading.started_run, outer
    if started:
        sys.modules.pop(name, None)
        fix = 'Put the lines that start the run under: if __name__ == "__main__":'
        fault = "this file starts a run as soon as it is loaded, and the run loads this file"
        raise ConfigError(fault, got=str(file), fix=fix)
    return module


_loading = threading.local()
"""``started_run``: whether the file that this thread loads has started a run; None while it loads none."""


def refuse_while_loading() -> None:
    """Raise `SystemExit` in a user's file that starts a run while it is loaded; `load_module` says why."""
    if getattr(_loading, "started_run", None) is not None:
        _loading.started_run = True
        raise SystemExit(2)


def load_from_module(module_path: str, name: str) -> Any:
    """The object ``name`` of a Python file or ``pkg://`` module; a missing name is a `ConfigError`."""
    module = load_module(module_path)
    try:
        return getattr(module, name)
    except AttributeError as error:
        public = [n for n in dir(module) if not n.startswith("_")]
        raise ConfigError(f"{module_path} has no {name!r}", allowed=public, fix=suggest(name, public)) from error


_GRPO = EstimatorFacts(groups=True, settings=("norm_adv_by_std_in_grpo",))
ADVANTAGE_ESTIMATORS = Registry(
    "advantage estimator",
    {
        "gae": "verl.algorithms.advantages.gae:gae",
        "grpo": "verl.algorithms.advantages.grpo:grpo",
        "grpo_vectorized": "verl.algorithms.advantages.grpo:grpo",
        "reinforce_plus_plus": "verl.algorithms.advantages.reinforce_plus_plus:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": (
            "verl.algorithms.advantages.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline"
        ),
        "rloo": "verl.algorithms.advantages.rloo:rloo",
        "rloo_vectorized": "verl.algorithms.advantages.rloo:rloo",
        "opo": "verl.algorithms.advantages.opo:opo",
        "gpg": "verl.algorithms.advantages.gpg:gpg",
        "grpo_passk": "verl.algorithms.advantages.grpo_passk:grpo_passk",
        "gdpo": "verl.algorithms.advantages.gdpo:gdpo",
        "gigpo": "verl.algorithms.advantages.gigpo:gigpo",
        "optimal_token_baseline": "verl.algorithms.advantages.optimal_token_baseline:optimal_token_baseline",
        "tir_optimal_token_baseline": "verl.algorithms.advantages.optimal_token_baseline:tir_optimal_token_baseline",
        "remax": "verl.algorithms.advantages.remax:remax",
        "vapo": "verl.algorithms.advantages.vapo:vapo",
    },
    key="algorithm.adv_estimator",
    facts=EstimatorFacts,
    known={
        "gae": EstimatorFacts(values=True),
        "grpo": _GRPO,
        "grpo_vectorized": _GRPO,
        "grpo_passk": _GRPO,
        "gdpo": EstimatorFacts(
            groups=True,
            settings=("norm_adv_by_std_in_grpo", "gdpo_reward_keys", "gdpo_reward_weights"),
            rewards="gdpo_reward_keys",
        ),
        "gigpo": EstimatorFacts(groups=True, settings=("norm_adv_by_std_in_grpo", "gigpo.step_advantage_w")),
        "reinforce_plus_plus_baseline": EstimatorFacts(groups=True),
        "rloo": EstimatorFacts(groups=True),
        "rloo_vectorized": EstimatorFacts(groups=True),
        "opo": EstimatorFacts(groups=True, on_policy=True),
        "gpg": EstimatorFacts(groups=True),
        "optimal_token_baseline": EstimatorFacts(groups=True, old_log_probs=True),
        "tir_optimal_token_baseline": EstimatorFacts(groups=True, old_log_probs=True),
        "vapo": EstimatorFacts(values=True, settings=("vapo_length_alpha", "vapo_lam_critic")),
    },
)
POLICY_LOSSES = Registry(
    "policy loss",
    {
        "vanilla": "verl.algorithms.policy_losses.vanilla:vanilla",
        "gspo": "verl.algorithms.policy_losses.gspo:gspo",
        "sapo": "verl.algorithms.policy_losses.sapo:sapo",
        "gpg": "verl.algorithms.policy_losses.gpg:gpg_loss",
        "clip_cov": "verl.algorithms.policy_losses.clip_cov:clip_cov",
        "kl_cov": "verl.algorithms.policy_losses.kl_cov:kl_cov",
        "geo_mean": "verl.algorithms.policy_losses.geo_mean:geo_mean",
        "cispo": "verl.algorithms.policy_losses.cispo:cispo",
        "dppo_tv": "verl.algorithms.policy_losses.dppo_tv:dppo_tv",
        "dppo_kl": "verl.algorithms.policy_losses.dppo_kl:dppo_kl",
        "dro": "verl.algorithms.policy_losses.dro:dro",
        "reinforce": "verl.algorithms.policy_losses.reinforce:reinforce",
        "bypass_mode": "verl.algorithms.policy_losses.bypass:bypass_mode",
        "rollout_correction": "verl.algorithms.policy_losses.bypass:bypass_mode",
    },
    key="actor_rollout_ref.actor.policy_loss.loss_mode",
    facts=LossFacts,
    known={
        "gspo": LossFacts(aggregation="seq-mean-token-mean"),
        "gpg": LossFacts(on_policy=True),
        "reinforce": LossFacts(on_policy=True),
        "sapo": LossFacts(settings=("tau_pos", "tau_neg"), aggregation="seq-mean-token-mean"),
        "clip_cov": LossFacts(
            settings=("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
        ),
        "kl_cov": LossFacts(settings=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")),
        "geo_mean": LossFacts(one_row=True, aggregation="the mean over sequences"),
        "dro": LossFacts(settings=("policy_loss.dro_beta",), required=("policy_loss.dro_beta",)),
    },
)
REWARD_MANAGERS = Registry(
    "reward manager",
    {
        "naive": "verl.rewards.managers.naive:NaiveRewardManager",
        "batch": "verl.rewards.managers.batch:BatchRewardManager",
        "dapo": "verl.rewards.managers.dapo:DAPORewardManager",
        "gdpo": "verl.rewards.managers.gdpo:GDPORewardManager",
        "prime": "verl.rewards.managers.prime:PrimeRewardManager",
        "rate_limited": "verl.rewards.managers.limited:RateLimitedRewardManager",
        "remote": "verl.rewards.managers.prime:PrimeRewardManager",
    },
    key="reward.reward_manager.name",
)
ENGINES = Registry(
    "training backend",
    {
        "plain": "verl.engines.plain:PlainEngine",
        "fsdp2": "verl.engines.fsdp2:FSDP2Engine",
        "fsdp": "verl.engines.fsdp2:FSDP2Engine",
        "megatron": "verl.engines.megatron:MegatronEngine",
        "torchtitan": "verl.engines.torchtitan:TorchTitanEngine",
    },
    planned=("fsdp_turbo", "veomni", "automodel", "mlite"),
    key="actor_rollout_ref.actor.strategy",
)
SAMPLERS = Registry(
    "rollout engine",
    {
        "hf": "verl.rollout.hf.sampler:HFSampler",
        "vllm": "verl.rollout.vllm.sampler:VLLMSampler",
        "sglang": "verl.rollout.sglang.sampler:SGLangSampler",
        "server": "verl.rollout.server.sampler:ServerSampler",
    },
    planned=("trtllm",),
    key="actor_rollout_ref.rollout.name",
)
TRANSPORTS = Registry(
    "transport of weights",
    {
        "shared_memory": "verl.weight_sync.shared_memory:SharedMemoryTransport",
        "gloo": "verl.weight_sync.collective:BroadcastTransport",
        "nccl": "verl.weight_sync.collective:BroadcastTransport",
        "cuda_ipc": "verl.weight_sync.cuda_ipc:CudaIpcTransport",
        "disk": "verl.weight_sync.disk:DiskTransport",
        "delta": "verl.weight_sync.delta_transport:DeltaTransport",
        "delta_sharded": "verl.weight_sync.delta_transport:DeltaTransport",
    },
    planned=("nixl", "hccl", "kimi_ckpt_engine", "mooncake"),
    key="actor_rollout_ref.rollout.checkpoint_engine.backend",
)
AGENT_LOOPS = Registry(
    "agent loop",
    {
        "single_turn_agent": "verl.agent_loop.single_turn:SingleTurnAgentLoop",
        "tool_agent": "verl.agent_loop.tool_agent:ToolAgentLoop",
        "openai_agent": "verl.agent_loop.server.loop:OpenAIAgentLoop",
        "environment_agent": "verl.agent_loop.envs.loop:EnvironmentAgentLoop",
    },
    key="actor_rollout_ref.rollout.agent.default_agent_loop",
)
TOOL_PARSERS = Registry(
    "tool-call format",
    {
        "hermes": "verl.agent_loop.parsers.json_calls:HermesToolParser",
        "llama3_json": "verl.agent_loop.parsers.json_calls:Llama3JsonToolParser",
        "kimi": "verl.agent_loop.parsers.json_calls:KimiToolParser",
        "deepseek_v3": "verl.agent_loop.parsers.json_calls:DeepSeekV3ToolParser",
        "gpt-oss": "verl.agent_loop.parsers.json_calls:GptOssToolParser",
        "qwen3_coder": "verl.agent_loop.parsers.tagged:Qwen3CoderToolParser",
        "seed": "verl.agent_loop.parsers.tagged:SeedToolParser",
        "minimax": "verl.agent_loop.parsers.tagged:MiniMaxToolParser",
        "deepseek_v4": "verl.agent_loop.parsers.tagged:DeepSeekV4ToolParser",
        "glm": "verl.agent_loop.parsers.tagged:GlmToolParser",
        "gemma4": "verl.agent_loop.parsers.gemma:Gemma4ToolParser",
    },
    key="actor_rollout_ref.rollout.multi_turn.format",
)
TRACKERS = Registry(
    "tracker",
    {
        "console": "verl.observability.backends.console:ConsoleTracker",
        "notebook": "verl.observability.backends.notebook:NotebookTracker",
        "file": "verl.observability.backends.file:FileTracker",
        "tensorboard": "verl.observability.backends.tensorboard:TensorboardTracker",
        "wandb": "verl.observability.backends.wandb:WandbTracker",
        "mlflow": "verl.observability.backends.mlflow:MlflowTracker",
        "swanlab": "verl.observability.backends.swanlab:SwanlabTracker",
        "trackio": "verl.observability.backends.trackio:TrackioTracker",
        "clearml": "verl.observability.backends.clearml:ClearmlTracker",
        "vemlp_wandb": "verl.observability.backends.vemlp:VemlpTracker",
        "rl_insight": "verl.observability.backends.rl_insight:RlInsightTracker",
        "prometheus": "verl.observability.backends.prometheus:PrometheusTracker",
    },
    key="trainer.logger",
)
SCHEDULES = Registry(
    "schedule",
    {
        "sync": "verl.trainer.ppo.schedules:SYNC",
        "one_step_off": "verl.trainer.ppo.schedules:ONE_STEP_OFF",
        "colocate_async": "verl.trainer.ppo.schedules:COLOCATE_ASYNC",
        "separate_async": "verl.trainer.ppo.schedules:SEPARATE_ASYNC",
        "fully_async": "verl.trainer.ppo.schedules:FULLY_ASYNC",
    },
    key="trainer.v1.trainer_mode",
    facts=ScheduleFacts,
    known={
        "one_step_off": ScheduleFacts(off_policy=True),
        "colocate_async": ScheduleFacts(off_policy=True, queue=True),
        "separate_async": ScheduleFacts(off_policy=True, queue=True),
        "fully_async": ScheduleFacts(off_policy=True, queue=True),
    },
)
ALL_REGISTRIES = (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    ENGINES,
    SAMPLERS,
    TRANSPORTS,
    AGENT_LOOPS,
    TOOL_PARSERS,
    TRACKERS,
    SCHEDULES,
)
