# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`docs/architecture.md` matches the code: its layers, the direction of imports, and the overrides of TRL."""

import ast
import compileall
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import house
import pytest
from helpers.folders import ROOT


PAGE = (ROOT / "docs" / "architecture.md").read_text()
LAYERS = house.layers()
PACKAGE = ROOT / "trl_multimodal_rft"
NO_LAYER = {"__init__", "lazy"}
OUTSIDE = house.outside()
# Modules of the core that import what is outside, for lazy names, and in functions for options
FACES = {"__init__.py", "data/__init__.py", "rewards/__init__.py"}
FACES |= {"cli/arguments.py", "cli/training.py"}


def test_page_has_every_layer():
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(LAYERS) == sorted(found - NO_LAYER)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down(layer):
    folder = PACKAGE / layer
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    allowed = {*LAYERS[LAYERS.index(layer) :], *NO_LAYER}
    known = house.modules()
    up = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in house.imports(path, known)
        if layer_of(name) not in allowed and not (is_face(path) and is_outside(known[name]))
    ]
    assert not up


def layer_of(module):
    return (module.split(".") + [""])[1]


def is_face(path):
    return path.relative_to(PACKAGE).as_posix() in FACES


def is_outside(path):
    return any(path.is_relative_to(PACKAGE / folder) for folder in OUTSIDE)


def test_core_imports_nothing_outside():
    """Imports of what is outside stand in functions, or in the block of a face that is for types and lazy names."""
    assert all((PACKAGE / folder / "__init__.py").exists() for folder in OUTSIDE)
    known = house.modules()
    reached = {
        path.relative_to(PACKAGE).as_posix()
        for module, path in known.items()
        if not is_outside(path) and any(is_outside(known[name]) for name in house.imports(path, known))
    }
    assert reached == FACES
    for face in FACES:
        package = ".".join([PACKAGE.name, *Path(face).parent.parts])
        for node in ast.parse((PACKAGE / face).read_text()).body:
            if isinstance(node, ast.ImportFrom):
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                assert module not in known or not is_outside(known[module])


def test_no_modules_import_each_other():
    """Also indirectly, and in functions."""
    assert not house.import_circles()


LAZY = sorted(path for path in PACKAGE.rglob("__init__.py") if "lazy_names(" in path.read_text())


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.parent.name)
def test_lazy_names_are_those_that_type_checkers_read(path):
    body = ast.parse(path.read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    read = {
        ("." * node.level + node.module, alias.name, alias.asname or alias.name)
        for node in block.body
        for alias in node.names
    }
    (call,) = [node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    lazy = []
    for module, entries in ast.literal_eval(call.args[1]).items():
        for entry in entries:
            name, _, alias = entry.partition(" as ")
            lazy.append((module, name, alias or name))
    assert sorted(lazy) == sorted(read)


def test_lazy_names_need_no_sources(tmp_path):
    copy = tmp_path / PACKAGE.name
    for path in (*(PACKAGE / f"{name}.py" for name in ("__init__", "lazy", "printable", "versions")), *LAZY):
        target = copy / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    assert compileall.compile_dir(copy, quiet=1, legacy=True)
    for path in copy.rglob("*.py"):
        path.unlink()
    names = (
        "import trl_multimodal_rft as p, trl_multimodal_rft.lightrft.trainer as t; print(p.__file__, dir(p), dir(t))"
    )
    printed = subprocess.run([sys.executable, "-c", names], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(copy / "__init__.pyc") in printed.stdout
    assert "'MultimodalGRPOTrainer'" in printed.stdout and "'FastExperienceMaker'" in printed.stdout


def test_extras_use_public_names_of_the_core():
    private = [
        f"{path.relative_to(ROOT)} imports {source}.{name}"
        for module, path in house.modules().items()
        if layer_of(module) in ("extras", "lightrft")
        for source, names in house.names_by_source(path).items()
        for name in names
        if source.startswith(PACKAGE.name) and layer_of(source) not in ("extras", "lightrft")
        if any(word.startswith("_") for word in f"{source}.{name}".split("."))
    ]
    assert not private


def test_page_has_every_override():
    """Checks the classes, too."""
    overridden = {name for trainer in house.trainers().values() for name in house.overrides(trainer)}
    table = PAGE.split("## What is overridden in TRL")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", table, re.MULTILINE)
    assert {f"{each}.{method}" for method, classes in rows for each in re.findall(r"`(\w+)`", classes)} == overridden


def test_glossary_has_one_word_per_concept():
    terms, words = house.glossary()
    assert terms == sorted({*terms}) and {"place", "medium", "refuse", "given"} <= words
    assert not words & {word for term in terms for word in term.split()}


@pytest.mark.parametrize("room", ["base", "sampling", "reading"])
def test_rooms_of_trainers_list_their_modules(room):
    """The folder's docstring says what each module is for."""
    folder = PACKAGE / "trainers" / room
    plan = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert sorted(re.findall(r"`(\w+)`", plan)) == sorted({path.stem for path in folder.glob("*.py")} - {"__init__"})


def test_names_are_those_of_the_glossary():
    assert not house.names_outside_the_glossary(house.trees())
    code = (
        "class A:\n    n_seen: int\n    def refuse(self, given, *, index):\n        self.place = other.asked = index"
    )
    code += "\n        for each in given: found_rows = found = each"
    found = house.names_outside_the_glossary({"a.medium": ast.parse(code), "a.b": ast.parse("class TakenRow: ...")})
    assert found == [
        *(f"a.medium: {name}" for name in ("each", "found", "given", "medium", "n_seen", "place", "refuse")),
        "a.b: TakenRow",
    ]
