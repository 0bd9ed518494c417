# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Plugin of pytest under which TRL's tests use this package's trainers, by name, and stand-ins for what they load."""

import ast
import functools
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from datasets import DatasetDict

import trl_multimodal_rft
from trl_suite.stand_ins import stand_in


ALGORITHMS = ("DPO", "KTO", "Reward", "SFT", "GRPO", "RLOO", "Distillation")
_INSTANCES: list[str] = []  # classes of this package of which tests have made instances
SECONDS = int(os.environ.get("TRL_SUITE_SECONDS", "120"))  # time limit of a test
# Modules from which TRL's tests import a trainer and its config
_MODULES = ("trl", "trl.trainer", "trl.experimental.distillation")


def pytest_configure(config: pytest.Config) -> None:
    _add_missing_names([Path(argument) for argument in config.args if Path(argument).is_file()])
    _add_missing_names([Path("tests/testing_utils.py")])
    if os.environ.get("TRL_SUITE_CLASSES") != "trl":
        _swap_names(with_self_check=os.environ.get("TRL_SUITE_SELF_CHECK") != "0")
    datasets.load_dataset = _with_stand_ins(datasets.load_dataset)


class _Missing:
    """Stands for a name that the installed release of TRL doesn't have. A test that uses it is skipped."""

    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"the installed release of TRL has no {self.__name__}")


def _add_missing_names(files: list[Path]) -> None:
    """Adds names to TRL's modules that tests import, but that the installed release doesn't have."""
    for file in files:
        for statement in ast.walk(ast.parse(file.read_text())):
            if not isinstance(statement, ast.ImportFrom) or not (statement.module or "").startswith("trl"):
                continue
            try:
                module = importlib.import_module(str(statement.module))
            except ModuleNotFoundError:
                module = sys.modules[str(statement.module)] = ModuleType(str(statement.module))
            for name in [alias.name for alias in statement.names if not hasattr(module, alias.name)]:
                is_check = name.startswith("is_") and name.endswith("_available")
                package = name.removeprefix("is_").removesuffix("_available")
                setattr(module, name, partial(_is_installed, package) if is_check else _Missing(name))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _swap_names(with_self_check: bool) -> None:
    for algorithm in ALGORITHMS:
        for kind in ("Config", "Trainer"):
            # Imported before the swap, after which TRL's own names stand for this package's classes
            ours = getattr(trl_multimodal_rft, f"Multimodal{algorithm}{kind}")
            ours.__init__ = _counted(ours.__init__)
            if kind == "Config" and not with_self_check:
                ours.__init__ = _with_default(ours.__init__, self_check=False)
            for name in _MODULES:
                with suppress(ImportError):
                    module = importlib.import_module(name)
                    if hasattr(module, f"{algorithm}{kind}"):
                        setattr(module, f"{algorithm}{kind}", ours)


def _counted(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(self, *args: Any, **kwargs: Any) -> Any:
        _INSTANCES.append(type(self).__name__)
        return function(self, *args, **kwargs)

    return call


def _with_default(function: Callable, **defaults: Any) -> Callable:
    @functools.wraps(function)
    def call(self, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **{**defaults, **kwargs})

    return call


def _with_stand_ins(load: Callable) -> Callable:
    @functools.wraps(load)
    def load_dataset(path: str, name: str | None = None, *args: Any, split=None, streaming=False, **kwargs: Any):
        try:
            rows = stand_in(Path(os.environ["HF_HUB_CACHE"]), path, name)
        except FileNotFoundError:
            return load(path, name, *args, split=split, streaming=streaming, **kwargs)
        if split is not None:
            part, _, window = split.partition("[")
            start, _, end = window.removesuffix("]").partition(":")
            chosen = rows[part]
            indices = range(len(chosen))[slice(int(start or 0), int(end) if end else None)]
            chosen = chosen.select(indices)
            return chosen.to_iterable_dataset() if streaming else chosen
        if streaming:
            return datasets.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in rows.items()})
        return DatasetDict(rows)

    return load_dataset


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """The folder of TRL's test data, as the plugin pytest-datadir gives it."""
    return request.path.parent / "data"


class TooSlow(Exception):
    """A test took longer than its limit."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"no result within {SECONDS} s")

    n_before = len(_INSTANCES)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        item.user_properties.append(("is_swapped", len(_INSTANCES) > n_before))


_RESULTS: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the outcome of a test, with the last line of its error."""
    name = report.nodeid.removeprefix("tests/")
    if report.when == "call" or report.outcome != "passed":
        line = ""
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            line = str(crash.message if crash is not None else report.longrepr)
        result = _RESULTS.setdefault(name, {"outcome": "passed", "error": "", "seconds": 0.0, "is_swapped": False})
        result["is_swapped"] = dict(report.user_properties).get("is_swapped", False)
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
        result.update(outcome=outcome, error=line[:2000], seconds=round(report.duration, 1))


def pytest_sessionfinish() -> None:
    with suppress(KeyError):
        Path(os.environ["TRL_SUITE_RESULTS"]).write_text(json.dumps(_RESULTS, indent=1))
