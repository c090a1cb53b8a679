"""The base of a section of settings that the caller declares; the library's own sections are `ConfigNode`s.

Nothing in the library derives from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A dataclass that is read as a mapping of its fields, too; each field is set once.

    A subclass names the fields that may be set again in ``_mutable_fields``.

    Raises:
        FrozenInstanceError: another field is set again.

    Example:
        >>> @dataclass
        ... class Weights(BaseConfig):
        ...     style: float = 0.5
        >>> Weights(style=1.0)["style"], Weights().get("length", 0)
        (1.0, 0)
    """

    _mutable_fields: ClassVar[Collection[str]] = ()

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(
                f"{type(self).__name__}.{name} is set once; _mutable_fields names those that change"
            )
        super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        if key not in iter(self):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))
