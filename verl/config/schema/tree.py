"""What every section of the configuration is: a frozen dataclass that also answers item and ``.get`` access.

A setting is declared once, with its type, default and meaning. Reads can be recorded, so that a test can prove that
every accepted setting is read by something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from verl.errors import ConfigError, VerlError, suggest

DTYPES = ("auto", "fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half")


@dataclass(frozen=True)
class ValueBound:
    """What is allowed, in words, and whether a value is that; null always is."""

    allowed: str
    holds: Callable[[Any], bool]

    def problems(self, key: str, value: Any) -> list[ConfigError]:
        """One if the value is outside."""
        return [] if value is None else in_range(key, value, self.allowed, self.holds(value))


@dataclass(frozen=True)
class NameBound:
    """One of some names, with what may stand in front of it or behind it."""

    names: tuple[str, ...]
    prefix: str = ""
    suffix: str = ""

    def problems(self, key: str, value: Any) -> list[ConfigError]:
        """One with the nearest name if the value is none of them."""
        return one_of(key, value.removeprefix(self.prefix).removesuffix(self.suffix), self.names)


def at_least(least: float) -> ValueBound:
    """A number from ``least`` on."""
    return ValueBound(f"{least} or more", lambda value: value >= least)


def at_most(most: float) -> ValueBound:
    """A number up to ``most``."""
    return ValueBound(f"at most {most}", lambda value: value <= most)


DTYPE, MODEL_DTYPE = NameBound(DTYPES, "torch."), NameBound(DTYPES[1:], "torch.")
LOSS_AGG_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")
LOSS_AGG_MODE, KL_KIND = NameBound(LOSS_AGG_MODES), NameBound(KL_KINDS, suffix="+")
COUNT, AMOUNT, POSITIVE = at_least(1), at_least(0), ValueBound("above 0", lambda value: value > 0)
AHEAD = ValueBound("0 or more", lambda value: 0 <= value < float("inf"))
GPUS = ValueBound("1 or more, or null for one", lambda value: value >= 1)
SHARE = ValueBound("0 to 1", lambda value: 0 <= value <= 1)
PORTION = ValueBound("above 0, at most 1", lambda value: 0 < value <= 1)
ROWS = ValueBound("-1 for all rows, or 1 or more", lambda value: value == -1 or value >= 1)
TOP_K = ValueBound("-1 for all tokens, or 1 or more", lambda value: value >= -1)
SECONDS = ValueBound("more than 0 seconds, or null", lambda value: value > 0)
EVERY = ValueBound("-1 for never, or a number of steps", lambda value: value >= -1)
COPIES = ValueBound("-1 for checkpoints only, or a number of steps", lambda value: value == -1 or value >= 1)
STEPS = ValueBound(
    "a list of steps, each 1 or more",
    lambda steps: all(isinstance(step, int) and not isinstance(step, bool) and step >= 1 for step in steps),
)
BETAS = ValueBound(
    "two numbers, each at least 0 and below 1",
    lambda betas: (
        isinstance(betas, list | tuple)
        and len(betas) == 2
        and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)
    ),
)


def in_range(key: str, value: Any, allowed: str, holds: bool) -> list[ConfigError]:
    """A problem unless ``holds``; ``allowed`` says the range in words."""
    return [] if holds else [ConfigError("out of range", key=key, got=value, allowed=allowed)]


def one_of(key: str, value: Any, choices: Iterable[str]) -> list[ConfigError]:
    """A problem unless the value is one of the names, with the nearest of them."""
    choices = list(choices)
    if value in choices:
        return []
    return [ConfigError("unknown value", key=key, got=value, allowed=choices, fix=suggest(str(value), choices))]


N = TypeVar("N", bound="Node")
D = TypeVar("D")


class _Unset:
    """Marks 'same as ours' where upstream's default is not given."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()
ABSENT = "no such setting"
"""Stands for upstream's default of a setting that upstream does not have."""


def setting(
    default: object,
    meaning: str,
    *,
    upstream: Any = UNSET,
    choices: tuple[Any, ...] | None = None,
    planned: str | None = None,
    no_effect: str | None = None,
    engines: tuple[str, ...] = (),
    follows: str | None = None,
    path: bool = False,
    within: Any = (),
    needs: str | None = None,
) -> Any:
    """One leaf of the configuration.

    Args:
        default: the only default there is.
        meaning: one sentence for a person.
        upstream: upstream's default where ours deviates.
        choices: the closed set of values, if there is one.
        planned: the feature that does not exist yet; any value but the default is refused by that name.
        no_effect: why the setting changes nothing in this version; setting it gives one notice with this text.
        engines: rollout engines that follow the setting nevertheless: with them neither of the two holds.
        follows: dotted key whose value is taken while this one is not set.
        path: a file or folder: ``~`` and variables are expanded.
        within: what it may be by itself, of `verl.config.schema.tree`; one, or several.
        needs: ``key=value``, ``key=one, two or three``, or ``key`` for a switch that is on: without it the setting has no
            effect, with a notice. A leading dot is the section of the setting, as in ``follows``.
    """
    metadata = {
        "meaning": meaning,
        "upstream": upstream,
        "choices": choices,
        "planned": planned,
        "no_effect": no_effect,
        "engines": engines,
        "follows": follows,
        "path": path,
        "within": within if isinstance(within, tuple) else (within,),
        "needs": needs,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def inherited(cls: type[N], name: str, default: D) -> D:
    """A setting of a base class with another default; the type is that of the default, as `dataclasses.field` has it."""
    metadata = cls.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    return dataclasses.field(default=default, metadata=metadata)


def section(
    cls: type[N], follows: Mapping[str, str] = MappingProxyType({}), *, needs: str | None = None, **defaults: Any
) -> Any:
    """A sub-section, whose class says what it is wherever it stands.

    Args:
        follows: settings of it that take the value of another dotted key in this place while they are not set.
        needs: of every setting in it, see `setting`; a leading dot is this section.
        defaults: replace the section's own in this place, e.g. the critic's learning rate.
    """
    metadata = {"section": cls, "defaults": defaults, "follows": dict(follows), "needs": needs}
    return dataclasses.field(default_factory=lambda: cls(**defaults), metadata=metadata)


_reads: set[str] | None = None


@contextmanager
def record_reads() -> Iterator[set[str]]:
    """Collect the dotted keys of all leaves that are read inside the block, in this process."""
    global _reads
    outer, _reads = _reads, set()
    try:
        yield _reads
    finally:
        if outer is not None:
            outer |= _reads
        _reads = outer


@contextmanager
def unrecorded() -> Iterator[None]:
    """Reads inside the block do not count: a rule that looks at a setting does not follow it."""
    global _reads
    outer, _reads = _reads, None
    try:
        yield
    finally:
        _reads = outer


@dataclasses.dataclass(frozen=True)
class Node:
    """A section: attribute, item, ``in`` and ``.get`` access; read-only. Declared sections are `verl.config.schema.node.ConfigNode`."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if _reads is not None and not name.startswith("_") and not isinstance(value, Node):
            attributes = object.__getattribute__(self, "__dict__")
            if name in attributes:
                _reads.add(f"{attributes.get('_path', '?')}.{name}".removeprefix("."))
        return value

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).__dataclass_fields__

    def get(self, name: str, default: object = None) -> Any:
        """The value, or ``default`` where there is no such setting or it is null."""
        if name not in self:
            return default
        value = getattr(self, name)
        return default if value is None else value

    def keys(self) -> list[str]:
        return list(type(self).__dataclass_fields__)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.keys()]

    def values(self) -> list[Any]:
        return [getattr(self, name) for name in self.keys()]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


def place(node: Node, path: str = "", typed: frozenset[str] = frozenset()) -> None:
    """Tell a node and everything below it where it stands, for read recording.

    ``typed`` are the dotted keys that were given on the command line, see `was_typed`.
    """
    object.__setattr__(node, "_path", path)
    for name, declared in type(node).__dataclass_fields__.items():
        value, key = object.__getattribute__(node, name), f"{path}.{name}".removeprefix(".")
        if isinstance(value, Node):
            object.__setattr__(value, "_following", frozenset(declared.metadata["follows"]))
            place(value, key, typed)
        elif key in typed:
            object.__setattr__(node, "_typed", (*node.__dict__.get("_typed", ()), name))


def key_of(section: object, name: str) -> str:
    """The dotted key of a setting of ``section`` in this program; of a section that was built by hand, the name alone.

    Example:
        >>> key_of(cfg.critic.fsdp, "param_offload")
        'critic.fsdp.param_offload'
    """
    return f"{getattr(section, '_path', '')}.{name}".removeprefix(".")


@contextmanager
def full_keys(*sections: Any) -> Iterator[None]:
    """An error of the block whose key is that of a setting inside one of these sections gets the full key, see `key_of`.

    So code below the sections names a setting by its last name, whatever program it serves.
    """
    try:
        yield
    except VerlError as error:
        head = (error.key or "").partition(".")[0]
        owner = next((node for node in sections if isinstance(node, Node) and head in node), None)
        if owner is None or error.key is None:
            raise
        named = type(error)(
            error.message, key=key_of(owner, error.key), got=error.got, allowed=error.allowed, fix=error.fix
        )
        raise named.with_traceback(error.__traceback__) from error.__cause__


def was_typed(node: Node, name: str) -> bool:
    """Whether a setting was given on the command line, be it with its default."""
    return name in node.__dict__.get("_typed", ())


def follows_another(node: Node, name: str) -> bool:
    """Whether a setting takes the value of another one while it is not set, everywhere or where this section stands."""
    anywhere = type(node).__dataclass_fields__[name].metadata["follows"] is not None
    return anywhere or name in node.__dict__.get("_following", ())


def changed_names(node: Node) -> list[str]:
    """Leaves of a section that differ from the section's own default, or were typed on the command line."""
    usual = type(node)()
    fields = type(node).__dataclass_fields__.items()
    leaves = [name for name, f in fields if f.metadata.get("section") is None and not follows_another(node, name)]
    return [name for name in leaves if node[name] != usual[name] or was_typed(node, name)]


def replace(node: N, **changes: Any) -> N:
    """A copy with changed settings; dotted keys reach into sections: ``replace(cfg, **{"optim.lr": 1e-4})``."""
    inner: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = value
        else:
            plain[head] = value
    for head, nested in inner.items():
        plain[head] = replace(object.__getattribute__(node, head), **nested)
    with unrecorded():  # a copy follows nothing
        made = dataclasses.replace(node, **plain)
    place(made, node.__dict__.get("_path", ""))
    return made


def to_dict(node: Node) -> dict[str, Any]:
    """Plain nested dictionaries, lists and scalars; reads nothing on the record."""
    plain: dict[str, Any] = {}
    for name in type(node).__dataclass_fields__:
        value = object.__getattribute__(node, name)
        plain[name] = to_dict(value) if isinstance(value, Node) else _plain(value)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def leaves(cls: type[Node], prefix: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    """Dotted key and field of every leaf below a section class, in order of declaration."""
    for field in dataclasses.fields(cls):
        key = f"{prefix}.{field.name}".removeprefix(".")
        inner = field.metadata.get("section")
        if inner is None:
            yield key, field
        else:
            yield from leaves(inner, key)


def unread(node: Node, defaults: Node, reads: set[str]) -> list[str]:
    """Leaves whose value differs from the default and that nothing has read."""
    keys = []
    for key, _ in leaves(type(node)):
        mine, theirs = node, defaults
        for part in key.split("."):
            mine, theirs = object.__getattribute__(mine, part), object.__getattribute__(theirs, part)
        if mine != theirs and key not in reads:
            keys.append(key)
    return keys
