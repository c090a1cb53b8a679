r"""Reads a formula, LaTeX or plain, into a tree of at most a few hundred nodes; nothing is evaluated.

What a model wrote must never reach ``eval``, and ``sympify`` is one. So this reader knows a short list of signs and
refuses all others, and what would be costly later: long texts, deep nesting, many letters, towers of powers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

LONGEST = 400
MOST_NODES = 300
DEEPEST = 40
MOST_DIGITS = 40
MOST_LETTERS = 4
BIGGEST_POWER = 64
MOST_POWERS = 2
BIGGEST_FACTORIAL = 20

FUNCTIONS = ("arcsin", "arccos", "arctan", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp")
GREEK = ("alpha", "beta", "gamma", "delta", "theta", "lambda", "mu", "rho", "sigma", "phi", "omega", "varphi")
TIMES = ("cdot", "times", "ast")
REMOVED = re.compile(
    r"\\(?:left|right|displaystyle|limits|quad|qquad|[,;:! ])|\\(?:text|mathrm|mathbf|operatorname)(?=\{)|[$~]"
)
TOKEN = re.compile(
    rf"(?P<number>[0-9]{{1,{MOST_DIGITS}}}(?:\.[0-9]{{0,{MOST_DIGITS}}})?|\.[0-9]{{1,{MOST_DIGITS}}})"
    rf"|\\(?P<command>[A-Za-z]+)|(?P<name>{'|'.join(FUNCTIONS)}|sqrt|pi)(?![a-z])|(?P<letter>[A-Za-z])"
    r"|(?P<sign>\*\*|[-+*/^_(){}\[\]|!π√·×÷°%−])"
)
SPLIT_NUMBER = re.compile(r"(?<!_)[0-9.]\s+[0-9.]")
BLANK = re.compile(r"\s*")
SAME_SIGN = {"**": "^", "·": "*", "×": "*", "÷": "/", "−": "-"}

Tree = tuple[Any, ...]
"""``("num", text)``, ``("sym", letter)``, ``("const", "pi" or "e" or "i" or "oo")``, ``(operator, tree, ...)``."""


class UnreadableError(ValueError):
    """The text is no formula of the kind that is read here."""


class TooCostlyError(UnreadableError):
    """A formula of the kind that is read here, which could take too long to compute."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str


def parse(text: str) -> Tree:
    r"""The tree of a formula.

    Example:
        >>> parse(r"\frac{x}{2}")
        ('div', ('sym', 'x'), ('num', '2'))

    Raises:
        UnreadableError: a sign that is not known, or (`TooCostlyError`) more of anything than the limits above.
    """
    if len(text) > LONGEST:
        raise UnreadableError("too long")
    if SPLIT_NUMBER.search(text):
        raise UnreadableError("two numbers side by side")
    reader = _Reader(_tokens(REMOVED.sub(" ", text).strip()))
    tree = reader.sum()
    if reader.left():
        raise UnreadableError(f"did not expect {reader.peek().text!r}")
    if len(letters(tree)) > MOST_LETTERS:
        raise TooCostlyError("too many unknowns")
    return tree


def letters(tree: Tree) -> set[str]:
    """The unknowns of a tree."""
    if tree[0] == "sym":
        return {tree[1]}
    return set().union(*(letters(part) for part in tree[1:] if isinstance(part, tuple)))


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or len(tokens) >= MOST_NODES:
            raise UnreadableError("an unknown sign") if match is None else TooCostlyError("too many parts")
        kind, value = str(match.lastgroup), match[str(match.lastgroup)]
        tokens.append(Token(kind, SAME_SIGN.get(value, value)))
        position = BLANK.match(text, match.end()).end()  # type: ignore[union-attr]
    return tokens


class _Reader:
    """Recursive descent: sum, product, signed power, atom."""

    def __init__(self, tokens: list[Token]):
        self._tokens, self._at, self._depth = tokens, 0, 0

    def left(self) -> bool:
        return self._at < len(self._tokens)

    def peek(self) -> Token:
        return self._tokens[self._at] if self.left() else Token("end", "")

    def take(self) -> Token:
        token = self.peek()
        self._at += 1
        return token

    def accept(self, text: str) -> bool:
        token = self.peek()
        accepted = token.text == text and token.kind != "letter"
        self._at += accepted
        return accepted

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise UnreadableError(f"expected {text!r}")

    def sum(self) -> Tree:
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooCostlyError("too deep")
        tree = self.product()
        while self.peek().text in ("+", "-"):
            sign = self.take().text
            right = self.product()
            tree = ("add", tree, right if sign == "+" else ("neg", right))
        self._depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.signed()
        while self.left():
            token = self.peek()
            if token.text == "/" or (token.kind == "command" and token.text == "div"):
                self.take()
                tree = ("div", tree, self.signed())
            elif token.text == "*" or (token.kind == "command" and token.text in TIMES):
                self.take()
                tree = ("mul", tree, self.signed())
            elif self._begins_a_factor(token):
                tree = ("mul", tree, self.power())
            else:
                break
        return tree

    def _begins_a_factor(self, token: Token) -> bool:
        if token.kind == "number":  # "2 3" is no product: two numbers side by side are something else
            return self._tokens[self._at - 1].kind not in ("number", "letter")
        if token.kind == "sign":
            return token.text in ("(", "{", "π", "√")
        return token.kind in ("letter", "name", "command")

    def signed(self) -> Tree:
        if self.accept("-"):
            return ("neg", self._nested(self.signed))
        if self.accept("+"):
            return self._nested(self.signed)
        return self.power()

    def _nested(self, read: Any) -> Tree:
        self._depth += 1
        if self._depth > DEEPEST:
            raise TooCostlyError("too deep")
        tree = read()
        self._depth -= 1
        return tree

    def power(self) -> Tree:
        base = self.atom()
        while True:
            if self.accept("!"):
                base = _factorial(base)
            elif self.accept("%"):
                base = ("div", base, ("num", "100"))
            elif self.accept("°"):
                continue
            elif self.accept("^"):
                if self._degree_sign():
                    continue
                return _power(base, self._nested(self.signed_exponent))
            else:
                return base

    def _degree_sign(self) -> bool:
        token = self.peek()
        if token.kind == "command" and token.text == "circ":
            self.take()
            return True
        following = self._tokens[self._at : self._at + 3]
        if [t.text for t in following] == ["{", "circ", "}"]:
            self._at += 3
            return True
        return False

    def signed_exponent(self) -> Tree:
        if self.accept("-"):
            return ("neg", self.signed_exponent())
        if self.peek().kind == "number" and self.peek().text.isdigit():
            return ("num", self.take().text)
        return self.atom()

    def atom(self) -> Tree:
        token = self.take()
        if token.kind == "number":
            return ("num", token.text)
        if token.kind == "letter":
            return self._subscripted(token.text)
        if token.kind == "name":
            return self._named(token.text)
        if token.kind == "command":
            return self._command(token.text)
        closing = {"(": ")", "{": "}", "|": "|"}.get(token.text)
        if closing:
            inner = self.sum()
            self.expect(closing)
            return ("abs", inner) if closing == "|" else inner
        if token.text == "π":
            return ("const", "pi")
        if token.text == "√":
            return ("root", ("num", "2"), self._nested(self.atom))
        raise UnreadableError(f"did not expect {token.text!r}")

    def _subscripted(self, letter: str) -> Tree:
        name = {"e": "e", "i": "i"}.get(letter)
        if self.accept("_"):
            braced = self.accept("{")
            index = self.take()
            if index.kind not in ("number", "letter"):
                raise UnreadableError("an odd index")
            if braced:
                self.expect("}")
            return ("sym", f"{letter}_{index.text}")
        return ("const", name) if name else ("sym", letter)

    def _named(self, name: str) -> Tree:
        if name == "pi":
            return ("const", "pi")
        if name == "sqrt":
            return ("root", ("num", "2"), self._nested(self.atom))
        return self._function(name)

    def _command(self, name: str) -> Tree:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            top = self._nested(self._argument)
            return ("div", top, self._nested(self._argument))
        if name == "sqrt":
            degree: Tree = ("num", "2")
            if self.accept("["):
                degree = self.sum()
                self.expect("]")
            return ("root", degree, self._nested(self._argument))
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("const", "oo")
        if name in FUNCTIONS:
            return self._function(name)
        if name in GREEK:
            return self._subscripted(name)
        raise UnreadableError(f"an unknown command {name!r}")

    def _argument(self) -> Tree:
        r"""``{...}``, or one sign: ``\frac12`` is a half."""
        token = self.peek()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            self._tokens[self._at] = Token("number", token.text[1:])
            return ("num", token.text[0])
        return self.atom()

    def _function(self, name: str) -> Tree:
        base: Tree | None = None
        power: Tree | None = None
        if name in ("log", "ln") and self.accept("_"):
            base = self._nested(self._argument)
        if self.accept("^"):
            power = self.signed_exponent()
        inner = self._nested(self.power)
        tree: Tree = ("fn", name, inner)
        if base is not None:
            tree = ("div", ("fn", "ln", inner), ("fn", "ln", base))
        return tree if power is None else _power(tree, power)


def _power(base: Tree, exponent: Tree) -> Tree:
    """A power that is known to be small: the exponent is a small number or has unknowns; powers of powers once."""
    if _has(exponent, ("pow", "fact")) or _powers_deep(base) >= MOST_POWERS:
        raise TooCostlyError("a tower of powers")
    if not letters(exponent) and not _bound(exponent) <= BIGGEST_POWER:  # nan among what is too large
        raise TooCostlyError("a large power")
    return ("pow", base, exponent)


def _powers_deep(tree: Tree) -> int:
    """How many powers are inside each other."""
    deepest = max((_powers_deep(part) for part in tree[1:] if isinstance(part, tuple)), default=0)
    return deepest + (tree[0] == "pow")


def _bound(tree: Tree) -> float:
    """A bound of the size of a number that is written without powers; infinite where none is seen at once."""
    kind, parts = tree[0], [part for part in tree[1:] if isinstance(part, tuple)]
    if kind == "num":
        return float(tree[1])
    if kind == "const":
        return 4.0 if tree[1] != "oo" else math.inf
    if kind == "div":
        below = parts[1]
        return _bound(parts[0]) if below[0] == "num" and float(below[1]) >= 1 else math.inf
    sizes = [_bound(part) for part in parts]
    if kind == "mul":
        return math.prod(sizes)
    return sum(sizes) if kind in ("add", "neg", "abs") else math.inf


def _factorial(base: Tree) -> Tree:
    if base[0] != "num" or not base[1].isdigit() or int(base[1]) > BIGGEST_FACTORIAL:
        raise TooCostlyError("a factorial of something that is no small number")
    return ("fact", base)


def _has(tree: Tree, kinds: tuple[str, ...]) -> bool:
    return tree[0] in kinds or any(_has(part, kinds) for part in tree[1:] if isinstance(part, tuple))
