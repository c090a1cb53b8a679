"""From the two settings that name tools to the tools: upstream's YAML file, and a Python file of functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl.config.loading.files import entries_of, read_user_yaml
from verl.errors import ConfigError
from verl.registry import load_object
from verl.tools.base import BaseTool
from verl.tools.function_tool import load_function_tools_from_path

YAML_KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
PYTHON_KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"


def load_tools(tool_config_path: str | None, function_tool_path: str | None = None) -> dict[str, BaseTool]:
    """The tools of both files by name, in their order.

    Args:
        tool_config_path: YAML with ``tools:``, a list of entries with ``class_name`` (dotted path), ``config`` and
            ``tool_schema``.
        function_tool_path: Python file; every `FunctionTool` in it is a tool.

    Raises:
        ConfigError: a file or class is missing, an entry is not complete, or two tools have one name.
    """
    by_name: dict[str, BaseTool] = {}
    if tool_config_path:
        entries = entries_of(read_user_yaml(tool_config_path, YAML_KEY), YAML_KEY, tool_config_path, "tools")
        for number, entry in enumerate(entries):
            _add(by_name, _from_entry(entry, f"{tool_config_path}, tools[{number}]"), YAML_KEY)
    if function_tool_path:
        tools = load_function_tools_from_path(function_tool_path)
        if not tools:
            fix = "Decorate them with @function_tool() of verl.tools.function_tool."
            raise ConfigError("the file has no function tools", key=PYTHON_KEY, got=function_tool_path, fix=fix)
        _add(by_name, tools, PYTHON_KEY)
    return by_name


def _from_entry(entry: dict[str, Any], place: str) -> list[BaseTool]:
    if not isinstance(entry.get("class_name"), str):
        raise ConfigError("a tool without a class_name", key=place, got=sorted(entry), allowed="class_name, config")
    tool_class = load_object(entry["class_name"])
    if not (isinstance(tool_class, type) and issubclass(tool_class, BaseTool)):
        raise ConfigError("not a tool", key=place, got=entry["class_name"], allowed="a subclass of BaseTool")
    try:
        return list(tool_class.from_config(entry))
    except ConfigError as error:
        message = f"{error.key}: {error.message}" if error.key else error.message
        raise ConfigError(message, key=place, got=error.got, allowed=error.allowed, fix=error.fix) from error


def _add(by_name: dict[str, BaseTool], tools: Iterable[BaseTool], key: str) -> None:
    for tool in tools:
        if by_name.get(tool.name, tool) is not tool:
            raise ConfigError("two tools have one name", key=key, got=tool.name)
        by_name[tool.name] = tool
