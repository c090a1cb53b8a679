"""A user's function is found in its file, its form is read off its parameters, every mistake has its own message."""

from __future__ import annotations

import functools

import pytest

from tests.rewards.files import reward_file, samples
from verl.errors import RewardError
from verl.rewards import Form, RewardFunction, load_reward_function

BRIEF_BATCH = r"""
    import re

    def compute_reward(responses, ground_truths):
        rewards = []
        for response, gt in zip(responses, ground_truths):
            match = re.search(r'\\boxed{([^}]+)}', response)
            if match and match.group(1).strip() == gt.strip():
                rewards.append(1.0)
            else:
                rewards.append(0.0)
        return rewards
"""
BRIEF_SINGLE = """
    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float:
        return float(solution_str == ground_truth)
"""


def test_the_batch_form_of_the_brief_is_found_without_a_name(tmp_path):
    function = load_reward_function(reward_file(tmp_path, BRIEF_BATCH))
    assert (function.name, function.form) == ("compute_reward", Form.RESPONSES)
    assert function.call(samples(r"\boxed{42}", "42")) == [1.0, 0.0]


def test_the_single_form_of_the_brief_is_found_without_a_name(tmp_path):
    function = load_reward_function(reward_file(tmp_path, BRIEF_SINGLE))
    assert (function.name, function.form) == ("compute_score", Form.SINGLE)
    assert function.call(samples("42")) == 1.0
    assert function("d", "41", "42", None) == 0.0


def test_compute_score_comes_before_compute_reward_and_before_all_others(tmp_path):
    code = """
        def helper(x): return x
        def compute_reward(responses, ground_truths): return []
        def compute_score(solution_str): return 1
    """
    assert load_reward_function(reward_file(tmp_path, code)).name == "compute_score"


def test_the_only_public_function_is_taken_whatever_its_name(tmp_path):
    code = """
        from os.path import join
        def _private(x): return x
        def score_me(data_source, solution_str, ground_truth, extra_info=None): return 1
    """
    assert load_reward_function(reward_file(tmp_path, code)).name == "score_me"


def test_several_functions_without_a_usual_name_are_listed(tmp_path):
    path = reward_file(tmp_path, "def compute_scores(solution_str): ...\ndef other(solution_str): ...\n")
    with pytest.raises(RewardError) as caught:
        load_reward_function(path)
    assert "compute_scores, other" in str(caught.value) and "Did you mean 'compute_scores'" in str(caught.value)
    assert "reward.custom_reward_function.name" in str(caught.value)


def test_a_misspelt_name_gets_the_nearest_one(tmp_path):
    with pytest.raises(RewardError, match="Did you mean 'compute_score'") as caught:
        load_reward_function(reward_file(tmp_path, BRIEF_SINGLE), name="compute_scor")
    assert "my_reward.py" in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "form"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", Form.SINGLE),
        ("data_source, solution_str, ground_truth, extra_info=None, **kwargs", Form.SINGLE),
        ("solution_str, ground_truth", Form.SINGLE),
        ("data_source, solution_str, ground_truth, extra_info, /", Form.SINGLE),
        ("*, solution_str", Form.SINGLE),
        ("**kwargs", Form.SINGLE),
        ("data_sources, solution_strs, ground_truths, extra_infos", Form.BATCH),
        ("data_sources, solution_strs, ground_truths, extra_infos, **kwargs", Form.BATCH),
        ("data_sources, **kwargs", Form.BATCH),
        ("responses, ground_truths", Form.RESPONSES),
        ("responses, ground_truths, temperature=1.0", Form.RESPONSES),
        ("responses, extra_infos", Form.RESPONSES),
    ],
)
def test_the_form_is_read_off_the_parameter_names(tmp_path, parameters, form):
    function = load_reward_function(reward_file(tmp_path, f"def compute_score({parameters}): return locals()"))
    assert function.form is form
    got = function.call(samples("a", "b") if form is not Form.SINGLE else samples("a"))
    got = {**got, **got.get("kwargs", {})}
    expected = {"solution_str": "a", "solution_strs": ["a", "b"], "responses": ["a", "b"]}
    assert [got[name] for name in expected if name in got] == [
        value for name, value in expected.items() if name in got
    ] and set(expected) & set(got)


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ("prompt, completion", "no parameter says which text is scored"),
        ("response, ground_truth", "Did you mean 'responses'"),
        ("solution_str, ground_truth, judge", "could be passed as 'judge'"),
        ("solution_str, ground_thruth", "Did you mean 'ground_truth'"),
        ("solution_str, responses", "mix two forms"),
        ("", "no parameter says which text is scored"),
        ("*args", "no parameter says which text is scored"),
    ],
)
def test_parameters_of_no_form_are_shown_with_the_allowed_forms(tmp_path, parameters, part):
    path = reward_file(tmp_path, f"def compute_score({parameters}): ...")
    with pytest.raises(RewardError) as caught:
        load_reward_function(path)
    text = str(caught.value)
    assert part in text and path in text
    assert "(data_source, solution_str, ground_truth, extra_info=None)" in text and "(responses, ground_truths)" in text


@pytest.mark.parametrize(
    "parameters",
    ["data_source, response, gt", "data_source, response, ground_truth, extra_info=None", "data_source, a, b, /"],
)
def test_three_parameters_behind_a_data_source_are_filled_by_position(tmp_path, parameters):
    file = reward_file(tmp_path, f"def compute_score({parameters}): return list(locals().values())")
    (sample,) = samples("a")
    wanted = [sample.data_source, "a", sample.ground_truth]
    wanted += [sample.extra_info] if "extra_info" in parameters else []
    assert load_reward_function(file).call([sample]) == wanted


@pytest.mark.parametrize("parameters", ["predict_str, ground_truth", "model_output, ground_truth, format_score=0.1"])
def test_a_scorer_as_upstream_writes_its_own_gets_text_and_truth(tmp_path, parameters):
    first = parameters.partition(",")[0]
    file = reward_file(tmp_path, f"def compute_score({parameters}): return [{first}, ground_truth]")
    (sample,) = samples("a")
    assert load_reward_function(file).call([sample]) == ["a", sample.ground_truth]
    file = reward_file(tmp_path, "def compute_score(predict_str, ground_truth, bonus): return bonus")
    with pytest.raises(RewardError, match="no parameter says"):
        load_reward_function(str(file))


def test_reward_kwargs_reach_a_function_that_is_filled_by_position(tmp_path):
    file = reward_file(tmp_path, "def compute_score(data_source, response, gt, bonus): return response + bonus")
    assert load_reward_function(file, reward_kwargs={"bonus": "!"}).call(samples("a")) == "a!"
    with pytest.raises(RewardError, match="has no such parameter"):
        load_reward_function(file, reward_kwargs={"bonus": "!", "other": 1})


def test_reward_kwargs_go_into_every_call(tmp_path):
    code = "def compute_score(solution_str, bonus, scale=1): return bonus * scale\n"
    function = load_reward_function(reward_file(tmp_path, code), reward_kwargs={"bonus": 2, "scale": 3})
    assert function.call(samples("a")) == 6
    assert function(solution_str="a", scale=5) == 10


@pytest.mark.parametrize(
    ("kwargs", "part"),
    [({"bonnus": 1}, "Did you mean 'bonus'"), ({"solution_str": "x"}, "comes from the data")],
)
def test_reward_kwargs_that_do_not_fit_are_refused(tmp_path, kwargs, part):
    path = reward_file(tmp_path, "def compute_score(solution_str, bonus=0): return bonus\n")
    with pytest.raises(RewardError, match=part) as caught:
        load_reward_function(path, reward_kwargs=kwargs)
    assert f"reward_kwargs.{next(iter(kwargs))}" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("def compute_score(:\n", ["SyntaxError", "line 1"]),
        ("x = 1\nraise ValueError('no model here')\n", ["ValueError: no model here", "line 2"]),
        ("import sys\nsys.exit(3)\n", ["SystemExit", "line 2"]),
        ("import helper_beside\n", ["helper_beside", "PYTHONPATH"]),
        ("x = 1\n", ["holds no public function", "compute_score"]),
    ],
)
def test_a_file_that_fails_is_named_with_the_line(tmp_path, code, parts):
    (tmp_path / "helper_beside.py").write_text("")
    path = reward_file(tmp_path, code)
    with pytest.raises(RewardError) as caught:
        load_reward_function(path)
    assert all(part in str(caught.value) for part in [*parts, path])


@pytest.mark.parametrize("name", ["my_rewards.py", ".", "data.json"])
def test_a_file_that_is_none_is_refused(tmp_path, name):
    reward_file(tmp_path, BRIEF_SINGLE)
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(RewardError, match=r"reward\.custom_reward_function\.path") as caught:
        load_reward_function(str(tmp_path / name))
    if name == "my_rewards.py":
        assert "Did you mean 'my_reward.py'" in str(caught.value)


def test_a_module_on_the_import_path_works_too():
    dotted = load_reward_function("verl.rewards.scorers.gsm8k:compute_score")
    package = load_reward_function("pkg://verl.rewards.scorers.gsm8k", name="compute_score")
    assert dotted(solution_str="#### 4", ground_truth="4") == package(solution_str="#### 4", ground_truth="4") == 1.0
    with pytest.raises(RewardError, match="no_such_package"):
        load_reward_function("no_such_package.rewards:score")


def test_callables_of_every_kind_are_wrapped(tmp_path):
    class Judge:
        def __call__(self, solution_str, ground_truth):
            return 0.5

        async def later(self, solution_str):
            return 0.5

    async def asynchronous(solution_str):
        return 1

    def plain(solution_str, weight):
        return weight

    assert RewardFunction.of(Judge()).call(samples("a")) == 0.5
    assert RewardFunction.of(functools.partial(plain, weight=3)).call(samples("a")) == 3
    assert RewardFunction.of(plain, {"weight": 4}).call(samples("a")) == 4
    assert RewardFunction.of(lambda responses: [1]).form is Form.RESPONSES
    assert RewardFunction.of(asynchronous).is_async and RewardFunction.of(Judge().later).is_async
    assert not RewardFunction.of(plain, {"weight": 4}).is_async
    with pytest.raises(RewardError, match="callable"):
        RewardFunction.of("compute_score")


def test_a_changed_file_is_loaded_anew(tmp_path):
    path = reward_file(tmp_path, "def compute_score(solution_str): return 1\n")
    assert load_reward_function(path).call(samples("a")) == 1
    reward_file(tmp_path, "def compute_score(solution_str): return 22\n")
    assert load_reward_function(path).call(samples("a")) == 22
