"""Small helpers of upstream's under their path."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from verl.config.schema.node import plain


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list under its name in ``data``; a list is joined to it. A name gets ``prefix`` once."""
    for name, value in new_data.items():
        values = data.setdefault(name if name.startswith(prefix) else f"{prefix}{name}", [])
        values.extend(value) if isinstance(value, list) else values.append(value)


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """``dict1`` with the entries of ``dict2``; one that both have must be equal."""
    differing = [key for key in dict2 if key in dict1 and dict1[key] != dict2[key]]
    if differing:
        raise AssertionError(f"both have these keys, with different values: {differing}")
    dict1.update(dict2)
    return dict1


def convert_to_regular_types(obj: Any) -> Any:
    """OmegaConf's containers and tuples as dictionaries and lists, at any depth."""
    obj = plain(obj)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    is_list = isinstance(obj, list | tuple) or type(obj).__name__ == "ListConfig"
    return [convert_to_regular_types(value) for value in obj] if is_list else obj


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a call that takes longer raises a TimeoutError; what it runs goes on in a thread of its own."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def limited(*args: Any, **kwargs: Any) -> Any:
            pool = ThreadPoolExecutor(1)
            try:
                return pool.submit(fn, *args, **kwargs).result(seconds)
            except FutureTimeout as error:
                raise TimeoutError(f"{fn.__name__} took longer than {seconds} s") from error
            finally:
                pool.shutdown(wait=False)

        return limited

    return wrap
