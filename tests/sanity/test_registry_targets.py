"""The built-in tables hold strings; each must lead to something that exists."""

from __future__ import annotations

import pytest

from verl.registry import ALL_REGISTRIES, Registry, load_object

TARGETS = [(r.kind, name, target) for r in ALL_REGISTRIES for name, target in sorted(r.builtin_targets().items())]


@pytest.mark.parametrize(("kind", "name", "target"), TARGETS, ids=[f"{k}-{n}" for k, n, _ in TARGETS])
def test_every_built_in_name_leads_to_an_object(kind, name, target):
    assert callable(load_object(target)), f"{kind} {name}: {target} is not callable"


@pytest.mark.parametrize("registry", ALL_REGISTRIES, ids=lambda r: r.kind)
def test_no_name_is_both_built_and_planned(registry: Registry):
    assert not set(registry.builtin_targets()) & registry._planned
