"""Imports point down, heavy packages stay behind their fences: ``layers.toml`` is the law, this file is the police."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import verl
from tests.sanity import source_tree
from tests.sanity.source_tree import (
    ROOT,
    Import,
    imports,
    module_name,
    module_names,
    parse,
    python_files,
    read_toml,
    show,
    upstream_paths,
)

FACADE_LINES, ALL_FACADE_LINES, COMPAT_LINES = 60, 1500, 3084
FORMS = "verl.compat.forms"
"""Upstream's signatures and helpers, which only facades use."""
OF_THEIR_ROOM = {
    "verl.models.generation_settings": "it imports transformers",
    "verl.rewards.scorers.math_verify": "users name its path",
    "verl.tools.sandbox_fusion": "users name its class",
}
"""Modules that only facades import, and why they are no forms."""
FACADE_ROOMS = ("compat", "model_merger")
LAZY_ROOT_ATTRIBUTES = {"DataProto": "protocol", "__version__": "_version", **dict.fromkeys(verl.OF_API, "api")}


@functools.cache
def law() -> dict:
    return read_toml(ROOT / "layers.toml")


@functools.cache
def layer_of_room() -> dict[str, int]:
    return {room: int(layer) for layer, rooms in law()["layers"].items() for room in rooms}


def room_of(module: str) -> str | None:
    """``verl.trainer.ppo.step`` -> ``trainer``; None for ``verl`` itself. A module may have a layer of its own."""
    parts = module.split(".")
    alone = ".".join(parts[1:3])
    if alone in layer_of_room():
        return alone
    return parts[1] if len(parts) > 1 else None


def target_room(found: Import) -> str | None:
    if found.module == "verl":
        return LAZY_ROOT_ATTRIBUTES.get(found.attribute or "")
    return room_of(found.module) if found.module.startswith("verl.") else None


def layer_errors(path: Path) -> list[str]:
    """The imports of one file that point up or sideways."""
    room = room_of(module_name(path))
    if room is None:
        return []
    layers = layer_of_room()
    errors = []
    for found in imports(path):
        target = target_room(found)
        if target is None or target == room or target not in layers:
            continue
        if layers[target] >= layers[room]:
            errors.append(
                f"{show(path, found.line)}: {room} (layer {layers[room]}) imports {target} (layer {layers[target]})"
            )
    return errors


def inside(path: Path, places: list[str]) -> bool:
    """Whether a file lies in one of the rooms (or single-file rooms) that a fence names."""
    relative = path.relative_to(ROOT / "verl").with_suffix("").as_posix()
    return any(relative == place or relative.startswith(place + "/") for place in places)


def fence_errors(path: Path) -> list[str]:
    errors = []
    for found in imports(path):
        for package, places in law()["fences"].items():
            full = f"{found.module}.{found.attribute}" if found.attribute else found.module
            if (full + ".").startswith(package + ".") and not inside(path, places):
                errors.append(f"{show(path, found.line)}: only {', '.join(places)} may import {package}")
    return errors


def is_facade(module: str) -> bool:
    return module in law()["facades"]["modules"] or room_of(module) in FACADE_ROOMS or module in upstream_paths()


def test_every_room_of_the_package_stands_in_the_layer_table():
    rooms = {room_of(module_name(path)) for path in python_files("verl")} - {None}
    assert rooms <= set(layer_of_room()), f"not in layers.toml: {sorted(rooms - set(layer_of_room()))}"


def test_imports_point_down_and_never_sideways():
    errors = [error for path in python_files("verl") for error in layer_errors(path)]
    assert not errors, "\n" + "\n".join(errors)


def test_heavy_packages_are_imported_only_behind_their_fence():
    errors = [error for path in python_files("verl") for error in fence_errors(path)]
    assert not errors, "\n" + "\n".join(errors)


def test_only_env_reads_the_environment():
    errors = [
        show(path, node.lineno)
        for path in python_files("verl")
        if module_name(path) != "verl.env"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("environ", "getenv", "putenv", "unsetenv")
    ]
    assert not errors, f"use verl.env instead of os.environ: {errors}"


def test_facades_are_thin():
    facades = [path for path in python_files("verl") if is_facade(module_name(path))]
    lines = {p: len(p.read_text().splitlines()) for p in facades if not module_name(p).startswith(FORMS)}
    errors = [f"{show(path)} has {count} lines" for path, count in lines.items() if count > FACADE_LINES]
    assert not errors, f"a facade holds at most {FACADE_LINES} lines: {errors}"
    assert sum(lines.values()) <= ALL_FACADE_LINES


def test_all_that_serves_upstreams_paths_has_one_budget():
    paths = [path for path in python_files("verl") if room_of(module_name(path)) == "compat"]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= COMPAT_LINES


def test_what_only_facades_import_is_in_the_room_of_the_facades():
    names = {module_name(path): path for path in python_files("verl")}
    users: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for found in imports(path):
            for target in {found.module, f"{found.module}.{found.attribute}"} & names.keys() - {name}:
                users[target].add(name)
    texts = {name: path.read_text() for name, path in names.items() if room_of(name) != "compat"}
    alone = {name for name, of in users.items() if of and all(room_of(user) == "compat" for user in of)}
    named = {name for name in alone for user, text in texts.items() if name in text and user != name}
    left = {name for name in alone - named if room_of(name) != "compat"}
    assert left == OF_THEIR_ROOM.keys()


def test_no_facade_stands_in_front_of_a_module_of_the_library():
    own = {module_name(path) for path in python_files("verl")}
    both = sorted(set(upstream_paths()) & own)
    assert not both, f"one name, two modules: {both}"


def test_the_library_itself_does_not_use_its_facades():
    errors = [
        f"{show(path, found.line)} imports {found.module}"
        for path in python_files("verl")
        if not is_facade(module_name(path))
        for found in imports(path)
        if found.module != "verl" and found.module.startswith("verl.") and is_facade(found.module)
    ]
    assert not errors, "facades are for users' code:\n" + "\n".join(errors)


CONTRACT = tuple(f"verl.rollout.{name}" for name in ("base", "hosted", "lost", "reports", "request_spans", "service"))
"""What every sampler is, how it is lost, and the service over any of them: no backend."""
BACKENDS = tuple(f"verl.rollout.{name}" for name in ("hf", "server", "sglang", "vllm"))


def test_the_trainer_names_engines_and_samplers_only_in_build():
    errors = [
        f"{show(path, found.line)} imports {found.module}"
        for path in python_files("verl")
        if room_of(module_name(path)) == "trainer" and module_name(path) != "verl.trainer.build"
        for found in imports(path)
        if target_room(found) in ("engines", "rollout") and found.module not in CONTRACT
    ]
    assert not errors, "only verl/trainer/build.py names backends:\n" + "\n".join(errors)


def test_what_the_trainer_knows_of_sampling_imports_no_backend():
    paths = [path for path in python_files("verl") if module_name(path) in CONTRACT]
    assert len(paths) == len(CONTRACT)
    assert not [found.module for path in paths for found in imports(path) if found.module.startswith(BACKENDS)]


def test_the_layer_check_sees_an_import_inside_a_function(tmp_path, monkeypatch):
    """The police itself: an upward import hidden in a function is found, a downward one passes."""
    folder = tmp_path / "verl" / "algorithms"
    folder.mkdir(parents=True)
    bad, good = folder / "bad.py", folder / "good.py"
    bad.write_text("def f():\n    from verl.trainer import main_ppo\n    import ray.util\n")
    good.write_text("from verl import env\nfrom verl.metrics import Metric\n")
    assert law() and module_names()  # cached from the real tree before the root moves
    monkeypatch.setattr(source_tree, "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert layer_errors(bad) == ["verl/algorithms/bad.py:2: algorithms (layer 3) imports trainer (layer 8)"]
    assert fence_errors(bad) == ["verl/algorithms/bad.py:3: only single_controller/ray may import ray"]
    assert layer_errors(good) == [] and fence_errors(good) == []
