# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Lazy imports of the names that a package offers, and imports without garbage collection."""

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .versions import PACKAGE, check_versions, unfit_packages


def lazy_names(
    package: str, names_by_module: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Returns `__getattr__`, `__dir__` and `__all__` of a package that imports names when they are first used. Paths of
    modules are relative to the package. `"A as B"` is the name `A` of a module, which the package offers as `B`.
    """
    origins: dict[str, tuple[str, str]] = {}  # module and name in it, by the name that the package offers
    for module, entries in names_by_module.items():
        for entry in entries:
            name, _, alias = entry.partition(" as ")
            origins[alias or name] = module, name

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        check_versions()
        try:
            module, name_in_module = origins[name]
            return getattr(importlib.import_module(module, package), name_in_module)
        except Exception as error:
            version_hint = unfit_packages(error)
            if version_hint is None:
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
