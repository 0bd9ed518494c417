# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Names of modules on the reference pages, and exports of packages, have a docstring with their parameters, results and
errors. The others have one where it says more than the name.
"""

import ast
import dataclasses
import importlib
import inspect
import operator
import pkgutil
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from contextlib import suppress

from helpers.folders import ROOT

import trl_multimodal_rft


def modules():
    yield trl_multimodal_rft
    for info in pkgutil.walk_packages(trl_multimodal_rft.__path__, "trl_multimodal_rft."):
        yield importlib.import_module(info.name)


def public_names():
    """Returns functions, classes and methods of the package's modules by their full names."""
    for module in modules():
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                yield f"{module.__name__}.{name}", value
                for attribute, method in vars(value).items():
                    method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                    if not attribute.startswith("_") and inspect.isfunction(method):
                        yield f"{module.__name__}.{name}.{attribute}", method


NAMES = dict(public_names())


def documented_in_full():
    """Returns modules on the reference pages, and full names of exports and of single entries on the pages."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    listed = {path for page in pages for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}
    packages = [module for module in modules() if hasattr(module, "__path__")]
    exported = {f"{each.__name__}.{name}" for each in packages for name in vars(each).get("__all__", dir(each))}
    for path in listed | exported:
        owner, _, name = path.rpartition(".")
        value = sys.modules.get(path) or getattr(sys.modules[owner], name)
        if inspect.ismodule(value):
            if path in listed:
                yield path
        elif is_ours(value):
            yield f"{value.__module__}.{value.__name__}"


def sections(text):
    """Returns parts of a docstring with their titles; the first has none."""
    titles = r"^(Args|Parameters|Returns|Yields|Raises|Example):[ ]*$"
    parts = re.split(titles, inspect.cleandoc(text or ""), flags=re.MULTILINE)
    return list(zip(["", *parts[1::2]], parts[::2], strict=True))


def documented(text):
    """Returns names of the parameters that a docstring describes."""
    described = "".join(part for title, part in sections(text) if title in ("Args", "Parameters"))
    lines = re.findall(r"^    ([\w, `*]+?)(?: \(.*\))?:$", described, re.MULTILINE)
    return {name.strip(" `*") for line in lines for name in line.split(",")}


def references(value):
    """Returns the functions and classes to whose docstrings a docstring refers by "see [`name`]"."""
    for path in re.findall(r"\b[Ss]ee\s+\[`~?([\w.]+)`\]", value.__doc__ or ""):
        with suppress(AttributeError):
            yield operator.attrgetter(path)(sys.modules[value.__module__])
        yield from (each for name in NAMES if name.endswith(f".{path}") for each in definitions(name))


def parameters(value):
    """Returns names of the accepted parameters."""
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        return {field.name for field in dataclasses.fields(value) if field.init}
    if inspect.isclass(value) and issubclass(value, BaseException):
        return set()
    names = value.__annotations__ if typing.is_typeddict(value) else inspect.signature(value).parameters
    return {name for name in names if name not in ("self", "cls") and name[0] != "_"}


def definitions(name):
    """Returns the function or class of a name, and what it overrides, inside and outside the package."""
    value = NAMES[name]
    if inspect.isclass(value):
        return [base for base in value.__mro__ if base is not object]
    owner, _, attribute = name.rpartition(".")
    if owner not in NAMES:
        return [value]
    found = [vars(base)[attribute] for base in NAMES[owner].__mro__ if attribute in vars(base)]
    return [getattr(each, "fget", None) or getattr(each, "__func__", each) for each in found]


def is_ours(value):
    return (getattr(value, "__module__", None) or "").startswith("trl_multimodal_rft")


def raises(value):
    """Returns whether a function, or a constructor, raises an error itself, not in a nested function."""
    if inspect.isclass(value):
        value = vars(value).get("__post_init__" if dataclasses.is_dataclass(value) else "__init__")
    if value is None:
        return False
    nodes = list(ast.iter_child_nodes(ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]))
    for node in nodes:  # the loop extends it
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            nodes += ast.iter_child_nodes(node)
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in nodes)


IN_FULL = set(documented_in_full())


def is_in_full(name):
    parts = name.split(".")
    return any(".".join(parts[:n]) in IN_FULL for n in range(1, len(parts) + 1))


def offends(name):
    """Returns the fault of a name's docstring."""
    value = NAMES[name]
    known = definitions(name)
    if is_in_full(name) and not any(each.__doc__ for each in known):
        yield "has no docstring"
    strange = documented(value.__doc__) - parameters(value) - {"kwargs"}
    if strange:
        yield f"describes parameters that it doesn't have: {sorted(strange)}"
    if not is_in_full(name) or not (all(is_ours(each) for each in known) or inspect.isclass(value)):
        return
    described = [each for owner in known for each in (owner, *references(owner))]
    inherited = set().union(*(parameters(each) for each in known if not is_ours(each)))
    named = set().union(*(documented(each.__doc__) for each in described))
    left = parameters(value) - inherited - {"kwargs"} - named
    if left:
        yield f"doesn't describe {sorted(left)}"
    titles = {title for each in described if is_ours(each) for title, _ in sections(each.__doc__)}
    if raises(value) and "Raises" not in titles:
        yield "doesn't say what it raises"
    if inspect.isfunction(value) and parameters(value):
        result = inspect.signature(value).return_annotation
        nothing = (None, inspect.Signature.empty, Iterator[None])  # the last one for contexts
        if result not in nothing and not titles & {"Returns", "Yields"}:
            yield "doesn't say what it returns"


def test_docstrings():
    assert not [f"{name} {offence}" for name in NAMES for offence in offends(name)]


def test_all_of_the_package_is_looked_at():
    kinds = [inspect.isclass(value) for value in NAMES.values()]
    assert kinds.count(True) > 40 and kinds.count(False) > 100
    assert sum(map(is_in_full, NAMES)) > 100
    package = trl_multimodal_rft.__name__
    assert is_in_full(f"{package}.lightrft.trainer.ppo_trainer_vl.PPOTrainerVL.fit")  # exported
    assert is_in_full(f"{package}.algorithms.loss_types.aggregate")  # listed
    assert not is_in_full(f"{package}.lazy.lazy_names")
