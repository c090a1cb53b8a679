"""Which loop runs a row: a registered name, one of the YAML file ``agent_loop_config_path``, or the configured default.

Only the configuration can name code by its dotted path: a row's ``agent_name`` imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl.agent_loop.base import AgentLoopBase
from verl.config.loading.files import entries_of, read_user_yaml
from verl.config.schema.data import DataConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError, suggest
from verl.protocol.tokenizer import Tokenizer
from verl.registry import AGENT_LOOPS, load_object

if TYPE_CHECKING:
    from verl.agent_loop.client import SamplerClient
    from verl.data.vision.processor import VisionProcessor

KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
RESERVED = ("trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "shared")


@dataclass(frozen=True)
class LoadedLoop:
    """A loop with what its YAML entry says and what its trajectories share."""

    name: str
    loop_class: type[AgentLoopBase]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shared: Any = None

    def make(
        self,
        config: RolloutConfig,
        client: SamplerClient,
        tokenizer: Tokenizer,
        processor: VisionProcessor | None,
        data_config: DataConfig | None,
    ) -> AgentLoopBase:
        """A fresh loop for one row."""
        more = {**self.kwargs, **({} if self.shared is None else {"shared": self.shared})}
        return self.loop_class(config, client, tokenizer, processor, data_config=data_config, **more)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.loop_class.__module__}.{self.loop_class.__qualname__})"


class LoopLoader:
    """Finds loops, each once.

    Args:
        config: the ``rollout`` section.
    """

    def __init__(self, config: RolloutConfig, tokenizer: Tokenizer, data_config: DataConfig | None = None):
        self.config, self.tokenizer, self.data_config = config, tokenizer, data_config
        self._known: dict[str, LoadedLoop] = {}
        self._entries: dict[str, dict[str, Any]] | None = None

    def of(self, row: Mapping[str, Any]) -> LoadedLoop:
        """The loop of a row.

        Raises:
            ConfigError: no such name, file or class.
        """
        name = str(row.get("agent_name") or default_name(self.config))
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> LoadedLoop:
        if self._entries is None:
            self._entries = read_loops(self.config.agent.agent_loop_config_path)
        names = [*self._entries, *AGENT_LOOPS.names()]
        if name not in names and name != default_name(self.config):
            fix = suggest(name, names)
            if "." in name or ":" in name:
                fix = "A row imports no code: name its class in the YAML file of "
                fix += "actor_rollout_ref.rollout.agent.agent_loop_config_path, "
                fix += "or set actor_rollout_ref.rollout.agent.default_agent_loop to it."
            raise ConfigError("unknown agent loop", key="agent_name", got=name, allowed=names, fix=fix)
        kwargs = dict(self._entries.get(name, {}))
        target = kwargs.pop("_target_", None)
        loop_class = AGENT_LOOPS.get(name) if target is None else load_object(target)
        if not (isinstance(loop_class, type) and issubclass(loop_class, AgentLoopBase)):
            allowed = "a subclass of AgentLoopBase"
            raise ConfigError("not an agent loop", key="agent_name", got=target or name, allowed=allowed)
        shared = loop_class.prepare(self.config, self.tokenizer, self.data_config, **kwargs)
        return LoadedLoop(name, loop_class, kwargs, shared)


def default_name(config: RolloutConfig) -> str:
    """The loop of rows that name none; with ``multi_turn.enable``, ``tool_agent`` stands in for the single turn."""
    name = str(config.agent.default_agent_loop)
    return "tool_agent" if name == "single_turn_agent" and config.multi_turn.enable else name


def read_loops(path: str | None) -> dict[str, dict[str, Any]]:
    """The entries of such a file by name: ``_target_`` and arguments.

    Args:
        path: YAML, a list of entries with ``name``, ``_target_`` (dotted path of the class) and arguments of the class.

    Raises:
        ConfigError: another form, or two entries with one name.
    """
    loops: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries_of(read_user_yaml(path, KEY), KEY, path) if path else []):
        place, entry = f"{path}, entry {number}", dict(entry)
        name = entry.pop("name", None)
        if not isinstance(name, str) or not isinstance(entry.get("_target_"), str):
            raise ConfigError("an entry without name or _target_", key=place, got=sorted(entry))
        taken = sorted(set(entry) & set(RESERVED))
        if name in loops or taken:
            raise ConfigError("a name that is taken", key=place, got=taken[0] if taken else name)
        loops[name] = entry
    return loops
