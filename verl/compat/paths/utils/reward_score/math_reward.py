"""MATH under upstream's import path."""

from verl.rewards.scorers import math_boxed
from verl.rewards.scorers.math_boxed import compute_score
from verl.rewards.scorers.math_boxed import normalize as strip_string


def last_boxed_only_string(string: str) -> str | None:
    r"""The last ``\boxed{...}`` (else ``\fbox{...}``) with its command; None without one."""
    inside = math_boxed.last_boxed(string)
    if inside is None:
        return None
    if r"\boxed " in string:
        return rf"\boxed {inside}"
    return rf"\boxed{{{inside}}}" if r"\boxed" in string else rf"\fbox{{{inside}}}"


def remove_boxed(s: str) -> str:
    r"""What stands inside of ``\boxed{...}`` or behind ``\boxed ``.

    Raises:
        AssertionError: the text is neither.
    """
    if s.startswith(r"\boxed "):
        return s.removeprefix(r"\boxed ")
    if not (s.startswith((r"\boxed{", r"\fbox{")) and s.endswith("}")):
        raise AssertionError(rf"not of the form \boxed{{...}}: {s[:100]!r}")
    return s.partition("{")[2][:-1]


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are spelled alike once layout, units and fractions are."""
    return math_boxed.is_equiv(str1, str2)
