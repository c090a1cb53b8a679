"""A reward function reaches other processes as a file that scores as the function does."""

from __future__ import annotations

import functools
import math
import re
import subprocess
import sys
from collections import Counter as Bag

import pytest

from tests.harness import rows
from verl.api.functions import reward_settings, source_file
from verl.errors import RewardError
from verl.rewards import load_reward_function

SCRIPT = '''
import functools, json, re, sys
from math import sqrt as root
from pathlib import Path

from verl.api.functions import reward_settings

BONUS = {"right": [1.0, 0.25]}
MODEL = object()

def digits(text):
    """Calls itself, too."""
    numbers = re.findall("[0-9]+", text)
    return numbers[-1] if numbers else digits("0")

def decorated(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        return fn(*args, **kwargs)
    return wrapped

def score(solution_str, ground_truth, scale=1.0):
    return scale * BONUS["right"][0] * (digits(solution_str) == ground_truth) + root(0.0625)

def uses_a_model(solution_str):
    return MODEL(solution_str)

if __name__ == "__main__":
    print(json.dumps(reward_settings(functools.partial(score, scale=2.0), Path(sys.argv[1]))))
    try:
        reward_settings(uses_a_model, Path(sys.argv[1] + ".py"))
    except Exception as error:
        print(type(error).__name__, error)
'''


def test_a_function_of_a_script_becomes_a_file_with_all_that_it_names(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "run" / "reward.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(file)], capture_output=True, text=True, check=True)
    settings, refused = done.stdout.splitlines()
    assert settings == f'{{"path": "{file}", "name": "score", "reward_kwargs": {{"scale": 2.0}}}}'
    assert refused.startswith("RewardError uses_a_model uses MODEL, a object of this program")
    fn = load_reward_function(str(file), "score", {"scale": 2.0})
    assert fn(solution_str="it is 12", ground_truth="12") == 2.25 and fn(solution_str="?", ground_truth="12") == 0.25
    assert "print" not in file.read_text() and "MODEL" not in file.read_text()


LENGTH = 3


def counted(text):
    return Bag(text).most_common(1)[0][1]


def local_score(solution_str, ground_truth=None):
    return math.floor(counted(solution_str) / LENGTH)


def test_a_function_of_a_module_stays_in_its_file(tmp_path):
    settings = reward_settings(rows.turns, tmp_path / "reward.py")
    assert settings == {"path": rows.__file__, "name": "turns"} and not (tmp_path / "reward.py").exists()


def test_a_closure_brings_its_values_and_the_functions_around_it(tmp_path):
    words = ("a", "b")

    def nested(solution_str, ground_truth):
        return float(solution_str in words) + local_score("aaab") + len(re.findall("a", ground_truth))

    settings = reward_settings(nested, tmp_path / "reward.py")
    fn = load_reward_function(settings["path"], settings["name"])
    assert fn(solution_str="a", ground_truth="aa") == nested("a", "aa") == 1 + 1 + 2


TEXT = object()
"""A global that no file can hold, under the name of a parameter and of a local variable below."""
words = TEXT


def test_a_local_variable_may_have_the_name_of_a_global_one(tmp_path):
    settings = reward_settings(shadowing, tmp_path / "reward.py")
    assert (settings["name"], shadowing("a b", "b")) == ("shadowing", 2.0)
    assert "object" not in source_file(shadowing)


def shadowing(solution_str: TEXT, ground_truth):
    words = solution_str.split()
    return float(sum(len(word) for word in words))


def test_a_file_is_named_with_its_function(tmp_path):
    assert reward_settings("my.py:score", tmp_path / "r.py") == {"path": "my.py", "name": "score"}
    assert reward_settings("my.py", tmp_path / "r.py") == {"path": "my.py"}


@pytest.mark.parametrize(
    "reward, said",
    [
        (lambda solution_str: 1.0, "a lambda cannot be written to a file"),
        (len, "a reward is a function"),
        (functools.partial(counted, "a"), "binds keywords only"),
        (3, "a reward is a function"),
    ],
)
def test_what_has_no_source_is_refused_with_the_way_out(tmp_path, reward, said):
    with pytest.raises(RewardError, match=said) as caught:
        reward_settings(reward, tmp_path / "reward.py")
    assert "my_reward.py:my_function" in str(caught.value)
