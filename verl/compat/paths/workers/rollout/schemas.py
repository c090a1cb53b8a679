"""A message of a conversation under upstream's path."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Message:
    """One message; ``tool_calls`` are those of an assistant."""

    role: str
    content: Any
    tool_calls: list[Any] | None = None

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """As a dictionary, without calls where there are none."""
        return {name: value for name, value in asdict(self).items() if name != "tool_calls" or value is not None}
