"""Compare the package with the public names that users' code relies on (``public_names.json``).

``python -m tests.sanity.public_names --write`` drops from the pending list what exists by now; it never adds to it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES_FILE, PENDING_FILE = HERE / "public_names.json", HERE / "public_names_pending.txt"


def listed() -> Iterator[tuple[str, list[str] | None]]:
    """Every public name as ``module:name`` or ``module:Class.member``, with its parameters if they are fixed."""
    for module, names in json.loads(NAMES_FILE.read_text(encoding="utf-8")).items():
        for name, entry in names.items():
            yield f"{module}:{name}", entry["parameters"]
            for member, parameters in entry.get("members", {}).items():
                yield f"{module}:{name}.{member}", parameters


def fault(name: str, parameters: list[str] | None) -> str | None:
    """What is wrong with one public name, or None if it is as users' code expects it."""
    module_name, _, path = name.partition(":")
    try:
        thing = importlib.import_module(module_name)
        for part in path.split("."):
            thing = getattr(thing, part)
    except ImportError as error:
        return f"cannot be imported ({error})"
    except AttributeError:
        is_field = inspect.isclass(thing) and part in getattr(thing, "__annotations__", {})
        return None if is_field else "does not exist"
    return None if parameters is None else _parameter_fault(thing, parameters)


def _parameter_fault(thing: Any, wanted: list[str]) -> str | None:
    """Positional calls and keyword calls with the listed parameters must both work; further ones need a default."""
    found = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    names = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY, p.KEYWORD_ONLY)]
    missing = [name for name in wanted if name not in names]
    if missing:
        return f"lacks the parameters {missing} (has {names})"
    positional = [p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if positional[: len(wanted)] != [n for n in wanted if n in positional]:
        return f"has its parameters in the order {positional}, expected {wanted}"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    extra = [
        p.name
        for p in found
        if p.name not in wanted and p.default is inspect.Parameter.empty and p.kind not in variadic
    ]
    return f"has further parameters without a default: {extra}" if extra else None


def pending() -> set[str]:
    lines = PENDING_FILE.read_text(encoding="utf-8").splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def main() -> None:
    faults = {name: fault(name, parameters) for name, parameters in listed()}
    still = [name for name in faults if name in pending() and faults[name]]
    new = [f"{name} {why}" for name, why in faults.items() if why and name not in pending()]
    if "--write" in sys.argv:
        head = "# Public names whose capability is not built yet. A name that exists must leave this list.\n"
        PENDING_FILE.write_text(head + "".join(f"{name}\n" for name in still), encoding="utf-8")
    print(f"{len(faults)} public names, {len(still)} pending, {len(new)} wrong", *new, sep="\n")


if __name__ == "__main__":
    main()
