# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packages whose names are imported lazily."""

import importlib
from collections.abc import Callable


def lazy_names(package: str, modules: dict[str, str]) -> tuple[Callable, Callable, list[str]]:
    """The attributes of a package that imports its names lazily."""

    def load(name: str):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{modules[name]}", package), name)

    return load, lambda: sorted({*vars(importlib.import_module(package)), *modules}), list(modules)
