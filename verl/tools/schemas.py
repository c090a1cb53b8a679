"""The records of tool calling, in the form of OpenAI's function schema: what a tool takes, a call, an answer.

They are plain dataclasses with the two methods that code written against upstream's models calls: ``model_validate``
and ``model_dump``. What a JSON schema holds beyond the declared fields (``items``, ``default``, ``minimum``, ...) is
kept and shown to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from verl.errors import ConfigError
from verl.json_text import read_json

R = TypeVar("R", bound="SchemaRecord")


@dataclass
class SchemaRecord:
    """Fields that can be read from and written to JSON."""

    @classmethod
    def model_validate(cls: type[R], value: object) -> R:
        """The record of a mapping (or the record itself).

        Raises:
            ConfigError: not a mapping, or a field is missing.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"not a {cls.__name__}", got=type(value).__name__, allowed="a mapping")
        return cls._from_mapping(dict(value))

    @classmethod
    def _from_mapping(cls: type[R], record: dict[str, Any]) -> R:
        names = [f.name for f in fields(cls) if f.name != "further"]
        values = {name: record.pop(name) for name in names if name in record}
        if record and "further" in {f.name for f in fields(cls)}:
            values["further"] = record
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"not a complete {cls.__name__}", got=sorted(values), allowed=names) from error

    def model_dump(self, exclude_unset: bool = False, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """The record as JSON; ``exclude_unset`` leaves out what is as by default, ``exclude_none`` what is null."""
        dumped: dict[str, Any] = {}
        for f in fields(self):
            value = vars(self)[f.name]
            is_default = value is None or value is False
            if f.name == "further" or (exclude_none and value is None) or (exclude_unset and is_default):
                continue
            dumped[f.name] = _dumped(value, exclude_unset, exclude_none)
        return {**dumped, **vars(self).get("further", {})}

    def model_dump_json(self, **options: Any) -> str:
        """The same as text."""
        return json.dumps(self.model_dump(**options))


def _dumped(value: Any, exclude_unset: bool, exclude_none: bool) -> Any:
    if isinstance(value, SchemaRecord):
        return value.model_dump(exclude_unset=exclude_unset, exclude_none=exclude_none)
    if isinstance(value, dict):
        return {name: _dumped(item, exclude_unset, exclude_none) for name, item in value.items()}
    return value


@dataclass
class OpenAIFunctionPropertySchema(SchemaRecord):
    """One parameter of a function; ``type`` is null where the JSON schema has another form, as ``anyOf``."""

    type: str | list[str] | None
    description: str | None = None
    enum: list[Any] | None = None
    further: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def _from_mapping(cls, record: dict[str, Any]) -> OpenAIFunctionPropertySchema:
        return super()._from_mapping({"type": None, **record})


@dataclass
class OpenAIFunctionParametersSchema(SchemaRecord):
    """The parameters of a function: a JSON schema of an object."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = field(default_factory=list)
    further: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        entries = self.properties
        self.properties = {name: OpenAIFunctionPropertySchema.model_validate(value) for name, value in entries.items()}


@dataclass
class OpenAIFunctionSchema(SchemaRecord):
    """A function as a model sees it."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = field(
        default_factory=lambda: OpenAIFunctionParametersSchema("object", {})
    )
    strict: bool = False

    def __post_init__(self) -> None:
        self.parameters = OpenAIFunctionParametersSchema.model_validate(self.parameters)


@dataclass
class OpenAIFunctionToolSchema(SchemaRecord):
    """A tool as a model sees it; ``type`` is always ``function``."""

    type: str
    function: OpenAIFunctionSchema

    def __post_init__(self) -> None:
        self.function = OpenAIFunctionSchema.model_validate(self.function)

    def for_template(self) -> dict[str, Any]:
        """What a chat template is given: without nulls and defaults."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


@dataclass
class OpenAIFunctionParsedSchema(SchemaRecord):
    """A call as a parser found it: ``arguments`` is text, JSON if the model wrote JSON."""

    name: str
    arguments: str


@dataclass
class OpenAIFunctionCallSchema(SchemaRecord):
    """A call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """(call, whether the arguments could not be read); unreadable arguments are empty ones."""
        try:
            arguments = read_json(parsed_schema.arguments)
        except ValueError:
            arguments = None
        failed = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(parsed_schema.name, {} if failed else arguments), failed


@dataclass
class OpenAIFunctionToolCall(SchemaRecord):
    """A call as it stands in an assistant message."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema = field(default_factory=lambda: OpenAIFunctionCallSchema("", {}))

    def __post_init__(self) -> None:
        self.function = OpenAIFunctionCallSchema.model_validate(self.function)


@dataclass
class ToolResponse(SchemaRecord):
    """What a tool answers: text, and for vision models lists of images and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether there is text and nothing else."""
        return bool(self.text) and not (self.image or self.video)
