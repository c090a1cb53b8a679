"""Every setting that a text of the package names is one that the programs have which print it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.sanity.source_tree import ROOT, parse, python_files
from verl.config.loading.aliases import longest_prefix
from verl.config.loading.groups import NAMES
from verl.config.schema.node import schema_of

KEY = re.compile(r"(?<![\w./\[{:-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w/(])")
PROGRAMS = {program.name: program for program, _ in NAMES.values()}
RL, SUPERVISED, ALL_TRAINERS = ("ppo_trainer",), ("sft_trainer",), ("ppo_trainer", "sft_trainer")
SERVES = {
    "verl/trainer/generation.py": ("generation",),
    "verl/trainer/main_generation_server.py": ("ppo_trainer", "generation"),
    "verl/trainer/evaluation.py": ("evaluation",),
    "verl/algorithms/preference.py": ("dpo_trainer",),
    "verl/data/preference.py": ("dpo_trainer",),
    "verl/data/sft_dataset.py": SUPERVISED,
    "verl/data/columns.py": ALL_TRAINERS,
    "verl/data/turns.py": SUPERVISED,
    "verl/config/rules/validate.py": ("generation", "evaluation"),
    "verl/trainer/main_eval.py": ("evaluation",),
    "verl/trainer/main_generation.py": ("generation",),
    "verl/trainer/dpo_trainer.py": ("dpo_trainer",),
    "verl/trainer/pairs.py": ("dpo_trainer",),
    "verl/trainer/supervised.py": SUPERVISED,
    "verl/trainer/watch.py": SUPERVISED,
    "verl/config/schema/sft.py": ("dpo_trainer",),
    "verl/rollout": ("ppo_trainer", "generation"),
    "verl/engines": ALL_TRAINERS,
    "verl/models": ALL_TRAINERS,
    "verl/distributed": ALL_TRAINERS,
    "verl/checkpoint": ALL_TRAINERS,
    "verl/api/run.py": ALL_TRAINERS,
    "verl/api/start.py": ALL_TRAINERS,
    "verl/cli": ALL_TRAINERS,
    "verl/data/tokenizer.py": ALL_TRAINERS,
    "verl/data/chat_template.py": ALL_TRAINERS,
}
"""Programs that run a file or folder; what is not listed belongs to main_ppo."""
TABLES = (
    *("verl/registry.py", "verl/config/schema/leaves.py", "verl/config/loading/aliases.py"),
    *("verl/api/answers.py", "verl/cli/help.py", "verl/cli/last_words.py"),
)
NO_SETTINGS = {"torch.optim", "module.path", "module.name"}


@cache
def has(program: str, key: str) -> bool:
    """Whether a program takes the key, by its name of today or an old one."""
    schema, old = schema_of(PROGRAMS[program].root), PROGRAMS[program].aliases.moved
    return bool(schema.split(key)) or schema.is_section(key) or bool(longest_prefix(key, old))


@cache
def tails(program: str) -> frozenset[str]:
    """All ways to write a setting or a section of a program with some of its first names left out."""
    found = set()
    for key in schema_of(PROGRAMS[program].root).every:
        parts = key.split(".")
        found |= {".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 2, len(parts) + 1)}
    return frozenset(found)


def served(path: str) -> tuple[str, ...]:
    return next((programs for place, programs in SERVES.items() if path.startswith(place)), RL)


def wrong(key: str, path: str) -> bool:
    """Whether a key in a text of this file is a setting's, but not by the name that all who print it have."""
    programs = served(path)
    if key in NO_SETTINGS or not any(key in tails(p) or has(p, key) for p in PROGRAMS):
        return False
    having = [p for p in programs if has(p, key)]
    if not having:
        return not (path.startswith("verl/config/") and any(has(p, key) for p in PROGRAMS))  # rules of each program
    parts = key.split(".")
    shorter = {".".join(parts[cut:]) for cut in range(len(parts) - 1)}
    return any(shorter & tails(p) for p in programs if p not in having)


def texts(tree: ast.AST) -> Iterator[ast.Constant]:
    """String literals but docstrings and the meanings of settings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setting", "section"):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node
        yield from texts(node)


def wrong_keys(tree: ast.AST, path: str) -> list[str]:
    return [
        f"{path}:{text.lineno}: {key}" for text in texts(tree) for key in KEY.findall(text.value) if wrong(key, path)
    ]


def test_every_key_in_a_text_is_one_of_the_programs_that_print_it():
    found = []
    for path in python_files("verl"):
        name = path.relative_to(ROOT).as_posix()
        if name not in TABLES:
            found += wrong_keys(parse(path), name)
    assert found == []


@pytest.mark.parametrize(
    "place, text, caught",
    [
        ("verl/engines/fsdp2.py", "fsdp_config.offload_policy", True),
        ("verl/engines/fsdp2.py", "model.use_liger", True),
        ("verl/models/lora.py", "actor_rollout_ref.model.lora_rank", True),
        ("verl/models/lora.py", "lora_rank", False),
        ("verl/trainer/main_ppo.py", "set model.path to a folder", True),
        ("verl/trainer/main_ppo.py", "set actor_rollout_ref.model.path to a folder", False),
        ("verl/trainer/watch.py", "a lower optim.lr", False),
        ("verl/rollout/server/openai.py", "name its kind: server.api=vllm", True),
        ("verl/rollout/server/openai.py", "actor_rollout_ref.rollout.server.api", False),
        ("verl/engines/optimizer.py", "Default: torch.optim.", False),
    ],
)
def test_a_key_that_a_program_lacks_is_caught(place, text, caught):
    assert bool(wrong_keys(ast.parse(f"notice({text!r}, 'why')"), place)) is caught
