"""What must not stand in the tree: machine paths, unfinished work, and ways to run what a file or a model says."""

from __future__ import annotations

import ast
import re

from tests.sanity.source_tree import ROOT, module_name, parse, python_files, show, tracked_files

# Written so that this file does not contain what it forbids.
MACHINE_PATHS = re.compile(r"/(work)/(main|shared)|/(tmp)/(venv|plan)\b|/(root)/\.")
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b|mark\.(sk" + r"ip|xf" + r"ail)\b")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".json", ".cfg", ""}


def text_files():
    return [p for p in tracked_files() if p.suffix in TEXT_SUFFIXES and p.stat().st_size < 2_000_000]


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{show(path, number)}: {line.strip()[:100]}")
    return found


def calls(name: str) -> list[tuple[str, ast.Call, str]]:
    """All calls of ``name`` or ``something.name`` in the package, with place and module."""
    found = []
    for path in python_files("verl"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                found.append((show(path, node.lineno), node, module_name(path)))
    return found


def test_no_path_of_a_developers_machine_stands_in_the_tree():
    assert not matches(MACHINE_PATHS), "\n".join(matches(MACHINE_PATHS))


def test_nothing_unfinished_stands_in_the_tree():
    assert not matches(UNFINISHED), "\n".join(matches(UNFINISHED))


def test_an_unbuilt_feature_is_refused_by_name_and_not_by_a_bare_error():
    errors = [
        show(path, node.lineno)
        for path in python_files("verl")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Raise) and node.exc is not None and "NotImplemented" in ast.unparse(node.exc)
    ]
    assert not errors, f"raise NotBuiltError(message, key=...) instead: {errors}"


def test_no_pickle_and_no_evaluation_of_text():
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    errors = [
        show(path, node.lineno)
        for path in python_files("verl")
        for node in ast.walk(parse(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in banned
    ]
    errors += [f"{place}: {name}()" for name in ("eval", "exec") for place, _, m in calls(name) if room(m) != "sandbox"]
    assert not errors, errors


JUMPING = re.compile(r"(.*\.)?(time\.(time|time_ns|CLOCK_REALTIME)|(date|datetime)\.(now|today|utcnow))")


def test_only_stamps_and_announced_ends_read_the_clock_that_may_jump():
    """Deadlines are on the monotonic clock, but for the end of a machine, which its platform announces by this one."""
    readers = set()
    for path in python_files("verl"):
        place, nodes = path.relative_to(ROOT / "verl").as_posix(), list(ast.walk(parse(path)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in nodes:
            if isinstance(node, ast.Attribute) and JUMPING.fullmatch(ast.unparse(node)):
                around = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
                readers.add((place, max(around, key=lambda f: f.lineno).name if around else ""))
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                readers.add((place, "from time import"))
    assert readers == {
        ("agent_loop/server/replies.py", "_head"),
        ("agent_loop/server/responses_form.py", "__init__"),
        ("journal/spans.py", ""),
        ("observability/backends/mlflow.py", "log"),
        ("observability/traces.py", "_inside"),
        ("observability/traces.py", "trace"),
        ("observability/traces.py", "traced"),
        ("trainer/expiry.py", "should_save_ckpt_esi"),
        ("trainer/ppo/callbacks.py", "__init__"),
    }


def test_torch_load_reads_weights_only():
    errors = [
        place
        for place, call, _ in calls("torch.load")
        if not any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
    ]
    assert not errors, errors


OWN_JSON = {
    "verl.json_text": "the reader with limits itself",
    "verl.protocol.codec": "a damaged batch is an error there, however deep it is",
    "verl.distributed.ranks": "what another rank of the run has written",
    "verl.sandbox.inside.keeper": "the start message of the process that started it",
    "verl.sandbox.inside.watch": "runs inside of the sandbox, without the package around it",
}
"""Modules that read JSON without a limit on its nesting, and why they may."""


def test_json_from_outside_is_read_with_a_limit_on_its_nesting():
    readers = ("json.loads", "json.load", "json.JSONDecoder")
    errors = [
        f"{place}: {name}"
        for name in readers
        for place, call, module in calls(name)
        if module not in OWN_JSON and not ast.unparse(call).startswith("json.loads(json.dumps(")
    ]
    assert not errors, f"verl.json_text.read_json does it: {errors}"


SAID = re.compile(r"boundary|carried|goes on to")


def test_broad_except_stands_only_at_a_named_boundary_or_carries_the_error_on():
    errors = []
    for path in python_files("verl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            near = " ".join(lines[max(node.lineno - 2, 0) : node.lineno + 1])
            if broad and not SAID.search(near) and not _reraises(node):
                errors.append(show(path, node.lineno))
    assert not errors, f"say in a comment which boundary this is: {errors}"


def _reraises(handler: ast.ExceptHandler) -> bool:
    """A handler that cleans up and raises again swallows nothing."""
    return any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_forbidden_patterns_are_found_where_they_stand():
    assert MACHINE_PATHS.search("see /wo" + "rk/main/verl") and MACHINE_PATHS.search("/t" + "mp/venv/bin/python")
    assert UNFINISHED.search("# TO" + "DO later") and UNFINISHED.search("@pytest.mark.sk" + "ip")
    assert not MACHINE_PATHS.search("framework/main") and not UNFINISHED.search("todo list")
    assert (ROOT / "layers.toml").exists()
