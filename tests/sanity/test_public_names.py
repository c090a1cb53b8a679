"""Import paths and parameters that recipes, reward files and forks call must stay as they are."""

from __future__ import annotations

from tests.sanity.public_names import _parameter_fault, fault, listed, pending


def test_public_names_exist_with_their_parameters():
    waiting = pending()
    faults = {name: fault(name, parameters) for name, parameters in listed() if name not in waiting}
    wrong = [f"{name} {why}" for name, why in faults.items() if why]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_pending_list_only_shrinks():
    parameters = dict(listed())
    assert pending() <= set(parameters), "not a public name: " + ", ".join(sorted(pending() - set(parameters)))
    done = [name for name in sorted(pending()) if fault(name, parameters[name]) is None]
    assert not done, "built by now; run python -m tests.sanity.public_names --write:\n" + "\n".join(done)


def test_the_check_refuses_a_lost_moved_or_needed_parameter():
    def upstream(a, b=1): ...

    def good(a, b=1, c=2, **kwargs): ...

    def lost(a): ...

    def moved(b, a): ...

    def inserted(a, c=2, b=1): ...

    def needed(a, b, c): ...

    assert _parameter_fault(upstream, ["a", "b"]) is None and _parameter_fault(good, ["a", "b"]) is None
    assert all(_parameter_fault(f, ["a", "b"]) for f in (lost, moved, inserted, needed))
