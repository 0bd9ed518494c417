# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`docs/architecture.md` matches the code: its layers, the direction of imports, and the overrides of TRL."""

import ast
import importlib.util
import re
from pathlib import Path

import house
import pytest


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = re.findall(r"^\| \[`(\w+)[`./py]+\]", PAGE, re.MULTILINE)  # in the order of the table
PACKAGE = ROOT / "trl_multimodal_rft"
NO_LAYER = {"__init__", "lazy"}


def test_page_has_every_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(LAYERS) == sorted(found - NO_LAYER)


def imported(path, root=ROOT):
    """Returns this package's names that a module imports, at any depth, with their lines."""
    package = ".".join(path.relative_to(root).parent.parts)
    tree = ast.parse(path.read_text())
    typing = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    left_out = {inner for node in typing for each in node.body for inner in ast.walk(each)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{source}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.split(".")[0] == PACKAGE.name)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_up(layer):
    folder = PACKAGE / layer
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *NO_LAYER}
    down = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imported(path)
        if (name.split(".") + [""])[1] not in allowed
    ]
    assert not down


def test_page_has_every_override():
    """Checks the classes, too."""
    overridden = {name for trainer in house.trainers().values() for name in house.overrides(trainer)}
    table = PAGE.split("## What is overridden in TRL")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", table, re.MULTILINE)
    assert {f"{each}.{method}" for method, classes in rows for each in re.findall(r"`(\w+)`", classes)} == overridden


def test_page_is_short():
    assert len(PAGE.split()) <= 1390
