"""An enum whose members can be added at run time, so that a recipe can bring its own dispatch mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

M = TypeVar("M", bound="DynamicEnum")


class _DynamicEnumMeta(type):
    _members: dict[str, Any]
    _gone: ClassVar[dict[str, str]]

    def __iter__(cls) -> Iterator[Any]:
        return iter(tuple(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, item: object) -> bool:
        return item in cls._members if isinstance(item, str) else item in cls._members.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._members[name.upper()]

    def __getattr__(cls, name: str) -> Any:
        """Members are attributes; a member of an older release says what replaced it."""
        if not name.startswith("_"):
            if name in cls._members:
                return cls._members[name]
            replaced = cls._gone.get(name)
            if replaced:
                raise AttributeError(f"{cls.__name__}.{name} does not exist any more: {replaced}")
        raise AttributeError(f"{cls.__name__} has no member {name!r}; members: {', '.join(cls.__dict__['_members'])}")

    def names(cls) -> list[str]:
        return list(cls._members)

    def values(cls) -> list[Any]:
        return list(cls._members.values())


class DynamicEnum(metaclass=_DynamicEnumMeta):
    """Members are made by `register`, found as attributes or by name, compared by identity."""

    _members: ClassVar[dict[str, Any]] = {}
    _gone: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str, value: int):
        self.name, self.value = name, value

    def __init_subclass__(cls) -> None:
        cls._members = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _member, (type(self), self.name)

    @classmethod
    def register(cls: type[M], name: str) -> M:
        """Add a member; the name is kept in upper case and must be new."""
        key = name.upper()
        if key in cls._members:
            raise ValueError(f"{cls.__name__} has a member {key} already")
        member = cls(key, 1 + max((m.value for m in cls._members.values()), default=-1))
        cls._members[key] = member
        return member

    @classmethod
    def remove(cls: type[M], name: str) -> M:
        return cls._members.pop(name.upper())

    @classmethod
    def from_name(cls: type[M], name: str) -> M | None:
        return cls._members.get(name.upper())


def _member(kind: type[DynamicEnum], name: str) -> DynamicEnum:
    return kind[name]
