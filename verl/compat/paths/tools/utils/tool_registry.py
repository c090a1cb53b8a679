"""Tools of a YAML file under upstream's path."""

from verl.tools.base import BaseTool
from verl.tools.loading import load_tools


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """The tools in the order of the file."""
    return list(load_tools(tools_config_file).values())
