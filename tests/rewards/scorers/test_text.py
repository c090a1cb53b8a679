"""Which separators set off thousands, and which normalisations make one number of two."""

from __future__ import annotations

from verl.rewards.scorers.text import join_thousands, joins_digits


def test_the_thousands_that_are_joined():
    joined = {
        "1,000": "1000",
        r"12\,345\,678": "12345678",
        "1{,}000 + 2": "1000 + 2",
        "-1 000": "-1000",
        r"1,\!000": "1000",
    }
    apart = ("2,3", "1,00", "1,0000", "0,123", "(1,234)", "1,234,5", "12345,678", "5 7", "1.5,000")
    assert {text: join_thousands(text) for text in joined} == joined
    assert [join_thousands(text) for text in apart] == list(apart)


def test_a_normalisation_may_split_numbers_and_drop_them():
    assert (
        not joins_digits(r"\frac12", r"\frac{1}{2}")
        and not joins_digits("12 cm", "12")
        and not joins_digits(".5", "0.5")
    )
    assert joins_digits("1 2", "12") and joins_digits("1. 5", "1.5") and joins_digits("5 .7", "50.7")
