# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Hides packages that a machine with a GPU lacks, so that a test that imports one fails on a CPU, too. Python runs this
file at startup when this folder is on `PYTHONPATH`.
"""

import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import distributions, packages_distributions
from pathlib import Path


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def listed() -> set[str]:
    """Returns names of the packages of the lists, and of those that they need in the versions of this environment."""
    lines = [line for name in ("machine", "wheels") for line in (FOLDER / f"{name}.txt").read_text().splitlines()]
    needs = {canonical(each.name): each.requires or [] for each in distributions()}
    found = {"trl-multimodal-rft"}
    new = {canonical(line) for line in lines if not line.startswith("#")}
    while new:
        found |= new
        required = {canonical(line) for name in new for line in needs.get(name, ()) if "extra ==" not in line}
        new = required - found
    return found


FOLDER = Path(__file__).parents[1]
LISTED = listed()
HIDDEN = {module for module, names in packages_distributions().items() if LISTED.isdisjoint(map(canonical, names))}


class Finder(PathFinder):
    """Finds no module of the other packages."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
