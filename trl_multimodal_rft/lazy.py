# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packages whose names are imported lazily."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable

from .versions import unfit_packages


def lazy_names(package: str, modules: dict[str, str] | None = None) -> tuple[Callable, Callable, list[str]]:
    """The attributes of a package that imports its names lazily, by default those that type checkers import."""
    known = _names_for_checkers(package) if modules is None else modules

    def load(name: str):
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f".{known[name]}", package), name)
        except (ImportError, RuntimeError) as error:
            if (unfit := unfit_packages(error)) is None:
                raise
            raise ImportError(unfit) from error

    return load, lambda: sorted({*vars(importlib.import_module(package)), *known}), sorted(known)


def _names_for_checkers(package: str) -> dict[str, str]:
    """Names in the block `if TYPE_CHECKING:` of a package, with their modules."""
    (block,) = (node for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(each.module) for each in imports for name in each.names}
