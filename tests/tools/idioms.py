# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Counts what makes the package's code dense, and its long parts, and compares them with `idioms.json`; `make lint`
runs it.

One assignment binds one thing, and a comprehension has one loop. Each file has a bound for each idiom that it had when
this began, and each long function, class or file has its number of lines. They only fall: `make fix` lowers them. A
file without bounds may have what others have lost with the same change, so that code can move.

Long are functions over 100 lines, classes over 450 and files over 700. Tables, which are assigned or returned as a
display such as `{...}`, don't count.

```bash
python tests/tools/idioms.py                # fails where a bound is exceeded
python tests/tools/idioms.py forward/trees  # prints each place in the files whose path has this
```
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


PACKAGE = Path(__file__).parents[2] / "trl_multimodal_rft"
BOUNDS = Path(__file__).with_name("idioms.json")
LIMITS = {"file": 700, "class": 450, "function": 100}
DISPLAYS = ast.Tuple | ast.List | ast.Dict | ast.Set
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

# A number for each key: an idiom, or a long part such as `function decode`
Counts = dict[str, int]


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


def places(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields each idiom with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _binds_unrelated(node):
            yield "a, b = x, y", node.lineno
        elif isinstance(node, ast.NamedExpr):
            yield ":=", node.lineno
        elif isinstance(node, COMPREHENSIONS) and len(node.generators) > 1:
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


def counts(folder: Path = PACKAGE) -> dict[str, Counts]:
    """Returns what each file of a folder has, by its path there; files without any are left out."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        idioms = Counter(idiom for idiom, _ in places(tree))
        of_file = {**dict(sorted(idioms.items())), **dict(long_parts(tree, len(text.splitlines())))}
        if of_file:
            found[str(path.relative_to(folder))] = of_file
    return found


def _moved(found: dict[str, Counts], bounds: dict[str, Counts]) -> Counts:
    """Returns how much files without bounds have of each key, where others have lost as much or more."""
    before = Counter()
    for of_file in bounds.values():
        before.update(of_file)
    now = Counter()
    moved = Counter()
    for name, of_file in found.items():
        now.update(of_file)
        if name not in bounds:
            moved.update(of_file)
    return {key: n for key, n in moved.items() if now[key] <= before[key]}


def exceeded(found: dict[str, Counts], bounds: dict[str, Counts]) -> list[str]:
    """Returns a line for each number that is above its bound."""
    lines = []
    moved = _moved(found, bounds)
    for name, of_file in found.items():
        for key, n in of_file.items():
            bound = bounds.get(name, {}).get(key, 0)
            if n > bound and (name in bounds or key not in moved):
                limit = bound or LIMITS.get(key.split()[0], 0)
                lines.append(f"{name}: {key}: {n}, at most {limit}")
    return lines


def lowered(found: dict[str, Counts], bounds: dict[str, Counts]) -> dict[str, Counts]:
    """Returns new bounds: what is measured, where that isn't more than its bound."""
    moved = _moved(found, bounds)
    new = {}
    for name, of_file in found.items():
        allowed = bounds.get(name, moved)
        kept = {key: min(n, allowed[key]) if name in bounds else n for key, n in of_file.items() if key in allowed}
        if kept:
            new[name] = kept
    return new


def stored() -> dict[str, Counts]:
    return json.loads(BOUNDS.read_text())


def text() -> str:
    """Returns the text of `idioms.json`, with bounds that have fallen, and a line for each file."""
    bounds = lowered(counts(), stored())
    lines = [f"  {json.dumps(name)}: {json.dumps(of_file)}" for name, of_file in bounds.items()]
    return "\n".join(["{", ",\n".join(lines), "}\n"])


def main(names: list[str]) -> int:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if any(each in name for each in names):
            for idiom, line in sorted(places(ast.parse(path.read_text())), key=lambda place: place[1]):
                print(f"trl_multimodal_rft/{name}:{line}: {idiom}")
    failures = exceeded(counts(), stored())
    if failures:
        print(*failures, "Bind one thing at a time, in plain loops, and split what is long.", sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
