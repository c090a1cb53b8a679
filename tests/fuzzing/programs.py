"""Programs that a model could write, from a seed: right ones, broken ones, and ones that misbehave."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.fuzzing.texts import pieces

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3.0, 7.5]}
LISTS = {"fn_name": "f", "inputs": [[1, 2]], "outputs": [[1, [2.5, "a"], {"k": None}]]}
VALUES = (
    "10**400", "-10**400", "10**5000", "float('nan')", "float('inf')", "1e308 * 10", "3", "3.0", "a + b", "True",
    "None", "'x' * 10**6", "[[]] * 1000", "(1, 2)", "{1: 2}", "{'k': {1, 2}}", "b'x'", "1j", "object()", "'\\ud800'",
    "'\\x00'", "[1, [2.5, 'a'], {'k': None}]", "nested(900)", "nested(5000)", "range(3)", "iter([1])", "lambda: 0",
    "int('9' * 4000)", "__import__('decimal').Decimal('1e999')", "__import__('fractions').Fraction(1, 3)", "-0.0",
    "2**53 + 1", "1000009000.0",
)  # fmt: skip
BEFORE = (
    "", "import sys", "import os", "x = [0] * 10**5", "print('noise')", "sys.stdout.write('\\n<')",
    "print('\\x00\\x1b[31m')", "sys.stdout.buffer.write(bytes(range(256)))", "sys.setrecursionlimit(10**9)",
    "raise ValueError", "raise SystemExit(0)", "os._exit(0)", "os.close(1)", "os.close(0)", "sys.stdout.close()",
    "sys.stdin.close()", "1 / 0", "import nonexistent", "del print", "open('/etc/passwd').read()",
    "open('f', 'w').write('x')", "exec('1 +')", "raise KeyboardInterrupt", "print('x' * 2_000_000)",
    "x = bytearray(1 << 30)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)", "raise BaseException('\\ud800')",
    "import signal; signal.alarm(1)", "os.fork()", "print('3')", "json = None",
    "import threading; threading.Thread(target=print).start()", "import atexit; atexit.register(print, 'late')",
    "sys.stderr.write('SyntaxError: x')", "raise SyntaxError('y')", "sys.excepthook = None", "sys.stdout = None",
)  # fmt: skip
NESTED = "def nested(n):\n    found = []\n    for _ in range(n):\n        found = [found]\n    return found\n"
ENDLESS = (
    "while True: pass", "import time; time.sleep(100)", "x = 9**9**8", "import re; re.match('(a+)+b', 'a' * 40)",
)  # fmt: skip
FENCES = (
    "```python\n{}\n```", "```py\n{}```", "{}", "text\n```\n{}\n```", "```python\n{}",
    "```python\n```\n```python\n{}\n```",
)  # fmt: skip


def programs(random: Random) -> Iterator[tuple[str, Any]]:
    """Answers with the tests that belong to them; one in a hundred does not end."""
    while True:
        before = "\n".join(random.choice(BEFORE) for _ in range(random.randint(0, 2)))
        kind = random.random()
        if kind < 0.45:
            body = f"{NESTED}def f(*given):\n    a, b = (*given, 1, 1)[:2]\n    return {random.choice(VALUES)}"
            tests = random.choice((CALLS, LISTS))
        elif kind < 0.85:
            body = f"{NESTED}a, b = map(int, input().split())\nprint({random.choice(VALUES)})"
            tests = SUMS
        else:
            body, tests = pieces(random), random.choice((SUMS, CALLS))
        if random.random() < 0.01:
            before = random.choice(ENDLESS)
        code = f"{before}\n{body}" if random.random() < 0.8 else f"{body}\n{before}"
        if random.random() < 0.2:
            place = random.randint(0, len(code))
            code = code[:place] + pieces(random)[:20] + code[place:]
        yield random.choice(FENCES).replace("{}", code), tests
