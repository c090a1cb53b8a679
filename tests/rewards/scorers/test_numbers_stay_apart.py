"""One number is never made of two, whole numbers are compared as such, and an empty answer is right nowhere."""

from __future__ import annotations

import pytest

from verl.rewards.scorers import code, geo3k, gsm8k, math_boxed, math_dapo, numina, search_qa
from verl.sandbox import Outcome

RIGHT = {
    "gsm8k": lambda answer, truth: gsm8k.compute_score(f"#### {answer}", truth) == 1.0,
    "gsm8k, lenient": lambda answer, truth: gsm8k.compute_score(f"#### {answer}", truth, lenient=True) == 1.0,
    "gsm8k, flexible": lambda answer, truth: (
        gsm8k.compute_score(f"it is {answer}", truth, method="flexible", lenient=True) == 1.0
    ),
    "math": lambda answer, truth: math_boxed.compute_score(rf"\boxed{{{answer}}}", truth) == 1.0,
    "dapo": lambda answer, truth: math_dapo.compute_score(f"Answer: {answer}", truth)["acc"],
    "dapo, strict": lambda answer, truth: math_dapo.compute_score(
        rf"\boxed{{{answer}}}", truth, strict_box_verify=True
    )["acc"],
    "geo3k": lambda answer, truth: geo3k.compute_score(rf"\boxed{{{answer}}}", truth) == 0.9,
    "numina": lambda answer, truth: numina.compute_score(rf"\boxed{{{answer}}}", truth)["acc"],
    "search": lambda answer, truth: search_qa.compute_score(f"<answer>{answer}</answer>", truth) == 1.0,
    "search, part": lambda answer, truth: search_qa.compute_score_subem(f"<answer>{answer}</answer>", truth) == 1.0,
}
TWO_NUMBERS = ("5,7", "5, 7", "5{,}7", "5 cm 7", r"5\$7", r"5\!,7", "5. 7", "5;7", r"5\%7", "5 or 7", "5%7", "5 ways 7")
EMPTY = ("", " ", r"\!", r"\text{}", r"\$", "a", ",", "%", " " * 500)
WITHOUT_CONTENT = ("", " ", "$", r"\$", r"\text{}", "the", ",", "%", ".")


@pytest.mark.parametrize("scorer", RIGHT)
def test_two_numbers_are_not_one(scorer):
    assert [two for two in TWO_NUMBERS if RIGHT[scorer](two, "57")] == [], "as the answer"
    pairs = [(one, two) for one in ("57", "5.7") for two in TWO_NUMBERS]
    assert [pair for pair in pairs if RIGHT[scorer](*pair)] == [], "as the truth"


@pytest.mark.parametrize("scorer", RIGHT)
def test_a_mixed_number_is_not_the_fraction_of_its_digits(scorer):
    assert not RIGHT[scorer]("1 1/2", "11/2")
    assert not RIGHT[scorer]("11/2", "1 1/2")


@pytest.mark.parametrize("scorer", [name for name in RIGHT if name not in ("math", "dapo, strict")])
def test_thousands_may_be_set_off(scorer):
    assert RIGHT[scorer]("1,234,567", "1234567")


@pytest.mark.parametrize("scorer", RIGHT)
def test_an_empty_answer_is_never_right(scorer):
    pairs = [(answer, truth) for answer in EMPTY for truth in WITHOUT_CONTENT if not answer.strip() or answer != truth]
    assert [pair for pair in pairs if RIGHT[scorer](*pair)] == []


@pytest.mark.parametrize("scorer", ["numina", "geo3k", "math", "dapo", "gsm8k", "gsm8k, lenient", "search"])
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1000009000.0", "1000000000"),
        ("1000009000", "1000000000.0"),
        ("1000009000", "1000000000"),
        ("12346", "12345"),
        ("12346.0", "12345"),
        ("100000000000000000000001", "100000000000000000000000"),
        ("12344.5", "12345"),
    ],
)
def test_whole_numbers_are_compared_as_such(scorer, answer, truth):
    assert not RIGHT[scorer](answer, truth)
    assert not RIGHT[scorer](truth, answer)
    assert RIGHT[scorer](truth, truth)


MATHEMATICS = ("math", "dapo", "geo3k", "numina")


@pytest.mark.parametrize(
    ("answer", "truth", "scorers"),
    [
        (r"50\%", "50", ("math", "geo3k", "numina")),
        (r"50\%", "0.5", ("numina",)),
        ("x=5", "5", MATHEMATICS),
        ("5 cm", "5", ("dapo", "geo3k", "numina")),
        ("5 cm", "5 inches", ()),
        ("5%", "5", ("geo3k", "numina")),
        ("5%", "0.05", ("numina",)),
        ("5%", "500", ()),
        ("500", "5%", ()),
        ("2,1", "1,2", ()),
        ("2/4", "1/2", ()),
        ("1,000", "1000", ("dapo", "geo3k", "numina")),
        (r"4\pi", "12.56", ("numina",)),
        ("3.14159", "3.1416", ("numina",)),
        ("5 dollars", "5", ("dapo",)),
    ],
)
def test_the_conventions_that_the_page_lists(answer, truth, scorers):
    assert tuple(name for name in MATHEMATICS if RIGHT[name](answer, truth)) == scorers


@pytest.mark.parametrize("scorer", MATHEMATICS)
@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5 minutes", "5 hours"),
        (r"5\text{ cm}", r"5\text{ m}"),
        (r"5\text{ cm}", r"5\text{ cm}^2"),
        (r"5\text{ square cm}", r"5\text{ cm}^3"),
        (r"5\text{m}", r"5\text{s}"),
        ("5 mph", "5 kilometers per hour"),
        (r"5\%", r"5^\circ"),
        (r"\$5", "5 cents"),
        ("5 students", "5 meals"),
        ("x=5", "y=5"),
        ("x_1=5", "x_2=5"),
        (r"\theta = 5", r"\alpha = 5"),
        ("2x=5", "x=5"),
        ("AB=5", "BC=5"),
        ("f(2)=5", "f(3)=5"),
        ("99999.6", "100000"),
        ("-5", "5"),
    ],
)
def test_a_unit_an_unknown_or_a_sign_that_both_name_is_the_same(scorer, answer, truth):
    assert not RIGHT[scorer](answer, truth) and not RIGHT[scorer](truth, answer)
    assert RIGHT[scorer](answer, answer)


@pytest.mark.parametrize(
    ("answer", "truth", "scorers"),
    [
        (r"5\text{ cm}", r"5\text{ centimeters}", ("math", "geo3k", "numina")),
        (r"5\text{ square inches}", r"5\text{ in}^2", ("math", "geo3k", "numina")),
        (r"3\text{ square inches}", "3", MATHEMATICS),
        ("90 degrees", r"90^\circ", ("dapo", "geo3k", "numina")),
        ("x=5", "X = 5", MATHEMATICS),
        ("the value of x is x=5", "x=5", ("dapo",)),
        (r"1\text{ or }2", "1", ()),
        (r"1\text{ or }2", r"1\text{ or }3", ()),
    ],
)
def test_other_spellings_of_a_unit_or_unknown_are_the_same(answer, truth, scorers):
    assert tuple(name for name in MATHEMATICS if RIGHT[name](answer, truth)) == scorers


@pytest.mark.parametrize("below", ["0", "00", "000"])
@pytest.mark.parametrize("truth", ["5", "1 5/00", "1"])
def test_a_mixed_number_without_a_value_is_wrong_and_raises_nothing(below, truth):
    answer = f"1 5/{below}"
    assert geo3k.compute_score(rf"\boxed{{{answer}}}", truth) == (0.9 if answer == truth else 0.0)
    assert numina.compute_score(rf"\boxed{{{answer}}}", truth)["acc"] is (answer == truth)


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("1000009000.0", "1000000000", False),
        ("1000009000", "1000000000.0", False),
        ("1000000000.0", "1000000000", True),
        ("1000000000.2", "1000000000", False),
        ("1000000000.00001", "1000000000", True),
        ("99999.6", "100000", False),
        ("100000", "99999.6", False),
        ("1e9", "1000000000", True),
        ("1.00001e9", "1000000000", False),
        ("99999", "100000", False),
        ("0.333333", "0.3333333333", True),
        ("2.9999999", "3", True),
        ("1" * 30, "1" * 29 + "2", False),
        ("1e999", "1e999", True),
        ("1e999", "2e999", False),
    ],
)
def test_printed_whole_numbers_are_compared_as_such(printed, expected, right):
    assert code.same_output(printed, expected) is right


class Returns:
    """Stands for a sandbox in which the function returned this JSON."""

    def __init__(self, value: str):
        self.value, self.shown = value, []

    def run(self, program, stdin, seconds):
        import json

        self.shown.append(program)
        return Outcome("ok", stdout=f"\n{json.loads(stdin)['mark']}{self.value}\n")


@pytest.mark.parametrize(
    ("returned", "expected", "right"),
    [
        ("1" + "0" * 400, 2.5, False),
        ("-1" + "0" * 400, 1e308, False),
        ("2.5", 10**400, False),
        ("[1" + "0" * 400 + "]", [2.5], False),
        ("1" + "0" * 400, 10**400, True),
        ("1" + "0" * 5000, 2.5, False),
        ("1000009000.0", 1_000_000_000, False),
        ("1000009000", 1_000_000_000.0, False),
        ("1000000000.0", 1_000_000_000, True),
        (str(2**53 + 1), float(2**53), True),  # the nearest float
        ("1" + "0" * 23, 1e23, True),
        (str(10**17 + 1), 10**17, False),
        ("NaN", 1.0, False),
        ("Infinity", 1e308, False),
        ("1e999", 1.0, False),
        ("[" * 500 + "]" * 500, [1], False),
        ("[" * 100_000, [1], False),
        ("true", 1, False),
        ('{"a": true}', {"a": 1}, False),
        ('{"a": 1}', {"a": True}, False),
        ('{"a": [1, {"b": false}]}', {"a": [1, {"b": 0}]}, False),
        ('{"a": [1, {"b": false}]}', {"a": [1, {"b": False}]}, True),
        ('{"a": 1}', {"b": 1}, False),
        ('{"a": 99999.6}', {"a": 100000}, False),
        ("99999.6", 100_000, False),
        ("1.0000001", 1.0, True),
    ],
)
def test_returned_numbers_of_any_size_are_compared(returned, expected, right):
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [expected]}
    assert code.compute_score("def f(x): ...", tests, Returns(returned))["acc"] is right


@pytest.mark.parametrize("text", ["", " \n", "```python\n```", "```python\n\n\n```"])
def test_an_empty_program_passes_no_test_and_is_not_run(text):
    runner = Returns("1")
    found = code.compute_score(text, {"inputs": ["1", "2"], "outputs": ["", ""]}, runner)
    assert found["score"] == 0.0 and found["verdict"] == "empty" and runner.shown == []
