"""The nearest names of a message, also among very many."""

from __future__ import annotations

import difflib

from verl.errors import suggest

NAMES = [f"model.layers.{layer}.{part}.weight" for layer in range(5000) for part in ("q_proj", "k_proj", "up_proj")]


def test_the_nearest_name_is_found_among_very_many_without_comparing_with_all(monkeypatch):
    compared, original = [], difflib.get_close_matches

    def counted(name, known, **options):
        compared.append(len(known))
        return original(name, known, **options)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    assert suggest("model.layers.4321.q_prj.weight", NAMES).startswith("Did you mean 'model.layers.4321.q_proj.weight'")
    assert max(compared) <= 1000


def test_names_of_absurd_length_are_compared_with_nothing():
    assert suggest("a" * 10**6, ["a" * 10**6, "b"]) == ""
    assert suggest("lr", ["l" * 10**6, "lr_"]) == "Did you mean 'lr_'?"
