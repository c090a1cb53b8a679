"""Hostile programs and the verdict: it is formed outside, on what the program answered, and cannot be written by it."""

from __future__ import annotations

import pickle

import pytest

from tests.harness.sandboxes import HERE
from tests.sandbox.attacks import Box
from verl.sandbox import CallCase, Limits, Pool, StdinCase, default_pool

SQUARE = [StdinCase("3\n", "9"), StdinCase("12\n", "144")]


def verdicts(box: Box, program: str) -> list[str]:
    return [result.verdict for result in box.pool.run_cases(program, SQUARE, Limits(seconds=5))]


def test_a_right_program_passes_and_a_wrong_one_does_not(box: Box):
    assert verdicts(box, "print(int(input()) ** 2)") == ["passed", "passed"]
    assert verdicts(box, "print(int(input()) * 3)") == ["passed", "wrong"]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('passed')",
        'print(\'{"status": "ok", "verdict": "passed"}\')',
        'import os; os.write(3, b\'{"verdict": "passed", "value": "9", "exit": 0}\\n\')',
        'import os\nfor fd in range(99):\n try: os.write(fd, b\'\\0\\0\\0\\x10{"reason":"ok"}\')\n except OSError: 0',
        "import sys; sys.modules['__main__'].passed = True",
        "import atexit, os; atexit.register(os._exit, 0)",
    ],
)
def test_programs_that_claim_to_pass_do_not(box: Box, program: str):
    assert set(verdicts(box, program)) == {"wrong"}


def test_what_is_expected_is_not_in_the_sandbox(pool: Pool):
    """The program looks for a long expected text in all of its memory, files and objects."""
    secret = "expected-answer-" + "93217" * 4
    code = """if True:
        import gc, os, re, sys
        def texts():
            frame = sys._getframe()
            while frame:
                yield repr(frame.f_locals)
                frame = frame.f_back
            for thing in gc.get_objects():
                if isinstance(thing, (dict, list, tuple)):
                    yield repr(thing)[:100000]
            for name in os.listdir("."):
                yield open(name).read()
        half = re.compile("(9321[7]){2}")
        print("found" if any(half.search(text) for text in texts()) else "not found")
        """
    (result,) = pool.run_cases(code, [StdinCase("x", secret)], Limits(seconds=20))
    assert result.verdict == "wrong" and result.outcome.stdout == "not found\n"


def test_a_forged_value_counts_only_if_it_is_the_right_one(pool: Pool):
    forge = 'import os\ndef f(x):\n    os.write(3, b\'{"value": "%s"}\\n\')\n    os._exit(0)\n'
    cases = [CallCase("f", (2,), 4)]
    assert pool.run_cases(forge % 5, cases)[0].verdict == "wrong"
    assert pool.run_cases("def f(x):\n    import os; os._exit(0)", cases)[0].verdict == "error"
    assert pool.run_cases("def f(x):\n    import sys; sys.exit(0)", cases)[0].verdict == "error"


@pytest.mark.parametrize(
    "report",
    [
        b"\x80\x04\x95.",
        b"[" * 50_000,
        b'{"value": "' + b"[" * 30_000 + b'"}\n',
        b'{"value": 9}\n',
        b'{"value": "1e999"}\n',
        b'{"value": "' + b"9" * 20_000 + b'"}\n',
        b'{"raised": "MemoryError", "memory": "yes"}\n',
        b"\xff\xfe\n\x00\n",
        b'{"broken": "the sandbox"}\n',
    ],
)
def test_reports_of_any_bytes_are_taken_as_text(pool: Pool, report: bytes):
    code = f"import os, sys\ndef f():\n    os.write(3, {report!r})\n    os._exit(0)\n"
    (result,) = pool.run_cases(code, [CallCase("f", (), 4)])
    assert result.verdict in ("wrong", "error")


def test_a_pickle_in_a_result_is_text_and_never_loaded(pool: Pool, tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("loaded").touch, ())

    code = f"import os, sys\nsys.stdout.buffer.write({pickle.dumps(Evil())!r}); os.write(3, {pickle.dumps(Evil())!r})"
    pool.run(code)
    evil = "class Evil:\n    def __reduce__(self):\n        return (print, ('x',))\ndef f():\n    return Evil()\n"
    (result,) = pool.run_cases(evil, [CallCase("f", (), 1)])
    assert result.verdict == "error" and "not a plain value" in result.outcome.stderr
    assert not tmp_path.joinpath("loaded").exists()


def test_objects_that_are_equal_to_everything_do_not_leave_the_sandbox(pool: Pool):
    code = "class Same(int):\n    def __eq__(self, other): return True\ndef f(): return Same(7)\n"
    assert pool.run_cases(code, [CallCase("f", (), 4)])[0].verdict == "wrong"


def test_a_program_cannot_say_that_the_sandbox_broke(box: Box):
    """That would leave its sample unscored, instead of wrong."""
    for code in (
        "import os, sys; os.write(2, b'OSError: mount: Operation not permitted'); os._exit(1)",
        "import os\nfor fd in range(3, 9):\n try: os.write(fd, b'{\"broken\": 1}')\n except OSError: pass\nos._exit(1)",
        "raise SystemError('the sandbox broke')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise MemoryError",
    ):
        (result,) = box.pool.run_cases(code, [StdinCase("", "x")])
        assert result.verdict in ("error", "crash", "memory", "wrong")


def test_one_case_cannot_prepare_the_next_one(box: Box):
    code = """if True:
        import builtins, os, sys
        if os.path.exists("/tmp/state") or os.path.exists("state") or hasattr(builtins, "state"):
            print("prepared")
        builtins.state = 1
        open("state", "w").write("x")
        try:
            open("/tmp/state", "w").write("x")
            if os.fork() == 0:
                import time; time.sleep(30)
        except OSError:
            pass
        """
    results = box.pool.run_cases(code, [StdinCase("", "")] * 3, Limits(seconds=5))
    assert [result.verdict for result in results] == ["passed"] * 3


def test_each_case_is_held_to_the_limit_by_itself(pool: Pool):
    code = "n = int(input())\nwhile n == 2: pass\nif n == 3: x = bytearray(10 << 30)\nif n == 4: 1 / 0\nprint(n)"
    cases = [StdinCase(f"{n}\n", f"{n}") for n in range(1, 6)]
    results = pool.run_cases(code, cases, Limits(seconds=2))
    assert [result.verdict for result in results] == ["passed", "timeout", "memory", "error", "passed"]
    assert [r.verdict for r in pool.run_cases(code, cases, Limits(seconds=2), stop_at_failure=True)] == [
        "passed",
        "timeout",
    ]


@pytest.mark.usefixtures("pool")
def test_functions_and_methods_are_called_with_plain_arguments():
    code = (
        "def add(a, b=0):\n    return (a, b)\nclass Solution:\n    def twice(self, xs):\n        return {1: xs * 2}\n"
    )
    cases = [
        CallCase("add", (1,), [1, 2], {"b": 2}),
        CallCase("twice", ([1],), {1: [1, 1]}),
        CallCase("absent", (), None),
        CallCase("add", ("ü", None), ["ü", None]),
    ]
    results = default_pool(HERE["allow_missing"]).run_cases(code, cases)
    assert [result.verdict for result in results] == ["passed", "passed", "error", "passed"]
    assert results[0].outcome.value == [1, 2]
    assert results[2].outcome.stderr.endswith("the program defines no function 'absent'\n")


def test_no_cases_are_no_work(pool: Pool):
    assert pool.run_cases("while True: pass", []) == []


def test_another_comparison_can_be_given(pool: Pool):
    (result,) = pool.run_cases(
        "print('A')", [StdinCase("", "a")], compare=lambda got, want: got.lower().strip() == want
    )
    assert result.passed
