"""Paths of settings, and OpenAI's harmony format by hand, under upstream's path."""

from pathlib import Path

import verl


def resolve_config_path(config_path: str) -> str:
    """A file named from the working folder, or from the folder that holds the package."""
    known = [Path(config_path).absolute(), Path(verl.__file__).parents[1] / config_path]
    for path in known:
        if path.exists():
            return str(path)
    raise FileNotFoundError(f"{config_path}: there is neither {known[0]} nor {known[1]}")


def add_generation_prompt_for_gpt_oss(message_content: str) -> str:
    """The text with the header of an answer behind it."""
    return f"{message_content}<|start|>assistant"


def format_gpt_oss_tool_response_manually(tool_response: str, tool_call_name: str) -> str:
    """A tool's answer to the assistant as one message."""
    head = f"<|start|>functions.{tool_call_name} to=assistant<|channel|>commentary<|message|>"
    return f"{head}{tool_response}<|end|>"
