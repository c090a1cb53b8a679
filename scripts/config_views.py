"""The tree of a program as files to read and to copy from: ``verl/trainer/config/*.yaml``, made from the declarations.

No program takes a default from them. One that is named on the command line (``--config-path verl/trainer/config
--config-name _generated_ppo_trainer``) is read like any file, and says what would be so without it.

Under Hydra a recipe with a ``main`` of its own reads the tree itself: it hands ``ray_kwargs.ray_init`` to ``ray.init``
and compares ``strategy`` with the names that upstream has. So a file to compose from leaves out the mappings that take
what a section does not name, and where upstream names an engine, it has that name in place of ``auto``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from verl.config.loading.groups import COMPOSED_ENGINE, choose, program_of
from verl.config.loading.merge import TWINS
from verl.config.schema.node import Leaf, schema_of

MADE = "Made by scripts/generate_config_docs.py from verl/config: change the declarations there, then run it again."
TO_COPY = f"""\
# Every setting of `python -m verl.trainer.main_ppo` that works, with its default, behind a comment sign.
# {MADE}
# No default is read from here. Copy what you change into a file of your own, without the sign, and name it:
#   python -m verl.trainer.main_ppo --config-path DIR --config-name NAME
# A default ${{a.b}} means the value of a.b, until this one is set. The whole table: docs/reference/configuration.md.
defaults: [ppo_trainer, _self_]
"""
BASE = f"""\
# What a file of your own builds on, also under Hydra: `defaults: [{{name}}, _self_]`.
# {MADE}
defaults: [_generated_{{name}}, _self_]
"""


def files() -> dict[str, str]:
    """File name -> text, of every view."""
    return {
        "every_setting.yaml": TO_COPY + "".join(_lines("ppo_trainer", commented=True)),
        "ppo_trainer.yaml": BASE.format(name="ppo_trainer"),
        "ppo_megatron_trainer.yaml": BASE.format(name="ppo_megatron_trainer"),
        "_generated_ppo_trainer.yaml": f"# {MADE}\n" + "".join(_lines("ppo_trainer")),
        "_generated_ppo_megatron_trainer.yaml": f"# {MADE}\n" + "".join(_lines("ppo_megatron_trainer")),
    }


def _lines(name: str, commented: bool = False) -> Iterator[str]:
    """One line per section and setting; with ``commented``, only settings that work, each with its meaning."""
    program, engine = program_of(name)
    chosen = dict(choose(program, program.engine_group, engine) or [])
    leaves = schema_of(program.root).leaves
    engines = {key: COMPOSED_ENGINE for key in program.strategies if leaves[key].follows is None}
    above: list[str] = []
    for leaf in leaves.values():
        if leaf.planned is not None if commented else leaf.key.endswith(".further"):
            continue
        *sections, last = leaf.key.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(above, sections)) if a != b), min(len(above), len(sections)))
        for depth in range(shared, len(sections)):
            yield f"{'  ' * depth}{sections[depth]}:\n"
        above = sections
        value = _value(leaf, chosen if commented else engines | chosen)
        said = f"{'  ' * len(sections)}{'# ' if commented else ''}{last}: {value}"
        yield f"{said}  # {leaf.meaning}\n" if commented else f"{said}\n"


def _value(leaf: Leaf, chosen: dict[str, str]) -> str:
    if leaf.key in chosen:
        return chosen[leaf.key]
    is_twin = any(leaf.key in twins for twins in TWINS)  # which have to be set alike
    return f"${{{leaf.follows}}}" if leaf.follows and not is_twin else _scalar(leaf.default)


def _scalar(value: Any) -> str:
    """JSON, which YAML reads; a plain word goes without its quotation marks."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_~][\w./~-]*", value) and value.lower() not in _NOT_TEXT:
        return value
    return json.dumps(value)


_NOT_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf")
