# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Lazy imports of the names that a package offers, and imports without garbage collection."""

import ast
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .versions import PACKAGE, check_versions, unfit_packages


def lazy_names(package: str) -> tuple[Callable, Callable, list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports its `TYPE_CHECKING` block lazily."""
    # The only `if` of the package's `__init__.py`
    (block,) = (node for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    # The module of a lazy import and the name in it, by the name that the package offers
    origins = {
        alias.asname or alias.name: ("." * node.level + str(node.module), alias.name)
        for node in imports
        for alias in node.names
    }

    def load(name: str):
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check_versions()
        try:
            module, name = origins[name]
            return getattr(importlib.import_module(module, package), name)
        except Exception as error:
            if (version_hint := unfit_packages(error)) is None:
                raise
            raise ImportError(version_hint, name=PACKAGE) from error

    return load, lambda: sorted({*vars(importlib.import_module(package)), *origins}), sorted(origins)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """
    Turns off the garbage collector within the context. It would search the objects of torch, transformers and TRL
    several times during the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
