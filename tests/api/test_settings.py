"""Settings of Python become words that read back as the same values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.api.settings import word_of, words_of
from verl.config.loading.files import parse_override
from verl.errors import ConfigError

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3), max_leaves=5)


@given(VALUES)
def test_every_value_reads_back_as_it_is_or_is_refused_by_its_key(value):
    try:
        word = word_of("data.x", value)
    except ConfigError as error:
        assert error.key == "data.x"
        return
    read = parse_override(word)
    assert read.key == "data.x" and read.value == value and type(read.value) is type(value)


@pytest.mark.parametrize(
    "value, word",
    [
        (None, "k=null"), (True, "k=true"), (1e-6, "k=1e-06"), (3, "k=3"), ("a/b.parquet", "k=a/b.parquet"),
        ("true", "k='true'"), ("12", "k='12'"), ("", "k="), ("it's", None), (["console", "file"], "k=[console,file]"),
        (["a b", 1, None], "k=['a b',1,null]"), ({"a": {"b": 1}}, "k={a:{b:1}}"), (("x",), "k=[x]"),
        (Path("~/data"), "k=~/data"), (np.float64(0.5), "k=0.5"), (np.int64(4), "k=4"),
    ],
)  # fmt: skip
def test_words_are_those_that_a_person_would_type(value, word):
    written = word_of("k", value)
    assert written == word if word else parse_override(written).value == value


def test_nested_and_dotted_settings_are_the_same_and_a_mapping_that_is_a_value_stays_whole():
    nested = {"trainer": {"seed": 3}, "reward": {"custom_reward_function": {"reward_kwargs": {"bonus": 0.5}}}}
    dotted = {"trainer.seed": 3, "reward.custom_reward_function.reward_kwargs": {"bonus": 0.5}}
    words = ["trainer.seed=3", "reward.custom_reward_function.reward_kwargs={bonus:0.5}"]
    assert words_of("ppo_trainer", nested) == words_of("ppo_trainer", dotted) == words


@pytest.mark.parametrize("value", [object(), np.zeros(3), [print], {1, 2}])
def test_what_no_command_line_holds_is_refused_with_its_key(value):
    with pytest.raises(ConfigError, match=r"trainer\.seed: a setting is a number, a text"):
        words_of("ppo_trainer", {"trainer": {"seed": value}})
