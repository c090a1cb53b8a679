"""The open mapping of roles that the dataflow calls."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError, WorkerError
from verl.single_controller.base import Role
from verl.workers.roles import RoleHandle, Roles


def test_roles_are_an_open_mapping_with_kinds():
    roles = Roles()
    actor, learner = RoleHandle("actor", "trainable", "A"), RoleHandle("implicit_prm", "trainable", "P")
    for handle in (actor, learner, RoleHandle("ref", "frozen", "A")):
        roles.add(handle)
    assert roles["actor"] is roles[Role.Actor] is actor and Role.RefPolicy in roles and "critic" not in roles
    assert roles.of_kind("trainable") == {"actor": actor, "implicit_prm": learner}
    assert list(roles) == ["actor", "implicit_prm", "ref"] and roles.groups() == ["A", "P"]
    with pytest.raises(WorkerError, match="'actor'"):
        roles["actr"]
    with pytest.raises(ConfigError, match="exists already"):
        roles.add(RoleHandle("actor", "trainable", "B"))
    with pytest.raises(ConfigError, match="scorer"):
        RoleHandle("x", "trained", "B")
