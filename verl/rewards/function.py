"""A user's reward function: found in a file, its form read off its parameters, called with what it asks for."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl import env
from verl.errors import RewardError, suggest
from verl.rewards.forms import FIELDS, Form, Signature, read_form
from verl.rewards.samples import RewardSample
from verl.rewards.user_file import load_user_code

PATH_KEY = "reward.custom_reward_function.path"
NAME_KEY = "reward.custom_reward_function.name"
USUAL_NAMES = ("compute_score", "compute_reward")
Function = TypeVar("Function", bound=Callable[..., Any])
_built_in: list[Callable[..., Any]] = []


def built_in(fn: Function) -> Function:
    """Mark the library's own scorer. By identity: what wraps it is not the library's."""
    _built_in.append(fn)
    return fn


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with what is known about it. Calling it calls the user's function, ``reward_kwargs`` merged in.

    Example:
        >>> fn = load_reward_function("my_reward.py", reward_kwargs={"bonus": 0.5})
        >>> fn(data_source="d", solution_str="42", ground_truth="42", extra_info=None)
    """

    fn: Callable[..., Any]
    signature: Signature
    name: str
    file: str | None = None
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    origin: str | None = None
    """``file.py`` or ``pkg://module`` from which another process can load the function; None where none can."""
    is_loaded: bool = False
    """Whether it was found in a file or module by name, as opposed to passed as an object."""

    @classmethod
    def of(
        cls, fn: Callable[..., Any], reward_kwargs: Mapping[str, Any] | None = None, default: Form = Form.SINGLE
    ) -> RewardFunction:
        """Wrap any callable; a `RewardFunction` gets the further ``reward_kwargs``."""
        if isinstance(fn, RewardFunction):
            merged = {**fn.reward_kwargs, **(reward_kwargs or {})}
            made = _make(fn.fn, fn.name, fn.file, merged, fn.origin, default)
            return replace(made, is_loaded=fn.is_loaded)
        if not callable(fn):
            raise RewardError("a reward function must be callable", got=fn)
        inner = inspect.unwrap(_unbound(fn))
        named = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
        return _make(fn, named.__qualname__, _file_of(named), reward_kwargs or {}, _origin_of(fn), default)

    @property
    def form(self) -> Form:
        return self.signature.form

    @property
    def is_builtin(self) -> bool:
        """Whether it is the library's own scorer, which is bounded in time and needs no guard."""
        return any(self.fn is fn for fn in _built_in)

    @property
    def is_ours(self) -> bool:
        """Whether it stands in this library: what it does wrong on a text is ours to mend, and must not pay."""
        return (getattr(inspect.unwrap(_unbound(self.fn)), "__module__", None) or "").startswith("verl.")

    @property
    def is_async(self) -> bool:
        inner = _unbound(self.fn)
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)

    @property
    def label(self) -> str:
        """The function and its file, as messages name it."""
        return f"{self.name} in {self.file}" if self.file else self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **{**self.reward_kwargs, **kwargs})

    def call(self, samples: Sequence[RewardSample]) -> Any:
        """Call the function on one sample (single form) or on all of them (batch forms); returns what it returns."""
        values = self._values(samples)
        positional = [
            values[name] if name in values else self.reward_kwargs[name] for name in self.signature.positional
        ]
        extra = {name: value for name, value in self.reward_kwargs.items() if name not in self.signature.positional}
        return self.fn(*positional, **{name: values[name] for name in self.signature.named}, **extra)

    def _values(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        if self.form is Form.SINGLE:
            (one,) = samples
            parts: tuple[Any, ...] = (one.solution_str, one.data_source, one.ground_truth, one.extra_info)
        else:
            parts = (
                [s.solution_str for s in samples],
                [s.data_source for s in samples],
                [s.ground_truth for s in samples],
                [s.extra_info for s in samples],
            )
        return dict(zip(FIELDS[self.form], parts, strict=True))


def load_reward_function(
    path: str, name: str | None = None, reward_kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Find the reward function of a user.

    Args:
        path: a Python file, or a module on the import path (``my_pkg.rewards`` or ``my_pkg.rewards:my_score``).
        name: the function; without it ``compute_score``, else ``compute_reward``, else the only public function.
        reward_kwargs: extra keyword arguments for every call.

    Raises:
        RewardError: no such file or function, a file that fails, or parameters that match no form.
    """
    source, file, attribute, fn = _locate(path, name)
    origin = source if source.startswith("pkg://") else file
    return replace(_make(fn, attribute, file, reward_kwargs or {}, origin), is_loaded=True)


def find_reward_function(path: str, name: str | None = None) -> Callable[..., Any]:
    """The function itself, its parameters not yet looked at; arguments and errors as for `load_reward_function`."""
    return _locate(path, name)[-1]


def _locate(path: str, name: str | None) -> tuple[str, str, str, Callable[..., Any]]:
    """Source, file and name of a user's function, and the function."""
    if not path:
        raise RewardError("a Python file is needed", key=PATH_KEY, got=path)
    source, inner = _source(str(path))
    module = load_user_code(source, PATH_KEY)
    file = module.__file__ or source
    attribute = _find(module, name or inner, file)
    return source, file, attribute, vars(module)[attribute]


def _source(path: str) -> tuple[str, str | None]:
    """``my_pkg.my_mod:name`` -> (``pkg://my_pkg.my_mod``, ``name``); a file stays as it is."""
    is_file = "/" in path or path.endswith(".py") or not ("." in path or ":" in path) or Path(env.expand(path)).exists()
    if is_file and not path.startswith("pkg://"):
        return path, None
    module, _, name = path.removeprefix("pkg://").partition(":")
    return f"pkg://{module}", name or None


def _make(
    fn: Callable[..., Any],
    name: str,
    file: str | None,
    kwargs: Mapping[str, Any],
    origin: str | None,
    default: Form = Form.SINGLE,
) -> RewardFunction:
    where = f"{name} in {file}" if file else name
    return RewardFunction(fn, read_form(fn, kwargs, where, default), name, file, dict(kwargs), origin)


def _find(module: ModuleType, name: str | None, file: str) -> str:
    members = vars(module)
    functions = [
        n for n, m in members.items() if inspect.isfunction(m) and m.__module__ == module.__name__ and n[0] != "_"
    ]
    if name:
        if callable(members.get(name)):
            return name
        raise RewardError(
            f"{file} has no function {name!r}",
            key=NAME_KEY,
            allowed=functions or "none found",
            fix=suggest(name, functions),
        )
    for usual in USUAL_NAMES:
        if callable(members.get(usual)):
            return usual
    if len(functions) == 1:
        return functions[0]
    if not functions:
        raise RewardError(f"{file} holds no public function", key=PATH_KEY, fix="Define compute_score in it.")
    near = next((hint for hint in (suggest(usual, functions) for usual in USUAL_NAMES) if hint), "")
    raise RewardError(
        f"{file} holds several functions and neither compute_score nor compute_reward",
        key=NAME_KEY,
        allowed=functions,
        fix=f"{near} Name the function with {NAME_KEY}.".strip(),
    )


def _unbound(fn: Any) -> Any:
    """The function inside partial applications."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _file_of(fn: Any) -> str | None:
    try:
        return inspect.getsourcefile(fn)
    except TypeError:  # written in C
        return None


def _origin_of(fn: Any) -> str | None:
    """The module from which another process can import a plain module-level function."""
    if not inspect.isfunction(fn) or "<" in fn.__qualname__ or "." in fn.__qualname__:
        return None
    module = sys.modules.get(fn.__module__)
    if module is None or vars(module).get(fn.__name__) is not fn:
        return None
    return vars(module).get("__file__") if fn.__module__ == "__main__" else f"pkg://{fn.__module__}"
