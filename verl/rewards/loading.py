"""From the ``reward`` section of a configuration to the function and the manager that it names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, suggest
from verl.metrics import notice
from verl.registry import REWARD_MANAGERS
from verl.rewards import truths
from verl.rewards.dispatch import check_data_sources, default_compute_score, runs_programs
from verl.rewards.function import RewardFunction, find_reward_function, load_reward_function
from verl.rewards.programs import code_runner
from verl.rewards.scoring import ScoringLimits
from verl.rewards.user_file import load_user_code

if TYPE_CHECKING:
    from verl.config.schema.node import SettingsSource
    from verl.protocol.tokenizer import Tokenizer

USUAL_NAME = "compute_score"
LIMIT_NAMES = (
    "timeout", "on_error", "isolation", "num_workers",
    "max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request",
)  # fmt: skip
NAME_KEY = "reward.reward_manager.name"
MODULE_KEY = "reward.reward_manager.module.path"
SHARE_FOR_TESTS = 0.8
"""Of the time that scoring a sample may take: what the tests of a program get."""
ROUTER, RM_TOKENIZER = "reward_router_address", "reward_model_tokenizer"
"""Parameters of functions and managers under which upstream hands them a served reward model."""


@dataclass(frozen=True)
class ServedModel:
    """A generative reward model on a server, as functions and managers receive it.

    Args:
        address: host and port (``reward_router_address``).
        tokenizer: loads its tokenizer (``reward_model_tokenizer``); called only where somebody asks for it.
    """

    address: str
    tokenizer: Callable[[], Any]

    def arguments(self, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        """What of it these parameters name; all of them take the address."""
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        arguments: dict[str, Any] = {}
        if takes_all or ROUTER in parameters:
            arguments[ROUTER] = self.address
        if RM_TOKENIZER in parameters:
            arguments[RM_TOKENIZER] = self.tokenizer()
        return arguments


def get_custom_reward_fn(config: SettingsSource, served: ServedModel | None = None) -> RewardFunction | None:
    """The user's reward function of ``reward.custom_reward_function``, None where no file is named.

    The section may also stand at the top level, as in the evaluation program. The name ``compute_score`` is upstream's
    default and so counts as none: a file with only ``compute_reward`` works.
    """
    section = _at(config, "reward.custom_reward_function") or _at(config, "custom_reward_function")
    path = _at(section, "path")
    if not path:
        return None
    name = _at(section, "name")
    name, kwargs = None if name == USUAL_NAME else name, _dict(_at(section, "reward_kwargs"))
    if served is not None:
        kwargs |= served.arguments(inspect.signature(find_reward_function(path, name)).parameters)
    return load_reward_function(path, name, kwargs)


def resolve_reward_manager_cls(config: SettingsSource) -> type:
    """The manager class that ``reward.reward_manager`` names: built in, registered, dotted, or in a file."""
    section = _at(config, "reward.reward_manager")
    name = _at(section, "name") or "naive"
    if _at(section, "source") != "importlib":
        return REWARD_MANAGERS.get(name)
    path = _at(section, "module.path")
    if not path:
        raise ConfigError("a Python file is needed", key=MODULE_KEY, fix="It holds your reward manager's class.")
    module = load_user_code(path, MODULE_KEY)
    classes = {
        n: c for n, c in vars(module).items() if inspect.isclass(c) and c.__module__ == module.__name__ and n[0] != "_"
    }
    for class_name in (name, _at(section, "module.name")):
        if class_name in classes:
            return classes[class_name]
    managers = [c for c in classes.values() if "__call__" in dir(c) and not inspect.isabstract(c)]
    if len(managers) == 1:
        return managers[0]
    raise ConfigError(
        f"{path} has no class of this name",
        key=NAME_KEY,
        got=name,
        allowed=classes or "none",
        fix=suggest(name, classes),
    )


def load_reward_manager(
    config: SettingsSource, tokenizer: Tokenizer, *, served: ServedModel | None = None, **reward_kwargs: Any
) -> Any:
    """The reward manager of a run, ready to be called with a batch.

    Args:
        config: the whole configuration (``reward``, and ``data`` for the name of the column and the longest response).
        tokenizer: decodes responses.
        served: a generative reward model that the function or the manager asks.
        reward_kwargs: further arguments of the manager; they win over ``reward.reward_kwargs``. ``num_examine`` is the
            number of samples per data source that are logged (0).

    Returns:
        A manager whose call returns ``reward_tensor``, ``reward_extra_info``, ``unscorable`` and ``metrics``.
    """
    cls = resolve_reward_manager_cls(config)
    kwargs = {**_dict(_at(config, "reward.reward_kwargs")), **reward_kwargs}
    limits = ScoringLimits(**_limits(config, kwargs))
    kwargs.setdefault("num_examine", 0)
    kwargs.setdefault("reward_fn_key", _at(config, "data.reward_fn_key") or "data_source")
    function = get_custom_reward_fn(config, served) or _builtin(config, limits)
    if not _at(config, "reward.reward_model.enable"):
        truths.check_setting(function, _at(config, truths.SETTING))
    kwargs.update(config=config, tokenizer=tokenizer, compute_score=function)
    parameters = inspect.signature(cls).parameters
    if served is not None:
        named = {name: p for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        kwargs.update(served.arguments(named))
    if "max_resp_len" in parameters and kwargs.get("max_resp_len") is None:
        kwargs["max_resp_len"] = _at(config, "data.max_response_length")
    from verl.rewards.managers.foreign import adopt  # loads torch

    return adopt(cls(**_fitting(cls, parameters, kwargs)), limits)


def check_reward_data(
    config: SettingsSource,
    data_sources: Iterable[Any] | None,
    holders: Iterable[Any] = (),
    describe: Callable[[int], str] = "row {}".format,
) -> None:
    """Raise before a run if its rows name no scorer or lack a ground truth that the reward function names.

    A reward model and a manager of the user's own need neither, a function of the user's no scorer.

    Args:
        data_sources: the column of ``data.reward_fn_key``; None where the data has no such column.
        holders: the column ``reward_model``, a None for each row of data without it.
        describe: where a row stands, for messages.
    """
    manager = _at(config, "reward.reward_manager")
    own_manager = _at(manager, "source") == "importlib" or (
        (_at(manager, "name") or "naive") not in REWARD_MANAGERS.builtin_targets()
    )
    if own_manager or _at(config, "reward.reward_model.enable"):
        return
    function = get_custom_reward_fn(config) or RewardFunction.of(default_compute_score)
    truths.check_setting(function, _at(config, truths.SETTING))
    if not function.is_builtin:
        if _at(config, truths.SETTING) != "none":
            truths.check_truths(function, holders, describe)
        return
    sources = None if data_sources is None else list(data_sources)
    nothing = sources is None or all(source is None for source in sources)
    check_data_sources(None if nothing else sources, _at(config, "data.reward_fn_key") or "data_source")
    truths.check_truths(function, holders, describe)
    if any(map(runs_programs, sources or ())):
        code_runner(**_sandbox(config)).check()


def _builtin(config: Any, limits: ScoringLimits) -> RewardFunction:
    """The built-in scorers with the settings of those that run programs; their time is within the limit of a sample."""
    most = {} if limits.timeout is None else {"most_seconds": SHARE_FOR_TESTS * limits.timeout}
    settings = _sandbox(config)
    settings["sandbox_fusion_url"] = settings.pop("url")
    return RewardFunction.of(default_compute_score, {**settings, **most})


def _sandbox(config: Any) -> dict[str, Any]:
    """The settings of ``reward.sandbox_fusion`` that are set."""
    section = _at(config, "reward.sandbox_fusion")
    settings = {name: _at(section, name) for name in ("max_concurrent", "memory_limit_mb", "allow_missing")}
    return {"url": _at(section, "url"), **{name: value for name, value in settings.items() if value is not None}}


def _limits(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Limits from the ``reward`` section; those among the manager's own arguments win and are taken out of them."""
    limits = {name: _at(config, f"reward.{name}") for name in LIMIT_NAMES}
    limits |= {name: kwargs.pop(name) for name in LIMIT_NAMES if name in kwargs}
    by_model = bool(_at(config, "reward.reward_model.enable"))
    limits["needs_truth"] = _at(config, truths.SETTING) == "needed" and not by_model
    return {name: value for name, value in limits.items() if value is not None}


def _fitting(cls: type, parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a manager takes. One of another manager's gives a notice, an unknown one is an error."""
    ours = ("config", "tokenizer", "num_examine", "compute_score", "reward_fn_key")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return {name: value for name, value in kwargs.items() if name in parameters or name not in ours[:1]}
    for name in kwargs:
        if name in parameters or name in ours:
            continue
        takers = [taker for taker, its in _parameters_of_builtins().items() if name in its]
        if not takers:
            allowed = [n for n in parameters if n not in ours and n != "limits"] + list(LIMIT_NAMES)
            raise ConfigError(
                f"{cls.__name__} has no such setting",
                key=f"reward.reward_kwargs.{name}",
                allowed=allowed,
                fix=suggest(name, allowed),
            )
        notice(f"reward.reward_kwargs.{name}", f"has an effect only with {NAME_KEY}={' or '.join(takers)}")
    return {name: value for name, value in kwargs.items() if name in parameters}


def _parameters_of_builtins() -> dict[str, list[str]]:
    built_in = REWARD_MANAGERS.builtin_targets()
    return {name: list(inspect.signature(REWARD_MANAGERS.get(name)).parameters) for name in built_in}


def _at(node: Any, dotted: str) -> Any:
    """A value in a configuration of any kind (our own, a dict, a namespace); None where a part is missing or null."""
    for part in dotted.split("."):
        if node is None:
            return None
        node = node.get(part) if hasattr(node, "get") else getattr(node, part, None)
    return node


def _dict(node: Any) -> dict[str, Any]:
    return dict(node.items()) if node is not None else {}
