"""The built-in tables hold strings; each must lead to something that exists."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest

from verl.errors import ConfigError
from verl.registry import ALL_REGISTRIES, Registry, load_object, sibling

TARGETS = [(r.kind, name, target) for r in ALL_REGISTRIES for name, target in sorted(r.builtin_targets().items())]


@pytest.mark.parametrize(("kind", "name", "target"), TARGETS, ids=[f"{k}-{n}" for k, n, _ in TARGETS])
def test_every_built_in_name_leads_to_an_object(kind, name, target):
    thing = load_object(target)
    assert callable(thing) or is_dataclass(thing), f"{kind} {name}: {target} is neither callable nor a row of data"


@pytest.mark.parametrize("registry", ALL_REGISTRIES, ids=lambda r: r.kind)
def test_no_name_is_both_built_and_planned(registry: Registry):
    assert not set(registry.builtin_targets()) & registry._planned


@pytest.mark.parametrize("line", ["import mine_and", "raise ModuleNotFoundError('a library lacks its own')"])
def test_what_a_module_lacks_is_not_taken_for_the_module_itself(tmp_path, monkeypatch, line):
    """The first is another package whose name begins alike, the second an error that names no module."""
    (tmp_path / "mine_and_more.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    for step in (load_object, lambda path: sibling(path, "FACTS")):
        with pytest.raises(ModuleNotFoundError, match=r"mine_and'|a library lacks"):
            step("mine_and_more:function")
    for path in ("mine_or_not:function", "mine_or_not.module:function"):
        assert sibling(path, "FACTS") is None
        with pytest.raises(ConfigError, match="no module named"):
            load_object(path)
