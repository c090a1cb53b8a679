"""Rules as data: a range and a switch at a setting, rows about a section wherever it stands."""

from dataclasses import dataclass

import pytest

from verl.config import ConfigNode, replace, section, setting
from verl.config.rules.checks import NOTICE, Rule, out_of_bounds, problems_of_rows, tell, tell_without_effect
from verl.config.schema.tree import COUNT, SHARE, at_most
from verl.errors import ConfigError, NotBuiltError


@dataclass(frozen=True)
class Fade(ConfigNode):
    enable: bool = setting(False, "fade out")
    share: float | None = setting(0.5, "part of the run", within=SHARE)
    steps: int = setting(4, "how long", within=(COUNT, at_most(9)))
    shape: str = setting("line", "line or wave")
    waves: int = setting(1, "of a wave", needs=".shape=wave or twist")


@dataclass(frozen=True)
class Show(ConfigNode):
    begin: Fade = section(Fade)  # noqa: RUF009
    end: Fade = section(Fade, needs=".enable=true")  # noqa: RUF009


def keys(problems):
    return [(type(problem), problem.key, problem.got, problem.allowed) for problem in problems]


def test_a_bound_is_judged_in_every_place_of_its_section():
    cfg = replace(Show(), **{"begin.share": 1.5, "end.steps": 0})
    assert keys(out_of_bounds(cfg)) == [
        (ConfigError, "begin.share", 1.5, "0 to 1"),
        (ConfigError, "end.steps", 0, "1 or more"),
    ]
    assert keys(out_of_bounds(replace(cfg, **{"begin.share": None, "end.steps": 10}))) == [
        (ConfigError, "end.steps", 10, "at most 9")
    ]


@pytest.mark.parametrize(
    ("changes", "notices"),
    [
        ({}, {}),
        ({"begin.waves": 2}, {"begin.waves": "has no effect without begin.shape=wave or twist"}),
        ({"begin.waves": 2, "begin.shape": "twist"}, {}),
        ({"end.share": 0.1}, {"end.share": "has no effect without end.enable=true"}),
        ({"end.share": 0.1, "end.enable": True}, {}),
    ],
)
def test_a_setting_whose_switch_is_off_is_one_notice(told, changes, notices):
    tell_without_effect(replace(Show(), **changes))
    assert told() == notices


TABLE = {
    Fade: (Rule("shape", "{at} fades for {steps} steps as {got!r}", lambda fade: fade.steps > 5, "Set {key}=line."),),
    Show: (
        Rule("end.share", lambda show: f"{show.begin.share:g} of the run", lambda _: True, kind=NOTICE),
        Rule("begin.enable", "no", lambda show: show.begin.enable, allowed=[False], kind=NotBuiltError, shows=False),
    ),
}  # fmt: skip


def test_a_row_speaks_of_its_section_with_full_keys(told):
    cfg = replace(Show(), **{"end.steps": 6, "begin.enable": True})
    refused, long = problems_of_rows(TABLE)(cfg)
    assert keys([refused, long]) == [
        (NotBuiltError, "begin.enable", None, [False]),
        (ConfigError, "end.shape", "line", None),
    ]
    assert str(long) == "end.shape: end fades for 6 steps as 'line'. Got 'line'. Set end.shape=line."
    tell(TABLE, cfg)
    assert told() == {"end.share": "0.5 of the run"}
