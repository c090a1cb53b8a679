"""Which built-in scorer belongs to a ``data_source``, and what to say where none does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from verl.errors import RewardError, suggest
from verl.metrics import notice
from verl.rewards.function import built_in
from verl.rewards.programs import code_runner
from verl.rewards.scorers import code, geo3k, gsm8k, math_boxed, math_dapo, numina, search_qa, tagged
from verl.rewards.scorers.text import last_braced

LONGEST_VOTE = 1000
BuiltinScorer = Callable[..., "float | dict[str, Any]"]

SCORERS: dict[str, BuiltinScorer] = {
    "openai/gsm8k": gsm8k.compute_score,
    "lighteval/MATH": math_boxed.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math_boxed.compute_score,
    "HuggingFaceH4/MATH-500": math_boxed.compute_score,
    "math_dapo": math_dapo.compute_score,
    "math": math_dapo.compute_score,
    "math_dapo_reasoning": math_dapo.compute_score,
    "hiyouga/geometry3k": geo3k.compute_score,
    "lmms-lab/multimodal-open-r1-8k-verified": tagged.compute_score,
    "Zhang199/TinyLLaVA-Video-R1-training-data": tagged.same_option,
    "codecontests": code.compute_score,
    "apps": code.compute_score,
    "codeforces": code.compute_score,
    "taco": code.compute_score,
}
PREFIXES: dict[str, BuiltinScorer] = {
    "aime": math_dapo.compute_score,
    "searchR1_": search_qa.compute_score,
    "numina_": numina.compute_score,
}
ANSWERS: dict[BuiltinScorer | None, Callable[[str], str | None]] = {
    gsm8k.compute_score: gsm8k.extract_solution,
    math_boxed.compute_score: lambda text: _spelled(math_boxed.last_boxed(text), math_boxed.normalize),
    geo3k.compute_score: lambda text: _spelled(last_braced(text, r"\boxed"), geo3k.simplify),
    tagged.compute_score: lambda text: _spelled(tagged.answer(text), geo3k.simplify),
    tagged.same_option: lambda text: _spelled(tagged.answer(text), str.upper),
    search_qa.compute_score: lambda text: _spelled(search_qa.extract_solution(text), search_qa.normalize_answer),
}
"""What the scorers that return a bare number read as the answer; the others report it as ``pred``."""
WAITING = (code.compute_score, geo3k.compute_score, numina.compute_score, tagged.compute_score)
"""Scorers that wait for another process: several answers are better scored at once."""

OWN_FUNCTION = (
    "Set reward.custom_reward_function.path to a Python file with a function "
    "compute_score(data_source, solution_str, ground_truth, extra_info)"
)


def known_data_sources() -> list[str]:
    """All names and prefixes (written ``aime*``) that have a built-in scorer."""
    return sorted([*SCORERS, *(f"{prefix}*" for prefix in PREFIXES)])


def find_scorer(data_source: object) -> BuiltinScorer:
    """The built-in scorer of a data source.

    Raises:
        RewardError: the source is unknown or missing; the message names both ways out.
    """
    if not isinstance(data_source, str) or not data_source:
        raise missing_data_source(f"a row has no data_source (it holds {data_source!r})")
    scorer = _known(data_source)
    if scorer is not None:
        return scorer
    raise RewardError(
        "no built-in scorer for this data_source",
        key="data_source",
        got=data_source,
        allowed=known_data_sources(),
        fix=" ".join(filter(None, [_nearest(data_source), f"{OWN_FUNCTION}, or give the rows one of these names."])),
    )


def check_data_sources(data_sources: Iterable[Any] | None, column: str = "data_source") -> None:
    """Raise before a run if the built-in scorers cannot score these rows; ``None`` says that the column is missing."""
    if data_sources is None:
        raise missing_data_source(f"the data has no column {column!r} and no reward function is set", column)
    for source in {s if isinstance(s, str) else None for s in data_sources}:
        find_scorer(source)


def missing_data_source(message: str, column: str = "data_source") -> RewardError:
    """The error for rows that say nothing about how to score them; it names both ways out."""
    return RewardError(
        message,
        key=column,
        allowed=known_data_sources(),
        fix=f"{OWN_FUNCTION}, or add a column {column!r} whose value names a built-in scorer.",
    )


@built_in
def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int = 64,
    allow_missing: Sequence[str] = (),
    **kwargs: Any,
) -> float | dict[str, Any]:
    """The score of one answer by the scorer of its ``data_source``: a float, or a dict with ``score``.

    ``kwargs`` reach the scorer that has them (``method``, ``lenient``, ``strict_box_verify``, ...).

    Args:
        sandbox_fusion_url: a service that runs programs; without it the local sandbox does.
        concurrent_semaphore: held during a request to the service, instead of one of ``max_concurrent`` places.
        memory_limit_mb: memory of a program.
        allow_missing: layers that the local sandbox may lack.
    """
    scorer = find_scorer(data_source)
    options = _options_of(scorer, kwargs) if kwargs else {}
    if scorer is code.compute_score:
        options.setdefault("continuous", True)
        options["runner"] = code_runner(
            sandbox_fusion_url, max_concurrent, memory_limit_mb, concurrent_semaphore, allow_missing
        )
    return scorer(solution_str, ground_truth, **options)


def waits(data_source: object) -> bool:
    """Whether the scorer of a data source waits for another process."""
    return isinstance(data_source, str) and _known(data_source) in WAITING


def answer_of(data_source: object, solution_str: str) -> str | None:
    """The final answer that a source's scorer reads in a text, in one spelling, to count votes; None without one."""
    read = ANSWERS.get(_known(data_source)) if isinstance(data_source, str) else None
    return None if read is None else read(solution_str)


def runs_programs(data_source: object) -> bool:
    """Whether answers of a data source are programs."""
    return isinstance(data_source, str) and _known(data_source) is code.compute_score


def _spelled(answer: str | None, spelling: Callable[[str], str]) -> str | None:
    return None if answer is None or len(answer) > LONGEST_VOTE else spelling(answer)


def _known(data_source: str) -> BuiltinScorer | None:
    scorer = SCORERS.get(data_source)
    if scorer is None:
        scorer = next((one for prefix, one in PREFIXES.items() if data_source.startswith(prefix)), None)
    return scorer


def _options_of(scorer: BuiltinScorer, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = {name for fn in (*SCORERS.values(), *PREFIXES.values()) for name in inspect.signature(fn).parameters}
    for name in kwargs.keys() - names:
        notice(
            f"reward option {name}", f"no built-in scorer has it, so it has no effect. {suggest(name, names)}".strip()
        )
    return {name: value for name, value in kwargs.items() if name in inspect.signature(scorer).parameters}


def _nearest(data_source: str) -> str:
    """A known name that is near, or whose last part is: ``gsm8k`` -> ``openai/gsm8k``."""
    near = suggest(data_source, SCORERS)
    if near:
        return near
    tail = data_source.lower().rpartition("/")[2]
    same = [name for name in SCORERS if tail and name.lower().rpartition("/")[2] == tail]
    return f"Did you mean {same[0]!r}?" if same else ""
