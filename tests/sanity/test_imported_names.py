"""How much of what upstream's documentation, examples and recipes import exists here: a share that only rises.

``imported_names.json`` holds the measurement: of the names that upstream itself still had on that day, those that were
missing here when it was made, with how often each is imported. The others are held by `test_public_names`.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl.compat.absent import ABSENT

RECORD = Path(__file__).parent / "imported_names.json"
HELD_NAMES, HELD_USES = 0.89, 0.95
"""Who brings one up writes the higher number here; rounded down to two digits."""


@functools.cache
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def what_is_wrong(module: str, name: str = "") -> str | None:
    """Why ``from module import name`` fails, None where it works."""
    try:
        importlib.import_module(module)
        if name:
            exec(f"from {module} import {name}", {})
    except ImportError as error:
        return str(error)
    return None


def missing() -> dict[tuple[str, str], tuple[int, str]]:
    """(module, name) -> how often it is imported, and why that fails."""
    wrong = {}
    for module, names in record()["missing at first"].items():
        for name, uses in (names or {"": 1}).items():
            why = what_is_wrong(module, name)
            if why is not None:
                wrong[module, name] = uses, why
    return wrong


def test_the_share_of_upstreams_names_that_can_be_imported_never_falls():
    known, wrong = record(), missing()
    names = 1 - len(wrong) / known["names"]
    uses = 1 - sum(count for count, _ in wrong.values()) / known["uses"]
    shown = "\n".join(f"{module} {name}: {why}" for (module, name), (_, why) in wrong.items())
    assert names >= HELD_NAMES and uses >= HELD_USES, f"{names:.3f} of names, {uses:.3f} of uses\n{shown}"
    assert names < HELD_NAMES + 0.02 and uses < HELD_USES + 0.02, f"hold {names:.3f} and {uses:.3f}"


def test_every_name_that_upstreams_documentation_shows_can_be_imported():
    wrong = {name: why for name in record()["documented"] if (why := what_is_wrong(*name.split(":"))) is not None}
    assert not wrong


def test_a_name_that_stays_away_says_what_there_is_instead():
    silent = [place for place, (_, why) in missing().items() if "does not exist here." not in why]
    assert not silent, "name a replacement in verl/compat/absent.py"


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_what_stands_in_for_an_absent_name_exists(name):
    for path in re.findall(r"\bverl(?:\.\w+)+", ABSENT[name]):
        module, _, attribute = path.rpartition(".")
        assert what_is_wrong(module, attribute) is None, path
    module, _, attribute = name.rpartition(".")
    assert what_is_wrong(name) is not None and what_is_wrong(module, attribute) is not None, "it exists by now"
