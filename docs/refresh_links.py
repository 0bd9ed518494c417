# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python docs/refresh_links.py` points links such as [`Batch`](../package/trainers/batch.py#L1) to their lines."""

import ast
import re
from pathlib import Path


def lines(path: Path) -> dict[str, int]:
    """Line of each class, function and method of a file, and of what is assigned at its top."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        for target in [*getattr(node, "targets", []), *filter(None, [getattr(node, "target", None)])]:
            found[ast.unparse(target)] = node.lineno
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name: node.lineno, **{f"{node.name}.{each.name}": each.lineno for each in inner}}
    return found


def refreshed(page: Path) -> str:
    """A page's text with links to the lines where the names in backticks are now."""

    def link(found: re.Match) -> str:
        name, path = found.groups()
        if name not in lines(page.parent / path):
            raise ValueError(f"{page.name}: {path} has no {name}; link to where it is now.")
        return f"[`{name}`]({path}#L{lines(page.parent / path)[name]})"

    return re.sub(r"\[`([\w.]+)`\]\(([\w./]+\.py)#L\d+\)", link, page.read_text())


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(refreshed(page))
