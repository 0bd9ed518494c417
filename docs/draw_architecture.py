# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Draws the folders of the package by what they import, for docs/architecture.md; `make fix` stores the drawing.

A folder stands below all that import it. An arrow leads to what it imports, unless other arrows lead there, too. What
each holds is the start of its row in the page's tables.
"""

import ast
import html
import importlib.util
import re
from pathlib import Path


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trl_multimodal_rft"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

WIDTH = 760
BOX = (130, 28)  # pixels
ROW = 50  # from one row to the next
GAP = 16  # between boxes of a row
OUTER = 112  # width of a box outside of the core
LEFT = 20
TEXT = LEFT + 2 * BOX[0] + 2 * GAP  # where the words of a row begin
GREY = "#7d8590"
BLUE = "#35507a"
LIGHT = "#5b7fb5"
START = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" \
font-size="13" role="img" aria-label="The folders of the package, each above those that it imports">
<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 L8 4 L0 8 z" fill="#7d8590"/></marker></defs>
"""


def rows_of_page() -> dict[str, str]:
    """Returns what each folder and module of the tables holds, by its path in the package."""
    rows = re.findall(r"^\| \[`([\w/]+?)(?:\.py|/)`\]\([^)]*\) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: re.sub(r"[`*]", "", text) for name, text in rows}


def outside() -> set[str]:
    """Returns the folders that the page lists as outside of the core."""
    table = PAGE.read_text().split("\n## Outside of the core\n")[1].split("\n## ")[0]
    return {*re.findall(r"^\| \[`([\w/]+)/`\]", table, re.MULTILINE)}


def folder_of(path: str, folders: set[str]) -> str | None:
    """Returns the deepest of the folders that has a path, or is it."""
    found = [folder for folder in folders if path == folder or path.startswith(f"{folder}/")]
    return max(found, key=len, default=None)


def imports(path: Path) -> set[str]:
    """Returns the paths in the package of what a module imports, also in functions."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{source}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    start = f"{PACKAGE.name}."
    return {name.removeprefix(start).replace(".", "/") for name in found if name.startswith(start)}


def graph(folders: set[str]) -> dict[str, set[str]]:
    """Returns the other folders that each folder imports."""
    found: dict[str, set[str]] = {folder: set() for folder in folders}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = folder_of(path.relative_to(PACKAGE).with_suffix("").as_posix(), folders)
        if folder is not None:
            found[folder] |= {folder_of(name, folders) for name in imports(path)} - {folder, None}
    return found


def heights(edges: dict[str, set[str]]) -> dict[str, int]:
    """Returns how many folders stand below each folder, along the longest chain of imports."""
    found: dict[str, int] = {}
    while len(found) < len(edges):
        ready = [name for name, below in edges.items() if name not in found and below <= found.keys()]
        if not ready:
            raise ValueError(f"These import each other: {sorted(edges.keys() - found.keys())}")
        found |= {name: 1 + max((found[other] for other in edges[name]), default=-1) for name in ready}
    return found


def direct(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Returns the imports that no chain of others replaces."""

    def reached(name: str) -> set[str]:
        return edges[name].union(*(reached(other) for other in edges[name]))

    return {name: below - set().union(*(reached(other) for other in below)) for name, below in edges.items()}


def words_of(text: str, most: int = 62) -> str:
    """Returns the start of a row's text, up to the last comma, colon or semicolon that fits."""
    if len(text) <= most:
        return text
    ends = [found.start() for found in re.finditer(r"[,;:] ", text) if found.start() <= most]
    return text[: ends[-1]] if ends else text[:most].rpartition(" ")[0]


def box(x: float, y: float, name: str, is_core: bool = True, width: int = BOX[0]) -> str:
    """Returns a box with a name."""
    look = f'fill="{BLUE}"' if is_core else f'fill="none" stroke="{LIGHT}" stroke-dasharray="4 3"'
    color = "#fff" if is_core else LIGHT
    middle = x + width / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{BOX[1]}" rx="4" {look}/>\n'
        f'<text x="{middle:g}" y="{y + 19:g}" fill="{color}" text-anchor="middle">{html.escape(name)}</text>'
    )


def words(y: float, text: str) -> str:
    return f'<text x="{TEXT}" y="{y:g}" fill="{GREY}" font-size="12.5">{html.escape(text)}</text>'


def arrow(upper: tuple[float, float], lower: tuple[float, float]) -> str:
    """Returns an arrow from a box to another below it; both are given by their upper left corners."""
    aside = (lower[0] > upper[0]) - (lower[0] < upper[0])
    x_start = upper[0] + BOX[0] * (2 + aside) / 4
    y_start = upper[1] + BOX[1]
    x_end = lower[0] + BOX[0] / 2
    y_end = lower[1] - 1
    bend = (y_end - y_start) / 2
    curve = f"M{x_start:g} {y_start:g} C{x_start:g} {y_start + bend:g} {x_end:g} {y_end - bend:g} {x_end:g} {y_end:g}"
    return f'<path d="{curve}" fill="none" stroke="{GREY}" stroke-width="1.3" marker-end="url(#end)"/>'


def rows_of(names: set[str], height: dict[str, int]) -> list[list[str]]:
    """Returns the names of each row, from the top."""
    return [sorted(name for name in names if height[name] == n) for n in range(max(height.values()), -1, -1)]


def picture() -> str:
    """Returns the drawing as SVG."""
    texts = rows_of_page()
    others = outside()
    single = {name for name in texts if (PACKAGE / f"{name}.py").exists()} - {"policy"}
    core = texts.keys() - others - single
    edges = graph(core | others)
    edges = {name: edges[name] - others for name in core}
    parts = []
    for i, name in enumerate(sorted(others)):
        parts.append(box(LEFT + i * (OUTER + GAP / 2), 8, name, is_core=False, width=OUTER))
    end = LEFT + len(others) * (OUTER + GAP / 2)
    parts.append(f'<text x="{end}" y="27" fill="{GREY}" font-size="12.5">outside of the core</text>')
    corners = {}
    y = 8 + ROW + 6
    for row in rows_of(core, heights(edges)):
        x = LEFT + (2 - len(row)) * (BOX[0] + GAP) / 2
        for i, name in enumerate(row):
            corners[name] = (x, y)
            parts.append(box(x, y, name))
            line = texts[name] if len(row) == 1 else f"{name}: {texts[name]}"
            parts.append(words(y + 19 + (i - (len(row) - 1) / 2) * 16, words_of(line)))
            x += BOX[0] + GAP
        y += ROW
    parts.append(box(LEFT, y, ", ".join(name for name in texts if name in single), width=WIDTH - 2 * LEFT))
    arrows = []
    for name, below in sorted(direct(edges).items()):
        arrows += [arrow(corners[name], corners[other]) for other in sorted(below)]
    return START.format(width=WIDTH, height=y + BOX[1] + 8) + "\n".join([*arrows, *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
