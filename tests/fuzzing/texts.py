"""Texts that a model could write, from a seed: pieces put together at random, and known texts with random changes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tests.harness.hostile import answers

LONGEST = 20_000
PIECES = (
    r"\boxed{", "}", "{", "#### ", "Answer: ", "the answer is ", "<answer>", "</answer>", "<think>", "</think>", "$",
    "$$", "0", "1", "2", "7", "00", "18", "57", "1000", "1,000", "2,3", "0.5", ".5", "5.", "1e9", "1e999", "9" * 45,
    "-", "+", "*", "/", "^", "_", "**", "!", "%", "=", "(", ")", "[", "]", "|", ",", ", ", ";", ":", ".", " ", "\n",
    "\t", "\\", r"\frac{", r"\frac12", r"\dfrac", r"\sqrt{", r"\sqrt[3]{", r"\pi", "π", r"\infty", r"\cdot ",
    r"\times", r"\left(", r"\right)", r"\sin ", r"\cos(", r"\ln ", r"\log_2 ", r"\tan^{2}", "sqrt(", "exp(",
    r"\text{", r"\text{ cm}", r"^\circ", r"^{\circ}", r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", r"\%", r"\$",
    r"\!", r"\,", r"\ ", "{,}", "x", "y", "z", "e", "i", "n", "x_1", "alpha", r"\alpha", " cm", " square feet",
    " million", " and ", " or ", "1 5/00", "7 3/4", "1/0", "0^0", "-1", "٣", "²", "½", "−", "×", "\u200b", "\x00",
    "\ud800", "🙂", "İ", "ß", "NaN", "inf", "True", "None", "null", "true", "```python\n", "```", "print(1)",
    "def f(x):\n    return x", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', '"x": 1', "}}",
    "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>", "<|im_end|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<invoke name=\"f\">", "</invoke>", "[[", "]]",
    "<｜tool▁call▁begin｜>", "<seed:tool_call>", "<minimax:tool_call>", "<|channel|>commentary to=functions.f",
    "<|message|>", "<|call|>", "call:f{", "<|\"|>", "functions.f:0", "<|tool_call_argument_begin|>",
)  # fmt: skip
DIGITS = ("0", "00", "1", "5", "7", "10", "57", "234", "1000000000", "1" + "0" * 400, "9" * 45)
NUMBERS = (
    "N", "-N", "N.N", ".N", "N.", "N,N", "N{,}N", "N N", "N N/N", "N/N", "NeN", "N%", "N cm", "N cm N", "(N,N)",
    "[N,N)", "N^N", "N!", r"\frac{N}{N}", r"N\frac{N}{N}", r"\frac NN", r"N\pi", r"\sqrt{N}", r"\sqrt[N]{N}", "x=N",
    "N or N", "$N$", "N=N", "N million", "N-N", "{N, N}", "[N, [N.N, -N]]", "Infinity", "NaN", r"\log_N N",
    r"N\,N", "--N", "N*(N",
)  # fmt: skip
FORMULAS = (
    "x", "y", "2", "3", r"\pi", r"\sqrt{2}", r"\frac{1}{3}", "0.5", "e", "i", "7", "10", r"\sqrt{x}", "(x+1)",
)  # fmt: skip
SAME = (
    "({})", "{}+0", "1*{}", "{}+x-x", r"\frac{{{}}}{{1}}", "({})^1", "-(-({}))", r"\frac{{2({})}}{{2}}",
    "({})+({})-({})", r"\sqrt{{({})^2}}", r"\ln(e^{{({})}})", r"({})\cdot(\sin^2 x+\cos^2 x)", "2({})-({})",
    "(({})^2)^{{0.5}}",
)  # fmt: skip
JOINS = ("+", "-", r"\cdot ", "/", "^")
WRAPS = (
    r"\boxed{{}}", "#### {}", "Answer: {}", "<answer>{}</answer>", "so the answer is {}.",
    "<think>a</think> \\boxed{{}}",
)  # fmt: skip


def texts(random: Random, frame: str = "{}") -> Iterator[str]:
    """Texts without end, mostly short, a few of some ten thousand characters.

    Args:
        frame: how an answer is written for a reader of texts; half of them are written so.
    """
    known = [text for text in answers("canary") if len(text) <= LONGEST]
    while True:
        kind = random.random()
        if kind < 0.35:
            text = numbers(random)
        elif kind < 0.5:
            text = pieces(random)
        elif kind < 0.75:
            text = changed(random, random.choice(known), known)
        else:
            text = formula(random)
            text = changed(random, text, known) if random.random() < 0.3 else text
        if random.random() < 0.7:
            text = (frame if random.random() < 0.7 else random.choice(WRAPS)).replace("{}", text)
        yield text[:LONGEST]


def numbers(random: Random) -> str:
    """One or two numbers as answers have them, of few and of many digits."""
    forms = (random.choice(NUMBERS) for _ in range(random.choice((1, 1, 2))))
    return " ".join("".join(random.choice(DIGITS) if sign == "N" else sign for sign in form) for form in forms)


def pieces(random: Random) -> str:
    """Pieces side by side; sometimes one of them many times."""
    made = [random.choice(PIECES) for _ in range(random.randint(1, 30))]
    if random.random() < 0.03:
        place = random.randrange(len(made))
        made[place] *= random.choice((10, 100, 1000))
    return "".join(made)


def changed(random: Random, text: str, others: list[str]) -> str:
    """A text with up to four changes: cut, doubled, repeated, swapped, or with something put in."""
    for _ in range(random.randint(1, 4)):
        a, b = sorted((random.randint(0, len(text)), random.randint(0, len(text))))
        kind = random.randrange(7)
        if kind == 0:
            text = text[:a] + text[b:]
        elif kind == 1:
            text = text[:b] + text[a:]
        elif kind == 2:
            text = text[:a] + text[a : a + 20] * random.choice((2, 5, 50)) + text[b:]
        elif kind == 3:
            text = text[:a] + random.choice(PIECES) + text[a:]
        elif kind == 4:
            text = text[:a] + random.choice(others)[:2000] + text[b:]
        elif kind == 5:
            text = text[:a] + chr(random.choice((random.randint(0, 127), random.randint(0, 0x10FFFF)))) + text[a + 1 :]
        else:
            text = random.choice(WRAPS).replace("{}", text)
        text = text[:LONGEST]
    return text


def formula(random: Random, depth: int = 3) -> str:
    """A formula that can be read, up to some hundred characters."""
    if depth == 0 or random.random() < 0.2:
        return random.choice(FORMULAS) if random.random() < 0.8 else str(random.randint(-99, 10**6))
    kind = random.random()
    if kind < 0.6:
        sides = [formula(random, depth - 1) for _ in range(2)]
        return f"({sides[0]}){random.choice(JOINS)}({sides[1]})"
    name = random.choice((r"\sin", r"\cos", r"\tan", r"\ln", r"\exp", r"\sqrt", r"\arctan"))
    inner = formula(random, depth - 1)
    return f"{name}{{{inner}}}" if name == r"\sqrt" else f"{name}({inner})"


def same(random: Random, text: str) -> str:
    """The formula in another form, so that telling the two apart takes a proof."""
    for _ in range(random.randint(1, 2)):
        form = random.choice(SAME)
        text = form.format(*[text] * form.count("{}"))
    return text
