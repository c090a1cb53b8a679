"""Print what the library's house looks like, counted from its code.

    python scripts/house.py                  a table
    python scripts/house.py --against REV    beside what it was at a commit
    PYTHONPATH=. python scripts/house.py --frames    with frames, which short runs are made for

`tests/sanity/test_house.py` holds the counts: they may only fall.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"fsdp", "fsdp2", "megatron", "vllm", "sglang", "hf", "veomni", "torchtitan", "automodel", "trtllm"}
AT_HOME = ("verl.engines", "verl.rollout", "verl.config", "verl.trainer.build", "verl.registry", "verl.compat",
           "verl.planner.engines")  # fmt: skip
"""Where a backend may be called by its name; the registry lists them, and upstream's names hold some."""
WINDOW = 8
"""Lines without blanks and comments that have to be equal for a clone."""
ODD_WORDS = re.compile(r"\b(?:whoever|anew|told|goes on|so many|lies|asked|wanted)\b", re.IGNORECASE)
"""Words that no engineer of the field uses for what the code does."""
PARTICIPLES = ("found", "wanted", "asked", "own", "given", "kept", "whole", "said", "chosen", "known")
"""Names of variables that do not say what they hold."""
LEAVES = """
from verl.config.loading.groups import NAMES
from verl.config.schema.node import schema_of
declared = schema_of(NAMES["ppo_trainer"][0].root).leaves.values()
works = [leaf for leaf in declared if leaf.engines or (leaf.planned is None and leaf.no_effect is None)]
print(len(declared), len(works))
"""
BROAD = {"Exception", "BaseException"}
UPSTREAM_NAMES = "verl.compat"
"""Its public functions carry upstream's names, whatever ours are called."""
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Counts = dict[str, float]


class House:
    """The modules of a tree, parsed.

    Args:
        tree: a checkout; only ``verl/`` in it is read.
    """

    def __init__(self, tree: Path):
        self.tree = tree
        self.files = {_module(path.relative_to(tree)): path for path in sorted((tree / "verl").rglob("*.py"))}
        self.texts = {module: path.read_text(encoding="utf-8") for module, path in self.files.items()}
        self.parsed = {module: ast.parse(text) for module, text in self.texts.items()}
        self.graph = {module: sorted(self._imports(module)) for module in self.files}

    def _imports(self, module: str) -> set[str]:
        """The modules of the package that one imports, wherever in the file."""
        package = module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]
        named: set[str] = set()
        for node in ast.walk(self.parsed[module]):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                named |= {full if (full := f"{base}.{alias.name}") in self.files else base for alias in node.names}
        return named & self.files.keys() - {module}

    def lines(self) -> Counter[str]:
        """Of each room; a file beside the rooms counts as ``verl``."""
        rooms: Counter[str] = Counter()
        for module, text in self.texts.items():
            rooms[room_of(module, self.files[module])] += text.count("\n")
        return rooms

    def twin_classes(self) -> dict[str, list[str]]:
        """Class name -> the modules that define it, where it is more than one."""
        homes: dict[str, list[str]] = defaultdict(list)
        for module, tree in self.parsed.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(module)
        return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}

    def close_twins(self) -> list[str]:
        """Those of `twin_classes` in one room, or in rooms of which one imports the other."""
        room = {module: room_of(module, path) for module, path in self.files.items()}
        ties = {(room[module], room[target]) for module, targets in self.graph.items() for target in targets}

        def are_close(modules: list[str]) -> bool:
            rooms = [room[module] for module in modules]
            pairs = [(a, b) for i, a in enumerate(rooms) for b in rooms[i + 1 :]]
            return any(a == b or (a, b) in ties or (b, a) in ties for a, b in pairs)

        return [name for name, modules in self.twin_classes().items() if are_close(modules)]

    def twin_functions(self) -> dict[str, list[str]]:
        """Public function -> the modules that define it, where it is more than one; ``main`` may be everywhere."""
        homes: dict[str, dict[str, None]] = defaultdict(dict)
        for module, tree in self.parsed.items():
            for node in tree.body if not module.startswith(UPSTREAM_NAMES) else ():
                if isinstance(node, FunctionNode) and not node.name.startswith("_") and node.name != "main":
                    homes[node.name][module] = None
        return {name: list(modules) for name, modules in sorted(homes.items()) if len(modules) > 1}

    def any_in_signatures(self) -> list[tuple[str, bool]]:
        """(module:line, whether it is all that a public function says of a parameter or result) per ``Any``.

        ``*args`` and ``**kwargs`` are not such a parameter: they hand on what someone else declares.
        """
        places = []
        for module, tree in self.parsed.items():
            for node in ast.walk(tree):
                if isinstance(node, FunctionNode):
                    is_public = not node.name.startswith("_") or node.name.endswith("__")
                    places += [(f"{module}:{line}", is_bare and is_public) for line, is_bare in _any_of(node)]
        return places

    def broad_excepts(self) -> list[tuple[str, bool]]:
        """(module:line, whether a comment says why) of each handler of every error."""
        places = []
        for module, tree in self.parsed.items():
            lines = self.texts[module].splitlines()
            for node in ast.walk(tree):
                if isinstance(node, ast.ExceptHandler) and _is_broad(node):
                    comments = lines[node.lineno - 2 : node.body[0].lineno]
                    places.append((f"{module}:{node.lineno}", any("#" in line for line in comments)))
        return places

    def recipe_paths(self) -> list[str]:
        """Texts in code that name a module of ``recipe``, docstrings aside."""
        return [place for place, text in self._texts_in_code() if re.search(r"\brecipe\.[a-z_]+", text)]

    def backend_places(self) -> list[str]:
        """Texts in code that are a backend's name, where none belongs."""
        away = [(place, text) for place, text in self._texts_in_code() if not place.startswith(AT_HOME)]
        return [place for place, text in away if text in BACKENDS]

    def odd_words(self) -> int:
        """How often `ODD_WORDS` stand anywhere in the code."""
        return sum(len(ODD_WORDS.findall(text)) for text in self.texts.values())

    def assignments_to(self, name: str) -> int:
        nodes = (node for tree in self.parsed.values() for node in ast.walk(tree))
        return sum(isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name for node in nodes)

    def clone_share(self) -> float:
        """Percent of lines that stand in a window of `WINDOW` lines that is there twice."""
        places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
        total = 0
        for module, text in self.texts.items():
            plain = [line.strip() for line in text.splitlines()]
            lines = [line for line in plain if len(line) > 3 and not line.startswith(("#", "import ", "from "))]
            total += len(lines)
            for start in range(len(lines) - WINDOW + 1):
                places[tuple(lines[start : start + WINDOW])].append((module, start))
        cloned = {
            (module, start + i)
            for spots in places.values()
            if len(spots) > 1
            for module, start in spots
            for i in range(WINDOW)
        }
        return round(100 * len(cloned) / total, 2)

    def leaves(self) -> tuple[int, int] | None:
        """Settings of a PPO run that are declared, and that work; None where the code of a commit counts otherwise."""
        if not (self.tree / "verl" / "config").is_dir():
            return None  # an installed verl would answer in its stead
        environment = {**os.environ, "PYTHONPATH": str(self.tree)}
        run = subprocess.run(
            [sys.executable, "-c", LEAVES], cwd=self.tree, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode:
            return None
        declared, works = map(int, run.stdout.split())
        return declared, works

    def _texts_in_code(self) -> Iterator[tuple[str, str]]:
        """(module:line, text) of every text that is no statement of its own, as docstrings are."""
        for module, tree in self.parsed.items():
            alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                    yield f"{module}:{node.lineno}", node.value


def _any_of(function: FunctionNode) -> Iterator[tuple[int, bool]]:
    """(line, whether the annotation is nothing else) of each ``Any`` in one signature."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    annotations = [(argument.annotation, True) for argument in named]
    annotations += [(argument.annotation, False) for argument in rest] + [(function.returns, True)]
    for annotation, counts in annotations:
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name) and node.id == "Any":
                yield node.lineno, counts and node is annotation


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(isinstance(n, ast.Name) and n.id in BROAD for n in ast.walk(handler.type))


def circles(graph: Mapping[str, Iterable[str]]) -> set[tuple[str, ...]]:
    """The strongly connected components of more than one module (Tarjan, 1972), each sorted."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: set[tuple[str, ...]] = set()

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in graph[module]:
            if target not in number:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == number[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                components.add(tuple(sorted(stack[start:])))
            del stack[start:]

    for module in graph:
        if module not in number:
            visit(module)
    return components


def room_of(module: str, path: Path) -> str:
    """``verl.trainer.ppo.step`` -> ``trainer``; ``verl`` for a module that is no folder's."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and path.name == "__init__.py") else "verl"


def measure(house: House) -> Counts:
    """The counts that `tests/sanity/test_house.py` holds."""
    rings, anys, broad = circles(house.graph), house.any_in_signatures(), house.broad_excepts()
    return {
        "class names that exist twice": len(house.twin_classes()),
        "of these in rooms that import each other": len(house.close_twins()),
        "module circles": len(rings),
        "modules in circles": sum(map(len, rings)),
        "recipe paths in verl/": len(house.recipe_paths()),
        "places that name a backend": len(house.backend_places()),
        "words outside the glossary": house.odd_words(),
        **{f"assignments to `{name}`": house.assignments_to(name) for name in PARTICIPLES},
        "public functions of one name in several modules": len(house.twin_functions()),
        "`Any` in signatures": len(anys),
        "of these all that a public parameter or result says": sum(is_bare for _, is_bare in anys),
        "broad excepts": len(broad),
        "of these without a reason": sum(not has_reason for _, has_reason in broad),
        "cloned lines, %": house.clone_share(),
    }


def everything(tree: Path) -> Counts:
    """All rows of the table."""
    house = House(tree)
    leaves, rooms = house.leaves(), house.lines()
    rows: Counts = {}
    if leaves is not None:
        rows |= {"leaves declared": leaves[0], "leaves that work, %": round(100 * leaves[1] / leaves[0], 1)}
    rows |= measure(house)
    rows["lines of verl/"] = sum(rooms.values())
    return rows | {f"lines of {room}": count for room, count in sorted(rooms.items())}


def table(now: Counts, before: Counts | None, revision: str) -> str:
    """Markdown; a row that one side cannot count has a dash there."""
    head = ["what", *([revision] if before is not None else []), "now"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in dict.fromkeys([*now, *(before or {})]):
        cells = [counts.get(name, "-") for counts in ([now] if before is None else [before, now])]
        lines.append(f"| {name} | " + " | ".join(f"{cell:,}" if cell != "-" else "-" for cell in cells) + " |")
    return "\n".join(lines)


def frames_of(runtime: str) -> int:
    """Frames between the loop and the optimizer, counted in a run of its own process."""
    command = [sys.executable, str(ROOT / "scripts/count_frames.py"), "--runtime", runtime]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return int(re.findall(rf"^{runtime}: (\d+) frames", said, re.MULTILINE)[0])


def at_revision(revision: str) -> Counts:
    """The counts of a commit of this repository, counted by this file."""
    command = ["git", "archive", revision, "verl"]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return everything(Path(folder))


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", metavar="REV", help="a commit to compare with")
    parser.add_argument("--frames", action="store_true", help="of now, counted in a run in one process and one on Ray")
    parser.add_argument("--json", action="store_true", help="the counts of now as JSON")
    parser.add_argument("--places", action="store_true", help="where each of what may only fall stands")
    chosen = parser.parse_args(argv)
    if chosen.places:
        house = House(ROOT)
        for name, modules in house.twin_classes().items():
            print(f"class {name}{' (close)' if name in house.close_twins() else ''}: {', '.join(modules)}")
        print("\n".join(f"def {name}: {', '.join(modules)}" for name, modules in house.twin_functions().items()))
        print("\n".join(f"Any: {place}" for place, is_bare in house.any_in_signatures() if is_bare))
        print("\n".join(f"except{'' if why else ' (no reason)'}: {place}" for place, why in house.broad_excepts()))
        print("\n".join([f"recipe: {place}" for place in house.recipe_paths()]))
        print("\n".join([f"backend: {place}" for place in house.backend_places()]))
        print("\n".join(f"circle: {' <-> '.join(ring)}" for ring in sorted(circles(house.graph))))
        return 0
    now = everything(ROOT)
    if chosen.frames:
        now = {
            f"frames from stages.train to optimizer.step, {name}": frames_of(name) for name in ("local", "ray")
        } | now
    before = at_revision(chosen.against) if chosen.against else None
    print(json.dumps(now, indent=1) if chosen.json else table(now, before, chosen.against or ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
