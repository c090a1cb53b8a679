"""Programs of upstream's recipes that are not built: each is a module that says so, and what there is instead.

Upstream keeps recipes in a repository of their own. A copy of one that lies in this folder comes first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any

from verl.trainer.command import not_built

_OWN = "Put the recipe's folder next to this one, or start verl.trainer.main_ppo with its settings."
_ASCEND = "Start verl.trainer.main_ppo with its settings; nothing here was run on Ascend devices."
_EVALUATION = "Start verl.trainer.main_eval."
PROGRAMS: dict[str, tuple[str, str]] = {
    "recipe.atropos.generate_proxy": ("training with the environments of Atropos", _OWN),
    "recipe.atropos.main_atropos": ("training with the environments of Atropos", _OWN),
    "recipe.dance_grpo.dance_grpo_mindspeed_mm.main_dance": ("DanceGRPO, which trains models of images", _OWN),
    "recipe.dapo.dapo_transfer_queue.main_dapo": (
        "DAPO over the transfer queue",
        "Start recipe.dapo.main_dapo: batches need no queue here.",
    ),
    "recipe.fault_recover.main_ppo": (
        "recovery of single workers during a step",
        "Start verl.trainer.main_ppo: a run that died goes on from its last checkpoint.",
    ),
    "recipe.grpo_mindspeed_mm.main_ppo": ("the MindSpeed-MM engine", _ASCEND),
    "recipe.gvpo.main_gvpo": ("GVPO", _OWN),
    "recipe.r1.data_process": ("the data preparation of recipe r1", _OWN),
    "recipe.r1.main_eval": ("the evaluation of recipe r1", _EVALUATION),
    "recipe.r1_ascend.main_ppo": ("training of DeepSeek-V3 on Ascend", _ASCEND),
    "recipe.spo.spo_main_ppo": (
        "SPO by upstream's settings",
        "Start recipe.spo.main_spo; its README has the settings.",
    ),
}
"""Module -> the feature, and what to do without it."""


class AbsentPrograms:
    """Finds these modules and the packages around them where there is no file."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name in PROGRAMS:
            return spec_from_file_location(name, __file__)
        if any(program.startswith(f"{name}.") for program in PROGRAMS) and name != "recipe":
            package = ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = []
            return package
        return None


def install() -> None:
    """Look here last; once per process."""
    if AbsentPrograms not in sys.meta_path:
        sys.meta_path.append(AbsentPrograms)


def main(argv: list[str] | None = None) -> int:
    """Says that the program is not built; exit status 2."""
    name = __spec__.name  # type: ignore[name-defined]  # also where it runs as __main__
    return not_built(name, *PROGRAMS[name])


if __name__ == "__main__":
    sys.exit(main())
