# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`make lint` finds dense code and long parts."""

import ast

import idioms
import pytest


PAIR = "a, b = x, y"
LOOPS = "comprehension of two loops"
CONDITIONAL = "for x in a if c else b"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a, b = 1, 2", [PAIR]),
        ("self.a, (b, c) = [x.y, f()]", [PAIR]),
        ("(a, b) = (c, *d)", [PAIR]),
        ("a, *b = c, d, e", [PAIR]),
        ("a, b = (1, 2) if c else (3, f())", [PAIR]),
        ("a, b = f() if c else (3, 4)", [PAIR]),
        ("a, b = x = 1, 2", [PAIR]),
        ("a, b = b, a", []),
        ("a[i], a[j] = a[j], a[i]", []),
        ("a, b = b, a + b", [PAIR]),
        ("a, b = f()", []),
        ("a, b = pair", []),
        ("a, b = (f(x) for x in y)", []),
        ("a = b, c", []),
        ("a = b = c", []),
        ("if (n := len(a)) > 1: pass", [":="]),
        ("[x for x in y if (n := f(x))]", [":="]),
        ("[x for y in z for x in y]", [LOOPS]),
        ("f(x for y in z if y for x in y)", [LOOPS]),
        ("{x: 1 for y in z for x in y}", [LOOPS]),
        ("[[x for x in y] for y in z]", []),
        ("for x in (a if c else ()): pass", [CONDITIONAL]),
        ("[x for x in (a if c else b)]", [CONDITIONAL]),
        ("async def f():\n    async for x in a if c else b: pass", [CONDITIONAL]),
        ("for x in f(a if c else b): pass", []),
        ("for a, b in c: pass", []),
    ],
)
def test_what_is_counted(code, expected):
    tree = ast.parse(code)
    assert [idiom for idiom, _ in [*idioms.assignments(tree), *idioms.loops(tree)]] == expected


def parts(text: str) -> dict[str, int]:
    return dict(idioms.long_parts(ast.parse(text), len(text.splitlines())))


def test_long_parts_without_their_tables(monkeypatch):
    monkeypatch.setattr(idioms, "LIMITS", {"file": 12, "class": 6, "function": 3})
    table = "{\n" + "1: 2,\n" * 20 + "}"
    short = "def f():\n    a = 1\n    return a\n"
    assert parts(f"x = {table}\n{short}") == {}
    assert parts(f"def f():\n    return {table}\n{short}") == {}
    assert parts("a = f(\n" + "1,\n" * 10 + ")\n") == {}
    assert parts("a = f(\n" + "1,\n" * 11 + ")\n") == {"file": 13}  # a call isn't a table
    methods = "class A:\n    @cache\n    def g(self):\n        a = 1\n        return a\n    b: int\n    c: int\n"
    assert parts(methods) == {"class A": 7, "function A.g": 4}
    assert parts(f"def g():\n    {short.replace(chr(10), chr(10) + '    ')}\n    return f\n") == {"function g": 6}
