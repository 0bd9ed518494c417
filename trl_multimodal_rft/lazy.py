# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Packages whose names are imported when they are asked for."""

import importlib
from collections.abc import Callable


def lazy_names(package: str, places: dict[str, str]) -> tuple[Callable, Callable, list[str]]:
    """What a package defines to import its names when they are asked for."""

    def load(name: str):
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{places[name]}", package), name)

    return load, lambda: sorted({*vars(importlib.import_module(package)), *places}), list(places)
