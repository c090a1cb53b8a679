"""One program against tests, each with its own verdict, under upstream's path."""

from collections.abc import Mapping
from typing import Any

from verl.json_text import read_json
from verl.rewards.programs import code_runner
from verl.rewards.scorers import code


def run_test(in_outs: Any, test: str | None = None, debug: bool = False, timeout: float = 15) -> tuple[Any, Any]:
    """(whether each test passes, what became of the last one); ``timeout`` seconds for each."""
    cases = in_outs if isinstance(in_outs, Mapping) else read_json(in_outs)
    verdicts = []
    for given, expected in zip(cases["inputs"], cases["outputs"], strict=True):
        one = {**cases, "inputs": [given], "outputs": [expected]}
        verdicts.append(code.compute_score(f"```python\n{test or ''}\n```", one, code_runner(), seconds=timeout))
    return [scored["acc"] for scored in verdicts], verdicts[-1]
