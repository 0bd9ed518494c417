# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packages whose names are imported lazily."""

import importlib
from collections.abc import Callable

from .versions import unfit_packages


def lazy_names(package: str, modules: dict[str, str]) -> tuple[Callable, Callable, list[str]]:
    """The attributes of a package that imports its names lazily."""

    def load(name: str):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f".{modules[name]}", package), name)
        except (ImportError, RuntimeError) as error:
            if (unfit := unfit_packages(error)) is None:
                raise
            raise ImportError(unfit) from error

    return load, lambda: sorted({*vars(importlib.import_module(package)), *modules}), sorted(modules)
