# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Finds what makes code dense, and the package's long parts; `make lint` runs it, and fails if there are any.

One assignment binds one thing, also in tests, examples and benchmarks; in the package a comprehension has one loop.
Long are functions over 100 lines, classes over 450 and files over 700. Tables, which are assigned or returned as a
display such as `{...}`, don't count.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_multimodal_rft"
OTHERS = [ROOT / name for name in ("tests", "examples", "benchmarks")]
LIMITS = {"file": 700, "class": 450, "function": 100}
DISPLAYS = ast.Tuple | ast.List | ast.Dict | ast.Set
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def _binds_unrelated(node: ast.Assign) -> bool:
    """Whether `a, b = x, y` or `a, b = (x, y) if c else (z, w)`; `a, b = b, a` exchanges values and is left out."""

    def is_display(value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            return is_display(value.body) or is_display(value.orelse)
        return isinstance(value, ast.Tuple | ast.List)

    targets = [each for each in node.targets if isinstance(each, ast.Tuple | ast.List)]
    if not targets or not is_display(node.value):
        return False
    values = map(ast.unparse, getattr(node.value, "elts", ()))
    return sorted(map(ast.unparse, targets[0].elts)) != sorted(values)


def assignments(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields each assignment that binds several things, or hides in an expression, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _binds_unrelated(node):
            yield "a, b = x, y", node.lineno
        elif isinstance(node, ast.NamedExpr):
            yield ":=", node.lineno


def loops(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields each dense loop with its line."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
            yield "comprehension of two loops", node.lineno
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and isinstance(node.iter, ast.IfExp):
            yield "for x in a if c else b", node.iter.lineno


def _lines_of_tables(node: ast.AST) -> int:
    """Returns the lines of the outermost tables in a node, but for their first ones."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return) and isinstance(node.value, DISPLAYS):
        return node.end_lineno - node.lineno
    return sum(map(_lines_of_tables, ast.iter_child_nodes(node)))


def long_parts(tree: ast.Module, n_lines: int) -> Iterator[tuple[str, int]]:
    """Yields kind and name of each part that exceeds its limit, with its number of lines."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, int]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, FUNCTIONS | ast.ClassDef):
                name += child.name
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                n = child.end_lineno - first + 1 - _lines_of_tables(child)
                yield "class" if isinstance(child, ast.ClassDef) else "function", name, n
                name += "."
            yield from walk(child, name)

    parts = [("file", "", n_lines - _lines_of_tables(tree)), *walk(tree, "")]
    for kind, name, n in parts:
        if n > LIMITS[kind]:
            yield f"{kind} {name}".rstrip(), n


def main() -> int:
    failures = []
    for path in sorted(each for folder in [PACKAGE, *OTHERS] for each in folder.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        name = path.relative_to(ROOT)
        failures += [f"{name}:{line}: {idiom}" for idiom, line in assignments(tree)]
        if not path.is_relative_to(PACKAGE):
            continue
        failures += [f"{name}:{line}: {idiom}" for idiom, line in loops(tree)]
        failures += [f"{name}: {part}: {n} lines" for part, n in long_parts(tree, len(text.splitlines()))]
    if failures:
        print(*failures, "Bind one thing at a time, in plain loops, and split what is long.", sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
