"""Which of the accepted forms a reward function has, read off the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import Parameter
from typing import Any

from verl.errors import RewardError, suggest


class Form(StrEnum):
    """How a reward function is called."""

    SINGLE = "single"
    """``(data_source, solution_str, ground_truth, extra_info)`` -> a score, once per answer."""
    BATCH = "batch"
    """``(data_sources, solution_strs, ground_truths, extra_infos)`` -> a list, once per batch."""
    RESPONSES = "responses"
    """``(responses, ground_truths)`` -> a list, once per batch."""


FIELDS: dict[Form, tuple[str, ...]] = {
    Form.SINGLE: ("solution_str", "data_source", "ground_truth", "extra_info"),
    Form.BATCH: ("solution_strs", "data_sources", "ground_truths", "extra_infos"),
    Form.RESPONSES: ("responses", "data_sources", "ground_truths", "extra_infos"),
}
"""The parameters of each form. The first one is what tells the form; a function may leave out any of the others."""

BY_PLACE = ("data_source", "solution_str", "ground_truth")
"""What upstream's evaluation passes by position, whatever the parameters are called."""

OF_SCORERS = (("predict_str", "ground_truth"), ("model_output", "ground_truth"))
"""How upstream's own scorers name the text and the truth; they get both by position."""

ALLOWED = (
    "(data_source, solution_str, ground_truth, extra_info=None) for one answer; "
    "(data_sources, solution_strs, ground_truths, extra_infos) for the whole batch; "
    "(responses, ground_truths) for the whole batch; parameters beyond these need a default or a value in reward_kwargs"
)


@dataclass(frozen=True)
class Signature:
    """What `read_form` found: the form, and which of its fields go in by position and by name."""

    form: Form
    positional: tuple[str, ...]
    named: tuple[str, ...]


def read_form(
    fn: Callable[..., Any], given: Iterable[str] = (), where: str = "", default: Form = Form.SINGLE
) -> Signature:
    """Read the form of a function.

    Args:
        given: the names in ``reward_kwargs``, which are passed with the form's fields.
        where: the function and its file, for the message.
        default: the form of a function that takes everything as ``**kwargs``.

    Raises:
        RewardError: the parameters match no form, or ``reward_kwargs`` does not fit them.
    """
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where}: its parameters cannot be read", allowed=ALLOWED) from error
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    names = [p.name for p in parameters.values() if p.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)]
    given = list(given)
    if _is_by_place(parameters, names, given):
        _check_kwargs(given, names, Form.SINGLE, takes_all, where)
        named = [name for name in names[3:] if name in FIELDS[Form.SINGLE]]
        return Signature(Form.SINGLE, BY_PLACE, tuple(named))
    if tuple(names[:2]) in OF_SCORERS and all(parameters[name].default is not Parameter.empty for name in names[2:]):
        _check_kwargs(given, names, Form.SINGLE, takes_all, where)
        return Signature(Form.SINGLE, ("solution_str", "ground_truth"), ())
    form = _form_of(names, default if takes_all else None, where)
    _check_kwargs(given, names, form, takes_all, where)
    needed = [name for name in names if parameters[name].default is Parameter.empty]
    unknown = [name for name in needed if name not in FIELDS[form] and name not in given]
    if unknown:
        raise RewardError(
            f"{where}: nothing is known that could be passed as {unknown[0]!r}",
            got=_shown(names),
            allowed=ALLOWED,
            fix=suggest(unknown[0], FIELDS[form]),
        )
    positional = [name for name in names if parameters[name].kind is Parameter.POSITIONAL_ONLY]
    named = [name for name in FIELDS[form] if (name in names or takes_all) and name not in positional]
    return Signature(form, tuple(positional), tuple(named))


def _is_by_place(parameters: Mapping[str, Parameter], names: list[str], given: list[str]) -> bool:
    """Whether the first three can only be `BY_PLACE` under other names: ``(data_source, response, gt)``."""
    if names[:1] != ["data_source"] or any(fields[0] in names for fields in FIELDS.values()):
        return False
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    needed = [name for name in names if parameters[name].default is Parameter.empty and name not in given]
    return needed == names[:3] and len(needed) == 3 and all(parameters[name].kind in kinds for name in needed)


def _form_of(names: list[str], default: Form | None, where: str) -> Form:
    matching = [form for form, fields in FIELDS.items() if fields[0] in names]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise RewardError(f"{where}: its parameters mix two forms", got=_shown(names), allowed=ALLOWED)
    if default is not None:  # def compute_score(**kwargs)
        return Form.BATCH if any(name in FIELDS[Form.BATCH] for name in names) else default
    near = next((hint for hint in (suggest(name, [f[0] for f in FIELDS.values()]) for name in names) if hint), "")
    raise RewardError(f"{where}: no parameter says which text is scored", got=_shown(names), allowed=ALLOWED, fix=near)


def _check_kwargs(given: list[str], names: list[str], form: Form, takes_all: bool, where: str) -> None:
    for name in given:
        if name in FIELDS[form]:
            raise RewardError(f"{where}: {name!r} comes from the data", key=f"reward_kwargs.{name}")
        if name not in names and not takes_all:
            raise RewardError(
                f"{where} has no such parameter", key=f"reward_kwargs.{name}", allowed=names, fix=suggest(name, names)
            )


def _shown(names: list[str]) -> str:
    return f"({', '.join(names)})"
