import pytest

from verl.config import SFTTrainerConfig, leaves
from verl.config.schema.node import build, convert, describe, expand_path, schema_of
from verl.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "wanted", "expected"),
    [
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        ("-.5", float, -0.5),
        ("inf", float, float("inf")),
        (3.0, int, 3),
        ("8", int, 8),
        (2**60, int, 2**60),
        (True, bool, True),
        ("False", bool, False),
        ("on", bool, True),
        (0, bool, False),
        (7, str, "7"),
        ("a", list, ["a"]),
        (("a", "b"), list, ["a", "b"]),
        (["0.9", 1], list[float], [0.9, 1.0]),
        ({"a": 1}, dict, {"a": 1}),
        (None, int | None, None),
        ("None", int | None, None),
        ("null", str | None, None),
        ("0.5_2.0", float | str, "0.5_2.0"),
        (2, float | str, 2.0),
        ("all-linear", str | list, "all-linear"),
        (["q_proj"], str | list, ["q_proj"]),
    ],
)
def test_a_value_that_can_only_mean_one_thing_is_converted(value, wanted, expected):
    got = convert(value, wanted)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("ten", int),
        (2.5, int),
        ("1_000", int),
        (True, int),
        (None, int),
        (float("nan"), float),
        ("0.5_2", float),
        (True, float),
        ([1], float),
        ("maybe", bool),
        (2, bool),
        (None, bool),
        (True, str),
        (["a"], str),
        (None, str),
        (5, list),
        ("", list),
        (["a"], list[float]),
        ("a", dict),
        ([1], dict),
    ],
)
def test_a_value_that_means_something_else_is_refused(value, wanted):
    with pytest.raises(TypeError):
        convert(value, wanted)


def test_the_expected_type_is_described_in_words():
    assert describe(int | None) == "a whole number or null"
    assert describe(float | str | list) == "a number or a text or a list"
    assert describe(dict) == "a mapping"


def test_home_and_variables_expand_in_paths_and_lists_of_paths(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("RM_PATH", "/models/rm")
    assert expand_path("~/data/x.parquet", "k") == "/home/me/data/x.parquet"
    assert expand_path(["$RM_PATH/a", "${RM_PATH}/b"], "k") == ["/models/rm/a", "/models/rm/b"]
    assert expand_path("Qwen/Qwen2.5-0.5B-Instruct", "k") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert expand_path(None, "k") is None


def test_a_variable_that_is_not_set_is_an_error_that_names_it(monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(ConfigError, match=r"data.train_files: the environment variable NOT_SET_HERE is not set"):
        expand_path("$NOT_SET_HERE/x", "data.train_files")


def test_a_built_tree_shares_no_list_with_the_values_it_was_built_from():
    values = {key: leaf.default for key, leaf in schema_of(SFTTrainerConfig).leaves.items()}
    made = build(SFTTrainerConfig, values)
    made.trainer.logger.append("x")
    assert values["trainer.logger"] == ["console", "file"]
    assert {key for key, _ in leaves(SFTTrainerConfig)} == set(values)
