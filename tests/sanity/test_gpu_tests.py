"""`python -m tests.gpu` runs on a machine without pytest: its tests take no fixtures and import nothing of it."""

from __future__ import annotations

import ast


def test_tests_for_a_gpu_need_no_pytest(project_root):
    for path in sorted((project_root / "tests/gpu").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert not ast.unparse(node.args), f"{path.name}: {node.name} takes a fixture"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert "pytest" not in (module, *names), f"{path.name} imports pytest"
